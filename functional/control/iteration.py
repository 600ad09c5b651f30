"""A step that runs n times: as a Python loop, or as one operation of the trace in progress."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.callbacks.effect import threaded
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.scope_frames import Frame, in_iteration
from torchard.functional.guards.present_cells import with_present_cells
from torchard.functional.loops.branch_call import has_effects
from torchard.functional.loops.call import Gives, LoopCall, Takes, as_body
from torchard.functional.loops.differentiated import run
from torchard.functional.loops.looked_up import take_rows
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.signature import ShapeDtype, paths_of, read
from torchard.functional.tracing.tensor_lifting import is_weak
from torchard.functional.tracing.trace_call import trace_call
from torchard.functional.tracing.trace_state import TraceState, active, current_frames, in_frames

__all__ = [
    "Application",
    "Iterated",
    "Wording",
    "as_tensor",
    "captured",
    "counted",
    "in_iteration_of",
    "operands_of",
    "trace_shapes",
]


class Wording(NamedTuple):
    """What messages call things.

    Attributes:
        who: the public function.
        body: the function that it runs.
        carry: what the body hands on.
        each: one iteration.
        remedy: what to do with a carry that is no tensor.
        hint: what to do if the body returned a carry of another structure.
        numbers: whether leaves of the first carry may be numbers, and None.
    """

    who: str
    body: str
    carry: str
    each: str
    remedy: str
    hint: str
    numbers: bool = True


@dataclass
class Iterated:
    """``count`` runs of a step, each of which hands its carry to the next.

    Attributes:
        words: what messages call things.
        fn: the step, ``(carry, row, *shared) -> (carry, y)``.
        frame: the frame of each iteration.
        count: the number of iterations; 0 returns the carry, and ys without rows.
        reverse: whether the last row is first.
        number: the leaf of the rows that is the number of the iteration, if there is one.
        ordered: whether the carry has the token of effects.
    """

    words: Wording
    fn: Callable[..., tuple[Any, Any]]
    frame: Frame
    count: int
    reverse: bool = False
    number: torch.Tensor | None = None
    ordered: bool = False

    def __call__(self, rows: Any, carry: Any, shared: Sequence[Any] = ()) -> tuple[Any, Any]:
        """The last carry, and the ys of all iterations, stacked.

        Args:
            rows: a tree whose tensors have a leading dim of ``count``; None leaves are handed on.
            carry: a tree of tensors, numbers and None.
            shared: further arguments of the step, the same each time.
        """
        carry = self.first(rows, carry, shared)
        step, state = self.step(carry), active()
        if self.count == 0:
            return carry, self._none(step, rows, carry, shared)
        if state is None or state.align_operands is not list:
            return self._loop(step, rows, carry, shared)  # in a shard_map, values vary over the mesh
        return self._traced(state, step, rows, carry, shared)

    def one_by_one(self, rows: Any, carry: Any, shared: Sequence[Any] = ()) -> tuple[Any, Any]:
        """The same, without a loop in the program."""
        carry = self.first(rows, carry, shared)
        return self._loop(self.step(carry), rows, carry, shared)

    def step(self, carry: Any) -> Application:
        """One application, whose carries are checked against the first one."""
        return Application(self.words, self.fn, carry)

    def first(self, rows: Any, carry: Any, shared: Sequence[Any] = ()) -> Any:
        """The carry with numbers as tensors without dims, in the dtypes that the step returns."""
        leaves, structure = tree.flatten(carry)
        for path, leaf in zip(tree.paths(carry, self.words.carry), leaves, strict=True):
            also = self.words.numbers and (is_number(leaf) or leaf is None)
            if not (also or isinstance(leaf, torch.Tensor) or is_placed(leaf)):
                raise LoopError(
                    f"{self.words.who}: {path} is {text_of(leaf)}; the carry must be tensors. "
                    f"{self.words.remedy}"
                )
        weak = [i for i, leaf in enumerate(leaves) if is_number(leaf)]
        if not weak:
            return carry
        device = _device((rows, carry))
        leaves = [as_tensor(leaf, device) for leaf in leaves]
        program = trace_shapes(
            self.fn, tree.unflatten(structure, leaves), tree.map(_shape_of_row, rows), *shared
        )
        tensors = [i for i, leaf in enumerate(leaves) if leaf is not None]
        returned = dict(zip(tensors, program.results, strict=False))
        for i in weak:
            if i in returned:
                dtype = VAL.of(returned[i]).dtype
                leaves[i] = leaves[i].to(torch.promote_types(leaves[i].dtype, dtype))
        return tree.unflatten(structure, leaves)

    def _none(self, step: Application, rows: Any, carry: Any, shared: Sequence[Any]) -> Any:
        """The ys of no iterations."""
        program = self._body(step, rows, carry, shared)
        vals = [VAL.of(node) for node in program.results]
        with internals.no_modes():
            specs = [(tuple(val.shape), val.dtype, val.device) for val in vals]
        made = [torch.empty((0, *shape), dtype=dtype, device=at) for shape, dtype, at in specs]
        return program.out_tree.build(made)[1]

    def _loop(self, step: Application, rows: Any, carry: Any, shared: Sequence[Any]) -> tuple[Any, Any]:
        """Run the Python loop."""
        leaves, structure = tree.flatten(rows)
        parts = [[None] * self.count if leaf is None else leaf.unbind(0) for leaf in leaves]
        listed = zip(*parts, strict=True) if parts else itertools.repeat((), self.count)
        alone = leaves and rows is _only(leaves)
        each = [row[0] if alone else tree.unflatten(structure, row) for row in listed]
        collected, traced = [], active() is not None
        order = range(self.count)
        for i in order[::-1] if self.reverse else order:
            with in_iteration_of(self.frame, i) if traced else _NO_TRACE:
                carry, y = step(carry, each[i], shared)
            collected.append(y)
        return carry, tree.map(_stacked, *(collected[::-1] if self.reverse else collected))

    def _traced(
        self, state: TraceState, step: Application, rows: Any, carry: Any, shared: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The loop as one operation of the trace in progress."""
        present = with_present_cells(step.fn)
        program = self._body(step, rows, carry, shared)
        if not self.ordered and has_effects(program.graph):
            return self._in_order(state, rows, carry, shared)
        step.fn = present  # what derivatives may run again
        of_rows, carried, others = (operands_of(each) for each in (rows, carry, shared))
        operands = (*of_rows, *carried, *others, *captured(state, program))
        natives = [state.operand(operand) for operand in operands]
        takes: list[Takes] = ["row"] * len(of_rows)
        takes += ["carry"] * len(carried)
        takes += ["shared"] * (len(natives) - len(takes))
        gives: list[Gives] = ["carry"] * len(carried)
        gives += ["rows"] * (len(program.outputs) - len(carried))
        body, taken = as_body(program), tuple(takes)
        if self.number is not None:
            number = next(i for i, leaf in enumerate(of_rows) if leaf is self.number)
            taken = take_rows(body, taken, number, self.count)
        call = LoopCall(body, taken, tuple(gives), self.count, self.reverse, run)
        last, ys = program.out_tree.build(call(*natives))
        return last, ys

    def _in_order(
        self, state: TraceState, rows: Any, carry: Any, shared: Sequence[Any]
    ) -> tuple[Any, Any]:
        """The loop, whose iterations hand on the token of their effects."""
        run = threaded(self.fn)

        def fn(carry: Any, row: Any, *shared: Any) -> tuple[Any, Any]:
            (carry, y), token = run(carry[1], carry[0], row, *shared)
            return (carry, token), y

        fn.__name__ = getattr(self.fn, "__name__", self.frame.name)
        loop = replace(self, fn=fn, ordered=True)
        (carry, token), ys = loop(rows, (carry, state.token()), shared)
        state.put_token(token)
        return carry, ys

    def _body(self, step: Application, rows: Any, carry: Any, shared: Sequence[Any]) -> Program:
        """The program of one application."""

        def body(row: Any, carry: Any, shared: Any) -> Any:
            with in_frames((*current_frames(), self.frame)):
                return step(carry, row, shared)

        body.__name__ = getattr(step.fn, "__name__", self.frame.name)
        return trace_shapes(body, tree.map(_shape_of_row, rows), carry, tuple(shared))


