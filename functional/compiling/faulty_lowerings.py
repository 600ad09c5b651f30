"""Operations that Inductor computes wrongly, or not at all, and that torch's own kernels compute instead.

Inductor calls an operator that it does not know. So each operation named here, where its arguments are
those of a fault, becomes a call of an operator of ours with the same schema, which calls torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["call_torch"]

LIBRARY = torch.library.Library("torchard", "FRAGMENT")
Passed = dict[str, Any]


def _takes_part_windows(given: Passed) -> bool:
    """Windows that reach beyond the padding are divided by their full size."""
    return bool(given.get("ceil_mode"))


def _scales_unevenly(given: Passed) -> bool:
    """Rows are distributed by sizes, also where a scale was given that is not their quotient."""
    sizes = zip(given["output_size"], given["input_size"][2:], strict=True)
    scales = [given.get(name) for name in ("scales_d", "scales_h", "scales_w", "scales")]
    given_scales = {scale for scale in scales if scale is not None}
    return any(out % size or given_scales - {out / size} for out, size in sizes)


def _takes_one(given: Passed) -> bool:
    """The place of an element cannot be a size of the graph."""
    return bool(VAL.of(given["index"]).dim() == 0)


def _has_no_dims(given: Passed) -> bool:
    value = VAL.get(given["self"])
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _writes_complex(given: Passed) -> bool:
    """The write in place into a view of complex numbers may come after reads of the written value."""
    return _is_complex(given["self"])


def _widens_complex(given: Passed) -> bool:
    """The largest absolute value is rounded before it is converted to the wider dtype."""
    infinite = given.get("ord") in (math.inf, -math.inf)
    return infinite and given.get("dtype") is not None and _is_complex(given["self"])


def _divides_halves(given: Passed) -> bool:
    """Quotients are rounded before they are rounded to whole numbers, and in float32."""
    tensors = [VAL.get(x) for x in given.values() if isinstance(x, fx.Node)]
    halves = (torch.bfloat16, torch.float16)
    rounded = given.get("rounding_mode", "floor") is not None and isinstance(given["self"], fx.Node)
    return rounded and any(x.dtype in halves for x in tensors if isinstance(x, torch.Tensor))


def _is_complex(value: Any) -> bool:
    tensor = VAL.get(value) if isinstance(value, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_complex()


# By operation, whether its arguments are those of a fault (torch 2.13).
_FAULTY: dict[Any, Callable[[Passed], bool]] = {
    aten.avg_pool2d_backward.default: _takes_part_windows,
    aten.avg_pool3d_backward.default: _takes_part_windows,
    aten.upsample_nearest2d_backward.default: _scales_unevenly,
    aten.take.default: _takes_one,
    # An IndexError in bfloat16.
    aten.scatter.value: _has_no_dims,
    aten.linalg_vector_norm.default: _widens_complex,
    **dict.fromkeys(
        (
            *(aten.floor_divide.default, aten.floor_divide.Scalar),
            *(aten.div.Tensor_mode, aten.div.Scalar_mode),
        ),
        _divides_halves,
    ),
    **dict.fromkeys(
        (
            aten.diagonal_scatter.default,
            aten.select_scatter.default,
            aten.slice_scatter.default,
            aten.as_strided_scatter.default,
        ),
        _writes_complex,
    ),
}


_OF_NUMBERS: dict[Any, Any] = {
    aten.floor_divide.default: aten.floor_divide.Scalar,
    aten.div.Tensor_mode: aten.div.Scalar_mode,
}


def call_torch(graph: fx.Graph) -> None:
    """Have torch compute what Inductor would not, in place."""
    for node in graph.nodes:
        faulty = _FAULTY.get(node.target)
        if faulty is not None and faulty(_arguments(node)):
            node.target = _opaque(_overload(node))


def _arguments(node: fx.Node) -> Passed:
    target: Any = node.target
    names = [argument.name for argument in internals.schema(target).arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _overload(node: fx.Node) -> Any:
    """The operator, or its overload for numbers: operators of ours take none for a tensor."""
    takes_number = any(isinstance(x, (int, float)) for x in node.args[1:2])
    return _OF_NUMBERS.get(node.target, node.target) if takes_number else node.target


@cache
def _opaque(op: Any) -> Any:
    """An operator that calls another one, and of which a compiler knows nothing."""
    schema = internals.schema(op)
    name = "_".join(["torch", schema.name.removeprefix("aten::"), schema.overload_name]).rstrip("_")
    signature = str(schema).split("(", 1)[1]
    LIBRARY.define(f"{name}({signature}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, op, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchard::{name}", op, lib=LIBRARY)
    return getattr(torch.ops.torchard, name).default


for _op in _FAULTY:  # so that code from Inductor's cache finds them
    _opaque(_op)
