"""Plan consistency: before a new plan runs, all ranks check that they have the same plan.

Ranks whose plans differ would issue different collectives and hang. Each rank writes a digest of its
plan, and checksums of its replicated values, to the process group's store, and reads those of the others
with a timeout; so a rank that alone retraced is an error, not a hang.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchard.functional import torch_internals as internals
from torchard.functional.programs.program import Leaf, Program
from torchard.functional.programs.tags import LAYOUT, STEP, VAL
from torchard.sharding.lowering.call_order import CallOrder, PlanMismatch, join_as_failed
from torchard.sharding.planning.constraints import SpecHint
from torchard.sharding.rules.registry import results
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.notes import LONG, error_text
from torchard.sharding.values.placement import MeshPlacement
from torchard.sharding.values.store_allgather import (
    ExchangeError,
    OutOfStep,
    RankFailed,
    exchange,
    missing_in,
    next_turn,
    report_failure,
)

__all__ = ["PlanMismatch", "ReplicaMismatch", "agreed", "know", "signature_of", "tell_failure"]


class ReplicaMismatch(ValueError):
    """Ranks passed different values for one replicated tensor.

    >>> # torchrun --nproc-per-node 2
    >>> import torch, torch.distributed as dist, torchard as ta
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2})
    >>> local = torch.full((4,), float(dist.get_rank()))              # differs from rank to rank
    >>> ta.place(local, mesh, ta.P())
    Traceback (most recent call last):
        ...
    torchard.ReplicaMismatch: values of place is replicated, but rank 0 and rank 1 passed different
        values. Make it from the same key or seed on every rank, pass rank-local data with
        MeshTensor.from_local, or, to skip the check, place(..., check_replicated=False).
    """


def agreed(
    order: CallOrder, program: Program, check_replicated: bool, parts: Sequence[torch.Tensor]
) -> int:
    """Check that all ranks have the same plan and equal replicated values.

    Args:
        order: the first call, of which ranks that call another plan are informed.
        parts: the arguments of the first call.

    Returns:
        The number of the plan: the same on all ranks, and unique among the plans of each.

    Raises:
        PlanMismatch: a rank has a different plan, or made none.
        RankFailed: a rank raised an error while it traced or planned.
        ReplicaMismatch: ranks passed different values.
    """
    global _last_number
    lines = _plan_lines(program)
    mine: dict[str, Any] = {
        "plan": hashlib.sha256("\n".join(line.text for line in lines).encode()).hexdigest(),
        "call": f"{program.name}({signature_of(program)})",
        "number": _last_number + 1,
        "sums": _common_values(program, parts) if check_replicated else {},
    }
    mesh = order.mesh
    all_plans = _exchanged(order, mine)
    digests = [theirs["plan"] for theirs in all_plans]
    if len(set(digests)) > 1:
        raise PlanMismatch(
            _difference(mesh, [theirs["call"] for theirs in all_plans], digests, lines)
        )
    rank = dist.get_rank()
    for other, theirs in enumerate(all_plans):
        _compare_sums(program.name, "shard", rank, mine["sums"], other, theirs["sums"])
    _last_number = max(int(theirs["number"]) for theirs in all_plans)
    return _last_number


_NOTHING_NEW = (
    "That rank died, is busy, or has nothing new to plan: pass arguments of the same shapes, dtypes and "
    "static values on every rank."
)
# The number of the plan that this rank agreed on last.
_last_number = 0


def agree_on_groups(order: CallOrder, groups: list[str]) -> None:
    """Wait until all ranks are about to make the groups of a new plan.

    Raises:
        PlanMismatch, RankFailed: as for `agreed`.
    """
    try:
        mine = {"call": order.text, "groups": groups}
        needed = [theirs["groups"] for theirs in _exchanged(order, mine, _GROUPS)]
        other = next((theirs for theirs in needed if theirs != groups), None)
        if other is not None:
            ranks = order.mesh.ranks
            raise PlanMismatch(
                f"{_having(ranks, needed, groups)} a plan with the groups of ranks "
                f"{', '.join(groups)}, where {_having(ranks, needed, other)} one with {', '.join(other)}."
                "\nEvery rank must call the same function with arguments of the same shapes, dtypes, "
                f"specs and static values.\nRank {dist.get_rank()} planned {order.text}."
            )
    except Exception as error:
        know(error)
        raise


def agree_on_compiled(order: CallOrder) -> None:
    """Wait until all ranks have compiled a new plan.

    Raises:
        PlanMismatch, RankFailed: as for `agreed`.
    """
    _exchanged(order, {"call": order.text}, "that its plan is compiled", order.mesh.patience)


_GROUPS = "the groups of ranks that its plan needs"


def _exchanged(
    order: CallOrder,
    mine: dict[str, Any],
    what: str = "the plan",
    patience: datetime.timedelta | None = None,
) -> list[dict[str, Any]]:
    """The plans of all ranks."""
    turn = next_turn()
    timeout = None if patience is None else patience.total_seconds()
    try:
        return exchange(order.mesh, what, mine, timeout, remedy=_NOTHING_NEW, meanwhile=order.join)
    except OutOfStep:
        raise
    except RankFailed as error:
        _tell_those_that_wait(order.mesh, turn, str(error))
        raise
    except ExchangeError as error:
        raise PlanMismatch(
            f"{error}\n"
            f"Rank {dist.get_rank()} planned {mine['call']} and waited for the others to plan it too."
        ) from error


def _difference(mesh: Mesh, calls: list[str], digests: list[str], lines: list[_PlanLine]) -> str:
    """A message with the first difference between the plans of two ranks, which send theirs to all."""
    other = next(i for i, digest in enumerate(digests) if digest != digests[0])
    ranks = mesh.ranks
    mine = lines if dist.get_rank() in (ranks[0], ranks[other]) else []
    plans = exchange(mesh, "how its plan differs", mine)
    pairs = itertools.zip_longest(plans[0], plans[other], fillvalue=_PlanLine(*["nothing more"] * 2))
    ours, theirs = next((_PlanLine(*a), _PlanLine(*b)) for a, b in pairs if a != b)
    has, where = (_having(ranks, digests, digests[i]) for i in (0, other))
    alike = ours.title == theirs.title
    found = [line.text if alike else line.title for line in (ours, theirs)]
    return (
        f"{has} {found[0]}, where {where} {found[1]}.\n"
        "The programs differ, so their collectives would not match. Every rank must call the same "
        "function with arguments of the same shapes, dtypes, specs and static values, and the same "
        "checkpoint policies.\n"
        f"Rank {ranks[0]} planned {calls[0]}, with {ours.text}.\n"
        f"Rank {ranks[other]} planned {calls[other]}, with {theirs.text}."
    )


def _having(ranks: Sequence[int], values: Sequence[Any], value: Any) -> str:
    """``rank 0 has``, or ``ranks 0, 2 have``: those with a value."""
    found = [str(rank) for rank, its in zip(ranks, values, strict=True) if its == value]
    return f"rank{'s' * (len(found) > 1)} {', '.join(found)} {'have' if len(found) > 1 else 'has'}"


def _compare_sums(
    name: str, verb: str, rank: int, mine: dict[str, str], other: int, theirs: dict[str, str]
) -> None:
    for path in {**mine, **theirs}:
        value, found = mine.get(path), theirs.get(path)
        if value is None or found is None:
            one, without = (rank, other) if found is None else (other, rank)
            raise ReplicaMismatch(
                f"{path} of {name} is replicated, but rank {one} passed it, and rank {without} did not. "
                "Pass the same tree on every rank."
            )
        if found != value:
            raise ReplicaMismatch(
                f"{path} of {name} is replicated, but {_unequal(rank, value, other, found)}. Make it "
                "from the same key or seed on every rank, pass rank-local data with "
                f"MeshTensor.from_local, or, to skip the check, {verb}(..., check_replicated=False)."
            )


def _unequal(rank: int, mine: str, other: int, theirs: str) -> str:
    """How two tensors differ, by their descriptions: in kind, or in values."""
    ours, found = mine.rpartition(" ")[0], theirs.rpartition(" ")[0]
    if ours == found:
        return f"rank {rank} and rank {other} passed different values"
    return f"rank {rank} passed {ours}, and rank {other} passed {found}"


def agree_on_values(
    mesh: Mesh, verb: str, values: dict[str, Any], timeout: float | None = None
) -> None:
    """Check that all ranks hold the same tensors under the same names.

    Raises:
        ReplicaMismatch: a tensor differs between ranks; names the first.
        ExchangeError: a rank did not arrive within ``timeout`` seconds, by default ``mesh.timeout``.
    """
    if mesh.virtual or mesh.size == 1:
        return
    rank = dist.get_rank()
    mine = {p: described(v) for p, v in values.items() if _is_whole(v)}
    sums = exchange(mesh, f"what it passed to {verb}", mine, timeout)
    for other, theirs in enumerate(sums):
        _compare_sums(verb, verb, rank, mine, other, theirs)


def _is_whole(value: Any) -> bool:
    """Whether a value is a plain tensor, not a transform's, which has no values to compare."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not internals.is_wrapped(value)


