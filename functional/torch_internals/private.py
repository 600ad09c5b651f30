"""Every private PyTorch interface this room relies on, and why. Nothing else imports one.

`versions.py` says with which versions of torch they were tried; where one is missing, importing this
module says which.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.core.locks import Lock
from torchard.functional.torch_internals import versions, zero_tangents
from torchard.functional.torch_internals.operators import aten
from torchard.functional.torch_internals.scalar_operands import as_tensors

versions.check(torch.__version__)
try:
    from torch._C import _functorch as functorch_c
    from torch._functorch import eager_transforms
    from torch._functorch.pyfunctorch import (
        retrieve_current_functorch_interpreter,
        temporarily_clear_interpreter_stack,
    )
    from torch._guards import TracingContext, tracing
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        disable_fake_tensor_cache,
    )
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import (
        ProxyTorchDispatchMode,
        PythonKeyTracer,
        disable_autocast_cache,
        get_proxy_slot,
        track_tensor_tree,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
    from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
    )
    from torch.utils._python_dispatch import (
        _pop_mode as _pop_dispatch_mode,
    )

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
    "OpOverloadPacket",
    "PythonKeyTracer",
    "autocast_off",
    "autocast_on",
    "autograd_sequence",
    "backend_of",
    "base_tensor",
    "before_reading",
    "below_forward_ad",
    "below_vmap",
    "clean_room",
    "compile_graph",
    "current_backward_node",
    "default_device",
    "direct",
    "dispatch_is_excluded",
    "end_fakes",
    "ended",
    "forward_ad_active",
    "function_modes",
    "gradient_level",
    "graph_task",
    "has_modes",
    "has_transforms",
    "in_gradient_level",
    "inserting_after",
    "is_view",
    "is_wrapped",
    "level_kinds",
    "mapped_at_top",
    "needs_grad_at_top",
    "no_function_modes",
    "no_modes",
    "overload",
    "profiler_enabled",
    "proxy_node",
    "proxying",
    "qualified_name",
    "registered_formula",
    "resolved",
    "saved_were_freed",
    "storage_info",
    "storage_uses",
    "track",
]

# The compiling flag is process-wide, so two traces at once must not restore each other's value; and
# torch's compilers are not re-entrant.
_one_at_a_time = Lock()


def _after_fork() -> None:
    """In the child: unless it was forked by a trace, no trace is in progress."""
    if not _one_at_a_time.is_held():
        torch.compiler._is_compiling_flag = False


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def _compiling_flag() -> Iterator[None]:
    """As torch.export does: libraries take their traceable branches while it is set."""
    with _one_at_a_time:
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


def default_device() -> torch.device | None:
    """Where `torch.device(...)` as a context, or set_default_device, puts new tensors; None: nowhere."""
    if not torch._C._len_torch_function_stack():
        return None
    modes = _get_current_function_mode_stack()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else None


@contextlib.contextmanager
def clean_room(gradients: bool = True) -> Iterator[None]:
    """No functorch level, no mode, gradients on (or off): where every trace happens.

    Calls come from inside grad, vmap, other tracers and backward passes; what is traced must not
    depend on which. (`_DisableFuncTorch` only hides the levels and breaks functorch inside.)
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_thread_state_kept())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(_no_function_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        stack.enter_context(_compiling_flag())
        stack.enter_context(_nested_forward_ad())
        stack.enter_context(_no_saved_tensor_hooks())
        # Once more in here: the contexts above put back what they took from an undisturbed state.
        stack.enter_context(_thread_state_kept())
        yield


class _ThreadState(NamedTuple):
    """What torch keeps for a thread (forward mode: for the process) and a trace must not change."""

    keys: tuple[Any, Any]
    levels: int
    function_modes: list[Any]
    dispatch_modes: list[Any]
    grad: bool
    forward_grad: bool
    inference: bool
    forward: tuple[int, int] | None

    @staticmethod
    def now() -> _ThreadState:
        c = torch._C
        return _ThreadState(
            (c._dispatch_tls_local_include_set(), c._dispatch_tls_local_exclude_set()),
            functorch_c.get_dynamic_layer_stack_depth(),
            _get_current_function_mode_stack(),
            _get_current_dispatch_mode_stack(),
            torch.is_grad_enabled(),
            c._is_fwd_grad_enabled(),
            torch.is_inference_mode_enabled(),
            (forward_ad._current_level, eager_transforms.JVP_NESTING) if _is_only_thread() else None,
        )

    def restore(self) -> None:
        """Close what was left open, innermost first."""
        if functorch_c.get_dynamic_layer_stack_depth() > self.levels:
            functorch_c.pop_dynamic_layer_stack_and_undo_to_depth(self.levels)
        for _ in range(torch._C._len_torch_function_stack() - len(self.function_modes)):
            _pop_mode()
        for _ in range(torch._C._len_torch_dispatch_stack() - len(self.dispatch_modes)):
            _pop_dispatch_mode()
        if self.forward is not None and _is_only_thread():
            level, eager_transforms.JVP_NESTING = self.forward
            while forward_ad._current_level > level:
                forward_ad.exit_dual_level()
        torch._C._set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)

    def differences(self, other: _ThreadState) -> list[str]:
        """The names of what is not as it is in another state."""
        if self.forward is None or other.forward is None:
            self, other = self._replace(forward=None), other._replace(forward=None)
        pairs = zip(self._fields, map(_comparable, self), map(_comparable, other), strict=True)
        return [name for name, mine, others in pairs if mine != others]


