"""Cross-entropy of a product whose result is the logits, which are never stored whole.

The product may have a bias, or be soft-capped: cap * tanh(x @ w / cap).

Source: Wijmans et al. 2024 (arXiv:2411.09009) and Hsu et al. 2024 (arXiv:2410.10989): rows are
independent, so they are computed in chunks, whose logits become their own gradient in place. Gemma Team
2024 (arXiv:2408.00118), section 2, for caps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.functional.torch_internals.operators import aten
from torchard.kernels.execution.buffers import reused
from torchard.kernels.library.cross_entropy import (
    by_gather,
    less_one_hot,
    mean_of,
    picked_of,
    scale_of,
    wide,
)
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["linear_cross_entropy", "linear_cross_entropy_biased", "linear_cross_entropy_capped"]

# Rows and elements of a chunk at most: products of fewer rows are slower, more rows are not faster.
_ROWS, _ELEMENTS = 512, 1 << 24
# Probabilities whose logarithm is exact to rounding; smaller ones may have been rounded to 0.
_TINY = 1e-30

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Head:
    """What follows the last hidden layer: x [n, d] @ w [d, v], and a bias [v] or a cap."""

    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    cap: float | None = None

    def chunks(self) -> Iterator[_Chunk]:
        """The logits of some rows at a time, in memory that the next ones overwrite."""
        n, v = self.x.shape[0], self.w.shape[1]
        step = max(1, min(_ROWS, _ELEMENTS // max(1, v), n))
        memory = [self._memory(step, v) for _ in range(1 if self.cap is None else 2)]
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield self._chunk(rows, [m[: rows.stop - start] for m in memory])

    def _memory(self, rows: int, width: int) -> Tensor:
        like = torch.empty((rows, width), dtype=wide(self.x.dtype), device="meta")
        return reused(like, self.x.device)

    def _chunk(self, rows: slice, memory: list[Tensor]) -> _Chunk:
        if self.cap is None:
            return _Chunk(self, rows, self.product(rows, memory[0]))
        tanh = self.product(rows, memory[0], 1 / self.cap).tanh_()
        return _Chunk(self, rows, torch.mul(tanh, self.cap, out=memory[1]), tanh)

    def product(
        self, rows: slice | Tensor, out: Tensor | None = None, factor: float = 1.0
    ) -> Tensor:
        """Some rows of the product and its bias times a factor, in a wide dtype."""
        x, b = self.x[rows], self.bias
        dtype = wide(x.dtype)
        same = out if x.dtype == dtype else None
        added = x.new_zeros(()) if b is None else b
        product = torch.addmm(added, x, self.w, beta=b is not None, alpha=factor, out=same)
        return product.to(dtype) if out is None else product if out is same else out.copy_(product)

    def capped(self, product: Tensor) -> Tensor:
        """The logits of a product."""
        return product if self.cap is None else torch.tanh(product / self.cap) * self.cap


@dataclass
class _Chunk:
    """Some rows of the logits, which may be overwritten.

    Attributes:
        tanh: the logits over the cap.
    """

    head: _Head
    rows: slice
    logits: Tensor
    tanh: Tensor | None = None

    def to_losses(self, labels: Tensor) -> Tensor:
        """The sum of the losses; the logits become their softmax."""
        labels, logits = labels[self.rows], self.logits
        counts, picked = picked_of(labels)
        if logits.device.type != "cpu":
            losses = torch.log_softmax(logits, -1, out=logits).gather(-1, picked).squeeze(-1)
            logits.exp_()
        else:  # a pass less, but for rows that must be computed again, which are rare
            chances = torch.softmax(logits, -1, out=logits).gather(-1, picked).squeeze(-1)
            losses = chances.log()
            again = (~(chances > _TINY) & counts).nonzero().squeeze(-1)
            if again.numel():
                rows = self.head.capped(self.head.product(again + self.rows.start))
                exact = torch.log_softmax(rows, -1).gather(-1, picked[again])
                losses[again] = exact.squeeze(-1)
        return -losses.masked_fill_(~counts, 0).sum()


class _Gradients:
    """The gradients of x [n, d], w [d, v] and a bias [v], accumulated over chunks of the logits.

    Sums over rows are in a wide dtype.
    """

    def __init__(self, head: _Head, labels: Tensor, cotangent: Tensor) -> None:
        self.head, self.labels = head, labels
        self.scale = scale_of(labels, cotangent)
        self.to_x = torch.empty_like(head.x, memory_format=torch.contiguous_format)
        # In the weight's layout: adding needs no copy then, and readers of the gradient expect it.
        self.to_w = torch.zeros_like(head.w, dtype=self.scale.dtype)
        self.to_bias = torch.zeros_like(self.to_w[0]) if head.bias is not None else None

    def add(self, chunk: _Chunk) -> None:
        """Add the gradients of some rows, whose logits have become their softmax."""
        rows, softmax, x = chunk.rows, chunk.logits, self.head.x[chunk.rows]
        factor = less_one_hot(softmax, self.labels[rows], self.scale)
        if chunk.tanh is not None:
            aten.tanh_backward.grad_input(softmax, chunk.tanh, grad_input=softmax)
        # The factor is applied on the side of [m, d], which is smaller than [m, v].
        narrow = softmax.to(x.dtype)
        torch.mm(narrow, self.head.w.t(), out=self.to_x[rows]).mul_(factor)
        self.to_w.addmm_((x * factor).t().to(softmax.dtype), softmax)
        if self.to_bias is not None:
            self.to_bias.addmv_(softmax.t(), factor.squeeze(-1))

    @property
    def done(self) -> Tensors:
        """The gradients, in the dtypes of what they are of."""
        sums = (self.to_w,) if self.to_bias is None else (self.to_w, self.to_bias)
        return self.to_x, *(total.to(self.head.w.dtype) for total in sums)


def _loss(head: _Head, labels: Tensor) -> Tensor:
    """The mean loss."""
    total = head.x.new_zeros((), dtype=wide(head.x.dtype))
    for chunk in head.chunks():
        total += chunk.to_losses(labels)
    return mean_of(total, labels, head.x.dtype)


def _vjp(head: _Head, labels: Tensor, cotangent: Tensor) -> Tensors:
    """The gradients; the logits are recomputed."""
    gradients = _Gradients(head, labels, cotangent)
    for chunk in head.chunks():
        torch.softmax(chunk.logits, -1, out=chunk.logits)
        gradients.add(chunk)
    return gradients.done


def _joint(head: _Head, labels: Tensor, cotangent: Tensor) -> Tensors:
    """The mean loss and the gradients; the logits are computed once."""
    gradients = _Gradients(head, labels, cotangent)
    total = gradients.scale.new_zeros(())
    for chunk in head.chunks():
        total += chunk.to_losses(labels)
        gradients.add(chunk)
    return mean_of(total, labels, head.x.dtype), *gradients.done


Run = Callable[..., Any]


def _kernel(name: str, dims: str, references: tuple[Run, ...], biased: bool = False) -> Kernel:
    def bound(run: Run) -> dict[str, Run]:
        def of_head(x: Tensor, w: Tensor, *rest: Tensor, cap: float | None = None) -> Any:
            bias, rest = (rest[0], rest[1:]) if biased else (None, rest)
            return run(_Head(x, w, bias, cap), *rest)

        return {"any": of_head}

    dims = f"{dims} -> | whole n d v"
    return register_kernel(
        Kernel(name, references, dims, bound(_loss), bound(_vjp), joint=bound(_joint))
    )


def _plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, labels)


def _plain_by_gather(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return by_gather(x @ w, labels)


def _biased(x: Tensor, w: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w + b, labels)


def _capped(x: Tensor, w: Tensor, labels: Tensor, cap: Any = ...) -> Tensor:
    return F.cross_entropy(torch.tanh(x @ w / cap) * cap, labels)


linear_cross_entropy = _kernel(
    "linear_cross_entropy", "n d, d v, n:int64", (_plain, _plain_by_gather)
)
linear_cross_entropy_biased = _kernel(
    "linear_cross_entropy_biased", "n d, d v, v, n:int64", (_biased,), biased=True
)
linear_cross_entropy_capped = _kernel(
    "linear_cross_entropy_capped", "n d, d v, n:int64", (_capped,)
)
