"""The values inside a function as it runs: transformed functions run their rewritten program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core import tree
from torchard.functional.core.errors import PurityError, StaticArgumentError
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Leaf, Placement, Program
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.unrolled import unrolled
from torchard.functional.reports.lowered import Lowered
from torchard.functional.tracing.signature import read
from torchard.sharding import place
from torchard.sharding.values.placement import MeshPlacement
from torchard.sharding.values.spec import spec_of
from torchard.testing.derived import derived, fixed_direction
from torchard.testing.rounding.programs import program_of
from torchard.testing.varying import Varying, varies

__all__ = ["LocalRun", "Observed", "local_run", "observed", "recorded"]

Fn = Callable[..., Any]


@dataclass
class Observed:
    """One run of a program.

    Attributes:
        program: the program that ran, without the results that were added to observe it.
        inputs: its inputs; placed inputs are gathered.
        values: the value of every node with one tensor; placed values are gathered.
        varying: each rank's values of nodes that vary over ranks, as inside `shard_map`.
    """

    program: Program
    inputs: list[torch.Tensor]
    values: dict[fx.Node, torch.Tensor]
    varying: dict[fx.Node, Varying]


@dataclass
class LocalRun:
    """One run of a program, as observed by this process.

    Attributes:
        program: the program that ran, without the results that were added to observe it.
        parts: the parts, in this process, of every node with one tensor.
        tags: how each value is placed; None for values that are not placed.
    """

    program: Program
    parts: dict[fx.Node, tuple[torch.Tensor, ...]]
    tags: dict[fx.Node, Placement | None]


def local_run(fn: Fn, args: Sequence[Any], *, gradients: bool = False) -> LocalRun:
    """Run a function, and keep this process's parts of the value of every operation.

    Values are those of the program after all rewrites, as the function runs it; nothing about the
    plan changes, as results are added after it is made.

    Args:
        fn: a transform's function, or a plain one.
        args: its arguments.
        gradients: run the joint program: outputs, and gradients with respect to all floating arguments,
            of cotangents that are small integers.
    """
    run = fn if isinstance(fn, Transformed) else Transformed(fn, ())
    lowered: Program = run.lower_joint(*args) if gradients else run.lower(*args)
    program = unrolled(lowered)
    inputs = list(_inputs(program, run.fn, args))
    nodes = [
        node for node in program.graph.nodes if _is_tensor(VAL.get(node)) and node.op != "output"
    ]
    extended, tags = _returning(program, nodes)
    flat = Lowered.of(extended).bind()(tuple(part for group in inputs for part in group))
    rest = iter(flat[_width(program.outputs) :])
    parts = {
        node: tuple(itertools.islice(rest, 1 if tag is None else tag.width))
        for node, tag in tags.items()
    }
    return LocalRun(program, parts, tags)


def observed(fn: Fn, args: Sequence[Any], *, gradients: bool = False) -> Observed:
    """Run a function as `local_run` does and gather placed values; run it directly if untraceable."""
    try:
        run = local_run(fn, args, gradients=gradients)
    except (PurityError, StaticArgumentError):
        return recorded(fn if not gradients else _with_gradients(fn), args)
    values: dict[fx.Node, torch.Tensor] = {}
    varying: dict[fx.Node, Varying] = {}
    for node, parts in run.parts.items():
        tag = run.tags[node]
        if isinstance(tag, MeshPlacement) and varies(tag):
            varying[node] = Varying.of(tag, parts)
        else:
            whole = parts[0] if tag is None else tree.whole(tag.wrap(parts))
            values[node] = whole.detach()
    inputs = [values[node] for node in run.program.placeholders]
    return Observed(run.program, inputs, values, varying)


def recorded(fn: Fn, args: Sequence[Any]) -> Observed:
    """Run a function unchanged, and record every value of the call."""
    program, inputs = program_of(fn, args)
    run = _Kept(torch.nn.Module(), garbage_collect_values=False, graph=program.graph)
    with torch.no_grad():
        run.run(*inputs, enable_io_processing=False)
    values = {node: x.detach() for node, x in run.env.items() if isinstance(x, torch.Tensor)}
    return Observed(program, inputs, values, {})


class _Kept(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return target(*args, **kwargs)


def _with_gradients(fn: Fn) -> Fn:
    return lambda *args: (fn(*args), derived(fn, "gradient")(*args))


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
    """The parts of a global value, placed as a leaf states."""
    if not isinstance(leaf.tag, MeshPlacement):
        return (value,)
    return _parts(place(value, leaf.tag.mesh, spec_of(leaf.tag.layout(value.shape))))


def _returning(
    program: Program, nodes: Sequence[fx.Node]
) -> tuple[Program, dict[fx.Node, Placement | None]]:
    """A copy of a program that returns further values, and how they are placed."""
    runtime = program.runtime
    tags = {node: None if runtime is None else runtime.residual_tag(node) for node in nodes}
    copied = program.copy()
    twins = {node.name: node for node in copied.graph.nodes}
    out = copied.graph.output_node()
    out.args = ((*copied.results, *(twins[node.name] for node in nodes)),)
    leaves = (Leaf(f"value {node.name}", tag) for node, tag in tags.items())
    return replace(copied, outputs=(*copied.outputs, *leaves)), tags


def _width(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.tag.width if isinstance(leaf.tag, Placement) else 1 for leaf in leaves)


def _is_tensor(val: Any) -> bool:
    return isinstance(val, torch.Tensor)