_NO_TRACE = contextlib.nullcontext()
Kind = tuple[tuple[int, ...], torch.dtype] | None


class Application:
    """One application of a step, whose carry is checked against the one that it received."""

    def __init__(self, words: Wording, fn: Callable[..., Any], carry: Any) -> None:
        self.words, self.fn = words, fn
        leaves, self.structure = tree.flatten(carry)
        self.kinds = _kinds(leaves)
        self.alone = self.kinds[0] if carry is _only(leaves) else None
        self.paths = tree.paths(carry, words.carry)

    def __call__(self, carry: Any, row: Any, shared: Sequence[Any]) -> tuple[Any, Any]:
        carry, y = self.fn(carry, row, *shared)
        if not self._is_alike(carry):
            leaves, structure = tree.flatten(carry)
            leaves = [as_tensor(leaf, _device(carry)) for leaf in leaves]
            self._check(leaves, structure)
            carry = tree.unflatten(structure, leaves)
        if y is not None and any(map(is_number, tree.leaves(y))):
            y = tree.map(lambda leaf: as_tensor(leaf, _device(carry)), y)
        return carry, y

    def _is_alike(self, carry: Any) -> bool:
        """Whether a carry has the structure, shapes and dtypes of the first one, without a conversion."""
        if self.alone is not None and isinstance(carry, torch.Tensor):
            return (carry.shape, carry.dtype) == self.alone
        leaves, structure = tree.flatten(carry)
        return structure == self.structure and _kinds(leaves) == self.kinds

    def _check(self, leaves: list[Any], structure: Any) -> None:
        who, body, name, each, _, hint, _ = self.words
        if structure != self.structure:
            raise LoopError(
                f"{source.begins_here()}{who}: the {body} returned {structure} for "
                f"{_one(name)} of {self.structure}; the next {each} receives this result, so it must "
                f"have the structure of {name}. {hint}"
            )
        for path, known, new in zip(self.paths, self.kinds, _kinds(leaves), strict=True):
            if known != new:
                raise LoopError(
                    f"{source.begins_here()}{who}: {path} is {_kind_text(known)}, and the {body} "
                    f"returned {_kind_text(new)}; the next {each} receives this result, so it must "
                    f"have the shape and dtype of {name}. Convert it in the {body}, or {name} before."
                )


