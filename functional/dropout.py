"""Dropout in modules, drawn from a key instead of torch's global state."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchard.functional import random
from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError

__all__ = ["Keyed"]

# Alpha dropout sets values to -_ALPHA, the limit of SELU at minus infinity, before it rescales.
_ALPHA = 1.7580993408473766


class Keyed(TorchFunctionMode):
    """A mode in which the n-th dropout draws its mask from ``fold_in(key, n)``.

    The masks are those of `torchard.random`: the same on any mesh, when recomputed, and under vmap.
    torch's generator is not used, so values differ from torch's for any seed.

    Args:
        key: int64 [2]; None refuses dropout.
        first: the n of the first dropout.

    Raises (inside):
        PurityError: a dropout with p > 0 runs in train mode, and there is no key.

    Source: Srivastava et al., JMLR 2014; alpha dropout: Klambauer et al., arXiv:1706.02515.
    """

    def __init__(self, key: Tensor | None, first: int | Tensor = 0) -> None:
        super().__init__()
        self.key, self.first = key, first
        self.drawn = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = internals.unpatched(func), kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # A mode is disabled while it handles a call, but must handle the calls made by this one.
            with self:
                return _unguarded(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def next_key(self, what: str) -> Tensor:
        """A new key for each draw."""
        if self.key is None:
            raise PurityError(
                f"{source.of_here()} applies {what} in train mode, which draws random numbers from "
                "torch's global state. Pass fn(params, ..., key=torchard.random.key(seed)), with "
                "a new key at every step, or functionalize(module.eval())."
            )
        number, self.drawn = self.first + self.drawn, self.drawn + 1
        return random.fold_in(self.key, number)

    def _dropout(
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool | None = None,
    ) -> Tensor:
        features, alpha, always_inplace = _DROPOUTS[func]
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability is {p}; it must lie in [0, 1]")
        if p == 0 or not (training if train is None else train):
            return input
        key = self.next_key(f"{func.__name__}(p={p})")
        shape = input.shape if features is None else _per_feature(input, features)
        mask = random.bernoulli(key, p, shape)
        out = (_alpha_dropped if alpha else _dropped)(input, p, mask)
        return input.copy_(out) if inplace or always_inplace else out

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention: torch's kernel without dropout, the formula of torch's documentation with it."""
        if dropout_p == 0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        mask_key = self.next_key(f"attention dropout (p={dropout_p})")
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        scores = query @ key.transpose(-2, -1)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = torch.softmax(scores, -1)
        mask = random.bernoulli(mask_key, dropout_p, weights.shape)
        return _dropped(weights, dropout_p, mask) @ value


def _dropped(x: Tensor, p: float, mask: Tensor) -> Tensor:
    return torch.zeros_like(x) if p == 1 else (x * (1 / (1 - p))).masked_fill(mask, 0)


def _alpha_dropped(x: Tensor, p: float, mask: Tensor) -> Tensor:
    """Alpha dropout of x, which preserves the mean and variance of a standard normal x."""
    if p == 1:
        return torch.zeros_like(x)
    a = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return x.masked_fill(mask, -_ALPHA) * a + _ALPHA * a * p


def _per_feature(x: Tensor, spatial: int) -> tuple[int, ...]:
    """The shape of a mask that drops entire channels; an input one dim short has no batch dim.

    As in torch, an input of rank 3 to dropout2d is an exception, and is taken as [N, C, L].
    """
    unbatched = spatial in (1, 3) and x.ndim == spatial + 1
    kept = 1 if unbatched else 2
    return (*x.shape[:kept], *[1] * (x.ndim - kept))


# By function: the spatial dims of a feature dropout (0: any; None: elementwise), whether it is alpha
# dropout, and whether it always works in place.
_DROPOUTS: dict[Any, tuple[int | None, bool, bool]] = {
    F.dropout: (None, False, False),
    F.dropout1d: (1, False, False),
    F.dropout2d: (2, False, False),
    F.dropout3d: (3, False, False),
    F.alpha_dropout: (None, True, False),
    F.feature_alpha_dropout: (0, True, False),
    torch.dropout: (None, False, False),
    torch.dropout_: (None, False, True),
    torch.feature_dropout: (0, False, False),
    torch.feature_dropout_: (0, False, True),
    torch.alpha_dropout: (None, True, False),
    torch.alpha_dropout_: (None, True, True),
    torch.feature_alpha_dropout: (0, True, False),
    torch.feature_alpha_dropout_: (0, True, True),
}


@functools.cache
def _unguarded(func: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a torch function without its check for modes, which would dispatch the call back here."""
    assert isinstance(func, types.FunctionType)
    scope = {**func.__globals__, "has_torch_function": lambda _: False}
    unguarded = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__)
    unguarded.__kwdefaults__ = func.__kwdefaults__
    return unguarded
