"""Every private PyTorch interface this room relies on, and why. Nothing else imports one.

`versions.py` says with which versions of torch they were tried; where one is missing, importing this
module says which.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import versions

versions.check(torch.__version__)
try:
    from torch._C import _functorch as functorch_c
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.fx.experimental.proxy_tensor import (
        ProxyTorchDispatchMode,
        PythonKeyTracer,
        disable_autocast_cache,
        get_proxy_slot,
        track_tensor_tree,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
    from torch.overrides import _pop_mode, _push_mode
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map_only

    GRAD, JVP, VMAP = (
        functorch_c.TransformType.Grad,
        functorch_c.TransformType.Jvp,
        functorch_c.TransformType.Vmap,
    )
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torchard needs torch {versions.RANGE}; {torch.__version__} lacks an internal it uses "
        f"({error}). Install one of those versions."
    ) from error

__all__ = [
    "GRAD",
    "JVP",
    "VMAP",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "OpOverload",
    "PythonKeyTracer",
    "autocast_off",
    "autocast_on",
    "autograd_sequence",
    "base_tensor",
    "clean_room",
    "compile_graph",
    "current_backward_node",
    "direct",
    "forward_ad_active",
    "functionalized",
    "graph_task",
    "has_modes",
    "has_transforms",
    "is_wrapped",
    "level_kinds",
    "needs_grad_at_top",
    "no_function_modes",
    "no_modes",
    "profiler_enabled",
    "proxy_node",
    "proxying",
    "track",
]

# The compiling flag is process-wide, so two traces at once must not restore each other's value.
_flag_lock = threading.RLock()


@contextlib.contextmanager
def _compiling_flag() -> Iterator[None]:
    """As torch.export does: libraries take their traceable branches while it is set."""
    with _flag_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Pop every TorchFunctionMode but the default device, which is part of what fn means."""
    popped = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    devices = [mode for mode in reversed(popped) if isinstance(mode, DeviceContext)]
    for mode in devices:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in devices:
            _pop_mode()
        for mode in reversed(popped):
            _push_mode(mode)


@contextlib.contextmanager
def clean_room() -> Iterator[None]:
    """No functorch level, no mode, gradients on: where every trace happens.

    Calls come from inside grad, vmap, other tracers and backward passes; what is traced must not
    depend on which. (`_DisableFuncTorch` only hides the levels and breaks functorch inside.)
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_no_function_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(_compiling_flag())
        yield


class _Proxying(ProxyTorchDispatchMode):
    """Records; and tells forward-mode AD on which device its values are.

    C++ takes a fake tensor to be on meta. There it makes the zero tangents of what has none, and there
    it copies tangents that are laid out otherwise than their primals; outside of the trace those would
    be tensors without values.
    """

    def __init__(self, tracer: PythonKeyTracer, device: torch.device) -> None:
        super().__init__(tracer, "fake")
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if forward_ad_active() and self.device.type != "meta":
            args = tree_map_only(torch.Tensor, self._zeros, args)
            target = (kwargs or {}).get("device")
            if target is not None and target.type == "meta":
                kwargs = {**kwargs, "device": self.device}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _zeros(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor) or value.device.type != "meta":
            return value
        with self:
            return torch.zeros(value.shape, dtype=value.dtype, device=self.device)


@contextlib.contextmanager
def proxying(
    tracer: PythonKeyTracer, fakes: FakeTensorMode, inputs: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Record what happens to these fake tensors as nodes of ``tracer.graph``.

    make_fx itself goes through ``fx.Tracer.trace``, which patches nn.Module for the whole process
    and leaves no place for an own tracer.
    """
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
    tracer.root = torch.nn.Module()
    tracer.tensor_attrs = {}
    device = inputs[0].device if inputs else torch.device("cpu")
    mode = _Proxying(tracer, device)
    after = None
    for i, tensor in enumerate(inputs):
        after = track(tracer, tensor, f"in{i}", after)
    with fakes, disable_autocast_cache(), mode:
        yield


def track(
    tracer: PythonKeyTracer, tensor: torch.Tensor, name: str, after: fx.Node | None
) -> fx.Node:
    """A placeholder for this fake tensor, after another one or (None) ahead of everything."""
    with no_modes(), inserting_after(tracer.graph, after):
        proxy = tracer.create_proxy("placeholder", name, (), {})
        track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
    return proxy.node