def counted(who: str, root: str, rows: Any, none: str) -> int | None:
    """The one leading dim of all tensors in a tree; None if there are no tensors.

    Raises:
        LoopError: a leaf has no leading dim, or two differ.

    Args:
        none: what to do with a leaf that has no leading dim.
    """
    counts: dict[int, str] = {}
    for path, leaf in zip(tree.paths(rows, root), tree.leaves(rows), strict=True):
        if leaf is None:
            continue
        shape = tuple(getattr(leaf, "shape", ()))
        if not shape:
            raise LoopError(f"{who}: {path} is {text_of(leaf)}, without a leading dim. {none}")
        counts.setdefault(int(shape[0]), f"{path} {list(shape)}")
    if len(counts) > 1:
        raise LoopError(
            f"{who}: {root} has {' and '.join(counts.values())}; all leaves have one leading dim, the "
            "number of iterations."
        )
    return next(iter(counts), None)


def trace_shapes(fn: Callable[..., Any], *args: Any) -> Program:
    """The program of a call with arguments of these shapes and dtypes, whatever they are."""
    args = tree.map(_shape_of, args)
    arguments, grad_mode = read(args, {}), torch.is_grad_enabled()
    return trace_call(fn, arguments, paths_of(args, {}), grad_mode=grad_mode, called=False)


def _only(leaves: Sequence[Any]) -> Any:
    """The one leaf; None if there are none or more, or if it is None."""
    return leaves[0] if len(leaves) == 1 else None


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number, or a traced argument that was one."""
    if isinstance(leaf, torch.Tensor):
        return is_weak(leaf)
    return isinstance(leaf, (bool, int, float, complex))


def as_tensor(leaf: Any, device: torch.device | None) -> Any:
    """A number as a tensor without dims; other leaves as they are."""
    if not is_number(leaf):
        return leaf
    if isinstance(leaf, torch.Tensor):
        return leaf.to(torch.get_default_dtype())
    return torch.full((), leaf, device=device)


def text_of(leaf: Any) -> str:
    """A leaf, in messages."""
    shape = getattr(leaf, "shape", None)
    return repr(leaf) if shape is None else f"a tensor of shape {list(shape)}"


def _one(name: str) -> str:
    return f"{'an' if name[0] in 'aeioux' else 'a'} {name}"


def _kinds(leaves: Sequence[Any]) -> list[Kind]:
    return [(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else None for leaf in leaves]


def _kind_text(kind: Kind) -> str:
    return "no tensor" if kind is None else f"{kind[1]}{list(kind[0])}".removeprefix("torch.")


def _device(values: Any) -> torch.device | None:
    return next((leaf.device for leaf in tree.leaves(values) if hasattr(leaf, "device")), None)


def in_iteration_of(frame: Frame, i: int) -> contextlib.AbstractContextManager[None]:
    """A context in which operations of a trace are in the iteration of a number."""
    if active() is None:
        return _NO_TRACE
    entered = replace(frame, name=in_iteration(frame.name, i), iterated=False)
    return in_frames((*current_frames(), entered))


def _stacked(*ys: Any) -> Any:
    if ys[0] is None:
        return None
    return torch.stack(ys)


def _shape_of_row(leaf: Any) -> Any:
    return None if leaf is None else ShapeDtype(tuple(leaf.shape[1:]), leaf.dtype, leaf.device)


def _shape_of(leaf: Any) -> Any:
    """The placeholder of an argument of the body while it is traced."""
    if is_placed(leaf):
        shape, dtype, device = leaf.__torchard_placed__()[:3]
        return ShapeDtype(tuple(shape), dtype, device)
    if isinstance(leaf, torch.Tensor) and not is_weak(leaf):
        return ShapeDtype(tuple(leaf.shape), leaf.dtype, leaf.device)
    return leaf


def operands_of(values: Any) -> list[Any]:
    """The leaves that are operands of the loop; others are constants of its body."""
    return [
        leaf
        for leaf in tree.leaves(values)
        if isinstance(leaf, (torch.Tensor, float)) or is_placed(leaf)
    ]


def captured(state: TraceState, program: Program) -> list[Any]:
    """What a body that becomes part of a trace reads besides its arguments: its last operands."""
    state.constants.update(map(id, program.constants))
    state.asks.extend(program.asks)
    return [*(closure.value for closure in program.closures), *program.constants]
