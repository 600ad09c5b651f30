"""Changes to Inductor itself, for faults that no pass over a graph can mend (torch 2.13).

`reads_after_writes`: Inductor's scheduler has a name for a buffer before each write and one after it, and
a node that reads what was written depends on the later name. Where it changes the loops of a node, to
fuse it with others, it takes the node's reads anew from its code, which knows the first name alone: the
node then depends on no write, and may be ordered before it, to save memory (gradients of `x.max(0)[0]`
that lack elements, if rows are summed in the same kernel).

`reads_before_writes`: a kernel that reads a buffer may be fused with one that writes into it, if each
element is read where it is written. The scheduler looks for the reads by the buffer's first name, so that
it finds none after an earlier write, and fuses what shifts elements.

`parts_stay`: an operand of a concatenation may be computed in its place in the whole. Where it is read
for the last time, the result may be written there, in place; but the whole is taken for no longer used,
and its memory for another value.

`laid_out_as_known`: what torch's own kernels return may have other strides than their functions of shapes
say, and be marked as conjugated or negated. Inductor's code reads memory as those functions say: it
raises an AssertionError if strides differ, and disregards marks.

`complex_sums_stay`: sums of complex values are taken of real views, which may be of what was there before
a write, or, of values that are broadcast, not exist.

`first_calls_are_plain`, of any compiler: the first call of compiled code runs under a dispatch mode,
which looks for operators that return their operands. Under a mode torch's kernels run with the handling
of conjugation excluded: those that conjugate a complex value, and multiply it, forget to conjugate
(`linalg.pinv`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from torchard.functional.torch_internals.accessors.required import needed, require
from torchard.functional.torch_internals.operators import aten

__all__ = ["CHANGES", "changed_inductor", "first_calls_are_plain", "laid_out"]


@contextlib.contextmanager
def changed_inductor() -> Iterator[None]:
    """A context of all changes.

    One thread compiles at a time; what torch.compile compiles meanwhile has them, too.
    """
    with contextlib.ExitStack() as stack:
        for change in CHANGES:
            stack.enter_context(change())
        yield


@contextlib.contextmanager
def reads_after_writes() -> Iterator[None]:
    """A context in which Inductor's scheduler keeps what a node depends on when its loops change."""
    with needed():
        from torch._inductor.dependencies import StarDep, WeakDep
        from torch._inductor.scheduler import SchedulerNode

        require(SchedulerNode, "_compute_attrs", "set_read_writes", "update_mutated_names")

    take_anew: Any = SchedulerNode._compute_attrs

    def keep(node: Any, *args: Any, **options: Any) -> None:
        before = getattr(node, "read_writes", None)
        take_anew(node, *args, **options)
        if before is None:
            return
        anew = node.read_writes
        for read in before.reads:
            anew = anew.with_read(read) if isinstance(read, (StarDep, WeakDep)) else anew
        node.set_read_writes(anew.rename(node.mutation_renames))

    with _replaced(SchedulerNode, "_compute_attrs", keep):
        yield


@contextlib.contextmanager
def reads_before_writes() -> Iterator[None]:
    """A context in which Inductor's scheduler knows reads of a buffer by all of its names."""
    with needed():
        from torch._inductor.dependencies import MemoryDep
        from torch._inductor.scheduler import Scheduler

        require(Scheduler, "fusable_weak_dep")

    fusable: Any = Scheduler.fusable_weak_dep

    def fusable_by_all_names(scheduler: Any, weak: Any, reader: Any, writer: Any) -> bool:
        if not fusable(scheduler, weak, reader, writer):
            return False
        first = scheduler.mutation_real_name
        written = [w for w in writer.read_writes.writes if w.name == weak.mutating_buf]
        buffer = first[weak.mutating_buf]
        reads = [r for r in reader.read_writes.reads if first.get(r.name, r.name) == buffer]
        return all(
            isinstance(read, MemoryDep) and (read.index, read.size) == (write.index, write.size)
            for read in reads
            for write in written
        )

    with _replaced(Scheduler, "fusable_weak_dep", fusable_by_all_names):
        yield