def inserting_after(graph: fx.Graph, node: fx.Node | None) -> contextlib.AbstractContextManager[None]:
    """Insert after a node or (None) ahead of everything, where fx would append."""
    first = next(iter(graph.nodes), None)
    ahead = node is None and first is not None
    return graph.inserting_before(first) if ahead else graph.inserting_after(node)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """No mode of any kind, no functorch level: what is done inside leaves no node."""
    with (
        temporarily_clear_interpreter_stack(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
    ):
        yield


@contextlib.contextmanager
def no_function_modes() -> Iterator[None]:
    """Ask a tensor for its metadata without a TorchFunctionMode hearing of it."""
    with torch._C.DisableTorchFunction():
        yield


def proxy_node(tracer: PythonKeyTracer, tensor: torch.Tensor) -> fx.Node | None:
    """The node that made this fake tensor."""
    slot = get_proxy_slot(tensor, tracer, None, lambda x: x)
    return None if slot is None else slot.proxy.node


def functionalized(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn without in-place operations; views stay views."""
    return torch.func.functionalize(fn, remove="mutations")


def has_transforms() -> bool:
    """Whether any functorch level is live."""
    return torch._C._are_functorch_transforms_active()


def level_kinds() -> list[Any]:
    """The live functorch levels, outermost first."""
    stack = functorch_c.get_interpreter_stack()
    return [] if stack is None else [level.key() for level in stack]


def forward_ad_active() -> bool:
    """Whether torch.autograd.forward_ad has a level open (functorch's jvp has one too)."""
    return torch.autograd.forward_ad._current_level >= 0


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a functorch level owns this tensor."""
    return functorch_c.is_functorch_wrapped_tensor(tensor)


def base_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all functorch wrappers."""
    while functorch_c.is_functorch_wrapped_tensor(tensor):
        tensor = functorch_c.get_unwrapped(tensor)
    return tensor


def autocast_on() -> bool:
    """Whether autocast is enabled for any device."""
    return torch._C._is_any_autocast_enabled()


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """A traced program has its casts written out; autocast must not add more."""
    with torch._C._DisableAutocast():
        yield


def has_modes() -> bool:
    """Whether a dispatch mode (a tracer, a fake mode) watches every operation."""
    return bool(torch._C._len_torch_dispatch_stack())


# Whether a profiler records this thread; asked at every call, and torch has no public way to ask.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], backend: str
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A flat graph through a backend of torch.compile, called with one list of inputs.

    torch.compile itself would trace the flat graph again and check guards at every call; what the
    graph depends on is in our own key. Inductor frees inputs as they die if it may empty the list
    they come in, which it does for graphs in a GmWrapper.
    """
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.utils import GmWrapper

    for node in module.graph.nodes:
        node.meta.pop("recompute", None)  # torch reads another thing from a tag of this name
    compile_with: Callable[..., Any] = lookup_backend(backend)
    if backend == "inductor":
        boxed: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = compile_with(
            GmWrapper(module, lambda args: args), list(inputs)
        )
        return boxed
    run = compile_with(module, list(inputs))
    return lambda args: run(*args)


def needs_grad_at_top(tensor: torch.Tensor) -> bool:
    """Whether the innermost (Grad) level follows this tensor."""
    top = functorch_c.peek_interpreter_stack()
    follows = functorch_c.maybe_get_level(tensor) == top.level()
    return bool(follows and tensor.requires_grad)


def storage_uses(storage: torch.UntypedStorage) -> int | None:
    """How many refer to a storage, tensors and this object alike; None if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def graph_task() -> int:
    """Which backward pass is running in this thread; -1 for none. It tells the phases apart."""
    return torch._C._current_graph_task_id()


def autograd_sequence() -> int:
    """The number the next autograd node gets: what links a backward to its forward's line."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_backward_node() -> int | None:
    """The number of the autograd node being run backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def direct(target: Any) -> Any:
    """An op without its Python call wrapper, a tenth of a microsecond each."""
    return target._op if isinstance(target, OpOverload) else target
