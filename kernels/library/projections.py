"""Products of one value with several weights, as one product with the concatenated weights.

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


def _concatenated(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate [d, a], [d, b], ... to [d, a + b + ...] in their layout (transposed for nn.Linear)."""
    if all(w.stride(0) == 1 for w in weights):
        return torch.cat([w.t() for w in weights]).t()
    return torch.cat(list(weights), 1)


def _rows(x: Tensor) -> Tensor:
    """Reshape x [..., d] to rows [n, d]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensors:
    """The products of x [..., d] and each of the weights [d, a], plus biases [a], if any."""
    rows = _rows(x)
    # Concatenating reads and writes every weight, but x is then read once, not once per weight.
    if rows.shape[0] * (len(weights) - 1) < 2 * sum(w.shape[1] for w in weights):
        products = [torch.addmm(b, rows, w) for b, w in zip(biases, weights, strict=False)]
        products = products or [rows @ w for w in weights]
    else:
        w = _concatenated(weights)
        product = torch.addmm(torch.cat(list(biases)), rows, w) if biases else rows @ w
        products = list(product.split([w.shape[1] for w in weights], 1))
    return tuple(p.reshape(*x.shape[:-1], p.shape[1]) for p in products)


def _gradients(
    x: Tensor, weights: Sequence[Tensor], cotangents: Sequence[Tensor], biased: bool
) -> Tensors:
    """The gradients of x, of the weights and of the biases, the first two by one product each."""
    rows = _rows(x)
    cotangent = torch.cat([_rows(c) for c in cotangents], 1)
    widths = [w.shape[1] for w in weights]
    to_x = (cotangent @ _concatenated(weights).t()).view(x.shape)
    to_weights = (rows.t() @ cotangent).split(widths, 1)
    to_biases = cotangent.sum(0).split(widths) if biased else ()
    return (to_x, *to_weights, *to_biases)


def _kernel(name: str, reference: Callable[..., Tensors], outputs: str, biased: bool) -> Kernel:
    names = outputs.split()
    n = len(names)
    operands = ["... d", *(f"d {o}" for o in names), *(names if biased else [])]
    dims = f"{', '.join(operands)} -> {', '.join(f'... {o}' for o in names)}"

    def run(x: Tensor, *given: Tensor) -> Tensors:
        return _products(x, given[:n], given[n:])

    # No gradient reads a bias: given are the weights and the cotangents.
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