def _is_only_thread() -> bool:
    """Forward-mode levels are the process's: with other threads about, who can say who opened one?"""
    return threading.active_count() == 1


def _comparable(value: Any) -> Any:
    """Sets of dispatch keys compare by what they print, modes by identity."""
    if isinstance(value, tuple):
        return [str(keys) for keys in value]
    return list(map(id, value)) if isinstance(value, list) else value


@contextlib.contextmanager
def _nested_forward_ad() -> Iterator[None]:
    """Let a jvp inside share the forward-mode level that is open around the trace, if one is.

    torch has one level for the process. functorch opens it for the outermost jvp, by its own count, in
    which levels that `forward_ad.dual_level` has opened are missing.
    """
    shared = int(forward_ad_active())
    eager_transforms.JVP_NESTING += shared
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= shared


@contextlib.contextmanager
def _no_saved_tensor_hooks() -> Iterator[None]:
    """Take the hooks around the trace away from what autograd saves inside, and allow hooks inside.

    They are meant for values (`torch.utils.checkpoint` counts them), and would be given fake ones.
    functorch forbids them around a gradient, which is no matter of what is traced.
    """
    autograd = torch._C._autograd
    forbidden = autograd._saved_tensors_hooks_get_disabled_error_message()
    autograd._saved_tensors_hooks_enable()
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)
        if forbidden is not None:
            autograd._saved_tensors_hooks_disable(forbidden)


@contextlib.contextmanager
def _thread_state_kept() -> Iterator[None]:
    """Leave torch's state of this thread as it is now, whatever is raised inside.

    Some of torch's functions change dispatch keys by a guard that is a local variable
    (`torch._tensor_str._str`). After an exception the guard lives as long as the traceback, and what it
    then does, at some time in the future, to the keys of the thread is no longer an undoing: later
    operations find no autograd, or no kernel that computes. So such frames let go of their variables
    here, and the keys are set back after that.
    """
    before = _ThreadState.now()
    try:
        with torch._C._PreserveDispatchKeyGuard():
            try:
                yield
            except BaseException as error:
                clear_frames_of_torch(error)
                raise
            finally:
                before.restore()
    finally:
        changed = before.differences(_ThreadState.now())
    if changed:
        raise RuntimeError(
            f"tracing left torch's state of this thread changed ({', '.join(changed)}), and it could not "
            "be set back: results of this thread can no longer be relied on. Start a new process."
        )


_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


def clear_frames_of_torch(error: BaseException) -> None:
    """Let frames of torch's that an error has left, and those of its causes, drop their variables.

    Frames of the user's keep theirs, for debuggers.
    """
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        error_or_none = errors.pop()
        if error_or_none is None or id(error_or_none) in seen:
            continue
        seen.add(id(error_or_none))
        errors += [error_or_none.__cause__, error_or_none.__context__]
        for frame, _ in traceback.walk_tb(error_or_none.__traceback__):
            if frame.f_code.co_filename.startswith(_TORCH_FOLDER):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()


_MEMORY_OF_A_PRIMAL = aten._new_zeros_with_same_feature_meta.default


