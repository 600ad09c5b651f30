"""localize_ranks: where the ranks of a running job first part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from torchard.functional.core.arguments import checked
from torchard.functional.costs.flops import op_name
from torchard.functional.programs.tags import PHASE, SCOPE, SOURCE, VAL
from torchard.functional.reports.text import value_text
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.placement import MeshPlacement
from torchard.sharding.values.store_allgather import exchange
from torchard.testing.localize import Operation, operands
from torchard.testing.observe import LocalRun, local_run

__all__ = ["RankDivergence", "localize_ranks"]

# The most operations that are shown.
_SHOWN = 4


@dataclass(frozen=True)
class RankDivergence:
    """Where ranks that should have the same values first differ.

    Attributes:
        operations: the first operations whose values differ between ranks, in order; their operands, if
            they have any, are the same on all ranks.
        ranks: for each of them, the ranks in groups that have the same value.

    >>> from torchard.testing import RankDivergence
    >>> print(RankDivergence((), ()))
    the ranks agree
    """

    operations: tuple[Operation, ...]
    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def agree(self) -> bool:
        """Whether all values agree that should be the same."""
        return not self.operations

    def __str__(self) -> str:
        if self.agree:
            return "the ranks agree"
        lines = ["the ranks first differ at"]
        for operation, groups in zip(self.operations, self.ranks, strict=True):
            who = " | ".join(", ".join(map(str, group)) for group in groups)
            lines.append(f"  {operation}; ranks that agree: {who}")
        return "\n".join(lines)


@checked
def localize_ranks(
    fn: Callable[..., Any], mesh: Mesh, *args: Any, gradients: bool = False
) -> RankDivergence:
    """Find where the ranks of a running job first differ, although they should have the same values.

    Every rank calls it, and runs the function once. In a plain function all values should be the same, as
    in data parallelism with one batch. In a sharded function, a value should be the same on ranks that
    hold the same shard of it. Ranks compare checksums, so a difference of one bit counts.

    Args:
        fn: the function, transformed or not; the same on all ranks.
        mesh: of processes.
        args: its arguments.
        gradients: also compare the values that the backward computes.

    Returns:
        The first operations that differ, the same on every rank; print it on one. An argument that
        differs counts as the first operation.

    Raises:
        ValueError: the mesh is virtual, or ranks run different programs; the message names the first
            operation.
        ReplicaMismatch: replicated arguments of a sharded function differ; to search further, create it
            with ``shard(..., check_replicated=False)``.
        ExchangeError: a rank did not answer within ``mesh.timeout``.

    >>> # torchrun --nproc-per-node 2
    >>> import torch, torch.distributed as dist, torchard as ta
    >>> from torchard.testing import localize_ranks
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2})
    >>> weight = torch.ones(2) + 0.5 * dist.get_rank()  # initialized differently
    >>> print(localize_ranks(lambda x: (x.exp() * weight).sum(), mesh, torch.zeros(2)))
    the ranks first differ at
      ...
    """
    if mesh.virtual:
        raise ValueError("mesh: a virtual mesh has one process; its ranks cannot differ")
    run = local_run(fn, args, gradients=gradients)
    nodes = list(run.parts)
    rows = exchange(mesh, "the values of an observed run", [_row(run, node) for node in nodes])
    _check_programs(rows, mesh)
    parted = {
        node: groups
        for node, column in zip(nodes, zip(*rows, strict=True), strict=True)
        if (groups := _groups(column))
    }
    first = [node for node in nodes if node in parted and _starts(node, parted)][:_SHOWN]
    found = (_operation(run, node, _spread(run.parts[node], mesh)) for node in first)
    order = mesh.ranks
    named = (tuple(tuple(order[i] for i in group) for group in parted[node]) for node in first)
    return RankDivergence(tuple(found), tuple(named))


def _row(run: LocalRun, node: fx.Node) -> list[str]:
    """A rank's record of a node: its description, the shard that this rank holds, and a checksum."""
    tag = run.tags[node]
    what = f"{op_name(node)} {value_text(VAL.of(node))} at {SOURCE.get(node) or 'an argument'}"
    which = ""
    if isinstance(tag, MeshPlacement) and tag.mesh.coords is not None:
        which = json.dumps([tag.mesh.coords[axis] for axis in tag.axes])
    return [what, which, _checksum(run.parts[node])]


def _checksum(parts: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        resolved = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
        digest.update(resolved.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_programs(rows: Sequence[Sequence[Sequence[str]]], mesh: Mesh) -> None:
    """Refuse ranks that run different programs."""
    names = [[what for what, _, _ in row] for row in rows]
    for rank, theirs in zip(mesh.ranks, names, strict=True):
        if theirs == names[0]:
            continue
        pairs = zip(names[0], theirs, strict=False)
        mine, other = next((p for p in pairs if p[0] != p[1]), ("an end", "an end"))
        first = mesh.ranks[0]
        raise ValueError(
            f"fn: rank {rank} runs a different program from rank {first}: its first difference is "
            f"{other} instead of {mine}. Does the function read the rank, or do arguments have "
            "different shapes?"
        )


def _groups(column: Sequence[Sequence[str]]) -> list[list[int]]:
    """The positions of ranks by value, if some of those with the same shard differ; else none."""
    by_shard: dict[str, dict[str, list[int]]] = {}
    for position, (_, shard, checksum) in enumerate(column):
        by_shard.setdefault(shard, {}).setdefault(checksum, []).append(position)
    if all(len(values) == 1 for values in by_shard.values()):
        return []
    return [group for values in by_shard.values() for group in values.values()]


def _starts(node: fx.Node, parted: dict[fx.Node, list[list[int]]]) -> bool:
    return not any(source in parted for source in operands(node))


def _spread(parts: Sequence[torch.Tensor], mesh: Mesh) -> float:
    """The largest difference between ranks of an element; infinite if shards have different shapes."""
    value = torch.cat([p.detach().flatten().cpu() for p in parts])
    wide = torch.view_as_real(value) if value.is_complex() else value
    shapes = exchange(mesh, "the size of a value", wide.numel())
    if len(set(shapes)) > 1 or mesh.host_group is None:
        return float("inf")
    everyone = [torch.empty_like(wide, dtype=torch.float64) for _ in shapes]
    dist.all_gather(everyone, wide.to(torch.float64).contiguous(), group=mesh.host_group)
    stacked = torch.stack(everyone)
    return float((stacked.amax(0) - stacked.amin(0)).max()) if stacked.numel() else 0.0


def _operation(run: LocalRun, node: fx.Node, error: float) -> Operation:
    names = {n: leaf.path for n, leaf in zip(run.program.placeholders, run.program.inputs, strict=True)}
    return Operation(
        names.get(node) or op_name(node),
        SOURCE.get(node) or "",
        SCOPE.get(node) or "",
        PHASE.get(node) or "forward",
        value_text(VAL.of(node)),
        error,
        0.0,
    )
