"""Agreement: before a new plan runs, all ranks check that they planned the same thing.

Ranks that planned differently would issue different collectives and hang. Each writes a digest of its
plan, and checksums of the values it holds in common with others, to the process group's store, and reads
the others' with a timeout; so a rank that alone retraced is a message, not a hang.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchard.functional import torch_internals as internals
from torchard.functional.program import Program
from torchard.sharding.exchange import ExchangeError, OutOfStep, exchange
from torchard.sharding.mesh import Mesh
from torchard.sharding.rules.registry import results

__all__ = ["PlanMismatch", "ReplicaMismatch", "agreement"]


class PlanMismatch(RuntimeError):
    """Ranks planned different programs, or one planned while others did not."""


class ReplicaMismatch(ValueError):
    """Ranks passed different values for one replicated tensor."""


def agreement(
    mesh: Mesh, program: Program, check_replicated: bool
) -> Callable[[Sequence[torch.Tensor]], None]:
    """A check that all ranks run once, together, with the parts of the first call."""

    def check(parts: Sequence[torch.Tensor]) -> None:
        if mesh.size > 1:
            _exchange(mesh, program, _common_values(program, parts) if check_replicated else {})

    return check


def _exchange(mesh: Mesh, program: Program, sums: dict[str, str]) -> None:
    rank = dist.get_rank()
    mine = {"plan": plan_digest(program), "name": program.name, "inputs": _signature(program)}
    try:
        told = exchange(mesh, "the plan", {**mine, "sums": sums})
    except OutOfStep:
        raise
    except ExchangeError as error:
        raise PlanMismatch(
            f"rank {rank} planned {mine['name']}({mine['inputs']}) and waited for the others to plan "
            f"it too: {error} Either that rank died, or its arguments differ (shapes, dtypes, static "
            "values), so that it had nothing new to plan."
        ) from error
    for other, theirs in enumerate(told):
        if theirs is not None and other != rank:
            _compare(program, rank, mine, other, theirs, sums)


def _compare(
    program: Program,
    rank: int,
    mine: dict[str, Any],
    other: int,
    theirs: dict[str, Any],
    sums: dict[str, str],
) -> None:
    if mine["plan"] != theirs["plan"]:
        raise PlanMismatch(
            f"rank {rank} planned {mine['name']}({mine['inputs']}), rank {other} planned "
            f"{theirs['name']}({theirs['inputs']}): the programs differ, and so would their "
            "collectives. Every rank must call the same function with arguments of the same shapes, "
            "dtypes, specs and static values, and the same checkpoint policies."
        )
    _compare_sums(program.name, "shard", rank, sums, other, theirs["sums"])


def _compare_sums(
    name: str, verb: str, rank: int, mine: dict[str, str], other: int, theirs: dict[str, str]
) -> None:
    for path, value in mine.items():
        if theirs.get(path, value) != value:
            raise ReplicaMismatch(
                f"{path} of {name} is one value for all ranks, but rank {rank} and rank {other} "
                "passed different ones. Make it from the same key or seed on every rank, pass "
                "rank-local data with MeshTensor.from_local, or, to skip the check, "
                f"{verb}(..., check_replicated=False)."
            )


def agree_on_values(mesh: Mesh, verb: str, values: dict[str, Any]) -> None:
    """Check that all ranks hold the same tensors under the same names.

    Raises:
        ReplicaMismatch: they do not; names the first that differs.
        ExchangeError: a rank did not come within ``mesh.timeout`` seconds.
    """
    if mesh.virtual or mesh.size == 1:
        return
    rank = dist.get_rank()
    mine = {p: checksum(v) for p, v in values.items() if _is_whole(v)}
    for other, theirs in enumerate(exchange(mesh, f"what it passed to {verb}", mine)):
        _compare_sums(verb, verb, rank, mine, other, theirs)


def _is_whole(value: Any) -> bool:
    """A plain tensor with values of its own (a transform's has none to compare)."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not internals.is_wrapped(value)


def plan_digest(program: Program) -> str:
    """A digest of everything that decides what the ranks do together."""
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        target = getattr(node.target, "__name__", str(node.target))
        shapes = [(tuple(v.shape), v.dtype) for v in results(node)]
        line = (node.op, target, str(node.args), str(node.meta.get("layout")), shapes)
        step = node.meta.get("step")
        digest.update(repr((line, None if step is None else (step.kind, step.axes))).encode())
    return digest.hexdigest()


def _signature(program: Program) -> str:
    vals = [n.meta["val"] for n in program.placeholders]
    texts = [
        f"{leaf.path}: {str(v.dtype).removeprefix('torch.')}{list(v.shape)}"
        for leaf, v in zip(program.inputs, vals, strict=True)
    ]
    return ", ".join(texts[:6]) + (", …" if len(texts) > 6 else "")


def _common_values(program: Program, parts: Sequence[torch.Tensor]) -> dict[str, str]:
    """Checksums of what is one value everywhere: plain inputs, given or closed over, and constants.

    Placed inputs take several parts in a simulation only; here every input is one.
    """
    sums = {}
    for leaf, part in zip(program.inputs, parts, strict=True):
        if leaf.tag is None and leaf.role in ("primal", "closure", "constant"):
            sums[leaf.path] = checksum(part)
    return sums


def checksum(value: torch.Tensor) -> str:
    """A digest of a tensor's bytes, whatever transforms are live around it."""
    with internals.no_modes():
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()