class _Proxying(ProxyTorchDispatchMode):
    """Records, and mends what torch does to fakes otherwise than to tensors.

    C++ takes a fake tensor to be on meta, and there it copies tangents that are laid out otherwise than
    their primals; outside of the trace those would be tensors without values. What it copies them into
    has the primal's whole memory, around it too; the cache of fake results remembers shape and strides
    alone, and a view of such a tangent is not laid out as that of its primal, on which torch asserts.
    """

    def __init__(
        self,
        tracer: PythonKeyTracer,
        fakes: FakeTensorMode,
        device: torch.device,
        below: Callable[[], Any],
    ) -> None:
        super().__init__(tracer, "fake")
        self.fakes = fakes
        self.device = device
        self.below = below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if forward_ad_active() and self.device.type != "meta":
            target = kwargs.get("device")
            if target is not None and target.type == "meta":
                kwargs = {**kwargs, "device": self.device}
        record = super().__torch_dispatch__

        def call(func: Any, *args: Any, **kwargs: Any) -> Any:
            with torch._C._PreserveDispatchKeyGuard(), self.below(), self._cache_for(func):
                return record(func, types, args, kwargs)

        try:
            return zero_tangents.run(call, func, as_tensors(call, func, args), kwargs)
        except BaseException as error:  # fn may catch it and go on
            clear_frames_of_torch(error)
            raise

    def _cache_for(self, func: Any) -> contextlib.AbstractContextManager[None]:
        if func is _MEMORY_OF_A_PRIMAL:
            return disable_fake_tensor_cache(self.fakes)
        return contextlib.nullcontext()


@contextlib.contextmanager
def below_forward_ad(levels: Sequence[Any]) -> Iterator[None]:
    """In a kernel no tensor has a tangent, but printing one would look for it, and fail.

    torch prints operands where it resolves an overload by trying (`aten.lerp(...)` in kernels
    for meta tensors).

    Args:
        levels: the functorch levels around this thread's trace.
    """
    before = forward_ad._current_level
    if not _forward_ad_ours(levels):
        yield
        return
    forward_ad._current_level = -1
    try:
        yield
    finally:
        forward_ad._current_level = before


def _forward_ad_ours(levels: Sequence[Any]) -> bool:
    """Whether forward mode's level, which is the process's, is open, and surely by this thread."""
    return forward_ad_active() and (JVP in levels or JVP in level_kinds() or _is_only_thread())


