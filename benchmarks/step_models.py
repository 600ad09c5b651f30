"""Models as their authors write them: losses of parameters and a batch, in plain torch.

    model = MODELS["GPT"](Size(width=128, vocabulary=512))
    model.loss(model.params, *model.batch) -> []

Parameters are nested dicts and lists of float32 tensors; weights have the layout of `torch.nn.Linear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MODELS", "Model", "Size"]

Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """The sizes of a model; of images, `length` is the number of rows and columns."""

    layers: int = 4
    width: int = 128
    vocabulary: int = 512
    batch: int = 8
    length: int = 128
    features: int = 32  # of a head

    @property
    def heads(self) -> int:
        return self.width // self.features

    def __str__(self) -> str:
        shown = f"{self.layers} layers, width {self.width}, vocabulary {self.vocabulary:,}"
        return f"{shown}, {self.batch} × {self.length}"


@dataclass(frozen=True)
class Model:
    """A loss of ``(params, *batch)``, and what it is called with.

    Without a loss the batch is the gradients of the parameters, one for each leaf.
    """

    loss: Callable[..., Tensor] | None
    params: Params
    batch: tuple[Tensor, ...]


class Draw:
    """Random parameters and batches, the same in each run."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def weight(self, rows: int, columns: int) -> Tensor:
        return self.normal(rows, columns) * columns**-0.5

    def linear(self, rows: int, columns: int) -> Params:
        return {"weight": self.weight(rows, columns), "bias": torch.zeros(rows)}

    def convolution(self, out: int, channels: int, size: int = 3) -> Params:
        weight = self.normal(out, channels, size, size) * (channels * size**2) ** -0.5
        return {"weight": weight, "bias": torch.zeros(out)}

    def integers(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=self.generator)


def norm(width: int) -> Params:
    return {"weight": torch.ones(width), "bias": torch.zeros(width)}


def linear(p: Params, x: Tensor) -> Tensor:
    return F.linear(x, p["weight"], p["bias"])


