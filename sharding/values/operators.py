"""The operators and methods that placed values have in common with tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact_dtype
from torchard.sharding.values.eager import IN_PLACE, run
from torchard.sharding.values.mesh import PlacementError

__all__ = ["Operators"]


class Operators:
    """The part of MeshTensor that mirrors tensors: operators, methods, and reading values."""

    __slots__ = ()

    shape: Any
    dtype: Any
    device: Any
    full: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(internals.unpatched(func), args, kwargs or {})

    if TYPE_CHECKING:  # set below: a real __getattr__ would slow down every other attribute

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, index: Any) -> Any:
        return run(torch.Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        run(torch.Tensor.__setitem__, (self, index, value), {})
        raise AssertionError("writing is refused")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a MeshTensor without dims")
        if not is_inexact_dtype(self.dtype):
            # A tensor treats an index that has a length as a tuple of indices.
            raise TypeError("len() of a MeshTensor of integers: use x.shape[0]")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a MeshTensor without dims")
        return iter(run(torch.Tensor.unbind, (self,), {}))

    def __contains__(self, value: Any) -> bool:
        return bool(torch.any(run(torch.Tensor.__eq__, (self, value), {})))

    def __hash__(self) -> int:
        return id(self)

    # -- reading values, which takes a gather by all ranks ---------------------------------------------

    def item(self) -> Any:
        """The only element, as a Python number. Every rank must call it."""
        if self.shape.numel() != 1:
            raise PlacementError(
                f"a MeshTensor of shape {list(self.shape)} is not one number; reduce it (x.mean()), or "
                "read x.full()."
            )
        return self.full().item()

    def tolist(self) -> Any:
        """The values as nested lists. Every rank must call it."""
        return self.full().tolist()

    def numpy(self) -> Any:
        """The full value as a NumPy array. Every rank must call it."""
        return self.full().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.full().detach().numpy()
        return array if dtype is None else array.astype(dtype)

    def __bool__(self) -> bool:
        if self.shape.numel() != 1:
            raise PlacementError(
                f"a MeshTensor of shape {list(self.shape)} has no truth value; reduce it (x.all(), "
                "x.any()), or call .full() first"
            )
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __index__(self) -> int:
        return operator.index(self.full())

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if how and not self.shape else format(str(self), how)


# Attributes that are read without a call.
_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
_NOT_METHODS = {
    *("register_hook", "share_memory_", "pin_memory", "storage", "untyped_storage", "data_ptr"),
}
_MOVING = {"to", "cpu", "cuda"}


def _attribute(name: str) -> property:
    """The property whose value an operation of torch computes."""

    def read(value: Any) -> Any:
        return getattr(value, name)

    read.__name__ = name
    return property(lambda self: run(read, (self,), {}))


def _absent(name: str) -> property:
    """The property that raises an error, for an attribute of tensors that placed values do not have."""

    def refuse(self: Any) -> NoReturn:
        raise AttributeError(
            f"a MeshTensor has no attribute {name!r}. It has mesh, spec, parts, shape and dtype, and "
            "the operations of tensors; x.full() is the full value as a plain tensor."
        )

    return property(refuse)


def _method(name: str) -> Callable[..., Any]:
    """The method of tensors with this name, for placed values."""

    def call(self: Operators, *args: Any, **kwargs: Any) -> Any:
        if name in _MOVING:
            _check_device(self, args, kwargs)
        return run(getattr(torch.Tensor, name), (self, *args), kwargs)

    call.__name__, call.__doc__ = name, getattr(torch.Tensor, name).__doc__
    return call


def _check_device(self: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a move to another device: values are on the mesh's device."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, (str, torch.device)) and torch.device(value).type != self.device.type:
            raise PlacementError(
                f"a MeshTensor is on its mesh's device, {self.device.type}; it cannot move to {value}. "
                "x.full().to(...) moves the full value."
            )


def _operator(name: str) -> Any:
    """The operator of tensors with this name, for placed values, tensors and numbers."""

    def apply(self: Operators, *others: Any) -> Any:
        if not all(isinstance(x, (Number, torch.Tensor, Operators)) for x in others):
            return NotImplemented
        return run(getattr(torch.Tensor, name), (self, *others), {})

    apply.__name__ = name
    return apply


def _refusal(name: str) -> Any:
    """The in-place operator with this name, which raises an error."""

    def refuse(self: Operators, other: Any) -> NoReturn:
        run(getattr(torch.Tensor, name), (self, other), {})
        raise AssertionError("writing is refused")

    refuse.__name__ = name
    return refuse


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_UNARY = ("neg", "pos", "abs", "invert")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")

for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_UNARY, *_COMPARISONS):
    setattr(Operators, f"__{_name}__", _operator(f"__{_name}__"))
for _name in dir(torch.Tensor):
    if _name.startswith("_") or _name in vars(Operators):
        continue
    if _name in _ATTRIBUTES:
        setattr(Operators, _name, _attribute(_name))
    elif callable(getattr(torch.Tensor, _name)) and _name not in _NOT_METHODS:
        setattr(Operators, _name, _method(_name))
    else:
        setattr(Operators, _name, _absent(_name))
for _name in IN_PLACE:
    if hasattr(torch.Tensor, f"__{_name}__"):
        setattr(Operators, f"__{_name}__", _refusal(f"__{_name}__"))
