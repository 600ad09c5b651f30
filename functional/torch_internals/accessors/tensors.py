"""Tensors, and the operators that are called with them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch._decomp import decomposition_table as DECOMPOSITION_TABLE
from torch._ops import OpOverload, OpOverloadPacket

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "DECOMPOSITION_TABLE",
    "VERSION",
    "OpOverload",
    "OpOverloadPacket",
    "check_like",
    "direct",
    "grouped_mm",
    "in_memory_of",
    "is_legacy_batched",
    "is_mutable",
    "is_view",
    "makes_new_memory",
    "overload",
    "qualified_name",
    "schema",
    "schema_or_none",
    "storage_id",
    "storage_number",
    "storage_uses",
    "tensor_uses",
    "unseen_storage_id",
    "valueless",
    "version",
    "without_base",
]

# -- tensors ---------------------------------------------------------------------------------------

require(torch.Tensor, "_is_view", "_make_wrapper_subclass", "_version")
require(torch.UntypedStorage, "_cdata")
require(torch, "_grouped_mm")

grouped_mm: Any = torch._grouped_mm  # which torch.nn.functional.grouped_mm calls

VERSION = "_version"
# The version counter of a tensor; RuntimeError for inference tensors, which have none. Autograd relies on
# it, but it is not public. An attrgetter has no Python frame: it is called at every call.
version: Callable[[torch.Tensor], int] = attrgetter(VERSION)


def check_like(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A compiled check of as many tensors: whether each has the facts of one of these.

    Its facts are type, dtype, device, sizes, strides, whether it requires a gradient, and its dispatch
    keys; and no two are the same. It is that of torch.compile's guards, and takes a fifth of the time of
    reading these facts in Python; it holds none of the tensors. None on versions of torch without it.
    """
    if _Guards is None:
        return None
    try:
        guards = _Guards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        )
    except (RuntimeError, SystemError, TypeError):
        return None
    check: Callable[..., bool] = guards.check
    return check


_Guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_Guards = getattr(_Guards, "TensorGuards", None)


# How many references there are to a tensor itself, from Python (one), C++ and DLPack; not public.
require(torch.Tensor, "_use_count")
tensor_uses: Callable[[torch.Tensor], int] = methodcaller("_use_count")


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view for autograd; not public."""
    return tensor._is_view()


# Whether a tensor is one of torch's older vmap, as autograd's is_grads_batched uses it. No version of
# torch lists its levels; where one cannot tell, none is.
is_legacy_batched: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)


def valueless(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of a subclass that has the shape, dtype and device of another, and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


def storage_id(tensor: torch.Tensor) -> int:
    """A number for a tensor's storage; fake tensors have one too, while their `data_ptr()` is 0.

    It may be reused once the storage is freed.
    """
    return storage_number(tensor.untyped_storage())


# The same without a call of any mode, which in a trace would have the storage of the tensor's operand.
unseen_storage_id: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_id", storage_id)


def storage_number(storage: torch.UntypedStorage) -> int:
    """The number of a storage."""
    number: int = storage._cdata
    return number


def _unknown(number: int) -> float:
    """Equal to no count, so that no memory is taken to be free."""
    return math.nan


# The reference count of the storage of a number, the object that the number is of included.
storage_uses: Callable[[int], float] = getattr(torch._C, "_storage_Use_Count", _unknown)


def _in_memory_of(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    empty = torch.empty(0, dtype=base.dtype, device=base.device)
    return empty.set_(base.untyped_storage(), base.storage_offset() + offset, shape, strides)


# A tensor of another's dtype and storage, with a shape, strides and an offset from it, that is no view
# for autograd. Inductor's code makes its views so: in a quarter of the time of the public functions.
in_memory_of: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_reinterpret_tensor", _in_memory_of
)


def without_base(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, but no view for autograd, which would hold the tensor that it is a view of."""
    if not is_view(x) or x.is_conj() or x.is_neg():
        return x
    return in_memory_of(x, x.shape, x.stride(), 0)


# -- operators: classes, schemas, decompositions ---------------------------------------------------

_ADD = torch.ops.aten.add
require(_ADD.Tensor, "_schema", "_op")
require(_ADD.Tensor._schema, "name", "arguments", "returns", "is_mutable")
require(_ADD, "_qualified_op_name")
require(torch._C, "_jit_resolve_packet")

# The schema of an operator: names and types of arguments and results, and which are written. Not public.
# The table of decompositions is effectively public: torch.export's documentation refers to it.
schema: Callable[[OpOverload], Any] = attrgetter("_schema")


def schema_or_none(target: Any) -> Any:
    """The schema of a node's target; None if it is no operator."""
    return getattr(target, "_schema", None)


def is_mutable(target: Any) -> bool:
    """Whether a target is an operator that writes to an argument."""
    op_schema = schema_or_none(target)
    return op_schema is not None and bool(op_schema.is_mutable)


# Views that no schema marks as such.
_UNMARKED_VIEWS = (
    torch.ops.aten._unsafe_view,
    torch.ops.aten.unsafe_split,
    torch.ops.aten.unsafe_split_with_sizes,
    torch.ops.aten.lift,
    torch.ops.prims.device_put,
)


@functools.cache
def makes_new_memory(target: Any) -> bool:
    """Whether a target is one of torch's operators whose results always have memory of their own.

    Not those that are composed of others, as `dropout`, which may return its operand.
    """
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    if target.overloadpacket in _UNMARKED_VIEWS:
        return False
    if target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return False
    op_schema = schema(target)
    return not op_schema.is_mutable and not any(each.alias_info for each in op_schema.returns)


def direct(target: Any) -> Any:
    """An operator without its Python wrapper, which costs a tenth of a microsecond per call."""
    return target._op if isinstance(target, OpOverload) else target


def qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    """The qualified name, ``space::name``; packets have none publicly."""
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else op.name()


def overload(op: Any, args: Any, kwargs: Any) -> Any:
    """The overload that torch selects for these arguments, without calling it."""
    if not isinstance(op, OpOverloadPacket):
        return op
    names = op.overloads()
    if len(names) > 1:
        names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs)]
    return getattr(op, names[0])
