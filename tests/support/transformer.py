"""A transformer as a pure function, and the parallel plans an expert would give it, as specs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from torchard import P, constrain, nn

Params = dict[str, Any]
Keep = Callable[[torch.Tensor], torch.Tensor]
WIDTH, HEADS, CONTEXT, VOCAB, LAYERS = 16, 4, 8, 24, 2


def attention(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Causal self-attention of x[batch, position, width]; q, k and v come from one projection."""
    q, k, v = F.linear(x, p["qkv"], p["qkv_bias"]).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), p["proj"], p["proj_bias"])


def block(p: Params, x: torch.Tensor, keep: Keep) -> torch.Tensor:
    """Pre-norm; ``keep`` says where the residual stream lives."""
    x = keep(x + attention(p, nn.layer_norm(x, p["norm1"], p["norm1_bias"])))
    hidden = F.gelu(F.linear(nn.layer_norm(x, p["norm2"], p["norm2_bias"]), p["up"], p["up_bias"]))
    return keep(x + F.linear(hidden, p["down"], p["down_bias"]))


def loss(keep: Keep, p: Params, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy; the embedding is also the output's weight."""
    x = keep(F.embedding(tokens, p["embedding"]))
    for layer in p["layers"]:
        x = block(layer, x, keep)
    x = nn.layer_norm(x, p["norm"], p["norm_bias"])
    logits = F.linear(x, p["embedding"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parameters(dtype: torch.dtype = torch.float64, layers: int = LAYERS) -> Params:
    made = torch.Generator().manual_seed(0)

    def w(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64).mul(0.2).to(dtype)

    def layer() -> Params:
        return {
            **{"norm1": w(WIDTH), "norm1_bias": w(WIDTH)},
            **{"qkv": w(3 * WIDTH, WIDTH), "qkv_bias": w(3 * WIDTH)},
            **{"proj": w(WIDTH, WIDTH), "proj_bias": w(WIDTH)},
            **{"norm2": w(WIDTH), "norm2_bias": w(WIDTH)},
            **{"up": w(4 * WIDTH, WIDTH), "up_bias": w(4 * WIDTH)},
            **{"down": w(WIDTH, 4 * WIDTH), "down_bias": w(WIDTH)},
        }

    norms = {"norm": w(WIDTH), "norm_bias": w(WIDTH)}
    return {"embedding": w(VOCAB, WIDTH), **norms, "layers": [layer() for _ in range(layers)]}


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, [size, context] each."""
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (size, CONTEXT + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Recipe:
    """How a model is laid out on a mesh: specs of its parameters, its batch, its residual stream."""

    mesh: dict[str, int]
    specs: Any
    batch: P = field(default_factory=P)
    stream: P | None = None

    @property
    def loss(self) -> Callable[..., torch.Tensor]:
        stream = self.stream
        keep = (lambda x: x) if stream is None else (lambda x: constrain(x, stream))
        return functools.partial(loss, keep)

    def step(self, p: Params, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        """Gradients and loss."""
        return torch.func.grad_and_value(self.loss)(p, tokens, targets)


def tensor_parallel(axis: str, data: str | None = None) -> Params:
    """Megatron's: heads and hidden units split, q, k and v of a head together; ``data``: and ZeRO."""
    fused = {"three": 3, "d": WIDTH // HEADS}
    layer = {
        **{"norm1": P(data), "norm1_bias": P(data), "norm2": P(data), "norm2_bias": P(data)},
        "qkv": P.factors("(three h d) e", **fused, h=axis, e=data),
        "qkv_bias": P.factors("(three h d)", **fused, h=axis),
        "proj": P.factors("o (h d)", d=WIDTH // HEADS, h=axis, o=data),
        "proj_bias": P(data),
        **{"up": P(axis, data), "up_bias": P(axis), "down": P(data, axis), "down_bias": P(data)},
    }
    norms = {"norm": P(data), "norm_bias": P(data)}
    return {"embedding": P(axis, data), **norms, "layers": [layer] * LAYERS}


RECIPES = {
    "tp=2": Recipe({"tp": 2}, tensor_parallel("tp")),
    "tp=3": Recipe({"tp": 3}, tensor_parallel("tp")),
    "tp=2 sequence": Recipe({"tp": 2}, tensor_parallel("tp"), stream=P(None, "tp")),
    "tp=3 sequence": Recipe({"tp": 3}, tensor_parallel("tp"), stream=P(None, "tp")),
    "dp=2": Recipe({"dp": 2}, P(), P("dp")),
    "fsdp=4": Recipe({"dp": 4}, P("dp"), P("dp")),
    "dp=2 tp=2": Recipe({"dp": 2, "tp": 2}, tensor_parallel("tp"), P("dp")),
    "dp=2 tp=2 sequence": Recipe(
        {"dp": 2, "tp": 2}, tensor_parallel("tp"), P("dp"), P("dp", "tp")
    ),
    "dp=2 fsdp=2 tp=2": Recipe(
        {"dp": 2, "fsdp": 2, "tp": 2}, tensor_parallel("tp", "fsdp"), P(("dp", "fsdp"))
    ),
    "fsdp=2 tp=2": Recipe({"dp": 2, "tp": 2}, tensor_parallel("tp", "dp"), P("dp")),
}