def layer_norm(p: Params, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p["weight"], p["bias"])


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[b, s, h * d] as [b, h, s, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[b, h, s, d] as [b, s, h * d]."""
    return x.transpose(1, 2).flatten(2)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- GPT, BERT and ViT: biased products, LayerNorm, GELU --------------------------------------------


def biased_block(draw: Draw, width: int) -> Params:
    block = {name: draw.linear(width, width) for name in "qkvo"}
    block |= {"up": draw.linear(4 * width, width), "down": draw.linear(width, 4 * width)}
    return block | {"norm1": norm(width), "norm2": norm(width)}


def biased_attention(p: Params, x: Tensor, heads: int, causal: bool) -> Tensor:
    q, k, v = (heads_of(linear(p[name], x), heads) for name in "qkv")
    return linear(p["o"], merged(F.scaled_dot_product_attention(q, k, v, is_causal=causal)))


def biased_mlp(p: Params, x: Tensor, approximate: str = "none") -> Tensor:
    return linear(p["down"], F.gelu(linear(p["up"], x), approximate=approximate))


def tokens_of(draw: Draw, size: Size) -> tuple[Tensor, Tensor]:
    shape = size.batch, size.length
    return draw.integers(size.vocabulary, *shape), draw.integers(size.vocabulary, *shape)


def gpt(size: Size) -> Model:
    """GPT-2: norms before each part, GELU by tanh, an output layer without bias."""
    draw = Draw()

    def loss(p: Params, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, p["tokens"]) + p["positions"]
        for block in p["blocks"]:
            x = x + biased_attention(block, layer_norm(block["norm1"], x), size.heads, True)
            x = x + biased_mlp(block, layer_norm(block["norm2"], x), "tanh")
        return next_token_loss(F.linear(layer_norm(p["norm"], x), p["head"]), targets)

    params = {
        "tokens": draw.weight(size.vocabulary, size.width),
        "positions": draw.weight(size.length, size.width),
        "blocks": [biased_block(draw, size.width) for _ in range(size.layers)],
        "norm": norm(size.width),
        "head": draw.weight(size.vocabulary, size.width),
    }
    return Model(loss, params, tokens_of(draw, size))


def bert(size: Size) -> Model:
    """BERT: norms after each residual sum, exact GELU, masked tokens, a biased output layer."""
    draw = Draw()

    def loss(p: Params, tokens: Tensor, targets: Tensor) -> Tensor:
        x = layer_norm(p["norm"], F.embedding(tokens, p["tokens"]) + p["positions"])
        for block in p["blocks"]:
            x = layer_norm(block["norm1"], x + biased_attention(block, x, size.heads, False))
            x = layer_norm(block["norm2"], x + biased_mlp(block, x))
        x = layer_norm(p["last"], F.gelu(linear(p["transform"], x)))
        return next_token_loss(linear(p["head"], x), targets)

    width = size.width
    params = {
        "tokens": draw.weight(size.vocabulary, width),
        "positions": draw.weight(size.length, width),
        "norm": norm(width),
        "blocks": [biased_block(draw, width) for _ in range(size.layers)],
        "transform": draw.linear(width, width),
        "last": norm(width),
        "head": draw.linear(size.vocabulary, width),
    }
    tokens, targets = tokens_of(draw, size)
    hidden = torch.rand(targets.shape, generator=draw.generator) < 0.15
    return Model(loss, params, (tokens, targets.masked_fill(~hidden, -100)))


def vit(size: Size) -> Model:
    """A vision transformer: patches of 16 × 16 pixels, a class token, exact GELU."""
    draw, patch, classes = Draw(), 16, 100

    def loss(p: Params, images: Tensor, labels: Tensor) -> Tensor:
        x = F.conv2d(images, p["patch"]["weight"], p["patch"]["bias"], stride=patch)
        x = x.flatten(2).transpose(1, 2)
        x = torch.cat([p["class"].expand(x.shape[0], 1, -1), x], 1) + p["positions"]
        for block in p["blocks"]:
            x = x + biased_attention(block, layer_norm(block["norm1"], x), size.heads, False)
            x = x + biased_mlp(block, layer_norm(block["norm2"], x))
        return F.cross_entropy(linear(p["head"], layer_norm(p["norm"], x)[:, 0]), labels)

    width, patches = size.width, (size.length // patch) ** 2
    params = {
        "patch": draw.convolution(width, 3, patch),
        "class": draw.weight(1, width),
        "positions": draw.weight(patches + 1, width),
        "blocks": [biased_block(draw, width) for _ in range(size.layers)],
        "norm": norm(width),
        "head": draw.linear(classes, width),
    }
    images = draw.normal(size.batch, 3, size.length, size.length)
    return Model(loss, params, (images, draw.integers(classes, size.batch)))


# -- Llama and Gemma 2: RMSNorm, rotary positions, gated MLPs ---------------------------------------


def rms_norm(weight: Tensor, x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotary(length: int, features: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines of each position's angles, [s, d]."""
    rates = 1e4 ** (-torch.arange(0, features, 2) / features)
    angles = torch.outer(torch.arange(length), rates)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def gated_block(draw: Draw, width: int, groups: int, features: int, norms: int) -> Params:
    block: Params = {"q": draw.weight(width, width), "o": draw.weight(width, width)}
    block |= {name: draw.weight(groups * features, width) for name in "kv"}
    block |= {name: draw.weight(3 * width, width) for name in ("gate", "up")}
    block |= {"down": draw.weight(width, 3 * width)}
    return block | {f"norm{i}": torch.ones(width) for i in range(norms)}


def grouped_heads(
    p: Params, x: Tensor, angles: tuple[Tensor, Tensor], heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and as many keys and values, of which several share one [b, h, s, d]."""
    q, k = heads_of(F.linear(x, p["q"]), heads), heads_of(F.linear(x, p["k"]), groups)
    v = heads_of(F.linear(x, p["v"]), groups)
    q, k = rotated(q, *angles), rotated(k, *angles)
    k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
    return q, k, v


def llama(size: Size) -> Model:
    """Llama: two queries to a key, SwiGLU."""
    draw, groups = Draw(), max(1, size.heads // 2)
    angles = rotary(size.length, size.features)

    def loss(p: Params, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, p["tokens"])
        for block in p["blocks"]:
            y = rms_norm(block["norm0"], x)
            q, k, v = grouped_heads(block, y, angles, size.heads, groups)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(merged(y), block["o"])
            y = rms_norm(block["norm1"], x)
            y = F.silu(F.linear(y, block["gate"])) * F.linear(y, block["up"])
            x = x + F.linear(y, block["down"])
        return next_token_loss(F.linear(rms_norm(p["norm"], x), p["head"]), targets)

    params = {
        "tokens": draw.weight(size.vocabulary, size.width),
        "blocks": [
            gated_block(draw, size.width, groups, size.features, 2) for _ in range(size.layers)
        ],
        "norm": torch.ones(size.width),
        "head": draw.weight(size.vocabulary, size.width),
    }
    return Model(loss, params, tokens_of(draw, size))


def gemma(size: Size) -> Model:
    """Gemma 2: four norms to a block, soft-capped scores and logits, a window in every other layer."""
    draw, groups = Draw(), max(1, size.heads // 2)
    angles, window = rotary(size.length, size.features), size.length // 4
    distance = torch.arange(size.length)[:, None] - torch.arange(size.length)
    least = torch.finfo(torch.float32).min
    full, sliding = (
        torch.zeros(distance.shape).masked_fill(hidden, least)
        for hidden in (distance < 0, (distance < 0) | (distance >= window))
    )

    def norm(weight: Tensor, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + weight.float())).type_as(x)

    def attention(p: Params, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = grouped_heads(p, x, angles, size.heads, groups)
        scores = q @ k.transpose(2, 3) * size.features**-0.5
        scores = torch.tanh(scores / 50.0) * 50.0 + mask.to(scores.dtype)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return F.linear(merged(weights @ v), p["o"])

    def loss(p: Params, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, p["tokens"]) * math.sqrt(size.width)
        for i, block in enumerate(p["blocks"]):
            y = attention(block, norm(block["norm0"], x), full if i % 2 else sliding)
            x = x + norm(block["norm1"], y)
            y = norm(block["norm2"], x)
            y = F.gelu(F.linear(y, block["gate"]), approximate="tanh") * F.linear(y, block["up"])
            x = x + norm(block["norm3"], F.linear(y, block["down"]))
        logits = F.linear(norm(p["norm"], x), p["tokens"])
        return next_token_loss(torch.tanh(logits / 30.0) * 30.0, targets)

    blocks = [gated_block(draw, size.width, groups, size.features, 4) for _ in range(size.layers)]
    for block in blocks:
        block.update({f"norm{i}": torch.zeros(size.width) for i in range(4)})
    params = {
        "tokens": draw.weight(size.vocabulary, size.width),
        "blocks": blocks,
        "norm": torch.zeros(size.width),
    }
    return Model(loss, params, tokens_of(draw, size))


# -- a mixture of experts ---------------------------------------------------------------------------


def mixture(size: Size) -> Model:
    """Mixtral's routing: a token goes to the best two of four experts, which take so many tokens each."""
    draw, experts, best = Draw(), 4, 2

    def routed(p: Params, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chances = F.softmax(F.linear(rows, p["router"]), -1)
        weights, chosen = torch.topk(chances, best, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        capacity = best * rows.shape[0] // experts
        share = torch.zeros_like(chances).scatter(1, chosen, weights)
        share, taken = torch.topk(share.t(), capacity, -1)  # [experts, capacity]
        given = rows[taken]
        hidden = F.silu(given @ p["gate"]) * (given @ p["up"])
        out = (hidden @ p["down"]) * share.unsqueeze(-1)
        summed = torch.zeros_like(rows).index_add(0, taken.flatten(), out.flatten(0, 1))
        return summed.view_as(x)

    def loss(p: Params, tokens: Tensor, targets: Tensor) -> Tensor:
        x = F.embedding(tokens, p["tokens"]) + p["positions"]
        for block in p["blocks"]:
            y = F.rms_norm(x, x.shape[-1:], block["norm1"])
            q, k, v = (heads_of(F.linear(y, block[name]), size.heads) for name in "qkv")
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(merged(y), block["o"])
            x = x + routed(block, F.rms_norm(x, x.shape[-1:], block["norm2"]))
        return next_token_loss(F.linear(F.rms_norm(x, x.shape[-1:], p["norm"]), p["head"]), targets)

    width = size.width

    def block() -> Params:
        p: Params = {name: draw.weight(width, width) for name in "qkvo"}
        p |= {"router": draw.weight(experts, width)}
        p |= {name: draw.normal(experts, width, 2 * width) * width**-0.5 for name in ("gate", "up")}
        p |= {"down": draw.normal(experts, 2 * width, width) * (2 * width) ** -0.5}
        return p | {"norm1": torch.ones(width), "norm2": torch.ones(width)}

    params = {
        "tokens": draw.weight(size.vocabulary, width),
        "positions": draw.weight(size.length, width),
        "blocks": [block() for _ in range(size.layers)],
        "norm": torch.ones(width),
        "head": draw.weight(size.vocabulary, width),
    }
    return Model(loss, params, tokens_of(draw, size))


# -- a U-Net ----------------------------------------------------------------------------------------


def unet(size: Size) -> Model:
    """A diffusion model's U-Net of three levels, whose blocks are twice GroupNorm, SiLU, convolution."""
    draw, levels = Draw(), 3
    width = size.width // 4

    def residual(channels: int, out: int) -> Params:
        first, second = draw.convolution(out, channels), draw.convolution(out, out)
        p: Params = {"norm1": norm(channels), "first": first, "norm2": norm(out), "second": second}
        return p | ({} if channels == out else {"skip": draw.convolution(out, channels, 1)})

    def convolved(p: Params, x: Tensor, **how: Any) -> Tensor:
        return F.conv2d(x, p["weight"], p["bias"], **how)

    def normed(p: Params, x: Tensor) -> Tensor:
        return F.silu(F.group_norm(x, 8, p["weight"], p["bias"]))

    def block(p: Params, x: Tensor) -> Tensor:
        y = convolved(p["first"], normed(p["norm1"], x), padding=1)
        y = convolved(p["second"], normed(p["norm2"], y), padding=1)
        return y + (convolved(p["skip"], x) if "skip" in p else x)

    def loss(p: Params, images: Tensor, noise: Tensor) -> Tensor:
        x, skips = convolved(p["in"], images, padding=1), []
        for level in p["down"]:
            x = block(level["block"], x)
            skips.append(x)
            x = convolved(level["half"], x, stride=2, padding=1)
        x = block(p["middle"], x)
        for level, skip in zip(p["up"], reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(level, torch.cat([x, skip], 1))
        return F.mse_loss(convolved(p["out"], normed(p["norm"], x), padding=1), noise)

    widths = [width * 2**i for i in range(levels)]
    params = {
        "in": draw.convolution(width, 3),
        "down": [
            {"block": residual(c, c), "half": draw.convolution(min(2 * c, widths[-1]), c)}
            for c in widths
        ],
        "middle": residual(widths[-1], widths[-1]),
        "up": [
            residual(c + (widths[i + 1] if i + 1 < levels else c), c)
            for i, c in reversed(list(enumerate(widths)))
        ],
        "norm": norm(width),
        "out": draw.convolution(3, width),
    }
    shape = size.batch, 3, size.length, size.length
    return Model(loss, params, (draw.normal(*shape), draw.normal(*shape)))


# -- what memory bounds: norms of a long sequence, the update of an optimizer -------------------------


def norms(size: Size) -> Model:
    """Residual sums of RMSNorms and of LayerNorms, without products."""
    draw = Draw()

    def loss(p: Params, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x + rms_norm(layer["root"], x)
            x = x + layer_norm(layer["mean"], x)
        return x.square().mean()

    width = size.width
    layers = [{"root": torch.ones(width), "mean": norm(width)} for _ in range(size.layers)]
    return Model(loss, {"layers": layers}, (draw.normal(size.batch, size.length, width),))


def updates(size: Size) -> Model:
    """The parameters of GPT, and gradients: AdamW alone."""
    params, draw = gpt(size).params, Draw()
    return Model(None, params, tuple(draw.normal(*p.shape) for p in optree.tree_leaves(params)))


MODELS: dict[str, Callable[[Size], Model]] = {
    "GPT": gpt,
    "Llama": llama,
    "BERT": bert,
    "ViT": vit,
    "U-Net": unet,
    "mixture of experts": mixture,
    "Gemma 2": gemma,
    "norms": norms,
    "AdamW": updates,
}
