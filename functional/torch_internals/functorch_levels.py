"""The levels of torch.func and of forward mode: which are live, and which tensors they wrap.

torch.func is public, its levels are not, but a transform in Python needs them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C import _functorch as functorch_c
from torch._functorch import eager_transforms
from torch._functorch import vmap as vmaps
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch.autograd import forward_ad

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "GRAD",
    "JVP",
    "VMAP",
    "base_tensor",
    "batch_dim",
    "batch_dims",
    "before_reading",
    "below_forward_ad",
    "below_tangents",
    "below_vmap",
    "ending_vmap",
    "forward_ad_active",
    "gradient_level",
    "has_tangent",
    "has_transforms",
    "in_gradient_level",
    "is_followed",
    "is_wrapped",
    "level_kinds",
    "mapped_at_top",
    "mapped_over",
    "needs_grad_at_top",
    "of_ended_level",
    "without_ended_levels",
    "wrapped_in",
]

require(torch._C, "_are_functorch_transforms_active", "_len_torch_function_stack")
require(functorch_c, "get_interpreter_stack", "peek_interpreter_stack", "is_functorch_wrapped_tensor")
require(functorch_c, "maybe_get_level", "maybe_get_bdim", "is_batchedtensor", "get_unwrapped")
require(functorch_c, "_add_batch_dim")
require(forward_ad, "_current_level", "_set_fwd_grad_enabled")
require(torch._C.DispatchKey, "ADInplaceOrView")
require(functorch_c, "is_gradtrackingtensor", "_wrap_for_grad", "_unwrap_for_grad")
require(eager_transforms, "JVP_NESTING", "grad_increment_nesting", "_create_differentiable")
GRAD, JVP, VMAP = (
    functorch_c.TransformType.Grad,
    functorch_c.TransformType.Jvp,
    functorch_c.TransformType.Vmap,
)


# Whether any functorch level is live.
has_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active


def level_kinds() -> list[Any]:
    """The live functorch levels, outermost first."""
    stack = functorch_c.get_interpreter_stack()
    return [] if stack is None else [level.key() for level in stack]


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a functorch level wraps this tensor."""
    return functorch_c.is_functorch_wrapped_tensor(tensor)


