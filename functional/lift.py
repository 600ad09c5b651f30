"""What a traced function may touch: foreign tensors become operands, floats stay weak."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.room import Room

__all__ = ["Lift", "is_weak"]

# Attributes that say nothing of a tensor's values.
_METADATA = {
    *("shape", "dtype", "device", "ndim", "layout", "names", "itemsize", "nbytes"),
    *("requires_grad", "is_leaf", "grad_fn", "grad", "_version"),
    *("is_cuda", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested"),
}


class Lift(TorchFunctionMode):
    """Swaps foreign tensors for operands, and gives Python floats their weak promotion back."""

    def __init__(self, room: Room) -> None:
        super().__init__()
        self.room = room

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _reads_metadata(func):
            return func(*args, **kwargs)
        if internals.forward_ad_active():
            self.room.inner_levels = internals.level_kinds()
        args, kwargs = self._natives(args), self._natives(kwargs)
        args, kwargs, weak = _weaken(args, kwargs)
        if _is_detach(func):
            return self._cut(func, args, kwargs)
        func = _WITHOUT_READING.get(func, func)
        out = func(*args, **kwargs)
        if weak and isinstance(out, torch.Tensor) and out.ndim == 0:
            out._torchard_weak = True  # type: ignore[attr-defined]
        return out

    def _natives(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if self.room.native(value) else self.room.lift(value)
        if isinstance(value, (list, tuple)):
            items = [self._natives(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(items)
        if isinstance(value, dict):
            return {key: self._natives(item) for key, item in value.items()}
        return value

    def _cut(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.room.cutting = True
        try:
            return func(*args, **kwargs)
        finally:
            self.room.cutting = False


def _one_hot(ids: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch reads the largest id to check it, unless it sees that there is none: not through a level."""
    if num_classes <= 0:
        return F.one_hot(ids, num_classes)
    classes = torch.arange(num_classes, device=ids.device)
    return (ids.unsqueeze(-1) == classes).to(torch.int64)


# Composite operations that read values for checks alone, and what to run while tracing.
_WITHOUT_READING: dict[Any, Any] = {F.one_hot: _one_hot}


def _reads_metadata(func: Any) -> bool:
    owner = getattr(func, "__self__", None)
    return getattr(func, "__name__", "") == "__get__" and (
        getattr(owner, "__name__", "") in _METADATA
    )


def _is_detach(func: Any) -> bool:
    return getattr(func, "__name__", "") in ("detach", "detach_")


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    flat = [*args, *kwargs.values()]
    return [value for value in flat if isinstance(value, torch.Tensor)]


def is_weak(value: Any) -> bool:
    """Whether a 0-d tensor carries a Python float (of a trace in progress)."""
    return getattr(value, "_torchard_weak", False) is True


def _weaken(args: Any, kwargs: Any) -> tuple[Any, Any, bool]:
    """A traced Python float must promote like one, not like the float64 tensor that carries it.

    Against a tensor with dimensions a 0-d tensor already does; against integers and other 0-d
    tensors it would win. Says whether all operands were floats: then so is the result.
    """
    tensors = _tensors(args, kwargs)
    weak = [tensor for tensor in tensors if is_weak(tensor)]
    if not weak:
        return args, kwargs, False
    strong = [tensor for tensor in tensors if not is_weak(tensor)]
    if not strong:
        return args, kwargs, True
    floating = any(t.is_floating_point() or t.is_complex() for t in strong)
    if floating and any(t.ndim and t.is_floating_point() for t in strong):
        return args, kwargs, False
    dtype = torch.result_type(strong[0], 1.0)
    for other in strong[1:]:
        dtype = torch.promote_types(dtype, torch.result_type(other, 1.0))

    def cast(value: Any) -> Any:
        return value.to(dtype) if is_weak(value) else value

    return tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}, False
