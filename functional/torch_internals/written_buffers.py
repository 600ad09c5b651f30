"""Buffers that Inductor's code writes in place: read behind the writes, and never parts of others.

Inductor's scheduler has a name for a buffer before each write and one after it, and a node that reads
what was written depends on the later name. Where it changes the loops of a node, to fuse it with others,
it takes the node's reads anew from its code, which knows the first name alone: the node then depends on
no write, and may be ordered before it, to save memory (torch 2.13: gradients of `x.max(0)[0]` that lack
elements, if rows are summed in the same kernel).

An operand of a concatenation may be computed in its place in the whole. Where it is read for the last
time, the result may be written there, in place; but the whole is taken for no longer used, and its memory
for another value (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torchard.functional.torch_internals.accessors.required import needed, require

__all__ = ["parts_stay", "reads_after_writes"]


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

    # One thread compiles at a time; to what torch.compile compiles meanwhile it does the same good.
    scheduler_node: Any = SchedulerNode
    scheduler_node._compute_attrs = keep
    try:
        yield
    finally:
        scheduler_node._compute_attrs = take_anew


@contextlib.contextmanager
def parts_stay() -> Iterator[None]:
    """A context in which Inductor writes nothing in place into a part of another buffer."""
    with needed():
        from torch._inductor.codegen import wrapper
        from torch._inductor.ir import NonOwningLayout

        require(wrapper, "can_match_buffer_size")

    inductor: Any = wrapper
    matches: Any = wrapper.can_match_buffer_size

    def whole_and_matches(read: Any, written: Any) -> bool:
        return not isinstance(read.get_output_spec(), NonOwningLayout) and matches(read, written)

    inductor.can_match_buffer_size = whole_and_matches
    try:
        yield
    finally:
        inductor.can_match_buffer_size = matches
