"""Writes in place, in the graph that Inductor lowers.

Where results are computed by writes into a donated input, such as a cache, they are written into its
memory. Where a value is written to many times, as if row by row, it is copied once, and the copy written
to: Inductor's kernels would otherwise compute all of it anew for every few writes, which takes time
quadratic in the rows. `write_chains.py` finds the writes, and says when they may be in place.

Inductor knows of donated inputs, too (`torch_internals/donated_buffers.py`): a kernel overwrites one
where it is the last to read it. An input that is written into is none of these, since it is a result.
"""

from __future__ import annotations

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.compiling.write_chains import (
    Chain,
    ChainedWrite,
    chains,
    operand_of,
)
from torchard.functional.effects.in_place import WRITTEN_VIEWS, in_place_variant
from torchard.functional.programs.graphs import Inserter
from torchard.functional.programs.tags import INDUCTOR_REALIZE_TO_STRIDES, VAL
from torchard.functional.programs.views import depending_on
from torchard.functional.torch_internals.operators import aten

__all__ = ["MIN_BYTES", "MIN_WRITES", "write_in_place"]

# Inductor merges about eight writes into one kernel, which computes everything; a kernel for each write
# is faster if the value is large. On a GPU, each kernel costs as much as several megabytes.
MIN_WRITES = 8
MIN_BYTES = {"cpu": 1 << 16}
_MIN_BYTES = 1 << 25


def write_in_place(graph: fx.Graph) -> None:
    """Have writes done in place that are the last to read what they write over."""
    found = chains(graph, internals.donated_inputs(graph))
    for chain in found:
        chain.donated = chain.donated and chain.is_returned
    chosen = [chain for chain in found if chain.donated or _pays(chain)]
    reading = [_reading(chain) for chain in chosen]  # of the graph as it is
    for chain, readers in zip(chosen, reading, strict=True):
        for n, write in enumerate(chain.writes):
            _convert(write, readers, copies=not (chain.donated or n))
    internals.keep_inputs(graph, [chain.start for chain in chosen if chain.donated])


def _pays(chain: Chain) -> bool:
    value: torch.Tensor = VAL.of(chain.start)
    least = MIN_BYTES.get(value.device.type, _MIN_BYTES)
    return len(chain.writes) >= MIN_WRITES and value.nbytes >= least


def _reading(chain: Chain) -> set[fx.Node]:
    """What may be computed from the memory of a chain."""
    return depending_on([chain.start if chain.donated else chain.writes[0].first])


def _convert(write: ChainedWrite, reading: set[fx.Node], copies: bool) -> None:
    """Do a write in place, where its base is, or in a copy of that."""
    first = write.first
    insert = Inserter(first)

    def stored(operand: fx.Node) -> fx.Node:
        """A copy that is in memory when what follows runs, with the strides of the graph."""
        copy = insert(aten.clone.default, operand)
        INDUCTOR_REALIZE_TO_STRIDES.set(copy, True)
        return copy

    base = operand_of((*write.views, first)[0])
    places = {base: stored(base) if copies else base}
    for view in write.views:
        place = places[operand_of(view)]
        places[view] = insert(view.target, place, *view.args[1:], **view.kwargs)
    # What is computed from the memory is so before that is written.
    operands, named = fx.map_arg(
        (first.args[1:], first.kwargs), lambda node: stored(node) if node in reading else node
    )
    written = places[operand_of(first)]
    if first.target in WRITTEN_VIEWS:
        source, *where = operands
        part = insert(WRITTEN_VIEWS[first.target], written, *where, **named)
        insert(aten.copy_.default, part, source)
    else:
        insert(in_place_variant(first.target), written, *operands, **named)
    for step in write.steps:
        step.replace_all_uses_with(places[operand_of(step)])
        step.graph.erase_node(step)
