"""Llama-like transformers: prompts tuned on frozen weights, and training by Megatron-LM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn, repeat, stack

from .case import (
    DP,
    LOSS,
    TP,
    TWO,
    Program,
    Sent,
    expert,
    gather,
    ids,
    reduce,
    scatter,
    values,
    weights,
)

HEADS, WORDS = 4, 128


def rotated(x: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, time, d]."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def attention(p: Any, x: Tensor) -> Tensor:
    q, k, v = (nn.linear(x, p[n]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
    mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    return nn.linear(mixed.transpose(1, 2).flatten(2), p["o"])


def block(p: Any, x: Tensor) -> Tensor:
    x = x + attention(p, nn.rms_norm(x, p["norm1"]))
    y = nn.rms_norm(x, p["norm2"])
    return x + nn.linear(nn.silu(nn.linear(y, p["gate"])) * nn.linear(y, p["up"]), p["down"])


def block_weights(width: int, hidden: int) -> Any:
    square = dict.fromkeys("qkvo", (width, width))
    wide = weights(**square, gate=(hidden, width), up=(hidden, width), down=(width, hidden))
    return {**wide, "norm1": torch.ones(width), "norm2": torch.ones(width)}


def prompted_loss(prompt: Tensor, p: Any, tokens: Tensor) -> Tensor:
    """The loss of predicting tokens [batch, time], with a prompt [length, width] in front of them."""
    x = nn.embedding(p["table"], tokens)
    x = torch.cat([prompt.expand(len(x), -1, -1), x], 1)
    if isinstance(p["blocks"], list):
        for layer in p["blocks"]:
            x = block(layer, x)
    else:
        x = repeat(block, p["blocks"], x)
    logits = nn.linear(nn.rms_norm(x, p["norm"]), p["head"])[:, len(prompt) - 1 : -1]
    return nn.cross_entropy(logits, tokens)


def by_last_dim(p: Any, axis: str) -> Any:
    """Specs that split each tensor's last dim."""
    if isinstance(p, Tensor):
        return P(*[None] * (p.ndim - 1), axis)
    if isinstance(p, list):
        return [by_last_dim(v, axis) for v in p]
    return {k: by_last_dim(v, axis) for k, v in p.items()}


WIDTH, HIDDEN, PROMPT = 64, 128, 8
BLOCK = 4 * WIDTH * WIDTH + 3 * HIDDEN * WIDTH + 2 * WIDTH


def prompt_tuning(layers: int, stacked: bool) -> Program:
    blocks: Any = [block_weights(WIDTH, HIDDEN) for _ in range(layers)]
    p = {
        **weights(table=(WORDS, WIDTH), head=(WORDS, WIDTH)),
        "norm": torch.ones(WIDTH),
        "blocks": stack(blocks) if stacked else blocks,
    }
    args = values(PROMPT, WIDTH), p, ids(64, 16, below=WORDS)
    specs = P(), by_last_dim(p, "dp"), P("dp")
    return Program(grad_and_value(prompted_loss), args, DP, specs, P())


def fully_sharded(layers: int) -> list[Sent]:
    """Gathers of frozen weights in both passes, and the sum of the prompt's gradient.

    There are 1,536 tokens, more than a weight has rows, so that any exchange of activations sends
    more. As in fully sharded training, the backward gathers weights again. It needs no table.
    """
    again = [gather(layers * BLOCK), gather(WORDS * WIDTH + WIDTH)] * 2
    return [gather(WORDS * WIDTH), *again, reduce(PROMPT * WIDTH), LOSS, LOSS]


@expert("Llama, 2 layers, last dims split, prompt", fully_sharded(2))
def _() -> Program:
    return prompt_tuning(2, stacked=False)


@expert("Llama, 4 layers by repeat, last dims split, prompt", fully_sharded(4))
def _() -> Program:
    return prompt_tuning(4, stacked=True)


def input_loss(x: Tensor, blocks: Any) -> Tensor:
    for p in blocks:
        x = block(p, x)
    return x.square().mean()


# The input's width is split like weights' columns. In the forward, each product is a term of a sum,
# which is scattered over heads (q, k, v), hidden units (gate, up) or the width (o, down); the
# backward gathers the gradients of the same seven values. Norms add up a number for each of the
# eight tokens, in both passes. An all_to_all to weights that are split by rows would send 0.75
# width / 4 = 24 numbers for each row of a weight, and these products 2 * 0.75 * 8 = 12.
FEW, BROAD, UNITS = 8, 128, 256


@expert(
    "Llama, 2 layers, last dims split, gradient of inputs",
    [
        *[scatter(FEW * BROAD), gather(FEW * BROAD)] * 10,
        *[scatter(FEW * UNITS), gather(FEW * UNITS)] * 4,
        *(reduce(FEW) * 8, LOSS),
    ],
)
def _() -> Program:
    blocks = [block_weights(BROAD, UNITS) for _ in range(2)]
    x = values(2, FEW // 2, BROAD)
    specs = by_last_dim(x, "tp"), by_last_dim(blocks, "tp")
    return Program(grad_and_value(input_loss), (x, blocks), TP, specs, (specs[0], P()))


def language_loss(p: Any, tokens: Tensor) -> Tensor:
    x = nn.embedding(p["table"], tokens[:, :-1])
    for layer in p["blocks"]:
        x = block(layer, x)
    logits = nn.linear(nn.rms_norm(x, p["norm"]), p["head"])
    return nn.cross_entropy(logits, tokens[:, 1:])


ROWWISE, COLWISE = P(None, "tp"), P("tp")
MEGATRON = {
    **dict.fromkeys(["q", "k", "v", "gate", "up"], COLWISE),
    **dict.fromkeys(["o", "down"], ROWWISE),
    **dict.fromkeys(["norm1", "norm2"], P()),
}
TOKENS = 16 * 16  # of each rank along dp
SHARE = (2 * BLOCK - 4 * WIDTH + 2 * WORDS * WIDTH) // 2 + 5 * WIDTH


# Over tp: the output of the embedding, two outputs of each block, as many gradients of their
# inputs, and that of the head's input; the loss needs a maximum, a sum and the target's logit for
# each token. Over dp: the gradients of each rank's shards.
@expert(
    "Llama, 2 layers, Megatron, gradient, 2x2",
    [reduce(TOKENS * WIDTH, 2) * 10, reduce(TOKENS, 2) * 3, reduce(SHARE, 2), reduce(2, 2)],
)
def _() -> Program:
    p = {
        **weights(table=(WORDS, WIDTH), head=(WORDS, WIDTH)),
        "norm": torch.ones(WIDTH),
        "blocks": [block_weights(WIDTH, HIDDEN) for _ in range(2)],
    }
    specs = {"table": P("tp"), "head": P("tp"), "norm": P(), "blocks": [MEGATRON, MEGATRON]}
    args = p, ids(32, 17, below=WORDS)
    return Program(grad_and_value(language_loss), args, TWO, (specs, P("dp")), (specs, P()))
