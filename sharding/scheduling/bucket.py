"""Buckets: merging collectives that can wait for one another into one call.

Buckets are chosen on the SPMD graph, so every rank merges the same collectives. Members of a bucket are
still separate steps, each the identity on global values; they share a tag, are adjacent, and are given to
the transport at once. After PyTorch's DistributedDataParallel (Li et al. 2020, §3.2.3).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from torchard.functional.machines.machine import Machine
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import PerIteration
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, LOOP, PHASE, RECOMPUTE, STEP, VAL
from torchard.sharding.layouts.collective_ops import AllReduce
from torchard.sharding.layouts.layout import Sizes
from torchard.sharding.layouts.tags import BUCKET
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.by_time import fastest, seconds_of_rank
from torchard.sharding.scheduling.collectives import Collective, op_of

__all__ = ["Bucket", "common", "first_use", "merge", "merge_reductions", "positions"]

_LEAST_BYTES = 25 * 2**20  # splitting a smaller bucket gains nothing
_MOST_CALLS = 4


@dataclass(eq=False, frozen=True)
class Bucket(PerIteration):
    """The tag that the members of one bucket share; compared by identity."""

    members: int

    def in_iteration(self, i: int) -> Bucket:
        """The bucket of one iteration of a loop."""
        return replace(self)


def merge_reductions(
    program: Program, machine: Machine, sizes: Sizes, limit: int | None = None
) -> None:
    """Merge all_reduces none of whose results is used before the last of them can be issued.

    This holds for gradients, and for a loss that is returned with them; an activation, used at once,
    never waits for another, nor does one that is recomputed. A bucket sends at most `limit` bytes, unless
    a single value is larger; by default as many as let the program end first on the machine
    (`by_time.py`), and a quarter of a large program's.
    """
    seconds = functools.cache(functools.partial(seconds_of_rank, machine=machine, sizes=dict(sizes)))
    graph = program.graph
    for reductions in _kinds(program):
        at = positions(graph)
        patient = _patient(reductions, at)
        if len(patient) < 2:
            continue
        uses = {node: first_use(node, at) for node in patient}
        split = functools.partial(_windows, at, uses, patient)
        if limit is None:
            buckets = fastest(split, _most(patient), at, uses, machine, seconds)
        else:
            buckets = split(limit)
        for members in buckets:
            if len(members) > 1 and _pays(members, machine):
                merge(members, members[-1])


def _pays(members: Sequence[fx.Node], machine: Machine) -> bool:
    """Whether a loss may join: beside a single value, which is then copied, only if that is cheap."""
    losses = [node for node in members if PHASE.get(node) != "backward"]
    if len(members) - len(losses) != 1:
        return True
    link = machine.link_of(STEP.of(members[0]).axes, "all_reduce")
    return 2 * sum(map(_bytes, members)) <= link.latency * machine.bandwidth


def _most(steps: Sequence[fx.Node]) -> int:
    """The most bytes of a bucket, which needs memory of its own."""
    return max(_LEAST_BYTES, math.ceil(sum(map(_bytes, steps)) / _MOST_CALLS))


def _kinds(program: Program) -> list[list[fx.Node]]:
    """The all_reduces that may share a bucket, in order; of a joint program, those of one half."""
    kinds: dict[object, list[fx.Node]] = {}
    for node in program.graph.nodes:
        op = op_of(node)
        if not isinstance(op, AllReduce) or op.reduction != "sum" or RECOMPUTE.get(node):
            continue
        if VAL.of(node).dtype != torch.bool:
            half = PHASE.get(node) if program.is_joint else None
            kinds.setdefault((LOOP.get(node), half, _alike(node)), []).append(node)
    return list(kinds.values())


def common(node: fx.Node) -> tuple[Hashable, ...]:
    """What the members of a bucket share: axes, dtype, device, home and phase."""
    return *_alike(node), PHASE.get(node, "forward")


def _alike(node: fx.Node) -> tuple[Hashable, ...]:
    val: torch.Tensor = VAL.of(node)
    return STEP.of(node).axes, val.dtype, val.device, LAYOUT.of(node).home


def _patient(steps: Sequence[fx.Node], at: dict[fx.Node, float]) -> list[fx.Node]:
    """Those whose result is not used before the next one is ready."""
    # The last one waits for no other, but others may wait for it.
    ready = [*(at[node] for node in steps[1:]), 0]
    return [n for n, after in zip(steps, ready, strict=True) if first_use(n, at) >= after]


def _windows(
    at: dict[fx.Node, float], uses: dict[fx.Node, float], steps: Sequence[fx.Node], limit: int
) -> list[list[fx.Node]]:
    """Groups of consecutive collectives, each ready before the first result of its group is used."""
    windows: list[list[fx.Node]] = []
    deadline, held = -math.inf, 0
    for node in steps:
        if at[node] > deadline or held + _bytes(node) > limit:
            windows.append([])
            deadline, held = math.inf, 0
        windows[-1].append(node)
        deadline, held = min(deadline, uses[node]), held + _bytes(node)
    return windows


def _bytes(node: fx.Node) -> int:
    collective: Collective = COLLECTIVE.of(node)
    return collective.bytes


def positions(graph: fx.Graph) -> dict[fx.Node, float]:
    """The position of each node; outputs are not used before the end."""
    at: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    at[graph.output_node()] = math.inf
    return at


def first_use(node: fx.Node, at: dict[fx.Node, float]) -> float:
    """The first position at which a value, and not only an alias of it, is used."""
    return min(
        (first_use(user, at) if is_alias(user) else at[user] for user in node.users),
        default=math.inf,
    )


def merge(members: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Make a bucket of some steps, and move them to the position of one of them, the anchor."""
    bucket = Bucket(len(members))
    for node in members:
        BUCKET.set(node, bucket)
        if node is not anchor:
            anchor.prepend(node)
    _record(members)


def _record(members: Sequence[fx.Node]) -> None:
    """Record the bucket as one collective of the plan, on the member that it names: a gradient's."""
    records: list[Collective] = list(map(COLLECTIVE.of, members))
    for node in members:
        forget(node, COLLECTIVE)
    first = next((r for r in records if r.phase == "backward"), records[0])
    alike = [r for r in records if r.phase == first.phase]
    merged = replace(
        first,
        shape=(sum(math.prod(r.shape) for r in records),),
        bytes=sum(r.bytes for r in records),
        scope=_common([r.scope for r in alike]),
        note=f"{len(records)} merged",
    )
    COLLECTIVE.set(members[records.index(first)], merged)


def _common(scopes: Sequence[str]) -> str:
    """The innermost scope common to all; if there is none, the first scope and the number of others."""
    parts = zip(*(scope.split("/") for scope in scopes), strict=False)
    shared = itertools.takewhile(lambda each: len({*each}) == 1, parts)
    distinct = sorted({*scopes}, key=scopes.index)
    named = next(filter(None, distinct), "")
    more = f" + {len(distinct) - 1} more" if len(distinct) > 1 else ""
    return "/".join(each[0] for each in shared) or named + more
