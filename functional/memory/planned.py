"""Planned programs: graphs bound to run in planned memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.locks import Lock
from torchard.functional.memory.arena import arena
from torchard.functional.memory.plan import (
    HalvesPlan,
    MemoryPlan,
    joint_tape_of,
    plan_of,
    plan_of_halves,
)
from torchard.functional.memory.planned_code import is_poisoned
from torchard.functional.memory.tape import Unplannable
from torchard.functional.programs.graphs import without_garbage
from torchard.functional.programs.program import Bound

__all__ = ["Planned", "PlannedHalves"]

P = TypeVar("P", bound=MemoryPlan)
Tensors = Sequence[torch.Tensor]


class _Plans(Generic[P]):
    """Plans by the strides of inputs; each is made when it is first needed."""

    def __init__(self) -> None:
        self._known: dict[Hashable, P | None] = {}
        self._lock = Lock()

    def get(self, inputs: Tensors, donates: bool, make: Callable[[], P]) -> P | None:
        key = is_poisoned(), donates, *[x.stride() for x in inputs]
        if key not in self._known:
            with self._lock:
                if key not in self._known:
                    try:
                        with without_garbage():
                            self._known[key] = make()
                    except Unplannable:
                        self._known[key] = None
        return self._known[key]

    def all(self) -> list[P]:
        return [plan for plan in self._known.values() if plan is not None]


class Planned:
    """A graph in planned memory; it is planned at its first call, and again for inputs of other strides.

    Args:
        graph: the graph that this process runs.
        generated: the same program with allocated memory, for callers that must see its operations.
        donated: the positions of inputs whose memory the program may take, if nothing else holds it.
    """

    def __init__(
        self, graph: fx.Graph, generated: Bound, name: str, donated: Sequence[int] = ()
    ) -> None:
        self.graph, self.generated, self.name = graph, generated, name
        self.donated = donated
        self._plans: _Plans[MemoryPlan] = _Plans()

    def plan(self, parts: Tensors) -> MemoryPlan | None:
        """The plan for inputs like these; None if the program cannot be planned."""
        donates = (
            bool(self.donated)
            and all(parts[i].is_contiguous() for i in self.donated)
            and not internals.held_elsewhere(parts, self.donated)
        )
        given = self.donated if donates else ()
        return self._plans.get(
            parts, donates, lambda: plan_of(self.graph, parts, self.name, given)
        )

    def __call__(self, parts: Tensors) -> list[torch.Tensor]:
        plan = self.plan(parts) if _are_plain(parts) else None
        if plan is None:
            return self.generated(parts)
        with arena.lent(plan, plan.sizes) as block:
            return block.made_for(plan.code, plan.code.bound)(parts)


class PlannedHalves:
    """A forward and its backward in one block of planned memory.

    Residuals stay in the block, which is reserved until they are freed. The last backward that reads the
    residuals, if nothing else holds them, runs in the same block and writes over residuals that it has
    read. Any other backward (of a graph that is retained, or whose saved tensors a hook has replaced or
    kept) runs in another block and does not change the residuals.

    Args:
        graph: the graph that this process runs for the forward.
        generated: the same program with allocated memory, for callers that must see operations.
        saved: for each residual that the backward takes, its list (0 inputs, 1 outputs, 2 values) and its
            index there.
        count: the number of outputs; those of the forward after them are values that are saved.
    """

    def __init__(
        self,
        graph: fx.Graph,
        generated: Bound,
        saved: Sequence[tuple[int, int]],
        count: int,
        name: str,
    ) -> None:
        self.graph, self.generated = graph, generated
        self.saved, self.count, self.name = saved, count, name
        self._plans: _Plans[HalvesPlan] = _Plans()
        self._alone: Planned | None = None

    def with_backward(self, graph: fx.Graph, generated: Bound) -> PlannedHalves:
        """Take the graph of the backward, without which nothing can be planned."""
        self._alone = Planned(graph, generated, f"{self.name}_backward")
        return self

    def plan(self, parts: Tensors) -> HalvesPlan | None:
        """The plan for inputs of the forward like these; None if the program cannot be planned."""
        return self._plans.get(parts, False, lambda: self._made(parts))

    def _made(self, parts: Tensors) -> HalvesPlan:
        assert self._alone is not None
        fakes = internals.FakeTensorMode()
        graphs = self.graph, self._alone.graph
        joint = joint_tape_of(*graphs, parts, self.saved, self.count, fakes)
        return plan_of_halves(joint, self.name, fakes)

    def forward(self, parts: Tensors) -> list[torch.Tensor]:
        """The outputs and the values that are saved."""
        plan = self.plan(parts) if _are_plain(parts) else None
        if plan is None:
            return self.generated(parts)
        with arena.lent(plan, plan.sizes) as block:
            results = block.made_for(plan.code, plan.code.bound)(parts)
            if plan.values:
                left = block.leave(plan, [results[i] for i in plan.values])
                for i, value in zip(plan.values, left, strict=True):
                    results[i] = value
            return results

    def backward(self, saved: Tensors) -> list[torch.Tensor]:
        """The gradients, from the residuals and the cotangents.

        Args:
            saved: a list if the residuals may be overwritten.
        """
        assert self._alone is not None
        if not _are_plain(saved):
            return self._alone(saved)
        for plan in self._plans.all() if isinstance(saved, list) else ():
            places = plan.residuals
            if places and all(internals.has_one_owner(saved, i) for i in places.values()):
                with arena.resumed(plan, {k: saved[i] for k, i in places.items()}) as block:
                    if block is not None:
                        run = block.made_for(plan.backward, plan.backward.bound)
                        return run(saved)
        return self._alone(saved)


def _are_plain(parts: Tensors) -> bool:
    """Whether operations on these tensors run at once, on memory: others need to be seen."""
    if internals.has_modes() or internals.has_transforms():
        return False
    plain = all(type(x) is torch.Tensor or type(x) is torch.nn.Parameter for x in parts)
    return plain and not any(x.is_meta or internals.is_legacy_batched(x) for x in parts)