def of_ended_level(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what a level of torch.func wrapped that has ended."""
    return is_wrapped(tensor) and functorch_c.maybe_get_level(tensor) < 0


def without_ended_levels(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of ended levels, outermost ones: what torch.func.vjp has saved."""
    while of_ended_level(tensor):
        tensor = functorch_c.get_unwrapped(tensor)
    return tensor


def base_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all functorch wrappers."""
    while functorch_c.is_functorch_wrapped_tensor(tensor):
        tensor = functorch_c.get_unwrapped(tensor)
    return tensor


def wrapped_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that functorch levels wrap in this one, outermost first."""
    inside = []
    while functorch_c.is_functorch_wrapped_tensor(tensor):
        tensor = functorch_c.get_unwrapped(tensor)
        inside.append(tensor)
    return inside


def batch_dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """For each vmap that maps a tensor, its level and the batch dim of the tensor it wraps."""
    dims = []
    while functorch_c.is_functorch_wrapped_tensor(tensor):
        if functorch_c.is_batchedtensor(tensor):
            dims.append((functorch_c.maybe_get_level(tensor), functorch_c.maybe_get_bdim(tensor)))
        tensor = functorch_c.get_unwrapped(tensor)
    return dims


def batch_dim(tensor: torch.Tensor) -> int | None:
    """The batch dim of the tensor that the outermost wrapper wraps; None if that is not of a vmap."""
    return functorch_c.maybe_get_bdim(tensor) if functorch_c.is_batchedtensor(tensor) else None


def mapped_at_top(values: Sequence[Any]) -> bool:
    """Whether the innermost level is a vmap, and one of these tensors is mapped by it."""
    top = functorch_c.peek_interpreter_stack()
    if top is None or top.key() != VMAP:
        return False
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(functorch_c.maybe_get_level(tensor) == top.level() for tensor in tensors)


def mapped_over(tensor: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """What the innermost level maps, if it is a vmap that maps this tensor: a tensor, over which dim."""
    if not mapped_at_top([tensor]):
        return None
    return functorch_c.get_unwrapped(tensor), functorch_c.maybe_get_bdim(tensor)


def ending_vmap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the innermost level is a vmap that maps none of these, as the results of one that ends."""
    top = functorch_c.peek_interpreter_stack()
    return top is not None and top.key() == VMAP and not mapped_at_top(tensors)


def needs_grad_at_top(tensor: torch.Tensor) -> bool:
    """Whether the innermost (Grad) level follows this tensor."""
    top = functorch_c.peek_interpreter_stack()
    follows = functorch_c.maybe_get_level(tensor) == top.level()
    return bool(follows and tensor.requires_grad)


def is_followed(tensor: torch.Tensor, kinds: Sequence[Any]) -> bool:
    """Whether autograd, or a level, follows a tensor to differentiate what is computed of it.

    Args:
        kinds: the levels that may, outermost first. Those of forward mode hide tangents from below, so
            what they wrap is taken to have one; those of vmap must be live.
    """
    for each in (tensor, *wrapped_in(tensor)):
        if each.requires_grad:
            return True
        level = functorch_c.maybe_get_level(each)
        if functorch_c.is_gradtrackingtensor(each) and kinds[level - 1 : level] == [JVP]:
            return True
        if functorch_c.is_batchedtensor(each) and level > len(level_kinds()):
            return True
    return False


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a tangent of torch.autograd.forward_ad, also where that is switched off."""
    below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView)
    if below or not forward_ad_active():  # a dispatch mode handles an operation: no tensor has one here
        return False
    with forward_ad._set_fwd_grad_enabled(True):
        return forward_ad.unpack_dual(base_tensor(tensor)).tangent is not None


@contextlib.contextmanager
def gradient_level(
    tensors: Sequence[torch.Tensor], mask: Sequence[bool]
) -> Iterator[tuple[list[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]]:
    """A Grad level of torch.func, as its vjp opens one.

    Yields:
        The tensors wrapped in it, those of the mask requiring grad, and a function that unwraps a tensor.
    """
    with eager_transforms.grad_increment_nesting() as level:
        inside = [functorch_c._wrap_for_grad(tensor, level) for tensor in tensors]
        for tensor, followed in zip(inside, mask, strict=False):
            if followed:
                eager_transforms._create_differentiable(tensor, level)
        yield inside, lambda tensor: functorch_c._unwrap_for_grad(tensor, level)


def in_gradient_level(tensor: torch.Tensor) -> bool:
    """Whether a Grad level wraps the tensor, or a tensor inside of other wrappers."""
    while functorch_c.is_functorch_wrapped_tensor(tensor):
        if functorch_c.is_gradtrackingtensor(tensor):
            return True
        tensor = functorch_c.get_unwrapped(tensor)
    return False


def below_vmap(
    run: Callable[..., Sequence[torch.Tensor]], operands: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """Apply a batching rule below the innermost vmap: run(size, *operands); all tensors are [size, ...].

    torch accepts batching rules in Python for custom operators and autograd Functions, not for its own
    operators.
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


def before_reading(operands: Callable[[Any], Any]) -> None:
    """Make torch.func read ``operands(tree)`` instead of each tree that it is given.

    It wraps leaves without calling any mode: it would flatten our placed objects, and wrap tensors of
    levels around a trace, which are hidden, in a second first level, on which torch asserts. It still
    does in versions of torch that read trees by functions with other names.
    """
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

    reading._torchard_reads = True  # type: ignore[attr-defined]  # our own mark
    # torch.compile treats functions by their files: this one is to be what it stands for, which is not
    # compiled by itself, under functorch levels.
    named: Any = reading
    named.__code__ = named.__code__.replace(co_filename=read.__code__.co_filename)
    return named


# -- forward mode, whose level is process-wide ---------------------------------------------------


def forward_ad_active() -> bool:
    """Whether torch.autograd.forward_ad has a level open (functorch's jvp has one too)."""
    return forward_ad._current_level >= 0


def is_only_thread() -> bool:
    """Whether no other thread can have opened the forward-mode level, which is process-wide."""
    return threading.active_count() == 1


@contextlib.contextmanager
def nested_forward_ad() -> Iterator[None]:
    """Let a jvp inside share the forward-mode level that is open around the trace, if one is.

    torch has one level per process. functorch opens it for the outermost jvp by its own counter, which
    ignores levels opened by `forward_ad.dual_level`.
    """
    shared = int(forward_ad_active())
    eager_transforms.JVP_NESTING += shared
    try:
        yield
    finally:
        eager_transforms.JVP_NESTING -= shared


@contextlib.contextmanager
def below_forward_ad(levels: Sequence[Any]) -> Iterator[None]:
    """A context for kernels without a forward-mode level: inside, printing a tensor would fail.

    No tensor has a tangent in a kernel, but printing looks for one, and torch prints operands where it
    resolves overloads by trial (`aten.lerp(...)` in kernels for meta tensors).

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


@contextlib.contextmanager
def below_tangents(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """A context for a Function's jvp, in which levels outside of its own compute tangents, too.

    torch switches forward mode off in there, for all levels: the tangent of a tangent is silently zero.

    Args:
        tensors: primals of the innermost level.

    Yields:
        They, without tangents of the innermost level.
    """
    with forward_ad._set_fwd_grad_enabled(True):
        yield [forward_ad.unpack_dual(tensor).primal for tensor in tensors]


def _forward_ad_ours(levels: Sequence[Any]) -> bool:
    """Whether a forward-mode level is open, and was certainly opened by this thread."""
    return forward_ad_active() and (JVP in levels or JVP in level_kinds() or is_only_thread())
