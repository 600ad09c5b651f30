"""accumulate: a function in slices of its batch, one after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import fx

from torchard.functional.core.arguments import AtLeast, checked
from torchard.functional.core.errors import AccumulateError
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Leaf, Pass, Program, Rewrite, Stage
from torchard.functional.programs.tags import VAL
from torchard.functional.remat.policies import save_nothing
from torchard.functional.remat.recompute import RECOMPUTE
from torchard.functional.remat.segments import enclose
from torchard.sharding.microbatches.mark import Batch, drop_small, insert_mark, merge_marks
from torchard.sharding.microbatches.spread import spread
from torchard.sharding.microbatches.turns import in_turn
from torchard.sharding.planning.canonicalize import prepare
from torchard.sharding.planning.constraints import SpecHint
from torchard.sharding.shard_rewrite import Shard
from torchard.sharding.values.placement import MeshPlacement
from torchard.sharding.values.spec import SpecError
from torchard.sharding.values.spectree import by_argument

__all__ = ["Accumulate", "accumulate"]


@checked
def accumulate(
    fn: Callable[..., Any], steps: Annotated[int, AtLeast(1)], *, batch: Any
) -> Transformed:
    """Compute a function in slices of its batch, one after another, with its sums added up.

    The result is the same as that of ``fn``: its sums over the batch are added up over the slices, and
    operations on a sum run after the last slice, so weighted means and masked losses are correct. Only
    the values and residuals of one slice are in memory at a time. If ``fn`` takes the gradients itself, a
    slice's backward follows its forward; if gradients of the result are taken, the backward computes each
    slice's forward again. Values that do not depend on the batch are computed once, before the first
    slice; operations that need the sums (an optimizer's update) run after the last.

    Sums of float16 and bfloat16 are added up in float32. A sum that the slices themselves need, such as
    the number of labels that count, is computed before the slices, if that takes no matrix product or
    convolution.

    Args:
        fn: a pure function of pytrees.
        steps: the number of slices.
        batch: which dim of each argument is the batch, like ``in_dims`` of `torch.vmap`: a pytree prefix
            of the positional arguments (or a mapping by argument name) with a dim, or None, at each leaf.

    Returns:
        A function that computes the same as ``fn``.

    Raises (when called):
        AccumulateError: a dim does not exist, or is not a multiple of the number of slices; or an
            operation needs the entire batch, as batch normalization does. The message names its line.

    Source: microbatches, Huang et al., GPipe, arXiv:1811.06965, section 2.2.

    >>> import torch, torchard as ta
    >>> def loss(w, x):
    ...     return (x @ w).square().mean()
    >>> w, x = torch.ones(4, 3), torch.arange(32.0).reshape(8, 4)
    >>> step = ta.accumulate(torch.func.grad(loss), 4, batch=(None, 0))
    >>> torch.allclose(step(w, x), torch.func.grad(loss)(w, x))
    True
    """
    return Transformed(fn, (Accumulate(steps, batch, fn),))


@dataclass(frozen=True)
class _Key:
    """A pytree of dims, compared by identity: it may hold lists and dicts."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Accumulate(Rewrite):
    """The rewrite of `accumulate`. It runs after kernels are fused, and before layouts are planned."""

    def __init__(
        self,
        steps: int,
        batch: Any = None,
        fn: Callable[..., Any] | None = None,
        recompute: bool = True,
        caller: tuple[str, str] = ("accumulate", "steps"),
    ) -> None:
        self.steps, self.batch, self.fn = steps, batch, fn
        self.recompute = recompute  # each forward again, in a backward that comes after all of them
        self.caller = caller  # for messages: the transform, and its argument for the number of slices

    def _key(self) -> tuple[Any, ...]:
        return self.steps, _Key(self.batch), self.recompute

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accumulate) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"accumulate({self.steps})"

    @property
    def passes(self) -> tuple[Pass, ...]:
        # Microbatches are computed one after another: there is nothing to advise on their loops.
        return (Pass(Stage.SLICE, self, remedy=""),)

    @property
    def asks(self) -> tuple[Rewrite, ...]:
        return (RECOMPUTE,)

    def annotate(self, program: Program) -> Program:
        """Check the dims against the arguments, and attach them to the leaves as hints."""
        form = "dim, as in batch=(None, 0)"
        try:
            dims = by_argument(program, self.batch, self.fn, "batch", int, form)
        except SpecError as error:
            raise AccumulateError(f"{self.caller[0]}({program.name}): {error}") from error
        traced = {leaf.path for leaf in program.inputs}
        static = next((path for path in dims if path not in traced), None)
        if static is not None or not dims:
            problem = f"{static} is not a tensor" if static else "no argument has a batch"
            raise AccumulateError(
                f"{self.caller[0]}({program.name}, batch={self.batch}): {problem}. Give each argument "
                "with a batch its dim, as in batch=(None, 0), and the others None."
            )
        inputs = tuple(
            self._hinted(leaf, dims.get(leaf.path), node)
            for leaf, node in zip(program.inputs, program.placeholders, strict=True)
        )
        return replace(program, inputs=inputs)

    def _hinted(self, leaf: Leaf, dim: int | None, node: fx.Node) -> Leaf:
        if dim is None:
            return leaf
        shape = list(VAL.of(node).shape)
        name, count = self.caller
        if not -len(shape) <= dim < len(shape):
            raise AccumulateError(
                f"{name}(batch=...): {leaf.path} has shape {shape} and no dim {dim}; use None where "
                "an argument has no batch."
            )
        inner = leaf.hint(Batch)  # of an accumulate around which this one is: slices of slices
        if inner is not None and inner.dim != dim % len(shape):
            raise AccumulateError(
                f"{name}(batch=...): {leaf.path} {shape} is computed in slices of dim {inner.dim} "
                f"and of dim {dim % len(shape)}; use the same dim."
            )
        steps = self.steps * (1 if inner is None else inner.steps)
        if shape[dim] % steps:
            fit = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0]
            raise AccumulateError(
                f"{name}({count}={steps}): dim {dim} of {leaf.path} {shape} is not a multiple of "
                f"{steps}. Pad the batch (and mask what is added), or take {count}="
                f"{' or '.join(map(str, _nearest(fit, steps)))}."
            )
        return leaf.hinted(Batch(dim % len(shape), steps))

    def __call__(self, program: Program) -> Program:
        """The program with the microbatches' operations one after another."""
        ordered = self.marked(program)
        counts = merge_marks(ordered.graph)
        if not counts:  # sliced already by another accumulate of the stack: the hints were of both
            return program
        for steps in counts:
            drop_small(ordered.graph, steps)
            if steps == 1:
                continue
            graph, made = in_turn(spread(prepare(ordered.graph), steps), steps)
            if program.is_joint and self.recompute:
                enclose(made, save_nothing)
            ordered = replace(ordered, graph=graph)
        if program.is_joint:
            _forward_first(ordered)
        return replace(ordered, inputs=tuple(leaf.unhinted(Batch) for leaf in ordered.inputs))

    def inline(self, program: Program) -> Program:
        """The program with marks, which the enclosing trace's lowering takes apart."""
        return replace(self.marked(program), asks=(*program.asks, self))

    def marked(self, program: Program) -> Program:
        """The program with marks on its batches, as the hints say."""
        program = program.copy()
        batches = [
            (leaf, node, batch)
            for leaf, node in zip(program.inputs, program.placeholders, strict=True)
            if (batch := leaf.hint(Batch)) is not None and node.users
        ]
        blocks = _blocks(batches, program.stack)
        for _, node, batch in batches:
            with program.graph.inserting_before(_first_call(program.graph)):
                insert_mark(node, batch, blocks)
        return program


