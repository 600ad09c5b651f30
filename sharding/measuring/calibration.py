"""The training step whose operations are timed: most of what transformers and MLPs consist of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.functional import optim

__all__ = ["SIZES", "Size", "step", "values"]

_VOCABULARY, _HEADS = 256, 4


class Size(NamedTuple):
    """The size of a step: sequences, tokens of each, and the width of a token."""

    batch: int
    length: int
    width: int


# In the last, memory bounds products, and no cache holds the parameters.
SIZES = (Size(4, 64, 64), Size(4, 64, 160), Size(8, 64, 320), Size(2, 4, 512))

_adamw, _sgd = optim.adamw(1e-3), optim.sgd(1e-3, momentum=0.9)


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    square, wide, tall = (width, width), (4 * width, width), (width, 4 * width)
    of_layer = {
        "norm": (width,),
        "shift": (width,),
        **dict.fromkeys(("q", "k", "v", "out", "query", "key"), square),
        "up": wide,
        "bias": (4 * width,),
        "down": tall,
        "gate": wide,
        "wide": wide,
        "tall": tall,
    }
    return {"table": (_VOCABULARY, width), **of_layer, "head": (_VOCABULARY, width)}


def values(size: Size) -> tuple[Any, ...]:
    """Parameters, the states of two optimizers, tokens and targets: the arguments of `step`."""
    made = torch.Generator().manual_seed(0)
    params = {
        name: 0.05 * torch.randn(shape, generator=made) for name, shape in _shapes(size.width).items()
    }
    tokens, targets = torch.randint(_VOCABULARY, (2, size.batch, size.length), generator=made)
    return params, _adamw.init(params), _sgd.init(params), tokens, targets


def _loss(p: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    x = F.embedding(tokens, p["table"])
    y = F.layer_norm(x, x.shape[-1:], p["norm"], p["shift"])
    q, k, v = (F.linear(y, p[name]).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(y.transpose(1, 2).flatten(2), p["out"])
    x = x + F.linear(F.gelu(F.linear(x, p["up"], p["bias"])), p["down"])
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * p["norm"]
    q, k = (F.linear(y, p[name]).unflatten(-1, (_HEADS, -1)).transpose(1, 2) for name in ("query", "key"))
    shares = torch.softmax(q @ k.transpose(2, 3) / q.shape[-1] ** 0.5, -1)
    x = x + (shares @ k).transpose(1, 2).flatten(2)
    x = x + F.linear(F.silu(F.linear(y, p["gate"])) * F.linear(y, p["wide"]), p["tall"])
    x = torch.tanh(F.relu(x) - torch.sigmoid(x) + torch.exp(-x.square()))
    return F.cross_entropy(F.linear(x, p["head"]).flatten(0, 1), targets.flatten())


def step(params: Any, adam: Any, momentum: Any, tokens: Tensor, targets: Tensor) -> Any:
    """The loss, and what two optimizers make of its gradient."""
    grads, loss = torch.func.grad_and_value(_loss)(params, tokens, targets)
    return _adamw.update(grads, adam, params), _sgd.update(grads, momentum, params), loss


def products(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[Tensor, Tensor]]:
    """Operands of equal products in several dtypes."""
    for dtype in dtypes:
        yield torch.ones(320, 320, dtype=dtype), torch.ones(320, 320, dtype=dtype)
