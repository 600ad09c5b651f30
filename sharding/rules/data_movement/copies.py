"""Copying variants of views (``view_copy`` of ``view``): the rules of the views."""

from __future__ import annotations

from typing import Any

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.compute import pointwise  # noqa: F401  its rules are read below
from torchard.sharding.rules.data_movement import select, slicing, views  # noqa: F401  theirs too
from torchard.sharding.rules.registry import REGISTRY, Call, Local, register_rule


def _copied(emit: Any) -> Any:
    def emit_copy(call: Call, local: Local) -> Any:
        return local.call(aten.clone.default, emit(call, local))

    return None if emit is None else emit_copy


for _view, _copy in [
    (aten.alias.default, aten.alias_copy.default),
    (aten.as_strided.default, aten.as_strided_copy.default),
    (aten.expand.default, aten.expand_copy.default),
    (aten.permute.default, aten.permute_copy.default),
    (aten.select.int, aten.select_copy.int),
    (aten.slice.Tensor, aten.slice_copy.Tensor),
    (aten.split.Tensor, aten.unsafe_split.Tensor),
    (aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default),
    (aten.squeeze.default, aten.squeeze_copy.default),
    (aten.squeeze.dim, aten.squeeze_copy.dim),
    (aten.squeeze.dims, aten.squeeze_copy.dims),
    (aten.t.default, aten.t_copy.default),
    (aten.transpose.int, aten.transpose_copy.int),
    (aten.unbind.int, aten.unbind_copy.int),
    (aten.unsqueeze.default, aten.unsqueeze_copy.default),
    (aten.view.default, aten.view_copy.default),
]:
    _rule = REGISTRY[_view]
    _emit = _rule.emit if "unsafe" in str(_copy) else _copied(_rule.emit)
    register_rule(_copy, text=_rule.text, emit=_emit)