@contextlib.contextmanager
def parts_stay() -> Iterator[None]:
    """A context in which Inductor writes nothing in place into a part of another buffer."""
    with needed():
        from torch._inductor.codegen import wrapper
        from torch._inductor.ir import NonOwningLayout

        require(wrapper, "can_match_buffer_size")

    matches: Any = wrapper.can_match_buffer_size

    def whole_and_matches(read: Any, written: Any) -> bool:
        return not isinstance(read.get_output_spec(), NonOwningLayout) and matches(read, written)

    with _replaced(wrapper, "can_match_buffer_size", whole_and_matches):
        yield


_IMPORT = f"from {__name__} import laid_out"


@contextlib.contextmanager
def laid_out_as_known() -> Iterator[None]:
    """A context in which Inductor's code lays out anew what is not laid out as Inductor knows it."""
    with needed():
        from torch._inductor.ir import FallbackKernel, MultiOutput
        from torch._inductor.virtualized import V

        require(MultiOutput, "codegen_size_asserts")
        require(FallbackKernel, "get_inputs_that_alias_output")

    checked: Any = MultiOutput.codegen_size_asserts

    def lay_out(output: Any, wrapper: Any) -> None:
        kernel = output.inputs[0]
        views = not isinstance(kernel, FallbackKernel) or kernel.get_inputs_that_alias_output()
        if views or V.graph.cpp_wrapper:  # views have the strides that their functions of shapes say
            checked(output, wrapper)
            return
        wrapper.add_import_once(_IMPORT)
        name, number = output.get_name(), wrapper.codegen_shape_tuple
        known = f"{number(output.get_size())}, {number(output.get_stride())}"
        wrapper.writeline(f"{name} = laid_out({name}, {known})")

    with _replaced(MultiOutput, "codegen_size_asserts", lay_out):
        yield


def laid_out(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor with these strides, and nothing lazy: a copy, if it is not that itself."""
    if x.shape != shape:
        raise AssertionError(f"torch's own kernel returned {list(x.shape)}, not {list(shape)}")
    x = x.resolve_conj().resolve_neg()
    if x.stride() == strides or _lies_alike(x, strides):
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _lies_alike(x: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether strides differ only where there is one element, or none."""
    found = zip(x.shape, x.stride(), strides, strict=True)
    return not x.numel() or all(have == known for size, have, known in found if size > 1)


@contextlib.contextmanager
def complex_sums_stay() -> Iterator[None]:
    """A context in which Inductor does not decompose sums of complex values, nor others differently.

    Not by a table of our own: Inductor's caches take no graph that is compiled with one.
    """
    with needed():
        from torch._inductor import decomposition

        require(decomposition, "decompositions", "fast_random_decomps")

    table, kept = decomposition.decompositions, aten.add.Tensor
    merged: Any = decomposition.fast_random_decomps
    tables = [table, merged()] if hasattr(merged, "cache_info") else [table]  # kept, or made anew
    decomposed = [(each, each.pop(kept)) for each in tables if kept in each]
    try:
        yield
    finally:
        for each, function in decomposed:
            each[kept] = function


@contextlib.contextmanager
def first_calls_are_plain() -> Iterator[None]:
    """A context in which compiled code is made whose first call is like all others."""
    with needed():
        from torch._functorch._aot_autograd import runtime_wrappers

    first: Any = getattr(runtime_wrappers, "_FirstInvocationContext", None)
    if first is None:  # versions that do not look
        yield
        return
    with _replaced(first, "__init__", lambda calls: setattr(calls, "_is_first", False)):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


CHANGES: tuple[Callable[[], AbstractContextManager[None]], ...] = (
    *(reads_after_writes, reads_before_writes, parts_stay, laid_out_as_known, complex_sums_stay),
)
