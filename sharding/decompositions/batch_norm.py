"""The decomposition of batch norm where the batch or the image is split: statistics are sums."""

from __future__ import annotations

from typing import Any

from torchard.functional.effects import batch_norm
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.functional_forms import register_decomposition


@register_decomposition(batch_norm.PURE, aten.native_batch_norm.default)
def _batch_norm(*args: Any) -> Any:
    outputs = batch_norm.composed(*args)
    with_running = args[3] is not None
    return outputs if with_running else outputs[:3]


@register_decomposition(aten.native_batch_norm_backward.default)
def _batch_norm_backward(*args: Any) -> Any:
    return batch_norm.composed_backward(*args)
