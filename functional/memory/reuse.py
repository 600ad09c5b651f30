"""Reuse: allocations that take memory which another buffer no longer needs, or is part of.

- An element-wise operation writes over an operand that nothing reads after it.
- A copy of such an operand is not made.
- What is concatenated along its first dim, as the gradients of a bucket are, is computed where it belongs
  in the result, as DistributedDataParallel's ``gradient_as_bucket_view`` and the flat parameters of
  FullyShardedDataParallel do (Li and others 2020, Zhao and others 2023).
- A result takes the memory of a donated argument.

Each turns an allocation of the tape into a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.effects.in_place import is_pointwise
from torchard.functional.memory.destinations import ALLOCATIONS
from torchard.functional.memory.lifetimes import Buffer, Lifetimes
from torchard.functional.memory.tape import Step, Tape, part_of
from torchard.functional.torch_internals.operators import aten

__all__ = ["with_reuse"]


def with_reuse(tape: Tape, donated: Sequence[torch.Tensor] = ()) -> Tape:
    """The tape with views of other memory in the place of allocations.

    Args:
        donated: the inputs whose memory the program may take.
    """
    return _Reuse(tape, Lifetimes(tape), donated).run()


@dataclass(eq=False)
class _Reuse:
    tape: Tape
    lifetimes: Lifetimes
    donated: Sequence[torch.Tensor]
    # By allocation: the view that takes its place.
    views: dict[Step, Step] = field(default_factory=dict)
    # By step: what is left to do of it.
    left: dict[Step, list[Step]] = field(default_factory=dict)

    def run(self) -> Tape:
        for at, step in enumerate(self.tape.steps):
            if step.function is aten.cat.out:
                self._concatenated(at, step)
            elif step.function is aten.copy_.default:
                self._copied(at, step)
            elif _is_element_wise(step.function):
                self._over(at, step)
        self._donate()
        return Tape(self.tape.inputs, list(self._steps()), self.tape.outputs)

    def _steps(self) -> Iterator[Step]:
        """The steps, each after the allocations of its operands, which come as late as they can."""
        allocations = [step for step in self.tape.steps if step.function in ALLOCATIONS]
        makers = {id(step.results[0]): self.views.get(step, step) for step in allocations}
        for step in self.tape.steps:
            others = [] if step.function in ALLOCATIONS else [step]
            for each in self.left.get(step, others):
                yield from _made(each.operands, makers)
                yield each
        yield from _made([x for x in self.tape.outputs if isinstance(x, torch.Tensor)], makers)

    # -- over an operand ----------------------------------------------------------------------------

    def _over(self, at: int, step: Step) -> None:
        result = written_by(step)
        for operand in step.operands:
            if result is not None and self._may_take(at, step, operand, result):
                self._take(operand, result)
                return

    def _copied(self, at: int, step: Step) -> None:
        result, source, *_ = step.args
        if self._may_take(at, step, source, result):
            self._take(source, result)
            self.left[step] = []
        elif self._may_be_inside(at, source, result) and _are_alike(source, result):
            self._put_inside(step, result, [source])

    def _may_take(self, at: int, step: Step, operand: torch.Tensor, result: torch.Tensor) -> bool:
        """Whether a step may write its result over an operand."""
        old, new = self.lifetimes.of(operand), self.lifetimes.of(result)
        return (
            self._is_new(at, result)
            and new.planned
            and old is not new
            and old.planned
            and old.end == at
            and _fills(operand, old)
            and _made_as(operand, old)
            and _made_as(result, new)
            and operand.dtype != torch.complex64  # whose kernels round otherwise there (torch 2.13)
            and self._reads_alike(step, old, result)
        )

    def _is_new(self, at: int, result: torch.Tensor) -> bool:
        """Whether a buffer was allocated for the result of a step, which is the first to use it."""
        buffer = self.lifetimes.of(result)
        return buffer.is_allocated and buffer.begin == at - 1 and _fills(result, buffer)

    def _take(self, base: torch.Tensor, result: torch.Tensor, offset: int = 0) -> None:
        """What is allocated for a result is part of other memory, from an offset in elements on."""
        new = self.lifetimes.of(result)
        assert new.maker is not None
        (made,) = new.maker.tensors
        args = (base, list(made.shape), list(made.stride()), offset)
        self.views[new.maker] = Step(part_of, args, {}, (made,), False, new.maker.label)
        self.lifetimes.merge(new, self.lifetimes.of(base))

    # -- parts of a whole ---------------------------------------------------------------------------

    def _concatenated(self, at: int, step: Step) -> None:
        """What is concatenated along dim 0 is computed in the result, if that saves most of the copy."""
        parts, *dims = step.args
        whole = step.kwargs["out"]
        if any(dims) or not self._is_new(at, whole) or not whole.is_contiguous():
            return
        inside = [part for part in parts if self._may_be_inside(at, part, whole)]
        olds = [self.lifetimes.of(part) for part in inside]
        inside = [part for part, old in zip(inside, olds, strict=True) if olds.count(old) == 1]
        if 2 * sum(part.nbytes for part in inside) > whole.nbytes:
            self._put_inside(step, whole, parts, {id(part) for part in inside})

    def _may_be_inside(self, at: int, part: torch.Tensor, whole: torch.Tensor) -> bool:
        """Whether the memory of a value, which nothing reads after a step, may be part of another's."""
        old = self.lifetimes.of(part)
        return (
            old.planned
            and old.end == at
            and _fills(part, old)
            and part.is_contiguous()
            and (part.dtype, part.device) == (whole.dtype, whole.device)
            and not _is_lazy(part)
            and _made_as(part, old)
            and self._is_new(at, whole)
        )

    def _put_inside(
        self,
        step: Step,
        whole: torch.Tensor,
        parts: Sequence[torch.Tensor],
        inside: Set[int] | None = None,
    ) -> None:
        """Compute parts in their places in a whole, and copy the others there."""
        copies: list[Step] = []
        start = 0
        for part in parts:
            if inside is None or id(part) in inside:
                self._take(whole, part, start)
            else:
                args = (whole, list(part.shape), list(part.contiguous().stride()), start)
                place = part_of(*args)
                copies.append(Step(part_of, args, {}, (place,), False, step.label))
                copies.append(Step(aten.copy_.default, (place, part), {}, (), False, step.label))
            start += part.numel()
        self.left[step] = copies

    # -- donated arguments --------------------------------------------------------------------------

    def _donate(self) -> None:
        """Results take the memory of donated arguments that nothing reads after they are begun."""
        free = [(self.lifetimes.of(tensor), tensor) for tensor in self.donated]
        outputs = {id(x): x for x in self.tape.outputs if isinstance(x, torch.Tensor)}
        for step in list(self.tape.steps):
            if step.function not in ALLOCATIONS or id(step.results[0]) not in outputs:
                continue
            (result,) = step.tensors
            buffer = self.lifetimes.of(result)
            for old, tensor in free:
                if _are_alike(tensor, result) and self._ends_before(old, buffer, result):
                    free.remove((old, tensor))
                    self._take(tensor, result)
                    break

    def _ends_before(self, old: Buffer, new: Buffer, result: torch.Tensor) -> bool:
        """Whether nothing reads a buffer once the result is written, which may be what reads it last."""
        if old.end < new.begin:
            return True
        at = new.begin + 1
        writes = at < len(self.tape.steps) and old.end == at
        return writes and self._reads_alike(self.tape.steps[at], old, result)

    def _reads_alike(self, step: Step, old: Buffer, result: torch.Tensor) -> bool:
        """Whether a step writes a result entry by entry, and reads of a buffer the same entries."""
        read = [x for x in step.operands if x is not result and self.lifetimes.of(x) is old]
        return (
            written_by(step) is result
            and _is_element_wise(step.function)
            and all(_are_alike(operand, result) for operand in read)
        )


