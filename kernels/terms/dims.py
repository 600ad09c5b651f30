"""Named dims of a pattern's inputs and outputs: ``"... d, d -> ... d"``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchard.functional.core.axis_expressions import (
    AxisExpression,
    AxisExpressionError,
    OperandExpression,
    parse,
)
from torchard.functional.core.errors import PatternError

__all__ = ["Dims"]

# The sizes in examples: one per name, all different.
_SIZES = (6, 10, 4, 14, 22, 26, 34, 38, 46, 58, 62, 74)
_ELLIPSIS = 3

Names = tuple[str, ...]
Shape = tuple[int, ...]
Side = tuple[OperandExpression, ...]
# The inputs or outputs of an expression that writes none: one value without dims.
_SCALAR: Side = (OperandExpression((), None, 0),)


@dataclass(frozen=True)
class Dims:
    """The names of the dims of every input and output; ``...`` is the same sequence of dims everywhere.

    An input may have a dtype: ``"n v, n:int64 -> n"``. Dims in a final ``| whole d`` are never split.
    """

    text: str
    inputs: tuple[Names, ...]
    outputs: tuple[Names, ...]
    dtypes: tuple[torch.dtype, ...]
    whole: Names = ()

    @staticmethod
    def read(text: str, inputs: int, name: str) -> Dims:
        """Parse the dims of a pattern with this number of inputs.

        Args:
            name: the name of the pattern, for errors.

        Raises:
            PatternError: the text is malformed or has the wrong number of inputs; points at the fault.
        """
        try:
            return _read(parse(text), inputs)
        except AxisExpressionError as error:
            raise PatternError(
                f"the dims {text!r} of the pattern {name} are not of the form '... d, d -> ... d' with "
                f"{inputs} inputs: {error}"
            ) from None

    def dtype(self, i: int) -> torch.dtype:
        return self.dtypes[i]

    def example(self) -> list[tuple[int, ...]]:
        """Example shapes of the inputs, in which sizes are equal only if their names are."""
        names = dict.fromkeys(
            n for dims in self.inputs for n in dims if n != "..." and not n.isdigit()
        )
        sizes = dict(zip(names, _SIZES, strict=False)) | {"...": _ELLIPSIS}
        return [tuple(int(n) if n.isdigit() else sizes[n] for n in dims) for dims in self.inputs]

    def check_results(self, shapes: Sequence[Shape], name: str) -> None:
        """Check the shapes that a pattern returns for inputs of the example shapes.

        Raises:
            PatternError: the outputs have other dims.
        """
        ins = self.example()
        names = Dims(self.text, (*self.inputs, *self.outputs), (), self.dtypes)
        if len(shapes) != len(self.outputs) or names._sizes([*ins, *shapes]) is None:
            raise PatternError(
                f"the dims {self.text!r} do not fit the pattern {name}: for inputs of shapes "
                f"{', '.join(str(list(s)) for s in ins)} it returns "
                f"{', '.join(str(list(s)) for s in shapes) or 'nothing'}."
            )

    def fit(self, shapes: Sequence[Sequence[int] | None]) -> bool:
        """Whether inputs can have these shapes; None is an unknown shape."""
        return self._sizes(shapes) is not None

    def _sizes(self, shapes: Sequence[Sequence[int] | None]) -> dict[str, tuple[int, ...]] | None:
        """The sizes of each name, from the known shapes; None if the shapes do not fit."""
        sizes: dict[str, tuple[int, ...]] = {}
        for dims, shape in zip(self.inputs, shapes, strict=True):
            if shape is None:
                continue
            extra = len(shape) - sum(n != "..." for n in dims)
            if extra < 0 or (extra and "..." not in dims):
                return None
            at = 0
            for n in dims:
                width = extra if n == "..." else 1
                size = tuple(shape[at : at + width])
                at += width
                wanted = (int(n),) if n.isdigit() else sizes.setdefault(n, size)
                if wanted != size:
                    return None
        return sizes

    def complete(self, shapes: Sequence[tuple[int, ...] | None]) -> list[tuple[int, ...]]:
        """The shapes of all inputs, given the shapes of some inputs that have all names."""
        sizes = self._sizes(shapes)
        assert sizes is not None, (self.text, shapes)
        return [
            tuple(k for n in dims for k in ((int(n),) if n.isdigit() else sizes[n]))
            for dims in self.inputs
        ]

    def rule(self, ins: Sequence[Shape], outs: Sequence[Shape]) -> str | None:
        """The factor rule for these shapes; None if the shapes do not fit.

        An output is summed over the dims that it lacks.
        """
        if self._sizes(ins) is None:
            return None
        lead = self._lead(ins)
        left = [_spelled(d, s, lead) for d, s in zip(self.inputs, ins, strict=True)]
        right = [_spelled(d, s, lead) for d, s in zip(self.outputs, outs, strict=True)]
        names = dict.fromkeys(n for dims in left for n in dims if not n.isdigit())
        whole = _spread(self.whole, lead)
        summed = [n for n in names if n not in whole and any(n not in dims for dims in right)]
        clauses = [f" | reduce {n} sum" for n in summed]
        clauses += [f" | whole {n}" for n in whole if n in names]
        texts = [", ".join(" ".join(dims) for dims in side) for side in (left, right)]
        return " -> ".join(texts) + "".join(clauses)

    def _lead(self, ins: Sequence[Shape]) -> list[str]:
        """Unused names for the dims that ``...`` represents."""
        extra = [len(s) - len(d) + 1 for d, s in zip(self.inputs, ins, strict=True) if "..." in d]
        used = {n for dims in (*self.inputs, *self.outputs) for n in dims}
        free = (name for i in itertools.count() if (name := f"n{i}") not in used)
        return list(itertools.islice(free, max(extra, default=0)))


def _spread(names: Names, lead: Sequence[str]) -> list[str]:
    """The names, in which ``...`` is replaced by the dims that it represents."""
    return [m for n in names for m in (lead if n == "..." else [n])]


def _spelled(dims: Names, shape: Shape, lead: Sequence[str]) -> list[str]:
    """Dims as factors of a rule; dims of size one are written as ``1``."""
    return ["1" if size == 1 else n for n, size in zip(_spread(dims, lead), shape, strict=True)]


def _read(text: AxisExpression, inputs: int) -> Dims:
    """The dims that an expression states.

    Raises:
        AxisExpressionError: the text is not an expression for a pattern with this number of inputs.
    """
    operands, results = _sides(text, inputs)
    ins = tuple(_names(text, operand) for operand in operands)
    outs = tuple(_names(text, result) for result in results)
    _check_names(text, ins, results)
    dtypes = tuple(_dtype(text, operand) for operand in operands)
    names = {name for dims in (*ins, *outs) for name in dims}
    return Dims(text.text, ins, outs, dtypes, _whole(text, names))


def _sides(text: AxisExpression, inputs: int) -> tuple[Side, Side]:
    """The inputs and the outputs of an expression with this number of inputs."""
    if text.results is None:
        text.fail(len(text.text), "'->' and the outputs are expected here")
    operands, results = text.operands or _SCALAR, text.results or _SCALAR
    if len(operands) != inputs:
        text.fail(operands[min(inputs, len(operands) - 1)], f"{len(operands)} inputs, not {inputs}")
    return operands, results


def _names(text: AxisExpression, operand: OperandExpression) -> Names:
    """The names of an operand's dims."""
    for dim in operand.dims:
        if len(dim.axes) > 1 or any(a.size is not None and not a.name.isdecimal() for a in dim.axes):
            text.fail(dim, "a dim of a pattern is a name, a number or '...'")
    return tuple(dim.name for dim in operand.dims)


