"""Train a byte-level GPT-2 on real English text, by any of the standard parallelism schemes.

    torchrun --nproc-per-node 2 examples/train_gpt.py --mesh tp=2 --plan tp+sp
    torchrun --nproc-per-node 2 examples/train_gpt.py --mesh dp=2 --plan fsdp
    python examples/train_gpt.py --virtual dp=2,tp=2 --plan fsdp+tp
    torchrun --nproc-per-node 2 examples/train_gpt.py --mesh pp=2 --plan pp --schedule 1f1b

The model is plain functions for one device. A scheme is only data, here called a recipe: the specs of the
parameters, of the batch, and, for sequence parallelism, of the one activation that the model labels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import _train
import torch
import torch.nn.functional as F
from _text import BYTES
from _train import Params, Recipe
from torch import Tensor

from torchard import P, name, nn, random, scope

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Size:
    """The sizes of the model.

    Attributes:
        context: the number of bytes that it sees.
        width: the width of the residual stream.
        heads: the number of attention heads, which share the width.
        layers: the number of blocks.
        tied: whether the embedding is also the weight of the output.
    """

    context: int = 32
    width: int = 64
    heads: int = 4
    layers: int = 2
    tied: bool = True


# -- the model --------------------------------------------------------------------------------------


def init(size: Size, key: Tensor) -> Params:
    """The initial parameters; as in GPT-2, layers that add to the residual stream have a smaller gain."""
    keys = iter(random.split(key, 3 + 4 * size.layers).unbind())
    width, adding = size.width, (2 * size.layers) ** -0.5

    def linear(out: int, into: int, gain: float = 1.0) -> Params:
        return {"w": nn.init_normal_fan_in(next(keys), (out, into), gain), "b": torch.zeros(out)}

    def norm() -> Params:
        return {"w": torch.ones(width), "b": torch.zeros(width)}

    def block() -> Params:
        return {
            "norm1": norm(),
            "qkv": linear(3 * width, width),
            "out": linear(width, width, adding),
            "norm2": norm(),
            "up": linear(4 * width, width),
            "down": linear(width, 4 * width, adding),
        }

    params = {
        "embedding": nn.init_normal(next(keys), (BYTES, width), 0.1),
        "positions": nn.init_normal(next(keys), (size.context, width), 0.1),
        "blocks": [block() for _ in range(size.layers)],
        "norm": norm(),
    }
    return (
        params if size.tied else {**params, "head": nn.init_normal(next(keys), (BYTES, width), 0.1)}
    )


def linear(p: Params, x: Tensor) -> Tensor:
    return nn.linear(x, p["w"], p["b"])


def norm(p: Params, x: Tensor) -> Tensor:
    return nn.layer_norm(x, p["w"], p["b"])


def attention(size: Size, p: Params, x: Tensor) -> Tensor:
    """Causal self-attention on x [batch, position, width]."""
    q, k, v = linear(p["qkv"], x).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (size.heads, -1)).transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return linear(p["out"], mixed.transpose(1, 2).flatten(2))


def mlp(p: Params, x: Tensor) -> Tensor:
    return linear(p["down"], nn.gelu(linear(p["up"], x), "tanh"))


def logits(size: Size, params: Params, context: Tensor) -> Tensor:
    """The logits [batch, n, 256] of the next byte after each of the bytes [batch, n], n ≤ context."""
    with scope("embedding"):
        places = params["positions"][: context.shape[1]]
        x = name(nn.embedding(params["embedding"], context) + places, "stream")
    for i, p in enumerate(params["blocks"]):
        with scope(f"block/{i}"):
            x = name(x + attention(size, p, norm(p["norm1"], x)), "stream")
            x = name(x + mlp(p, norm(p["norm2"], x)), "stream")
    with scope("head"):
        return nn.linear(norm(params["norm"], x), params.get("head", params["embedding"]))


def loss(size: Size, params: Params, batch: Tensor) -> Tensor:
    """The mean nats per byte of windows int64 [batch, context + 1], over all bytes but the first."""
    scores = logits(size, params, batch[:, :-1])
    with scope("loss"):
        return nn.cross_entropy(scores, batch[:, 1:])


def predict(size: Size, params: Params, context: Tensor) -> Tensor:
    return logits(size, params, context)[:, -1]


# -- the recipes ------------------------------------------------------------------------------------


def megatron(size: Size, dp: str | None = None) -> Any:
    """Specs that split heads, hidden units and vocabulary over "tp", and the other dims over `dp`."""
    d = size.width // size.heads
    norm = {"w": P(dp), "b": P(dp)}
    block = {
        "norm1": norm,
        "qkv": {  # three projections in one, each split between heads
            "w": P.factors("(three heads d) width", three=3, d=d, heads="tp", width=dp),
            "b": P.factors("(three heads d)", three=3, d=d, heads="tp"),
        },
        "out": {"w": P.factors("width (heads d)", d=d, heads="tp", width=dp), "b": P(dp)},
        "norm2": norm,
        "up": {"w": P("tp", dp), "b": P("tp")},
        "down": {"w": P(dp, "tp"), "b": P(dp)},
    }
    vocabulary = P("tp", dp)
    specs = {
        "embedding": vocabulary,
        "positions": P(dp),
        "blocks": [block] * size.layers,
        "norm": norm,
    }
    return specs if size.tied else {**specs, "head": vocabulary}


def recipes(size: Size) -> dict[str, Recipe]:
    """The recipes that `--plan` selects, for a mesh with the axes "pp", "dp" and "tp"."""
    rows = P("dp")
    by_position = {**megatron(size), "positions": P("tp")}
    return {
        "tp": Recipe(megatron(size), rows),
        "tp+sp": Recipe(by_position, rows, pins={"stream": P("dp", "tp")}),
        "fsdp": Recipe(P("dp"), rows),
        "fsdp+tp": Recipe(megatron(size, "dp"), rows),
        # The tied embedding is on all stages: the first one reads it, and so does the last.
        "pp": Recipe(P(), rows, stages="block/*"),
        "pp+tp": Recipe(megatron(size), rows, stages="block/*"),
        "pp+fsdp": Recipe(P("dp"), rows, stages="block/*"),
    }


def main(argv: list[str] | None = None) -> None:
    parser = _train.options(__doc__)
    parser.add_argument("--plan", choices=list(recipes(Size())), default="tp")
    parser.add_argument("--context", type=int, default=Size.context, help="bytes in a window")
    parser.add_argument("--width", type=int, default=Size.width, help="width of the residual stream")
    parser.add_argument("--heads", type=int, default=Size.heads)
    parser.add_argument("--layers", type=int, default=Size.layers)
    parser.add_argument("--microbatches", type=int, default=4, help="slices of a batch in a pipeline")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of a pipeline")
    parser.add_argument("--untied", action="store_true", help="a separate weight for the output")
    parser.set_defaults(batch=32, lr=5e-3, validate=256)
    options = parser.parse_args(argv)

    size = Size(options.context, options.width, options.heads, options.layers, not options.untied)
    functions = (functools.partial(f, size) for f in (init, loss, predict))
    model = _train.Model(size.context, size.context, *functions)
    recipe = recipes(size)[options.plan]
    axes = ("dp", "tp") if recipe.stages is None else ("pp", "dp", "tp")
    _train.run("train_gpt", options, model, recipe, axes)


if __name__ == "__main__":
    main()
