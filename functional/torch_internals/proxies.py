"""Fake tensors, and recording operations on them.

make_fx is partly public, but records whole functions: operands cannot be added while it runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _ProxyTensor,
    disable_autocast_cache,
    get_proxy_slot,
    set_proxy_slot,
    snapshot_fake,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import has_preserved_node_meta

from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.torch_internals import zero_tangents
from torchard.functional.torch_internals.accessors.fakes import KnownResults
from torchard.functional.torch_internals.accessors.graphs import ProgramGraph
from torchard.functional.torch_internals.accessors.required import require
from torchard.functional.torch_internals.accessors.tensors import OpOverload
from torchard.functional.torch_internals.functorch_levels import base_tensor, forward_ad_active
from torchard.functional.torch_internals.modes import no_modes
from torchard.functional.torch_internals.operators import aten
from torchard.functional.torch_internals.scalar_operands import as_tensors
from torchard.functional.torch_internals.thread_state import clear_frames_of_torch

__all__ = [
    "CONTROL_FLOW_IN_ERRORS",
    "GENERATOR_IN_ERRORS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "RecordingTracer",
    "end_fakes",
    "ended",
    "fake",
    "inserting_after",
    "is_known",
    "proxy_node",
    "proxying",
    "record_call",
    "text_of",
    "track",
]

require(torch._C, "DisableTorchFunctionSubclass")

# Parts of torch's errors for things that cannot be recorded. If another version words them differently,
# its errors are raised unchanged.
GENERATOR_IN_ERRORS = "torch._C.Generator"
CONTROL_FLOW_IN_ERRORS = ("There was no rule registered for H", "torch._dynamo.exc")

# Types of operands that are recorded unchanged.
_LITERALS = {
    *(int, float, bool, complex, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
# torch's tracer keeps the values of constants, and reads those of tensors.
_OF_VALUES = (aten.lift_fresh.default, aten.is_nonzero.default)
require(fx.Graph, "_target_to_str")
require(torch._C.DispatchKey, "CompositeImplicitAutograd")

_MEMORY_OF_A_PRIMAL = aten._new_zeros_with_same_feature_meta.default
_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default


class RecordingTracer(PythonKeyTracer):
    """torch's tracer, which notes of each node the tensor that it gives."""

    def note(self, node: fx.Node, tensor: torch.Tensor | None) -> None:
        """Keep what is known of a node's tensor; the caller's, as is how nodes are tagged."""
        raise NotImplementedError