def _check_names(text: AxisExpression, ins: Sequence[Names], results: Side) -> None:
    """Check that inputs give all names sizes, and that outputs have neither a new '...' nor a dtype."""
    if len({axis.name for axis in text.axes()}) > len(_SIZES):
        text.fail(0, f"more than {len(_SIZES)} names")
    known = any("..." in dims for dims in ins)
    new = [dim for result in results for dim in result.dims if dim.is_ellipsis and not known]
    if new:
        text.fail(new[0], "no input has a '...'")
    dtypes = [result.dtype for result in results if result.dtype is not None]
    if dtypes:
        text.fail(dtypes[0], "only inputs have dtypes")


def _dtype(text: AxisExpression, operand: OperandExpression) -> torch.dtype:
    """The dtype of an operand, float32 by default."""
    if operand.dtype is None:
        return torch.float32
    dtype = getattr(torch, operand.dtype.text, None)
    if not isinstance(dtype, torch.dtype):
        text.fail(operand.dtype, f"torch has no dtype {operand.dtype.text!r}")
    return dtype


def _whole(text: AxisExpression, names: set[str]) -> Names:
    """The names in ``whole`` clauses; no other clauses are allowed."""
    for clause in text.clauses:
        if clause.verb.text != "whole":
            text.fail(clause.verb, f"unknown clause {clause.verb.text!r}; the only clause is 'whole'")
        for word in clause.words:
            if word.text not in names:
                text.fail(word, f"no dim is called {word.text!r}")
    return tuple(word.text for clause in text.clauses for word in clause.words)
