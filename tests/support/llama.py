"""Layers in the shapes of Llama 3 (Dubey et al., arXiv:2407.21783), laid out by tensor, sequence and
fully sharded data parallelism."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from torchard import Mesh, P, constrain, nn, repeat, shard
from torchard.functional.programs.program import Program

Params = dict[str, Any]


@dataclass(frozen=True)
class Shapes:
    """The numbers of a model."""

    width: int = 16384
    heads: int = 128
    groups: int = 8
    hidden: int = 53248
    vocabulary: int = 128256
    context: int = 8192
    layers: int = 126

    @property
    def head(self) -> int:
        return self.width // self.heads


LLAMA_405B = Shapes()
LLAMA_SMALL = Shapes(32, 4, 2, 48, 40, 8, 2)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, position, head] turned by its position."""
    half, context = x.shape[-1] // 2, x.shape[-2]
    frequencies = 500000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(context, device=x.device)[:, None] * frequencies
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(s: Shapes, p: Params, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (F.linear(x, p[name]).unflatten(-1, (-1, s.head)).transpose(1, 2) for name in "qkv")
    mixed = F.scaled_dot_product_attention(
        rotated(q), rotated(k), v, is_causal=True, enable_gqa=True
    )
    return F.linear(mixed.transpose(1, 2).flatten(2), p["o"])


def loss(s: Shapes, p: Params, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of tokens [batch, position]; layers are a list, or stacked."""

    def keep(x: torch.Tensor) -> torch.Tensor:
        return constrain(x, P(("dp", "fsdp"), "tp"))

    def block(layer: Params, x: torch.Tensor) -> torch.Tensor:
        x = keep(x + attention(s, layer, nn.rms_norm(x, layer["norm1"])))
        y = nn.rms_norm(x, layer["norm2"])
        gate = F.silu(F.linear(y, layer["gate"])) * F.linear(y, layer["up"])
        return keep(x + F.linear(gate, layer["down"]))

    x = keep(F.embedding(tokens, p["embedding"]))
    if isinstance(p["layers"], dict):
        x = repeat(block, p["layers"], x)
    else:
        for layer in p["layers"]:
            x = block(layer, x)
    logits = F.linear(nn.rms_norm(x, p["norm"]), p["output"])
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def parameters(s: Shapes, make: Any) -> Params:
    """Made by a function of their shapes."""

    def layer() -> Params:
        wide, narrow = s.heads * s.head, s.groups * s.head
        return {
            **{"q": make(wide, s.width), "k": make(narrow, s.width), "v": make(narrow, s.width)},
            **{"o": make(s.width, wide), "norm1": make(s.width), "norm2": make(s.width)},
            **{"gate": make(s.hidden, s.width), "up": make(s.hidden, s.width)},
            "down": make(s.width, s.hidden),
        }

    ends = {"embedding": make(s.vocabulary, s.width), "output": make(s.vocabulary, s.width)}
    return {**ends, "norm": make(s.width), "layers": [layer() for _ in range(s.layers)]}


def specs(s: Shapes) -> Params:
    columns, rows, norm = P("tp", "fsdp"), P("fsdp", "tp"), P("fsdp")
    layer = {
        **dict.fromkeys(["q", "k", "v", "gate", "up"], columns),
        **dict.fromkeys(["o", "down"], rows),
        **dict.fromkeys(["norm1", "norm2"], norm),
    }
    return {"embedding": columns, "output": columns, "norm": norm, "layers": [layer] * s.layers}


BATCH = P(("dp", "fsdp"))


def lowered(s: Shapes, mesh: Mesh) -> Program:
    """The plan of a loss and its gradients, of 512 sequences; nothing is allocated."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    tokens = torch.empty(512, s.context, device="meta", dtype=torch.int64)
    step = torch.func.grad_and_value(functools.partial(loss, s))
    run = shard(step, mesh, (specs(s), BATCH, BATCH), (specs(s), P()))
    return run.lower(parameters(s, make), tokens, tokens)