class _Proxying(ProxyTorchDispatchMode):
    """Records operations, and corrects what torch does differently for fake tensors.

    C++ treats a fake tensor as one on meta. There it copies tangents whose strides differ from their
    primal's, and the copies would be meta tensors in the trace; they are put on the trace's device. The
    copy has the memory of the primal's whole storage. The cache of fake results knows shape and strides
    only, so views of such a tangent would differ from those of its primal, on which torch asserts; it is
    disabled.

    Most operations are recorded by a shorter way than torch's, without what it does for those that have
    symbolic sizes, constants or decompositions: traces take a third less time.
    """

    def __init__(
        self,
        tracer: RecordingTracer,
        fakes: FakeTensorMode,
        device: torch.device,
        below: Callable[[], Any],
    ) -> None:
        super().__init__(tracer, "fake")
        self.recorder = tracer
        self.fakes = fakes
        self.device = device
        self.below = below
        self.results = KnownResults(fakes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # As torch's fake mode answers, by a shorter way: more than half of all calls ask this.
            inside = args[0].fake_mode.in_kernel_invocation
            return torch.device("meta") if inside else args[0].fake_device
        kwargs = kwargs or {}
        if forward_ad_active() and self.device.type != "meta":
            target = kwargs.get("device")
            if target is not None and target.type == "meta":
                kwargs = {**kwargs, "device": self.device}

        def call(func: Any, *args: Any, **kwargs: Any) -> Any:
            return self._record(func, types, args, kwargs)

        try:
            return zero_tangents.run(call, func, as_tensors(call, func, args), kwargs)
        except BaseException as error:  # fn may catch it and go on
            clear_frames_of_torch(error)
            raise

    def _record(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = _name_if_plain(func)
        if name is None or self.emulate_precision_casts or has_preserved_node_meta():
            return self._as_torch_does(func, types, args, kwargs)
        try:
            operands, options = self._operand(args), self._operand(kwargs)
        except _Unusual:
            return self._as_torch_does(func, types, args, kwargs)
        node = self.recorder.create_node("call_function", func, operands, options, name)
        return self._run(node, args, kwargs)

    def _as_torch_does(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        with torch._C._PreserveDispatchKeyGuard(), self.below(), self._cache_for(func):
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _operand(self, value: Any) -> Any:
        kind = type(value)
        if kind in _LITERALS:
            return value
        if kind is FakeTensor:
            slot: Any = get_proxy_slot(value, self.recorder, None)
            if slot is None or slot.constant is not None:
                raise _Unusual
            return slot.proxy.node
        if kind is tuple or kind is list:
            return kind(map(self._operand, value))
        if kind is dict:
            return {name: self._operand(each) for name, each in value.items()}
        raise _Unusual

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        proxy = self.recorder.proxy(node)
        out, noted = self.results.run(node.target, args, kwargs, self._call)
        if type(out) is FakeTensor:
            _note(self.recorder, out, proxy, noted)
            return out
        return track_tensor_tree(out, proxy, constant=None, tracer=self.recorder)

    def _call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C._PreserveDispatchKeyGuard(), self.below(), self._cache_for(func):
            return func(*args, **kwargs)

    def _cache_for(self, func: Any) -> contextlib.AbstractContextManager[None]:
        if func is _MEMORY_OF_A_PRIMAL:
            return disable_fake_tensor_cache(self.fakes)
        return contextlib.nullcontext()


class _Unusual(Exception):
    """An operand of a kind that is left to torch's tracer."""


@functools.cache
def _name_if_plain(func: Any) -> str | None:
    """What nodes of an operator are called; None if torch's tracer does more than record a call."""
    if not isinstance(func, OpOverload) or func in _OF_VALUES or _decomposes(func):
        return None
    if torch.Tag.data_dependent_output in func.tags:
        return None
    return fx.Graph()._target_to_str(func.overloadpacket.__name__)


def _decomposes(func: OpOverload) -> bool:
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def proxying(
    tracer: RecordingTracer,
    fakes: FakeTensorMode,
    inputs: Sequence[torch.Tensor],
    below: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Record operations on these fake tensors as nodes of ``tracer.graph``; kernels run in `below()`.

    make_fx itself calls ``fx.Tracer.trace``, which patches nn.Module for the whole process and does not
    accept another tracer.
    """
    tracer.graph = ProgramGraph(tracer_cls=type(tracer))
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    device = inputs[0].device if inputs else torch.device("cpu")
    mode = _Proxying(tracer, fakes, device, below)
    after = None
    for i, tensor in enumerate(inputs):
        after = track(tracer, tensor, f"in{i}", after)
    with fakes, disable_autocast_cache(), mode:
        yield


def track(
    tracer: RecordingTracer, tensor: torch.Tensor, name: str, after: fx.Node | None
) -> fx.Node:
    """Add a placeholder for this fake tensor, after a node or (None) at the start."""
    with no_modes(), inserting_after(tracer.graph, after):
        node = tracer.create_node("placeholder", name, (), {})
        _note(tracer, tensor, tracer.proxy(node))
    return node


def _note(
    tracer: RecordingTracer, tensor: torch.Tensor, proxy: fx.Proxy, noted: torch.Tensor | None = None
) -> None:
    set_proxy_slot(tensor, tracer, _ProxyTensor(proxy, None))
    tracer.note(proxy.node, snapshot_fake(tensor) if noted is None else noted)


def record_call(
    tracer: RecordingTracer,
    target: Callable[..., Any],
    operands: Sequence[torch.Tensor],
    results: torch.Tensor | tuple[torch.Tensor, ...],
) -> None:
    """Add a call whose results are these fake tensors; the operands are tensors of the trace."""
    with no_modes():
        proxies = tuple(get_proxy_slot(operand, tracer).proxy for operand in operands)
        call = tracer.create_proxy("call_function", target, proxies, {})
        track_tensor_tree(results, call, constant=None, tracer=tracer)


def inserting_after(
    graph: fx.Graph, node: fx.Node | None
) -> contextlib.AbstractContextManager[None]:
    """Insert after a node or (None) at the start, where fx would append."""
    first = next(iter(graph.nodes), None)
    ahead = node is None and first is not None
    return graph.inserting_before(first) if ahead else graph.inserting_after(node)


def fake(fakes: FakeTensorMode, spec: TensorSpec) -> torch.Tensor:
    """The tensor that ``spec.empty()`` gives under the mode, computed faster."""
    with no_modes():
        return FakeTensor(fakes, replace(spec, device=_META).empty(), spec.device)


class _Over:
    """The fake mode of a tensor whose trace is over: using the tensor raises an error."""

    in_kernel_invocation = False

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error = error

    def __enter__(self) -> None:
        raise self.error()

    def __exit__(self, *_: Any) -> None:
        """Never entered."""


# Functions that read or pass on a tensor's memory, without an error if it has none.
_READS_MEMORY = (
    *(torch.Tensor.data_ptr, torch.Tensor.storage, torch.Tensor.untyped_storage),
    *(torch.Tensor.__reduce_ex__, torch.Tensor.__dlpack__, torch.Tensor.share_memory_),
)
_TEXTS = (torch.Tensor.__repr__, torch.Tensor.__format__)


class _Ended(FakeTensor):
    """A tensor whose trace is over: C++ code that never calls a kernel raises the error, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TEXTS:
                return text_of(args[0])
            error: Any = next(ended(x) for x in _flat((args, kwargs)) if isinstance(x, cls))
            if func in _READS_MEMORY:
                raise error
            try:
                return func(*args, **(kwargs or {}))
            except Exception as failure:
                raise error from (None if type(failure) is type(error) else failure)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _flat(item)
    else:
        yield value


def text_of(tensor: torch.Tensor) -> str:
    """A traced tensor's text in ``print``: its dtype and shape, as it has no value."""
    return f"Traced({str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)})"


def end_fakes(tracer: RecordingTracer, error: Callable[[fx.Node], Exception]) -> None:
    """Make tensors of the trace that are still alive raise an error when used."""
    for tensor, slot in list(tracer.tensor_tracker.items()):
        if isinstance(tensor, FakeTensor):
            over: Any = _Over(functools.partial(error, slot.proxy.node))
            tensor.fake_mode = over
            tensor.__class__ = _Ended


def ended(tensor: torch.Tensor) -> Exception | None:
    """The error of a tensor whose trace is over; None for any other."""
    base = base_tensor(tensor)
    mode = getattr(base, "fake_mode", None)
    return mode.error() if isinstance(mode, _Over) else None


def is_known(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor has a value, which was written in the function: ``torch.tensor(3)``."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def proxy_node(tracer: RecordingTracer, tensor: torch.Tensor) -> fx.Node | None:
    """The node of this fake tensor; None if it has none."""
    slot = get_proxy_slot(tensor, tracer, None, lambda x: x)
    return None if slot is None else slot.proxy.node
