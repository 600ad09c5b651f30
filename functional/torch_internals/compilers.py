"""Compiling flat graphs by backends of torch.compile; torch.compile around and inside of functions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchard.functional.core.locks import Lock
from torchard.functional.torch_internals.accessors.required import needed, require
from torchard.functional.torch_internals.changed_inductor import (
    changed_inductor,
    first_calls_are_plain,
)
from torchard.functional.torch_internals.donated_buffers import donating
from torchard.functional.torch_internals.thread_state import thread_state_kept
from torchard.functional.torch_internals.told_modes import one_at_a_time

__all__ = ["compile_graph", "outside_of_compile", "resolved", "uncompiled"]

Compiled = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
Passes = Sequence[Callable[[fx.Graph], None]]


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    backend: str,
    repairs: Passes,
    donated: Sequence[int] = (),
    rounding: bool = False,
) -> Compiled:
    """Compile a flat graph by a backend of torch.compile, to a function of one list of inputs.

    torch.compile itself would retrace the flat graph and check guards at every call; our own cache key
    has everything the graph depends on. Inductor frees inputs after their last use if it may empty the
    list they are in, which it does for graphs in a GmWrapper.

    Args:
        repairs: passes over the graph that Inductor lowers.
        donated: the positions of inputs whose memory Inductor's code may write results to.
        rounding: whether Inductor's kernels round to half precision wherever eager does. Without, they
            round what they store, and `x.bfloat16().float()` is `x` within a kernel (torch 2.13).
    """
    with one_at_a_time, thread_state_kept(), first_calls_are_plain():
        if backend != "inductor":
            return _by_backend(module, resolved(inputs), backend)
        with _repaired(repairs, rounding, any(x.device.type != "cpu" for x in inputs)):
            return _by_inductor(module, resolved(inputs), donated)


# Inductor's folding of constants takes x * 0 for 0, also where x is infinite or NaN (2.13).
_SETTINGS: dict[str, Any] = {"joint_graph_constant_folding": False}


@contextlib.contextmanager
def _repaired(repairs: Passes, rounding: bool, relaid: bool) -> Iterator[None]:
    """A context in which Inductor runs passes after its own and before it makes writes in place.

    It may lay images out with their channels last (`relaid`). On a CPU it may not: what is between
    convolutions is then read across its rows, and a U-Net's step takes up to 1.7 times as long.

    Its caches of compiled code, also that of AOTAutograd, have the files in the folders of the passes,
    and what is changed in Inductor itself, in their keys.
    """
    with needed():
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

        require(config, "post_grad_custom_post_pass")
        require(config, "emulate_precision_casts")
        require(config, "layout_optimization")
        for setting in _SETTINGS:
            require(config, setting)

    class Repairs(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for repair in repairs:
                repair(graph)

        def uuid(self) -> Any:
            files = [Path(str(sys.modules[repair.__module__].__file__)) for repair in repairs]
            beside = {str(near) for file in files for near in file.parent.glob("*.py")}
            changed = str(sys.modules[changed_inductor.__module__].__file__)
            return get_hash_for_files((*sorted(beside), changed))

    given: Any = config.post_grad_custom_post_pass
    users = given if isinstance(given, (list, tuple)) else [given] if given else []
    passes = [*users, Repairs()] if users else Repairs()
    exact = rounding or config.emulate_precision_casts
    with (
        changed_inductor(),
        config.patch(
            post_grad_custom_post_pass=passes,
            emulate_precision_casts=exact,
            layout_optimization=config.layout_optimization and relaid,
            **_SETTINGS,
        ),
    ):
        yield


def _by_backend(module: fx.GraphModule, inputs: list[torch.Tensor], backend: str) -> Compiled:
    run = _backend(backend)(module, list(inputs))
    return lambda args: run(*resolved(args))


def _by_inductor(
    module: fx.GraphModule, inputs: list[torch.Tensor], donated: Sequence[int]
) -> Compiled:
    # Imported here: it takes seconds.
    with needed():
        from torch._dynamo.utils import GmWrapper

    compile_with = _backend("inductor")
    takes_list = GmWrapper(module, lambda args: args)
    with _of_static_shapes(inputs) as fakes:
        if donated:
            with donating(donated, len(fakes)) as compile_inner:
                boxed = compile_with(takes_list, fakes, inner_compile=compile_inner)
        else:
            boxed = compile_with(takes_list, fakes)
    return lambda args: boxed(resolved(args))


def _backend(name: str) -> Callable[..., Any]:
    with needed():
        from torch._dynamo.backends.registry import list_backends, lookup_backend
        from torch._dynamo.exc import InvalidBackend

    try:
        return lookup_backend(name)
    except InvalidBackend as error:
        known = ", ".join(map(repr, ["eager", *list_backends()]))
        raise ValueError(f"jit(backend={name!r}): no such backend; pass one of {known}.") from error


def resolved(tensors: Sequence[torch.Tensor], conjugates: bool = True) -> list[torch.Tensor]:
    """The same list, with lazy negation and conjugation materialised.

    torch marks `z.conj()`, and `z.conj().imag`, by a bit. Traces assume tensors without it, and compilers
    read the memory without regard to it (torch 2.13: a wrong sign).

    Args:
        conjugates: whether a tensor may be complex, to save the check at every call.
    """
    given = tensors if isinstance(tensors, list) else list(tensors)
    if any(map(torch.Tensor.is_neg, given)) or (
        conjugates and any(map(torch.Tensor.is_conj, given))
    ):
        given[:] = [tensor.resolve_conj().resolve_neg() for tensor in given]
    return given


@contextlib.contextmanager
def _of_static_shapes(inputs: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Fakes of these inputs, in a tracing context as torch.compile has it.

    Inductor uses its cache of compiled graphs, which is shared with other processes, only in a context
    with a shape environment; and with one, sizes of real tensors would become symbols, so it is given
    fakes.
    """
    fakes = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with tracing(TracingContext(fakes)):
        yield [fakes.from_tensor(tensor, static_shapes=True) for tensor in inputs]


