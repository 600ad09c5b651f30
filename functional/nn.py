"""Stateless layers and initializers: plain functions of tensors, with torch's semantics.

Parameters are arguments, randomness comes from a key, and nothing branches on values, so that everything
can be traced, transformed and sharded. Weights are laid out as torch's: a linear weight is [out, in].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.functional import random

__all__ = [
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "init_normal",
    "init_normal_fan_in",
    "init_uniform_fan_in",
    "layer_norm",
    "linear",
    "log_softmax",
    "relu",
    "rms_norm",
    "silu",
    "softmax",
]


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """An affine map, ``x @ w.T + b``, of the last dim.

    Args:
        x: input, ``[..., in]``, floating.
        w: weight, ``[out, in]``, as in `torch.nn.Linear`; dtype of ``x``.
        b: bias, ``[out]``, or None.

    Returns:
        ``[..., out]``, dtype of ``x``.

    >>> import torch
    >>> from torchard import nn
    >>> nn.linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]), torch.ones(2))
    tensor([4., 7.])
    """
    return F.linear(x, w, b)


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table, looked up by index.

    Args:
        table: ``[vocab, d]``, floating.
        ids: row numbers in ``[0, vocab)``, ``[...]``, int32 or int64.

    Returns:
        ``[..., d]``, dtype of ``table``.

    >>> import torch
    >>> from torchard import nn
    >>> nn.embedding(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
    tensor([[4, 5],
            [0, 1]])
    """
    return F.embedding(ids, table)


def layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Layer normalization over the last dim: zero mean and unit variance, then scale and shift.

    Args:
        x: input, ``[..., d]``, floating.
        w: scale, ``[d]``, or None for 1.
        b: shift, ``[d]``, or None for 0.
        eps: added to the (biased) variance.

    Returns:
        ``[..., d]``, dtype of ``x``.

    Source: Ba, Kiros, Hinton, arXiv:1607.06450, eq. 4.

    >>> import torch
    >>> from torchard import nn
    >>> nn.layer_norm(torch.tensor([1.0, 3.0]), w=torch.full((2,), 10.0), eps=0.0)
    tensor([-10.,  10.])
    """
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def rms_norm(x: Tensor, w: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Root-mean-square normalization over the last dim, without centering.

    The mean of squares of a half-precision ``x`` is computed in float32.

    Args:
        x: input, ``[..., d]``, floating.
        w: scale, ``[d]``, or None for 1.
        eps: added to the mean of squares.

    Returns:
        ``[..., d]``, dtype of ``x`` (promoted with that of ``w``).

    Source: Zhang, Sennrich, arXiv:1910.07467, eq. 4.

    >>> import torch
    >>> from torchard import nn
    >>> nn.rms_norm(torch.tensor([1.0, 7.0]), w=torch.full((2,), 5.0), eps=0.0)
    tensor([1., 7.])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if w is None else y * w


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Gaussian error linear unit, x Φ(x), with Φ the standard normal CDF.

    Args:
        x: any shape, floating.
        approximate: ``"none"`` for the exact function, ``"tanh"`` for its tanh approximation.

    Returns:
        Shape and dtype of ``x``.

    Source: Hendrycks, Gimpel, arXiv:1606.08415, section 2.

    >>> import torch
    >>> from torchard import nn
    >>> nn.gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1587,  0.0000,  0.8413])
    """
    return F.gelu(x, approximate=approximate)


def relu(x: Tensor) -> Tensor:
    """Rectified linear unit, max(x, 0).

    Args:
        x: any shape and real dtype.

    Returns:
        Shape and dtype of ``x``.

    >>> import torch
    >>> from torchard import nn
    >>> nn.relu(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    """
    return F.relu(x)


