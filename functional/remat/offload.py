"""Offloading to host memory between forward and backward: two operations, and their placement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tagging import inherit, put
from torchard.functional.programs.tags import OFFLOAD, PHASE, RECOMPUTE, VAL

__all__ = ["offload_after", "reload_before"]

LIBRARY = torch.library.Library("torchard", "FRAGMENT")
LIBRARY.define("offload(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.define("reload(Tensor x, Device device) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which copies run beside the computation."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def _offload(x: Tensor) -> Tensor:
    """A copy of x on the host: in pinned memory, asynchronously, from a CUDA device."""
    if x.device.type != "cuda":
        return x.to("cpu", copy=True)
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        host.copy_(x, non_blocking=True)
    x.record_stream(stream)
    return host


def _reload(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x on the device, on the stream of the first copy, so that it comes after it."""
    if device.type != "cuda":
        return x.to(device, copy=True)
    stream, current = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        back = x.to(device, non_blocking=True)
    current.wait_stream(stream)
    back.record_stream(current)
    return back


def _offload_fake(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


def _reload_fake(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device)


LIBRARY.impl("offload", _offload, "CompositeExplicitAutograd")
LIBRARY.impl("reload", _reload, "CompositeExplicitAutograd")
torch.library.register_fake("torchard::offload", _offload_fake, lib=LIBRARY)
torch.library.register_fake("torchard::reload", _reload_fake, lib=LIBRARY)


def offload_after(node: fx.Node) -> fx.Node:
    """The node that copies a value to the host, added right after the value if there is none yet."""
    target = torch.ops.torchard.offload.default
    for user in node.users:
        if user.target is target:
            return user
    with internals.inserting_after(node.graph, node):
        copy = node.graph.call_function(target, (node,))
    _tag(copy, node, target, VAL.of(node))
    OFFLOAD.set(copy, True)
    return copy


def reload_before(reader: fx.Node, offloaded: fx.Node) -> fx.Node:
    """A node that copies a value back, right before its reader."""
    target, device = torch.ops.torchard.reload.default, VAL.of(offloaded.all_input_nodes[0]).device
    with reader.graph.inserting_before(reader):
        copy = reader.graph.call_function(target, (offloaded, device))
    _tag(copy, offloaded, target, VAL.of(offloaded), device)
    put(copy, {PHASE: "backward", RECOMPUTE: True})
    return copy


def _tag(copy: fx.Node, original: fx.Node, target: Any, *args: Any) -> None:
    """Give a copy the tags of the original, and its own value."""
    with internals.no_modes(), args[0].fake_mode:
        val = target(*args)
    inherit(copy, original, "value")
    VAL.set(copy, val)
