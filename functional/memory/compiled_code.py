"""Compiled code in planned memory.

The code that Inductor writes is straight-line, of fixed shapes: every call makes the same allocations in
the same order, and drops them at the same places. So one call of a program is observed, and the
allocations of all its regions packed as those of a tape are. In later calls what the code asks for is
already there, at its place in a block. The second call is observed: in the first one the code is
compiled, and a compiler may hold values for longer than the code does.

What is not dropped when a call ends (its results, and what they are views of), and what was given to an
operator that may keep it, is allocated anew, in memory of earlier calls that nothing refers to (pool.py).
Results of fused kernels that are the last to read a donated argument are written over it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchard.functional import torch_internals as internals
from torchard.functional.core.spans import Span
from torchard.functional.execution.binding import Compiling
from torchard.functional.memory.arena import arena
from torchard.functional.memory.lifetimes import KEEP_NOTHING
from torchard.functional.memory.packing import Packing, pack
from torchard.functional.memory.planned_code import Poison, is_poisoned, placed
from torchard.functional.memory.pool import Pool, machine_memory
from torchard.functional.programs.program import Bound
from torchard.functional.torch_internals import empty_cpu

__all__ = ["PlannedCompiled", "allocate", "own", "pool"]

Tensors = Sequence[torch.Tensor]
Take = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


class _Running(threading.local):
    """What the compiled code that a thread runs gets its memory from."""

    take: Take | None = None


_running = _Running()


def allocate(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What code that is compiled for planned memory calls for an uninitialised tensor on the CPU."""
    take = _running.take
    if take is None:
        return empty_cpu(shape, strides, dtype)
    return take(shape, strides, dtype)


def _with(take: Take, run: Bound, parts: Tensors) -> list[torch.Tensor]:
    """Run a program with what its code gets memory from; an operator may call another program."""
    before, _running.take = _running.take, take
    try:
        return run(parts)
    finally:
        _running.take = before


class PlannedCompiled(Compiling):
    """A compiled program whose intermediates are in planned memory, from its third call on.

    Args:
        run: the program, which may empty a list of inputs that it is given; its compiled code allocates
            by `allocate`.
    """

    def __init__(self, run: Compiling) -> None:
        self.run = run
        self.plans: dict[Hashable, CompiledPlan | None] = {}

    def prepare(self, parts: Tensors) -> None:
        """See `Compiling`."""
        self.run.prepare(parts)

    def __call__(self, parts: Tensors) -> list[torch.Tensor]:
        if internals.has_modes():
            return self.run(parts)
        key = is_poisoned(), *[part.stride() for part in parts]
        plan = self.plans.get(key)
        if plan is None:
            compiles = key not in self.plans
            results, observed = _observed(self.run, parts)
            self.plans[key] = None if compiles else observed
            return results
        if not plan.planned:
            return _with(plan.replay(plan.sizes), self.run, parts)
        with arena.lent(plan, plan.block) as block:
            places = block.made_for(plan, plan.places)
            return _with(plan.replay(places), self.run, parts)


def own(parts: list[torch.Tensor], donated: Sequence[int]) -> None:
    """Copy the donated inputs whose memory something else than the list holds; the pool may."""
    for i in internals.held_elsewhere(parts, donated):
        if not (internals.has_one_owner(parts, i) and pool.lends(parts[i])):
            parts[i] = parts[i].detach().clone()


def _observed(run: Bound, parts: Tensors) -> tuple[list[torch.Tensor], CompiledPlan]:
    """The results of a program, and the plan of its later calls."""
    seen = _Observation()
    with internals.Watching(seen.operands):
        results = _with(seen.take, run, parts)
    return results, seen.plan()


_CPU = torch.device("cpu")
# Bytes; smaller allocations take less time than a search.
_LEAST = 1 << 10