class _PlanLine(NamedTuple):
    """An operation of a plan as text: what it gives, for the first line of a message; and all of it."""

    title: str
    text: str


def _plan_lines(program: Program) -> list[_PlanLine]:
    """Everything that determines a plan's communication, one operation per line."""
    paths = {n: leaf.path for n, leaf in zip(program.placeholders, program.inputs, strict=True)}
    lines = []
    for node in program.graph.nodes:
        target = getattr(node.target, "__name__", str(node.target))
        shapes = [_kind(v) for v in results(node)]
        step, layout = STEP.get(node), LAYOUT.get(node)
        how = "" if step is None else f" by {step.kind} over {'·'.join(step.axes)}"
        call = f"{target}{node.args}" if node.op == "call_function" else node.op
        what = target if node.op == "call_function" else paths.get(node, node.op)
        layouts = ", ".join(map(str, layout if isinstance(layout, tuple) else [layout]))
        value = f"{', '.join(shapes)} as {layouts}{how}"
        lines.append(_PlanLine(f"{what}: {value}", f"{node.name} = {call}: {value}"))
    how = "as Python" if program.compiler is None else f"by {type(program.compiler).__name__}"
    return [*lines, _PlanLine(*[f"run {how}"] * 2)]  # sends are direct in Python alone