# -- torch.compile itself -----------------------------------------------------------------------------


def outside_of_compile(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call what this library made as it is: torch.compile breaks its graph here.

    As by torch.compiler.disable, which would load the compiler: that takes as long as torch itself.
    """
    return fn(*args, **kwargs)


_WHY = (
    "torch.compile does not compile functions of torchard: torchard.jit(fn) does, and torch.compile runs "
    "them as they are, between its graphs (fullgraph=False)"
)
_frames = torch._C._dynamo.eval_frame
if hasattr(_frames, "_FrameExecStrategy") and hasattr(_frames, "set_code_exec_strategy"):
    _skip = _frames._FrameAction.SKIP
    _skipped = _frames._FrameExecStrategy(_skip, _skip)
    _frames.set_code_exec_strategy(outside_of_compile.__code__, _skipped)  # and all that it calls
    outside_of_compile._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside_of_compile._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
else:
    outside_of_compile = torch.compiler.disable(outside_of_compile, reason=_WHY)


class _Stance:
    """The process's stance towards compiled functions, which threads share."""

    def __init__(self) -> None:
        self.lock, self.users = Lock(), 0
        self.set: Any = None

    def enter(self) -> None:
        with self.lock:
            if self.users == 0:
                self.set = torch.compiler.set_stance("force_eager")
            self.users += 1

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.set.__exit__(None, None, None)


_stance = _Stance()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """A context in which functions and modules that torch.compile has made run as they were written.

    It cannot compile a function on tensors of a trace, nor one that calls parts of a functionalized
    module. For the time of it, threads besides this one do not compile either.
    """
    try:
        _stance.enter()
    except RuntimeError:  # torch refuses where it is about to compile; it gave up on these frames
        yield
        return
    try:
        yield
    finally:
        _stance.leave()
