"""Plans that are broken on purpose: one change each to a step, a layout, an operand, a leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tags import LAYOUT, STEP, VAL
from torchard.functional.reports.lowered import Lowered
from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    LocalSlice,
    PsumScatter,
)
from torchard.sharding.layouts.layout import Layout, Sizes, Sub
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.layouts.tags import BUCKET
from torchard.sharding.scheduling.bucket import Bucket
from torchard.sharding.scheduling.collectives import STEPS
from torchard.sharding.testing import contributions, whole_of
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.place import MeshPlacement

aten = torch.ops.aten
REDUCTIONS = (AllReduce, PsumScatter)


@dataclass
class Broken:
    """A broken plan, how it was broken, and at which node."""

    kind: str
    node: str
    program: Program
    runs: bool = True  # whether a virtual mesh can show the difference


class _Site:
    """A copy of a program in which one node may be changed."""

    def __init__(self, program: Program, node: fx.Node, sizes: Sizes, rng: Random) -> None:
        self.program, self.sizes, self.rng = program.copy(), sizes, rng
        self.graph = self.program.graph
        self.node = next(n for n in self.graph.nodes if n.name == node.name)
        self.axes = [a for a, n in sizes if n > 1]
        self.runs = True

    @property
    def step(self) -> ReshardStep:
        return STEP.of(self.node)

    def with_collective(self, **changes: Any) -> None:
        STEP.set(self.node, replace(self.step, collective=replace(self.step.collective, **changes)))


# Each changes its site, or returns False if there is nothing of its kind to break.


def drop_a_step(site: _Site) -> bool:
    (source,) = site.node.all_input_nodes
    site.node.replace_all_uses_with(source)
    site.graph.erase_node(site.node)
    return True


def forget_it_for_one_user(site: _Site) -> bool:
    (source,) = site.node.all_input_nodes
    user = site.rng.choice(list(site.node.users))
    user.replace_input_with(site.node, source)
    return user.op != "output"


def other_axis(site: _Site) -> bool:
    others = [a for a in site.axes if a not in site.step.axes]
    if not others:
        return False
    site.with_collective(axes=(site.rng.choice(others), *site.step.axes[1:]))
    return True


def fewer_axes(site: _Site) -> bool:
    kept = site.step.axes[1:]
    lost = site.step.axes[0] in site.axes
    site.with_collective(axes=kept)
    return bool(kept) and lost


def other_order(site: _Site) -> bool:
    site.with_collective(axes=site.step.axes[::-1])
    many = len([a for a in site.step.axes if a in site.axes]) > 1
    return many and not isinstance(site.step.collective, AllReduce)


def other_dim(site: _Site) -> bool:
    collective = site.step.collective
    name = "at" if isinstance(collective, (AllGather, AllToAll)) else "to"
    if isinstance(collective, AllReduce):
        return False
    dim, sub = getattr(collective, name)
    dims = [i for i, subs in enumerate(site.step.before.dims) if i != dim and sub < len(subs)]
    if not dims:
        return False
    site.with_collective(**{name: (site.rng.choice(dims), sub)})
    return True


def other_reduction(site: _Site) -> bool:
    if not isinstance(site.step.collective, REDUCTIONS):
        return False
    (op,) = (
        {"sum", "max"}
        - {site.step.reduction}
        - ({"sum"} if site.step.reduction == "min" else set())
    )
    site.with_collective(reduction=op)
    return True


def shard_without_sum(site: _Site) -> bool:
    """A psum_scatter that only keeps a part; a slice is no reduction."""
    collective = site.step.collective
    if not isinstance(collective, PsumScatter):
        return False
    STEP.set(site.node, replace(site.step, collective=LocalSlice(collective.axes, collective.to)))
    return True


def gather_as_a_sum(site: _Site) -> bool:
    """An all_gather that is an all_reduce."""
    if not isinstance(site.step.collective, AllGather):
        return False
    STEP.set(site.node, replace(site.step, collective=AllReduce(site.step.axes)))
    return True


def reduced_twice(site: _Site) -> bool:
    """A sum once more: the value times the ranks."""
    if not isinstance(site.step.collective, AllReduce) or site.step.reduction != "sum":
        return False
    with site.graph.inserting_after(site.node):
        again = site.graph.node_copy(site.node, lambda n: n)
    site.node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    again.replace_input_with(again.all_input_nodes[0], site.node)
    return any(a in site.axes for a in site.step.axes)


def scaled_by_the_ranks(site: _Site) -> bool:
    """A sum over an axis along which all have the same."""
    layout = LAYOUT.of(site.node)
    free = [a for a in site.axes if a not in layout.axes]
    if not isinstance(layout, Layout) or not free or not VAL.of(site.node).dtype.is_floating_point:
        return False
    axis = site.rng.choice(free)
    with site.graph.inserting_after(site.node):
        made = site.graph.call_function(
            STEPS[AllReduce], (site.node,), {"axes": (axis,), "op": "sum"}
        )
    pending = Layout(layout.dims, tuple(sorted((*layout.pending, (axis, "sum")))))
    VAL.set(made, VAL.of(site.node))
    LAYOUT.set(made, layout)
    STEP.set(made, ReshardStep(AllReduce((axis,)), pending, layout))
    site.node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return bool(made.users)


def bias_before_the_sum(site: _Site) -> bool:
    """What is added to a sum is added to its parts."""
    if not isinstance(site.step.collective, AllReduce) or site.step.reduction != "sum":
        return False
    for user in site.node.users:
        others = [n for n in user.all_input_nodes if n is not site.node]
        if (
            user.target is aten.add.Tensor
            and len(others) == 1
            and VAL.of(user).shape == VAL.of(site.node).shape
        ):
            (source,) = site.node.all_input_nodes
            before, after = {site.node: source}, {source: user}
            with site.graph.inserting_before(user):
                early = site.graph.node_copy(user, lambda n, known=before: known.get(n, n))
                after[source] = early
                late = site.graph.node_copy(site.node, lambda n, known=after: known[n])
            LAYOUT.set(early, LAYOUT.of(source))
            user.replace_all_uses_with(late)
            site.graph.erase_node(user)
            return any(a in site.axes for a in site.step.axes)
    return False


def merged_with_another(site: _Site) -> bool:
    """Collectives over different axes as one call; a virtual mesh runs them one by one all the same."""
    others = [
        n for n in site.graph.nodes
        if STEP.on(n) and STEP.of(n).axes != site.step.axes and STEP.of(n).collective.sends
    ]  # fmt: skip
    if not others or not site.step.collective.sends:
        return False
    bucket = Bucket(2)
    BUCKET.set(site.node, bucket)
    BUCKET.set(site.rng.choice(others), bucket)
    site.runs = False
    return True


def other_layout(site: _Site) -> bool:
    """An axis moves to another dim, or away, or comes from nowhere, or is pending."""
    layout = LAYOUT.of(site.node)
    if not isinstance(layout, Layout) or not site.axes:
        return False
    axis = site.rng.choice(site.axes)
    dims: list[list[Sub]] = [
        [Sub(s.size, tuple(a for a in s.axes if a != axis)) for s in dim] for dim in layout.dims
    ]
    pending = [p for p in layout.pending if p[0] != axis]
    where = site.rng.choice(["away", "pending", *range(len(dims))])
    if where == "pending":
        pending.append((axis, "sum"))
    elif where != "away":
        dims[where][0] = Sub(dims[where][0].size, (*dims[where][0].axes, axis))
    made = Layout(tuple(map(tuple, dims)), tuple(sorted(pending))).normal(site.sizes)
    LAYOUT.set(site.node, made)
    if STEP.on(site.node):
        STEP.set(site.node, replace(site.step, after=made))
    return bool(made != layout)


def operands_layouts_swapped(site: _Site) -> bool:
    operands = [n for n in site.node.all_input_nodes if isinstance(LAYOUT.get(n), Layout)]
    if len(operands) != 2:
        return False
    one, other = operands
    a, b = LAYOUT.of(one), LAYOUT.of(other)
    LAYOUT.set(one, b)
    LAYOUT.set(other, a)
    return a != b and a.shape == b.shape


def result_not_as_promised(site: _Site) -> bool:
    """A split result is called plain, or a whole one split."""
    for i, (leaf, value) in enumerate(zip(site.program.outputs, site.program.results, strict=True)):
        if value is site.node and isinstance(leaf.tag, MeshPlacement) and leaf.role == "output":
            outputs = list(site.program.outputs)
            outputs[i] = replace(leaf, tag=None)
            site.program = replace(site.program, outputs=tuple(outputs))
            return leaf.tag.width > 1
    return False


OF_STEPS: tuple[Callable[[_Site], bool], ...] = (
    drop_a_step, forget_it_for_one_user, other_axis, fewer_axes, other_order, other_dim, other_reduction,
    shard_without_sum, gather_as_a_sum, reduced_twice, bias_before_the_sum, merged_with_another,
)  # fmt: skip
OF_ANY: tuple[Callable[[_Site], bool], ...] = (
    other_layout, scaled_by_the_ranks, operands_layouts_swapped, result_not_as_promised,
)  # fmt: skip


def breakages(program: Program, mesh: Mesh, rng: Random, most: int) -> Iterator[Broken]:
    """Random breakages of a plan, up to so many of each kind."""
    steps = [n for n in program.calls if STEP.on(n)]
    values = [n for n in program.graph.nodes if isinstance(VAL.get(n), torch.Tensor) and n.users]
    for kinds, nodes in ((OF_STEPS, steps), (OF_ANY, values)):
        for kind in kinds:
            left = most
            for node in rng.sample(nodes, len(nodes)):
                site = _Site(program, node, mesh.sizes, rng)
                if left and kind(site):
                    left -= 1
                    yield Broken(kind.__name__, node.name, site.program, site.runs)
                if not left:
                    break


def break_one(
    change: Callable[[_Site], bool], program: Program, node: fx.Node, mesh: Mesh
) -> Broken:
    """One breakage, at this node."""
    site = _Site(program, node, mesh.sizes, Random(0))
    if not change(site):
        raise ValueError(f"{change.__name__} finds nothing to break at {node.name}")
    return Broken(change.__name__, node.name, site.program, site.runs)


# -- running them -------------------------------------------------------------------------------------


def parts_of(program: Program, mesh: Mesh) -> list[torch.Tensor]:
    """The parts of random inputs; integers stay small."""
    generator = torch.Generator().manual_seed(0)
    parts: list[torch.Tensor] = []
    made = len(program.inputs) - len(program.constants)
    for i, (leaf, node) in enumerate(zip(program.inputs, program.placeholders, strict=True)):
        val = VAL.of(node)
        if i >= made:
            whole = program.constants[i - made]
        elif val.dtype.is_floating_point:
            whole = torch.randn(val.shape, generator=generator, dtype=torch.float64).to(val.dtype)
        else:
            whole = torch.randint(0, 2, val.shape, generator=generator).to(val.dtype)
        parts += (
            contributions(whole, leaf.tag.layout(val.shape), mesh) if _placed(leaf) else [whole]
        )
    return parts


def _placed(leaf: Leaf) -> bool:
    return isinstance(leaf.tag, MeshPlacement)


def results_of(program: Program, parts: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    """The whole results, plain ones as the first rank has them."""
    rest = iter(Lowered.of(program).bind()(tuple(parts)))
    found = []
    for leaf, node in zip(program.outputs, program.results, strict=True):
        width = leaf.tag.width if isinstance(leaf.tag, MeshPlacement) else 1
        mine = [next(rest) for _ in range(width)]
        if isinstance(leaf.tag, MeshPlacement):
            found.append(whole_of(mine, leaf.tag.layout(VAL.of(node).shape), mesh))
        elif isinstance(mine[0], torch.Tensor):
            found += mine
    return found


def outcome(broken: Broken, want: list[torch.Tensor], parts: list[torch.Tensor], mesh: Mesh) -> str:
    """What running it shows: "error", "other values" or "same values"."""
    try:
        have = results_of(broken.program, parts, mesh)
    except Exception:
        return "error"
    same = len(have) == len(want) and all(map(_close, have, want))
    return "same values" if same else "other values"


def _close(have: torch.Tensor, want: torch.Tensor) -> bool:
    if have.shape != want.shape:
        return False
    return torch.allclose(have.double(), want.double(), rtol=1e-9, atol=1e-9, equal_nan=True)