def _forward_first(program: Program) -> None:
    """Put what depends on cotangents after everything else, so that each output comes before its own."""
    given = zip(program.inputs, program.placeholders, strict=True)
    late = {node for leaf, node in given if leaf.role == "cotangent"}
    out = program.graph.output_node()
    for node in program.calls:
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            out.prepend(node)


def _first_call(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return node


def _blocks(batches: Sequence[tuple[Leaf, fx.Node, Batch]], stack: Sequence[Rewrite]) -> int:
    """How many blocks of each batch have a part in every microbatch: shards, where it is over a mesh.

    One number for all of them, however each is placed: the examples of a microbatch are the same rows of
    every batch.
    """
    shards = {_shards(leaf, node, batch, stack) for leaf, node, batch in batches}
    wanted = (math.lcm(*shards), *sorted(shards, reverse=True), 1)
    return next(n for n in wanted if all(_fits(n, node, batch) for _, node, batch in batches))


def _fits(blocks: int, node: fx.Node, batch: Batch) -> bool:
    """Whether every microbatch has as many rows of each block."""
    size: int = VAL.of(node).shape[batch.dim]
    return blocks == 1 or size % (blocks * batch.steps) == 0


def _shards(leaf: Leaf, node: fx.Node, batch: Batch, stack: Sequence[Rewrite]) -> int:
    """How many shards a batch over a mesh has."""
    shape = tuple(VAL.of(node).shape)
    mesh = next((rewrite.mesh for rewrite in stack if isinstance(rewrite, Shard)), None)
    hint = leaf.hint(SpecHint)
    if isinstance(leaf.tag, MeshPlacement):
        mesh, layout = leaf.tag.mesh, leaf.tag.layout(shape)
    elif mesh is not None and hint is not None:
        layout = hint.layout(shape, mesh, leaf.path)
    else:
        return 1
    assert mesh is not None
    return math.prod(mesh.shape[axis] for axis in layout.dims[batch.dim][0].axes)


def _nearest(numbers: Sequence[int], wanted: int) -> list[int]:
    below = [n for n in numbers if n < wanted][-1:]
    return below + [n for n in numbers if n > wanted][:1]