def silu(x: Tensor) -> Tensor:
    """Sigmoid linear unit, x sigmoid(x), also called swish.

    Args:
        x: any shape, floating.

    Returns:
        Shape and dtype of ``x``.

    Source: Hendrycks, Gimpel, arXiv:1606.08415, section 2.

    >>> import torch
    >>> from torchard import nn
    >>> nn.silu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.2689,  0.0000,  0.7311])
    """
    return F.silu(x)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) along a dim.

    Args:
        x: any shape, floating.
        dim: the dim that sums to 1.

    Returns:
        Shape and dtype of ``x``.

    >>> import torch
    >>> from torchard import nn
    >>> nn.softmax(torch.tensor([0.0, 0.0, float("-inf")]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    return torch.softmax(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of `softmax`, x - log(sum(exp(x))), computed without overflow.

    Args:
        x: any shape, floating.
        dim: the dim along which to normalize.

    Returns:
        Shape and dtype of ``x``.

    >>> import torch
    >>> from torchard import nn
    >>> nn.log_softmax(torch.tensor([1000.0, 1000.0]))
    tensor([-0.6931, -0.6931])
    """
    return torch.log_softmax(x, dim)


def dropout(key: Tensor, x: Tensor, rate: float | Tensor) -> Tensor:
    """Zero each element with probability ``rate`` and divide the others by ``1 - rate``.

    The mask depends only on the key and on each element's index, so it is the same on every mesh and
    when it is recomputed. For evaluation pass ``rate=0``, which does not use the key.

    Args:
        key: int64 ``[2]``; see `torchard.random`.
        x: any shape, floating.
        rate: a number in [0, 1], or a 0-d tensor. The number 0 returns ``x``, 1 returns zeros.

    Returns:
        Shape and dtype of ``x``.

    Raises:
        ValueError: ``rate`` is a number outside [0, 1].

    Source: Srivastava et al., JMLR 15 (2014), section 4, scaled at training time.

    >>> import torch
    >>> from torchard import nn, random
    >>> nn.dropout(random.key(0), torch.ones(8), 0.5)
    tensor([2., 0., 0., 2., 2., 2., 2., 0.])
    >>> nn.dropout(random.key(0), torch.ones(8), 1.5)
    Traceback (most recent call last):
        ...
    ValueError: p is 1.5; a probability lies in [0, 1]
    """
    if isinstance(rate, Tensor):
        # At rate 1 the scale is infinite; unselected, it must not make the gradient NaN.
        scale: float | Tensor = torch.where(rate < 1, 1 / (1 - rate), 0)
    elif rate == 0:
        return x
    elif rate == 1:
        return torch.zeros_like(x)
    else:
        scale = 1 / (1 - rate)
    return (x * scale).masked_fill(random.bernoulli(key, rate, x.shape), 0)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Negative log likelihood of class labels, with the classes in the *last* dim.

    Args:
        logits: unnormalized log-probabilities, ``[..., classes]``, floating.
        targets: class numbers in ``[0, classes)``, ``[...]``, int64.
        reduction: ``"mean"`` or ``"sum"`` over all targets, or ``"none"``.
        ignore_index: a target with this value has loss 0 and does not count in the mean.

    Returns:
        A 0-d tensor, or ``[...]`` with reduction ``"none"``; dtype of ``logits``.

    >>> import torch
    >>> from torchard import nn
    >>> logits, targets = torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [3, 2, -100]])
    >>> nn.cross_entropy(logits, targets).exp()                 # uniform over 4 classes
    tensor(4.)
    >>> nn.cross_entropy(logits, targets, "none").shape
    torch.Size([2, 3])
    """
    flat = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        reduction=reduction,
        ignore_index=ignore_index,
    )
    return flat.reshape(targets.shape) if reduction == "none" else flat


def init_normal(
    key: Tensor, shape: Sequence[int], std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw from a normal distribution with mean 0.

    Args:
        key: int64 ``[2]``; see `torchard.random`.
        shape: the shape of the result.
        std: the standard deviation.
        dtype: a real floating dtype.

    Returns:
        A tensor of this shape and dtype; each element depends only on the key and its index.

    >>> from torchard import nn, random
    >>> w = nn.init_normal(random.key(0), (1000, 100))
    >>> w.shape, round(w.std().item(), 3)
    (torch.Size([1000, 100]), 0.02)
    """
    return random.normal(key, shape, dtype) * std


def init_normal_fan_in(
    key: Tensor, shape: Sequence[int], gain: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw a weight [out, in] from a normal distribution with standard deviation gain / sqrt(in).

    Args:
        key: int64 ``[2]``; see `torchard.random`.
        shape: the shape of the weight; the last dim is the fan-in.
        gain: a factor; sqrt(2) preserves the variance through a ReLU.
        dtype: a real floating dtype.

    Returns:
        A tensor of this shape and dtype.

    Source: He et al., arXiv:1502.01852, section 2.2.

    >>> from torchard import nn, random
    >>> w = nn.init_normal_fan_in(random.key(0), (1000, 400))
    >>> round(w.std().item(), 3)
    0.05
    """
    return init_normal(key, shape, gain / math.sqrt(shape[-1]), dtype)


def init_uniform_fan_in(
    key: Tensor, shape: Sequence[int], fan_in: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw uniformly from ±1 / sqrt(fan_in), the default initialization of `torch.nn.Linear`.

    Args:
        key: int64 ``[2]``; see `torchard.random`.
        shape: the shape of the weight or bias.
        fan_in: the number of inputs of the layer; by default the last dim, as for a weight [out, in].
        dtype: a real floating dtype.

    Returns:
        A tensor of this shape and dtype.

    >>> from torchard import nn, random
    >>> b = nn.init_uniform_fan_in(random.key(0), (1000,), fan_in=400)
    >>> round(b.min().item(), 3), round(b.max().item(), 3)
    (-0.05, 0.05)
    """
    bound = 1 / math.sqrt(shape[-1] if fan_in is None else fan_in)
    return random.uniform(key, shape, dtype, -bound, bound)
