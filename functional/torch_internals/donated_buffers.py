"""Inputs of a graph whose memory Inductor may write results to.

Inductor has such inputs in the backwards of torch.compile, where they are the residuals ("donated
buffers"): where a fused kernel is the last to read one, and writes a value of the same size at the same
places, it writes over it. Nothing public asks for this in other graphs. A mutation in the graph itself
(``copy_`` of the result) would keep kernels that read the old values from being fused with those that
write the new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from torchard.functional.torch_internals.accessors.required import needed

__all__ = ["donating"]


@contextlib.contextmanager
def donating(positions: Sequence[int]) -> Iterator[Callable[..., Any]]:
    """A context in which to compile one graph with donated inputs, with the function that does (2.13).

    AOTAutograd's cache is off there: its keys leave out the names of inputs, so that it would take the
    same graph without donation for an equal one.
    """
    with needed():
        from torch._functorch import config
        from torch._guards import TracingContext
        from torch._inductor.compile_fx import compile_fx_inner

    def compile_inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        metadata: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
        if hasattr(metadata, "bw_donated_idxs"):
            metadata.bw_donated_idxs = list(positions)
            _rename(graph, positions)
            options["is_backward"] = True
        return compile_fx_inner(graph, inputs, **options)

    with config.patch(enable_autograd_cache=False):
        yield compile_inner


def _rename(graph: fx.GraphModule, positions: Sequence[int]) -> None:
    """Name donated inputs by what they are: the key of Inductor's cache has the code of the graph."""
    places = graph.graph.find_nodes(op="placeholder")
    for i in positions:
        places[i]._rename(f"donated_{i}")
        places[i].target = places[i].name
    graph.recompile()
