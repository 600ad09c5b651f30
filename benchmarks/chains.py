"""The chains of operations that fusion.py measures, all bound by memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import nn, random

__all__ = ["CHAINS", "Chain"]

# The length of rows; the size of a vocabulary, and the width of the layer before it.
HIDDEN, VOCABULARY, WIDTH = 1024, 16384, 128
EPS = 1e-5


@dataclass(frozen=True)
class Chain:
    """A function and its arguments."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Tensor, ...]


def _drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=draw) for shape in shapes)


def _of_rows(name: str, fn: Callable[..., Any], wide: int, narrow: int) -> Callable[[int], Chain]:
    """A chain on `wide` tensors [n, h], then `narrow` tensors [h]."""

    def make(elements: int) -> Chain:
        h = min(HIDDEN, elements // 16)
        shapes = [(elements // h, h)] * wide + [(h,)] * narrow
        return Chain(name, fn, _drawn(*shapes))

    return make


def _bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def _bias_gelu_tanh(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b, approximate="tanh")


def _bias_silu(x: Tensor, b: Tensor) -> Tensor:
    return F.silu(x + b)


def _bias_relu(x: Tensor, b: Tensor) -> Tensor:
    return F.relu(x + b)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, EPS)


def _rms_norm_by_hand(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w


def _add_rms_norm(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x + y
    return h, _rms_norm(h, w)


def _add_layer_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = x + y
    return h, _layer_norm(h, w, b)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def _softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _bias_dropout_residual(x: Tensor, b: Tensor, residual: Tensor, key: Tensor) -> Tensor:
    return residual + nn.dropout(key, x + b, 0.1)


def _bias_dropout_residual_layer_norm(
    x: Tensor, b: Tensor, residual: Tensor, key: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    h = _bias_dropout_residual(x, b, residual, key)
    return h, _layer_norm(h, weight, bias)


def _dropped(name: str, fn: Callable[..., Any], narrow: int) -> Callable[[int], Chain]:
    """A chain on tensors [n, h], [h] and [n, h], a key, and `narrow` tensors [h]."""

    def make(elements: int) -> Chain:
        h = min(HIDDEN, elements // 16)
        rows = (elements // h, h)
        x, b, residual, *more = _drawn(rows, (h,), rows, *[(h,)] * narrow)
        return Chain(name, fn, (x, b, residual, random.key(0), *more))

    return make


def _linear_loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, labels)


def _losses(name: str, fn: Callable[..., Any], product: bool) -> Callable[[int], Chain]:
    """A loss of `elements` logits; where the logits are a product, of twice as many."""

    def make(elements: int) -> Chain:
        v = min(VOCABULARY, elements // 16)
        n = elements // v * (2 if product else 1)
        shapes = [(n, WIDTH), (WIDTH, v)] if product else [(n, v)]
        labels = torch.randint(v, (n,), generator=torch.Generator().manual_seed(1))
        values = _drawn(*shapes)
        if product:
            values = (values[0], values[1] * WIDTH**-0.5)
        return Chain(name, fn, (*values, labels))

    return make


_ROWS: tuple[tuple[str, str, Callable[..., Any], int, int], ...] = (
    ("bias_gelu", "bias + gelu", _bias_gelu, 1, 1),
    ("bias_gelu_tanh", "bias + gelu, tanh", _bias_gelu_tanh, 1, 1),
    ("bias_silu", "bias + silu", _bias_silu, 1, 1),
    ("bias_relu", "bias + relu", _bias_relu, 1, 1),
    ("layer_norm", "layer_norm", _layer_norm, 1, 2),
    ("rms_norm", "rms_norm", _rms_norm, 1, 1),
    ("rms_norm_by_hand", "rms_norm by hand", _rms_norm_by_hand, 1, 1),
    ("add_rms_norm", "sum + rms_norm", _add_rms_norm, 2, 1),
    ("add_layer_norm", "sum + layer_norm", _add_layer_norm, 2, 2),
    ("swiglu", "swiglu", _swiglu, 2, 0),
    ("geglu", "geglu", _geglu, 2, 0),
    ("softmax", "softmax", _softmax, 1, 0),
    ("softmax_by_hand", "softmax by hand", _softmax_by_hand, 1, 0),
)

CHAINS: dict[str, Callable[[int], Chain]] = {
    key: _of_rows(name, fn, wide, narrow) for key, name, fn, wide, narrow in _ROWS
} | {
    "bias_dropout_residual": _dropped("bias + dropout + residual", _bias_dropout_residual, 0),
    "bias_dropout_residual_layer_norm": _dropped(
        "bias + dropout + residual + layer_norm", _bias_dropout_residual_layer_norm, 2
    ),
    "cross_entropy": _losses("cross-entropy", F.cross_entropy, False),
    "linear_cross_entropy": _losses("linear + cross-entropy", _linear_loss, True),
}