@contextlib.contextmanager
def proxying(
    tracer: PythonKeyTracer,
    fakes: FakeTensorMode,
    inputs: Sequence[torch.Tensor],
    below: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Record what happens to these fake tensors as nodes of ``tracer.graph``; kernels run in `below()`.

    make_fx itself goes through ``fx.Tracer.trace``, which patches nn.Module for the whole process
    and leaves no place for an own tracer.
    """
    tracer.graph = fx.Graph(tracer_cls=type(tracer))
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
    tracer: PythonKeyTracer, tensor: torch.Tensor, name: str, after: fx.Node | None
) -> fx.Node:
    """A placeholder for this fake tensor, after another one or (None) ahead of everything."""
    with no_modes(), inserting_after(tracer.graph, after):
        proxy = tracer.create_proxy("placeholder", name, (), {})
        track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
    return proxy.node


def inserting_after(
    graph: fx.Graph, node: fx.Node | None
) -> contextlib.AbstractContextManager[None]:
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


class _Over:
    """Stands in for the mode of a fake tensor whose trace is over: computing with it is an error."""

    in_kernel_invocation = False

    def __init__(self, error: Callable[[], Exception]) -> None:
        self.error = error

    def __enter__(self) -> None:
        raise self.error()

    def __exit__(self, *_: Any) -> None:
        """Never entered."""


def end_fakes(tracer: PythonKeyTracer, error: Callable[[fx.Node], Exception]) -> None:
    """Let tensors of the trace that are still alive raise an error wherever they are used."""
    for tensor, slot in list(tracer.tensor_tracker.items()):
        if isinstance(tensor, FakeTensor):
            over: Any = _Over(functools.partial(error, slot.proxy.node))
            tensor.fake_mode = over


def ended(tensor: torch.Tensor) -> Exception | None:
    """The error of a tensor whose trace is over."""
    base = base_tensor(tensor)
    mode = getattr(base, "fake_mode", None)
    return mode.error() if isinstance(mode, _Over) else None


def proxy_node(tracer: PythonKeyTracer, tensor: torch.Tensor) -> fx.Node | None:
    """The node that made this fake tensor."""
    slot = get_proxy_slot(tensor, tracer, None, lambda x: x)
    return None if slot is None else slot.proxy.node


def has_transforms() -> bool:
    """Whether any functorch level is live."""
    return torch._C._are_functorch_transforms_active()


def level_kinds() -> list[Any]:
    """The live functorch levels, outermost first."""
    stack = functorch_c.get_interpreter_stack()
    return [] if stack is None else [level.key() for level in stack]


def forward_ad_active() -> bool:
    """Whether torch.autograd.forward_ad has a level open (functorch's jvp has one too)."""
    return forward_ad._current_level >= 0


@contextlib.contextmanager
def gradient_level(
    tensors: Sequence[torch.Tensor], mask: Sequence[bool]
) -> Iterator[tuple[list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]]:
    """A level of torch.func's gradients, as its vjp opens.

    Yields:
        These tensors in it, those of the mask followed, and what takes a tensor out of it.
    """
    with eager_transforms.grad_increment_nesting() as level:
        inside = [functorch_c._wrap_for_grad(tensor, level) for tensor in tensors]
        for tensor, followed in zip(inside, mask, strict=False):
            if followed:
                eager_transforms._create_differentiable(tensor, level)
        yield inside, lambda tensor: functorch_c._unwrap_for_grad(tensor, level)


def in_gradient_level(tensor: torch.Tensor) -> bool:
    """Whether a level of torch.func's gradients owns it, or what other levels wrap in it."""
    while functorch_c.is_functorch_wrapped_tensor(tensor):
        if functorch_c.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch_c.get_unwrapped(tensor)
    return False


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows it as a view of another tensor."""
    return tensor._is_view()


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a functorch level owns this tensor."""
    return functorch_c.is_functorch_wrapped_tensor(tensor)


def mapped_at_top(values: Sequence[Any]) -> bool:
    """Whether the innermost level is a vmap, and one of these tensors is mapped by it."""
    top = functorch_c.peek_interpreter_stack()
    if top is None or top.key() != VMAP:
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(functorch_c.maybe_get_level(tensor) == top.level() for tensor in tensors)


def below_vmap(
    run: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """A batching rule: run(size, *operands), each [size, ...] as its results are, one level below.

    torch takes rules in Python for custom operators and autograd Functions, not for its own operators.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level, size = interpreter.level(), interpreter.batch_size()

    def lowered(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        if functorch_c.maybe_get_level(value) != level:
            return value.expand(size, *value.shape)
        return functorch_c.get_unwrapped(value).movedim(functorch_c.maybe_get_bdim(value), 0)

    with interpreter.lower():
        results = run(size, *map(lowered, operands))
    return tuple(functorch_c._add_batch_dim(result, 0, level) for result in results)


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


def dispatch_is_excluded() -> bool:
    """Whether torch runs Python code where operations cannot be traced, as `torch.tensor` does.

    It asks the items of a sequence for theirs with the Python key excluded: what a fake tensor is
    given there goes to the real kernels, on memory that was never written.
    """
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    return excluded


def has_modes() -> bool:
    """Whether a dispatch mode (a tracer, a fake mode) watches every operation."""
    return bool(torch._C._len_torch_dispatch_stack())


# Whether a profiler records this thread; asked at every call, and torch has no public way to ask.
profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def _backend(name: str) -> Callable[..., Any]:
    from torch._dynamo.backends.registry import list_backends, lookup_backend
    from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend as error:
        known = ", ".join(map(repr, ["eager", *list_backends()]))
        raise ValueError(f"jit(backend={name!r}): no such backend; there are {known}.") from error


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], backend: str
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A flat graph through a backend of torch.compile, called with one list of inputs.

    torch.compile itself would trace the flat graph again and check guards at every call; what the
    graph depends on is in our own key. Inductor frees inputs as they die if it may empty the list
    they come in, which it does for graphs in a GmWrapper.
    """
    with _one_at_a_time, _thread_state_kept():
        return _compiled(module, resolved(inputs), backend)


def _compiled(
    module: fx.GraphModule, inputs: list[torch.Tensor], backend: str
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    # Here, when a graph is compiled: importing it takes seconds.
    from torch._dynamo.utils import GmWrapper

    for node in module.graph.nodes:
        node.meta.pop("recompute", None)  # torch reads another thing from a tag of this name
    compile_with: Callable[..., Any] = _backend(backend)
    if backend == "inductor":
        with _of_static_shapes(inputs) as fakes:
            boxed: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = compile_with(
                GmWrapper(module, lambda args: args), fakes
            )
        return lambda args: boxed(resolved(args))
    run = compile_with(module, list(inputs))
    return lambda args: run(*resolved(args))


def resolved(tensors: Sequence[torch.Tensor], conjugates: bool = True) -> list[torch.Tensor]:
    """The same list, with every sign and conjugation carried out in memory.

    ``conjugates``: whether one of them may be complex; it is asked at every call.

    torch marks `z.conj()`, and `z.conj().imag`, by a bit. A trace is of tensors without it, and compilers
    read the memory behind it as it is (torch 2.13: a wrong sign).
    """
    given = tensors if isinstance(tensors, list) else list(tensors)
    if any(map(torch.Tensor.is_neg, given)) or (
        conjugates and any(map(torch.Tensor.is_conj, given))
    ):
        given[:] = [tensor.resolve_conj().resolve_neg() for tensor in given]
    return given


@contextlib.contextmanager
def _of_static_shapes(inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Fakes of these inputs, in a tracing context such as torch.compile has.

    Inductor looks into its cache of compiled graphs, which other processes share, only where a context
    has a shape environment; and with one, sizes of real tensors would become symbols.
    """
    fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with tracing(TracingContext(fakes)):
        yield [fakes.from_tensor(tensor, static_shapes=True) for tensor in inputs]


def needs_grad_at_top(tensor: torch.Tensor) -> bool:
    """Whether the innermost (Grad) level follows this tensor."""
    top = functorch_c.peek_interpreter_stack()
    follows = functorch_c.maybe_get_level(tensor) == top.level()
    return bool(follows and tensor.requires_grad)


def storage_uses(storage: torch.UntypedStorage) -> int | None:
    """How many refer to a storage, tensors and this object alike; None if torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def saved_were_freed(ctx: Any) -> bool:
    """Whether a Function's saved tensors are gone; asking for the tensors would run hooks on them."""
    try:
        ctx._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


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


def storage_info(file: str, offset: int, length: int) -> Any:
    """What DCP's index says of where an item is; made by its writer, whose results travel as JSON."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


def backend_of(group: Any, device_type: str) -> Any:
    """What carries a process group's tensors of a device.

    It says how long it waits, which nothing public does, and its sends are seen by no dispatch mode.
    """
    return group._get_backend(torch.device(device_type))


def before_reading(operands: Callable[[Any], Any]) -> None:
    """Have torch.func read ``operands(tree)`` in the place of each tree that it is given.

    It wraps the leaves without asking any mode: of a node of ours it takes the children, and a tensor of
    a level around a trace, which is hidden from it, would be wrapped in another first one, on which torch
    asserts.
    """
    from torch._functorch import vmap as vmaps

    for module in (eager_transforms, vmaps):
        for name, at in (("tree_flatten", 0), ("tree_map", 1), ("tree_map_only", 2)):
            read = getattr(module, name, None)
            if read is not None and not hasattr(read, "_torchard_reads"):
                setattr(module, name, _reading(read, at, operands))


def _reading(read: Callable[..., Any], at: int, operands: Callable[[Any], Any]) -> Any:
    @functools.wraps(read)
    def reading(*args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_function_stack() and len(args) > at:
            args = (*args[:at], operands(args[at]), *args[at + 1 :])
        return read(*args, **kwargs)

    reading._torchard_reads = True  # type: ignore[attr-defined]
    return reading


def qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    """``space::name``."""
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else op._name


def overload(op: Any, args: Any, kwargs: Any) -> Any:
    """The overload that torch picks for these arguments."""
    if not isinstance(op, OpOverloadPacket):
        return op
    names = op.overloads()
    if len(names) > 1:
        names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs)]
    return getattr(op, names[0])


def registered_formula(node: Any) -> tuple[Any, Any] | None:
    """What torch.library.register_autograd was given: backward and setup_context of autograd's node.

    torch keeps them in the closure of a class that it generates, and hands that out with the node alone.
    """
    generated: Any = getattr(type(node), "_forward_cls", None)
    if not getattr(generated, "__name__", "").startswith("GeneratedBackwardFor"):
        return None
    todo: list[Any] = [generated.backward]
    while todo:
        for cell in getattr(todo.pop(), "__closure__", None) or ():
            held = cell.cell_contents
            if hasattr(held, "_backward_fn") and hasattr(held, "_setup_context_fn"):
                return held._backward_fn, held._setup_context_fn
            todo.append(held)  # one that takes lists wraps another
    return None


def function_modes() -> list[Any]:
    """The torch function modes of this thread, outermost first."""
    return list(_get_current_function_mode_stack())
