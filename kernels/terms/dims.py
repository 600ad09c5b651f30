"""How the dims of a pattern's inputs and outputs go together: ``"... d, d -> ... d"``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional.core.errors import PatternError

__all__ = ["Dims"]

# Different for different names, so that an example at these sizes means what it says.
_SIZES = (6, 10, 4, 14, 22, 26)
_ELLIPSIS = 3


@dataclass(frozen=True)
class Dims:
    """Names of the dims of every input and output; ``...`` is any number of dims, the same everywhere.

    An input may say its dtype: ``"n v, n:int64 -> n"``. ``| whole d`` at the end: not to be split.
    """

    text: str
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    whole: tuple[str, ...] = ()

    @staticmethod
    def read(text: str, inputs: int, name: str) -> Dims:
        """
        Raises:
            PatternError: not in this form, or not as many as there are inputs.
        """
        body, _, clause = text.partition("|")
        left, arrow, right = body.partition("->")
        word, *whole = clause.split() or [""]
        operands, dtypes = [], list[torch.dtype]()
        for part in left.split(","):
            dims, _, dtype = part.partition(":")
            operands.append(tuple(dims.split()))
            found: Any = getattr(torch, dtype.strip() or "float32", None)
            dtypes.append(found)
        known = all(isinstance(dtype, torch.dtype) for dtype in dtypes)
        if not arrow or len(operands) != inputs or not known or word not in ("", "whole"):
            raise PatternError(
                f"the dims {text!r} of the pattern {name} are not of the form '... d, d -> ... d' with "
                f"{inputs} inputs"
            )
        results = tuple(tuple(part.split()) for part in right.split(","))
        return Dims(text, tuple(operands), results, tuple(dtypes), tuple(whole))

    def dtype(self, i: int) -> torch.dtype:
        return self.dtypes[i]

    def example(self) -> list[tuple[int, ...]]:
        """Shapes that fit, of two sizes the same where the names are."""
        names = dict.fromkeys(
            n for dims in self.inputs for n in dims if n != "..." and not n.isdigit()
        )
        sizes = dict(zip(names, _SIZES, strict=False)) | {"...": _ELLIPSIS}
        return [tuple(int(n) if n.isdigit() else sizes[n] for n in dims) for dims in self.inputs]

    def fit(self, shapes: Sequence[Sequence[int] | None]) -> bool:
        """Whether inputs of these shapes, as far as they are known, go together so."""
        return self._sizes(shapes) is not None

    def _sizes(self, shapes: Sequence[Sequence[int] | None]) -> dict[str, tuple[int, ...]] | None:
        """The size of each name, by the inputs that have a shape; None if they do not fit."""
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
        """The shapes of all inputs, given those of some that name all dims."""
        sizes = self._sizes(shapes)
        assert sizes is not None, (self.text, shapes)
        return [
            tuple(k for n in dims for k in ((int(n),) if n.isdigit() else sizes[n]))
            for dims in self.inputs
        ]

    def rule(self, ins: Sequence[tuple[int, ...]], outs: Sequence[tuple[int, ...]]) -> str | None:
        """A factor rule for these shapes: what not every output has is summed for those without."""
        if self._sizes(ins) is None:
            return None
        extra = max(
            (len(s) - len(d) + 1 for d, s in zip(self.inputs, ins, strict=True) if "..." in d),
            default=0,
        )
        lead = [f"n{i}" for i in range(extra)]

        def spelled(dims: tuple[str, ...], shape: Sequence[int]) -> list[str]:
            names = [m for n in dims for m in (lead if n == "..." else [n])]
            return ["1" if size == 1 else n for n, size in zip(names, shape, strict=True)]

        left = [spelled(d, s) for d, s in zip(self.inputs, ins, strict=True)]
        right = [spelled(d, s) for d, s in zip(self.outputs, outs, strict=True)]
        names = dict.fromkeys(n for dims in left for n in dims if n != "1" and not n.isdigit())
        summed = [n for n in names if any(n not in dims for dims in right)]
        whole = [m for n in self.whole for m in (lead if n == "..." else [n])]
        clauses = [f" | reduce {n} sum" for n in summed if n not in whole]
        clauses += [f" | whole {n}" for n in whole if n in names]
        texts = [", ".join(" ".join(dims) for dims in side) for side in (left, right)]
        return " -> ".join(texts) + "".join(clauses)
