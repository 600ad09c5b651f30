"""Products of one value with several weights, as one product with all of them side by side.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), whose attention has one weight for q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["biased_gate_up", "biased_qkv", "gate_up", "qkv"]

Tensors = tuple[Tensor, ...]


def _gate_up(x: Tensor, wg: Tensor, wu: Tensor) -> Tensors:
    return x @ wg, x @ wu


def _biased_gate_up(x: Tensor, wg: Tensor, wu: Tensor, bg: Tensor, bu: Tensor) -> Tensors:
    return x @ wg + bg, x @ wu + bu


def _qkv(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensors:
    return x @ wq, x @ wk, x @ wv


def _biased_qkv(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bq: Tensor, bk: Tensor, bv: Tensor
) -> Tensors:
    return x @ wq + bq, x @ wk + bk, x @ wv + bv


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """[d, a], [d, b], ... -> [d, a + b + ...], laid out as they are: linear's are transposed."""
    if all(w.stride(0) == 1 for w in weights):
        return torch.cat([w.t() for w in weights]).t()
    return torch.cat(list(weights), 1)


def _rows(x: Tensor) -> Tensor:
    """[..., d] -> [n, d]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensors:
    """x [..., d] times each of the weights."""
    rows = _rows(x)
    # To lay weights out costs reading and writing them; it spares reading x again for each.
    if rows.shape[0] * (len(weights) - 1) < 2 * sum(w.shape[1] for w in weights):
        parts = [torch.addmm(b, rows, w) for b, w in zip(biases, weights, strict=False)]
        parts = parts or [rows @ w for w in weights]
    else:
        w = _side_by_side(weights)
        whole = torch.addmm(torch.cat(list(biases)), rows, w) if biases else rows @ w
        parts = list(whole.split([w.shape[1] for w in weights], 1))
    return tuple(part.reshape(*x.shape[:-1], part.shape[1]) for part in parts)


def _gradients(
    x: Tensor, weights: Sequence[Tensor], cotangents: Sequence[Tensor], biased: bool
) -> Tensors:
    """Of x, one product in place of a sum of several; of weights, one product; of biases."""
    rows = _rows(x)
    change = torch.cat([_rows(c) for c in cotangents], 1)
    widths = [w.shape[1] for w in weights]
    to_x = (change @ _side_by_side(weights).t()).view(x.shape)
    to_weights = (rows.t() @ change).split(widths, 1)
    to_biases = change.sum(0).split(widths) if biased else ()
    return (to_x, *to_weights, *to_biases)


def _kernel(name: str, reference: Callable[..., Tensors], outputs: str, biased: bool) -> Kernel:
    names = outputs.split()
    n = len(names)
    # The gradient of a bias reads no bias: it is told everything else.
    operands = ["... d", *(f"d {o}" for o in names), *(names if biased else [])]
    dims = f"{', '.join(operands)} -> {', '.join(f'... {o}' for o in names)}"

    def run(x: Tensor, *given: Tensor) -> Tensors:
        return _products(x, given[:n], given[n:])

    def vjp(x: Tensor, *given: Any) -> Tensors:
        return _gradients(x, given[:n], given[n:], biased)

    weights = tuple(f"w{o[0]}" for o in names)
    return register_kernel(
        Kernel(
            name, (reference,), dims, {"any": run}, {"any": vjp}, weights=weights, shared_storage=True
        )
    )


gate_up = _kernel("gate_up", _gate_up, "g u", False)
biased_gate_up = _kernel("biased_gate_up", _biased_gate_up, "g u", True)
qkv = _kernel("qkv", _qkv, "q k v", False)
biased_qkv = _kernel("biased_qkv", _biased_qkv, "q k v", True)
