"""The values inside a function as it runs: transformed functions run their rewritten program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core import tree
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Leaf, Placement, Program
from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.reports.lowered import Lowered
from torchard.functional.tracing.signature import read
from torchard.sharding import place
from torchard.sharding.layouts.layout import VARYING
from torchard.sharding.values.placement import MeshPlacement
from torchard.sharding.values.spec import spec_of
from torchard.testing.derived import fixed_direction

__all__ = ["Observed", "observed"]

Fn = Callable[..., Any]


@dataclass
class Observed:
    """One run of a program.

    Attributes:
        program: the program that ran, without the results that were added to observe it.
        inputs: its inputs, placed ones gathered.
        values: of every node with one tensor, placed ones gathered.
    """

    program: Program
    inputs: list[torch.Tensor]
    values: dict[fx.Node, torch.Tensor]


def observed(fn: Fn, args: Sequence[Any], *, gradients: bool = False) -> Observed:
    """Run a function, and keep the value of every operation.

    Values are those of the program after all rewrites, as the function runs it; nothing about the
    plan changes, as results are added after it is made.

    Args:
        fn: a transform's function, or a plain one.
        args: its arguments.
        gradients: run the joint program: outputs, and gradients with respect to all floating arguments,
            of cotangents that are small integers.

    Returns:
        The run.

    Raises:
        NotImplementedError: values inside vary from rank to rank, as in `shard_map`.
    """
    run = fn if isinstance(fn, Transformed) else Transformed(fn, ())
    program: Program = run.lower_joint(*args) if gradients else run.lower(*args)
    parts = list(_inputs(program, run.fn, args))
    nodes = [
        node for node in program.graph.nodes if _is_tensor(VAL.get(node)) and node.op != "output"
    ]
    extended, tags = _returning(program, nodes)
    flat = Lowered.of(extended).bind()(tuple(part for group in parts for part in group))
    values = _gathered(flat[_width(program.outputs) :], nodes, tags)
    whole = [values[node] for node in program.placeholders]
    return Observed(program, whole, values)


def _inputs(program: Program, fn: Fn, args: Sequence[Any]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The parts of each input."""
    primals = iter(read(tuple(args), {}).values)
    closures = iter(program.closures)
    constants = iter(program.constants)
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        if leaf.role == "closure":
            yield _parts(next(closures).now(fn))
        elif leaf.role == "constant":
            yield (next(constants),)
        elif leaf.role == "cotangent":
            yield _shards(fixed_direction(VAL.of(node)), leaf)
        else:
            yield _parts(next(primals))


def _parts(value: Any) -> tuple[torch.Tensor, ...]:
    if is_placed(value):
        return tuple(value.__torchard_placed__().parts)
    return (
        value
        if isinstance(value, torch.Tensor)
        else torch.scalar_tensor(value, dtype=torch.float64),
    )


def _shards(value: torch.Tensor, leaf: Leaf) -> tuple[torch.Tensor, ...]:
    """The parts of a whole value, placed as a leaf says."""
    if not isinstance(leaf.tag, MeshPlacement):
        return (value,)
    return _parts(place(value, leaf.tag.mesh, spec_of(leaf.tag.layout(value.shape))))


def _returning(
    program: Program, nodes: Sequence[fx.Node]
) -> tuple[Program, list[Placement | None]]:
    """A copy of a program that returns further values, and how they are placed."""
    runtime = program.runtime
    tags = [None if runtime is None else runtime.residual_tag(node) for node in nodes]
    _check_gathered(nodes, tags)
    names = {node.name: i for i, node in enumerate(nodes)}
    copied = program.copy()
    found: dict[int, fx.Node] = {names[n.name]: n for n in copied.graph.nodes if n.name in names}
    out = copied.graph.output_node()
    out.args = ((*copied.results, *(found[i] for i in range(len(nodes)))),)
    leaves = (Leaf(f"value {node.name}", tag) for node, tag in zip(nodes, tags, strict=True))
    return replace(copied, outputs=(*copied.outputs, *leaves)), tags


def _check_gathered(nodes: Sequence[fx.Node], tags: Sequence[Placement | None]) -> None:
    for node, tag in zip(nodes, tags, strict=True):
        pending = tag.pending if isinstance(tag, MeshPlacement) else ()
        if varies := [axis for axis, op in pending if op == VARYING]:
            where = SOURCE.get(node) or "an argument"
            raise NotImplementedError(
                f"{node.name} ({where}) varies over {', '.join(varies)}: values inside of shard_map are "
                "each rank's own, and there is none on one device to compare them with. Compare the "
                "function's results with equal, or write it for shard."
            )


def _width(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.tag.width if isinstance(leaf.tag, Placement) else 1 for leaf in leaves)


def _gathered(
    flat: Sequence[torch.Tensor], nodes: Sequence[fx.Node], tags: Sequence[Placement | None]
) -> dict[fx.Node, torch.Tensor]:
    values, start = {}, 0
    for node, tag in zip(nodes, tags, strict=True):
        stop = start + (1 if tag is None else tag.width)
        parts = flat[start:stop]
        values[node] = (parts[0] if tag is None else tree.whole(tag.wrap(parts))).detach()
        start = stop
    return values


def _is_tensor(val: Any) -> bool:
    return isinstance(val, torch.Tensor)