def signature_of(program: Program) -> str:
    """The paths, dtypes, shapes and specs of a program's first inputs, as text."""
    vals = [VAL.of(n) for n in program.placeholders]
    texts = [
        f"{leaf.path}: {_kind(v)}{_spec_of(leaf)}"
        for leaf, v in zip(program.inputs, vals, strict=True)
    ]
    return ", ".join(texts[:6]) + (", …" if len(texts) > 6 else "")


def _spec_of(leaf: Leaf) -> str:
    """`` as P('dp')`` for an input that is placed, or has a spec; nothing for another one."""
    hint = leaf.hint(SpecHint)
    if isinstance(leaf.tag, MeshPlacement):
        return f" as {leaf.tag.spec}"
    return "" if hint is None else f" as {hint.spec}"


def _common_values(program: Program, parts: Sequence[torch.Tensor]) -> dict[str, str]:
    """Checksums of replicated values: inputs without a placement, closures and constants.

    Every input is one part here; only a simulated mesh has several parts for a placed input.
    """
    sums = {}
    for leaf, part in zip(program.inputs, parts, strict=True):
        if leaf.tag is None and leaf.role in ("primal", "closure", "constant"):
            sums[leaf.path] = described(part)
    return sums


def described(value: torch.Tensor) -> str:
    """A tensor's kind and a digest of its bytes: ``float32[2, 3] 0a1b…``."""
    return f"{_kind(value)} {checksum(value)}"


def _kind(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def checksum(value: torch.Tensor) -> str:
    """A digest of a tensor's bytes, computed outside of any active transform."""
    with internals.no_modes():
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()


# -- errors before there is a plan ---------------------------------------------------------------------


def tell_failure(mesh: Mesh, error: Exception) -> None:
    """Tell the other ranks of an error before this rank's program runs: they wait for its plan or call.

    An error that they know of is not told again.
    """
    if mesh.virtual or mesh.size == 1 or is_known(error):
        return
    know(error)
    text = error_text(error)
    with contextlib.suppress(RuntimeError):  # the store does not answer; the error itself is raised
        turn = report_failure(mesh, text)
        _tell_those_that_wait(mesh, turn, f"rank {dist.get_rank()} raised {text}")


_KNOWN = "__torchard_known__"


def know(error: BaseException) -> None:
    """Note that other ranks know of an error, or need not."""
    vars(error)[_KNOWN] = True


def is_known(error: BaseException) -> bool:
    """Whether other ranks know of an error."""
    return _KNOWN in vars(error)


def _tell_those_that_wait(mesh: Mesh, turn: int, text: str) -> None:
    """Tell ranks that do not come to an exchange, as they wait for this one in a call of an earlier plan.

    That they do is known once they have waited for a while.
    """
    end = time.monotonic() + 2.5 * LONG
    while (missing := missing_in(mesh, turn)) and time.monotonic() < end:
        if join_as_failed(mesh, missing, text):
            return
        time.sleep(0.1)
