"""Inputs of a graph that Inductor's code may write over.

In the backwards of torch.compile Inductor has such inputs: the residuals, as "donated buffers". A fused
kernel that is the last to read one, and writes a value of the same size in the same order, writes it
there. Nothing public asks for this in other graphs. A mutation in the graph itself (``copy_`` of the
result) is public, but keeps kernels that read the old values from being fused with those that write the
new ones; it is for inputs of which a few elements are written (`compiling/writes_in_place.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from torchard.functional.torch_internals.accessors.required import needed

__all__ = ["donated_inputs", "donating", "keep_inputs"]


@contextlib.contextmanager
def donating(positions: Sequence[int], count: int) -> Iterator[Callable[..., Any]]:
    """A context in which to compile one graph with donated inputs: gives the ``inner_compile`` for it.

    AOTAutograd's cache is off in this context: its keys leave out input names, so the cache would return
    the same graph compiled without donation (torch 2.13). On a torch version without donated buffers
    nothing is written over.

    Args:
        positions: the positions of the donated inputs.
        count: the number of inputs. If AOTAutograd adds or drops inputs, nothing is written over.
    """
    with needed():
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx_inner

    def compile_inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        metadata = _metadata()
        if hasattr(metadata, "bw_donated_idxs") and len(inputs) == count:
            metadata.bw_donated_idxs = list(positions)
            _rename(graph, positions)
            options["is_backward"] = True
        return compile_fx_inner(graph, inputs, **options)

    with config.patch(enable_autograd_cache=False):
        yield compile_inner


def donated_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The donated inputs of a graph that is being compiled, in a pass over it."""
    places = graph.find_nodes(op="placeholder")
    positions = getattr(_metadata(), "bw_donated_idxs", None) or ()
    # A graph within the graph has others at these positions.
    return [places[i] for i in positions if i < len(places) and places[i].target == _name(i)]


def keep_inputs(graph: fx.Graph, kept: Sequence[fx.Node]) -> None:
    """Have Inductor not write results over these donated inputs."""
    if kept:
        metadata = _metadata()
        names = {node.target for node in kept}
        metadata.bw_donated_idxs = [i for i in metadata.bw_donated_idxs if _name(i) not in names]


def _metadata() -> Any:
    """What AOTAutograd knows of the graph that is being compiled."""
    with needed():
        from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), "fw_metadata", None)


def _name(position: int) -> str:
    return f"donated_{position}"


def _rename(graph: fx.GraphModule, positions: Sequence[int]) -> None:
    """Name donated inputs by what they are: the key of Inductor's cache has the code of the graph."""
    places = graph.graph.find_nodes(op="placeholder")
    for i in positions:
        places[i].name = places[i].target = _name(i)
    graph.recompile()