def _made(tensors: Sequence[torch.Tensor], makers: dict[int, Step]) -> Iterator[Step]:
    """The allocations of some tensors that were not made yet, and of what these are part of."""
    for tensor in tensors:
        if id(tensor) in makers:
            maker = makers.pop(id(tensor))
            yield from _made(maker.operands, makers)
            yield maker


def _made_as(tensor: torch.Tensor, buffer: Buffer) -> bool:
    """Whether a buffer was allocated for entries of a tensor's dtype."""
    return buffer.maker is not None and buffer.maker.tensors[0].dtype == tensor.dtype


def _fills(tensor: torch.Tensor, buffer: Buffer) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == buffer.nbytes


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
        and one.storage_offset() == other.storage_offset()
        and not any(map(_is_lazy, (one, other)))
    )


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's entries are to be conjugated or negated when they are read."""
    return tensor.is_conj() or tensor.is_neg()


def written_by(step: Step) -> torch.Tensor | None:
    """The one tensor that a step writes to; None if there are several, or none."""
    if step.function is aten.copy_.default:
        return step.operands[0]
    schema = internals.schema_or_none(step.function)
    names = [] if schema is None else [each.name for each in schema.arguments if each.is_out]
    written: torch.Tensor | None = step.kwargs.get(names[0]) if len(names) == 1 else None
    return written


def _is_element_wise(op: Any) -> bool:
    return op is aten.copy_.default or is_pointwise(op)
