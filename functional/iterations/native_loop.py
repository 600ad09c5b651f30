"""A loop whose iterations do nothing but run one compiled region, in native code.

An iteration of small kernels takes less time than the calls from Python that run it. Here they are called
by a loop in C++ (`driver.py`), as they were noted when Python called them once (`recorded.py`), in memory
that all iterations share: results are copied to the carries, and to where they are collected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.locks import Lock
from torchard.functional.iterations.collecting import Kept, Rows, kept
from torchard.functional.iterations.driver import ADDS
from torchard.functional.iterations.recorded import MemoryLayout, layout_of, recorded
from torchard.functional.iterations.workspace import (
    Collected,
    LoopValue,
    NativeIteration,
    Workspace,
)
from torchard.functional.torch_internals.accessors.native_code import Run

__all__ = ["NativeLoop"]

MOST_BYTES = 1 << 20  # of an iteration: with more of them, calls from Python take little of its time
_FEWEST = 16  # iterations


class NativeLoop:
    """A loop, as generated code calls it.

    Args:
        compiled: gives the code of the region for inputs of some strides; None if there is none.
        operands: the region's inputs.
        carries: by carry, its value in the next iteration.
        order: the rows of the iterations; None if a carry says whether there is another one.
        going: this carry.
    """

    def __init__(
        self,
        compiled: Callable[[Sequence[torch.Tensor]], Run | None],
        operands: Sequence[LoopValue],
        carries: Sequence[LoopValue],
        collected: Sequence[Collected],
        order: range | None,
        going: int = 0,
    ) -> None:
        self.compiled, self.operands, self.carries = compiled, operands, carries
        self.collected, self.order, self.going = collected, order, going
        # By strides: what an iteration calls, and memory for that which no run is using.
        self._known: dict[Any, tuple[NativeIteration, list[Workspace]] | None] = {}
        self._lock = Lock()

    def __call__(
        self, sources: Sequence[Any], carries: Sequence[torch.Tensor], collectors: Sequence[Any]
    ) -> list[Any] | None:
        """Run all iterations; None if native code cannot, and nothing has been done.

        Args:
            sources: what rows are of, and values that all iterations read.
            collectors: the objects in which stacks and sums are collected, and lists that are not used.

        Returns:
            The carries at the end, then what takes the place of the lists.
        """
        if self.order is not None and len(self.order) < _FEWEST:
            return None
        if internals.has_modes() or internals.has_transforms() or internals.profiler_enabled():
            return None
        sources = [kept(x) if isinstance(x, list) else x for x in sources]
        stacks = [x.stack if isinstance(x, Kept) else x for x in sources]
        if not all(map(_is_plain, (*stacks, *carries))):
            return None
        if self.order is None and not bool(carries[self.going]):
            return None
        run = self.compiled(self._first(stacks, sources, carries))
        if run is None:
            return None
        key = run, *[x.stride() for x in (*stacks, *carries)]
        if key not in self._known and sys.getprofile() is not None:
            return None  # to note calls takes a profiler of its own
        with self._lock:
            if key not in self._known:
                self._known[key] = self._noted(stacks, sources, carries)
            known = self._known[key]
        if known is None:
            return None
        iteration, free = known
        with self._lock:
            workspace = free.pop() if free else None
        with torch.inference_mode(False):  # other runs write to it, too
            workspace = workspace or Workspace(iteration)
        try:
            return workspace.run(sources, carries, collectors)
        finally:
            free.append(workspace)

    def _first(
        self, stacks: Sequence[Any], sources: Sequence[Any], carries: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The region's inputs in the first iteration."""
        i = 0 if self.order is None else self.order[0]
        values = {"whole": stacks, "carry": carries}
        return [
            sources[number][i] if kind == "row" else values[kind][number]
            for kind, number in self.operands
        ]

    def _noted(
        self, stacks: Sequence[Any], sources: Sequence[Any], carries: Sequence[torch.Tensor]
    ) -> tuple[NativeIteration, list[Workspace]] | None:
        """What an iteration calls; if it can be, with carries laid out as they are handed on."""
        noted = self._noted_with(stacks, sources, carries)
        if noted is None:
            return None
        made, handed = noted
        if handed != made.homes:
            carries = [y.empty().copy_(x) for x, y in zip(carries, handed, strict=True)]
            noted = self._noted_with(stacks, sources, carries)
        return None if noted is None else (noted[0], [])

    def _noted_with(
        self, stacks: Sequence[Any], sources: Sequence[Any], carries: Sequence[torch.Tensor]
    ) -> tuple[NativeIteration, list[MemoryLayout]] | None:
        """What an iteration calls for carries of these layouts, and the layouts that it hands on."""
        first = self._first(stacks, sources, carries)
        run = self.compiled(first)
        calls = None if run is None else recorded(run, first)
        homes = list(map(layout_of, carries))
        size = sum(home.bytes for home in homes)
        if run is None or calls is None or size + sum(calls.buffers) > MOST_BYTES:
            return None
        made = NativeIteration(
            calls, self.operands, self.carries, self.collected, self.order, self.going,
            list(map(layout_of, stacks)), homes,
        )  # fmt: skip
        handed = [made.layout(value).filled for value in self.carries]
        if any((x.size, x.dtype) != (y.size, y.dtype) for x, y in zip(homes, handed, strict=True)):
            return None
        return (made, handed) if _can_collect(made) and _is_right(made, run, first) else None


def _is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is nothing but memory of a CPU."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return False
    if x.device.type != "cpu":
        return False
    return not (x.is_neg() or x.is_conj() or (torch.is_grad_enabled() and x.requires_grad))


def _can_collect(made: NativeIteration) -> bool:
    """Whether the driver can add what is added up."""
    totals = [made.layout(each.value) for each in made.collected if each.kind == "total"]
    return all(x.is_dense and x.dtype in ADDS for x in totals)


def _is_right(made: NativeIteration, run: Run, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the calls compute what compiled code does, to the bit."""
    results = range(len(made.calls.results))
    alone = made._replace(
        operands=[LoopValue("whole", i) for i in range(len(inputs))],
        carries=[],
        collected=[Collected("rows", LoopValue("result", i)) for i in results],
        order=range(1),
        sources=list(map(layout_of, inputs)),
        homes=[],
    )
    rows = [Rows(1) for _ in results]
    if Workspace(alone).run(inputs, [], rows) is None:
        return False
    return all(map(_are_equal, (row.get()[0] for row in rows), run(list(inputs))))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
    return torch.equal(*bits)