pool = Pool(machine_memory() // 4)
"""What compiled programs allocate their results from."""


class AllocationRequest(NamedTuple):
    """One allocation request."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes, which include what lies between its elements."""
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize if all(self.shape) else 0


@dataclass(eq=False)
class CompiledPlan:
    """Where the allocations of a call are.

    Attributes:
        requests: what the code asks for, in order.
        planned: the positions of those that have a place in a block.
        spans: of these, from the allocation that makes each to the last one at which it is in use.
        sizes: of all requests, in bytes.
        block: the bytes that those with a place in it need, by device.
    """

    requests: list[AllocationRequest]
    planned: list[int]
    spans: list[Span]
    packing: Packing = field(init=False)
    sizes: list[int] = field(init=False)
    block: dict[torch.device, int] = field(init=False)
    poisoned: bool = field(default_factory=is_poisoned)

    def __post_init__(self) -> None:
        self.packing = pack(self.spans)
        self.sizes = [request.nbytes for request in self.requests]
        self.block = {_CPU: self.packing.size}

    def places(self, block: Mapping[torch.device, torch.Tensor]) -> list[torch.Tensor | int]:
        """For each allocation its tensor in a block, or its bytes if it has no place there."""
        places: list[torch.Tensor | int] = [*self.sizes]
        with internals.no_modes(), torch.no_grad(), torch.inference_mode(False):
            for at, span, offset in zip(self.planned, self.spans, self.packing.offsets, strict=True):
                memory = block[_CPU][offset : offset + span.nbytes]
                places[at] = placed(memory, *self.requests[at])
        return places

    def replay(self, places: Sequence[torch.Tensor | int]) -> Take:
        """What hands out these places in order, for one call; what has none is from the pool."""
        rest = zip(self.requests, places, strict=True)

        def take(
            shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
        ) -> torch.Tensor:
            request, place = next(rest)
            if request != (shape, strides, dtype):
                raise AssertionError(
                    f"compiled code allocates {dtype}{list(shape)} where it allocated "
                    f"{request.dtype}{list(request.shape)} before"
                )
            if not isinstance(place, int):
                return place
            if place < _LEAST:
                return empty_cpu(shape, strides, dtype)
            return pool.empty(shape, strides, dtype, place)

        return _poisoning(take, self, places) if self.poisoned else take


def _poisoning(take: Take, plan: CompiledPlan, places: Sequence[torch.Tensor | int]) -> Take:
    """The same, which overwrites each place before it is taken, and once nothing uses it."""
    dead = ((span.end, _bytes(places[at])) for at, span in zip(plan.planned, plan.spans, strict=True))
    poison, count = Poison(dead), 0
    poison.all()

    def poisoned(
        shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        nonlocal count
        poison(count - 1)
        count += 1
        return take(shape, strides, dtype)

    return poisoned


def _bytes(place: torch.Tensor | int) -> torch.Tensor:
    """All bytes of the storage of a place."""
    assert isinstance(place, torch.Tensor)
    return torch.empty(0, dtype=torch.uint8).set_(place.untyped_storage())


class _Observation:
    """The allocations of a call, and when each is dropped."""

    def __init__(self) -> None:
        self.requests: list[AllocationRequest] = []
        self.storages: list[StorageWeakRef] = []
        self.sizes: list[int] = []
        self.last: list[int] = []  # the last allocation that was made while each was alive
        self.alive: set[int] = set()
        self.kept: set[int] = set()  # numbers of storages

    def take(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        made = empty_cpu(shape, strides, dtype)
        at = len(self.requests)
        self.requests.append(AllocationRequest(shape, strides, dtype))
        self.storages.append(StorageWeakRef(made.untyped_storage()))
        self.sizes.append(made.untyped_storage().nbytes())
        self.last.append(at)
        self._drop()
        for each in self.alive:
            self.last[each] = at
        self.alive.add(at)
        return made

    def operands(self, operator: Any, tensors: Tensors) -> None:
        """Note the operands of an operator that may keep them."""
        if operator.namespace not in KEEP_NOTHING:
            self.kept.update(map(internals.storage_id, tensors))

    def plan(self) -> CompiledPlan:
        """The plan, made while the results of the call are alive."""
        self._drop()
        planned = [
            at
            for at, storage in enumerate(self.storages)
            if at not in self.alive and storage.cdata not in self.kept and self.sizes[at]
        ]
        spans = [Span(at, self.last[at], self.sizes[at]) for at in planned]
        return CompiledPlan(self.requests, planned, spans)

    def _drop(self) -> None:
        self.alive = {at for at in self.alive if not self.storages[at].expired()}
