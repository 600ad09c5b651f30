"""The library's kernels are found in what people write, with their gradients, and in nothing else."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import random
from torchard.kernels import KERNELS, find

B, S, H, D, V = 2, 6, 3, 4, 30
M = H * D
KEYS = iter(random.split(random.key(29), 64))


def draw(*shape: int) -> Tensor:
    return random.normal(next(KEYS), shape)


X, Y = draw(B, S, M), draw(B, S, M)
GAIN, BIAS = draw(M), draw(M)
WIDE, WIDE_TOO, BOTH = draw(M, 14), draw(M, 14), draw(M, 28)
LINEAR, LINEAR_BIAS = (draw(M, M), draw(D, M), draw(D, M)), (draw(M), draw(D), draw(D))
LOGITS, LABELS = draw(S, V), random.randint(random.key(5), (S,), 0, V)
HEAD = draw(V, M)
Q, K, VALUE = draw(B, H, S, D), draw(B, H, S, D), draw(B, H, S, D)
COS, SIN = draw(B, S, D), draw(B, S, D)
KEY = random.key(3)


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def dropped(x: Tensor, p: float = 0.25) -> Tensor:
    return (x * (1 / (1 - p))).masked_fill(random.bernoulli(KEY, p, x.shape), 0)


def rms(x: Tensor, g: Tensor, eps: float = 1e-6) -> Tensor:
    return g * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def wide_deviation(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


def residual(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = y + x
        return h, norm(h)

    return fn


def weights(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


SCALE = 1 / math.sqrt(D)
Spelling = tuple[str, Callable[..., Any], tuple[Tensor, ...], int]

# Kernel, what is written, of what, how often the kernel is in it.
SPELLINGS: dict[str, Spelling] = {
    "silu of a product": (
        "swiglu",
        lambda x, a, b: F.silu(x @ a) * (x @ b),
        (X, WIDE, WIDE_TOO),
        1,
    ),
    "the other way round": (
        "swiglu",
        lambda x, a, b: (x @ b) * F.silu(x @ a),
        (X, WIDE, WIDE_TOO),
        1,
    ),
    "silu written out": ("swiglu", lambda g, u: u * (g * torch.sigmoid(g)), (X, Y), 1),
    "halves of one product": (
        "swiglu",
        lambda x, w: (lambda g, u: F.silu(g) * u)(*(x @ w).chunk(2, -1)),
        (X, BOTH),
        1,
    ),
    "gelu of the second half": (
        "geglu",
        lambda x, w: (lambda u, g: u * F.gelu(g))(*(x @ w).chunk(2, -1)),
        (X, BOTH),
        1,
    ),
    "gelu by tanh": ("geglu_tanh", lambda g, u: F.gelu(g, approximate="tanh") * u, (X, Y), 1),
    "two gates": ("swiglu", lambda g, u: (F.silu(g) * u, F.silu(u) * g), (X, Y), 2),
    "torch's rms_norm": (
        "add_rms_norm",
        lambda x, y, g: residual(lambda h: F.rms_norm(h, (M,), g, 1e-6))(x, y),
        (X, Y, GAIN),
        1,
    ),
    "rms written out": (
        "add_rms_norm",
        lambda x, y, g: residual(lambda h: rms(h, g))(x, y),
        (X, Y, GAIN),
        1,
    ),
    "rms of a wider copy": (
        "add_rms_norm",
        lambda x, y, g: residual(lambda h: rms(h.float(), g.float()).to(h.dtype))(x, y),
        (X, Y, GAIN),
        1,
    ),
    "rms with a wide variance": (
        "add_rms_norm",
        lambda x, y, g: residual(lambda h: g * (h * wide_deviation(h)).to(h.dtype))(x, y),
        (X, Y, GAIN),
        1,
    ),
    "layer_norm": (
        "add_layer_norm",
        residual(lambda h: F.layer_norm(h, (M,), GAIN, BIAS)),
        (X, Y),
        1,
    ),
    "softmax, by max": (
        "softmax",
        lambda x: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(x - x.amax(-1, keepdim=True))),
        (X,),
        1,
    ),
    "cross_entropy": ("cross_entropy", F.cross_entropy, (LOGITS, LABELS), 1),
    "nll of log_softmax": (
        "cross_entropy",
        lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
        (LOGITS, LABELS),
        1,
    ),
    "gathered": (
        "cross_entropy",
        lambda x, y: -F.log_softmax(x, 1).gather(1, y[:, None]).mean(),
        (LOGITS, LABELS),
        1,
    ),
    "loss of a linear": (
        "linear_cross_entropy",
        lambda x, w, y: F.cross_entropy(F.linear(x, w), y),
        (X[0], HEAD, LABELS),
        1,
    ),
    "loss of a batch": (
        "linear_cross_entropy",
        lambda x, w, y: F.cross_entropy((x @ w.t()).flatten(0, 1), y.view(-1)),
        (X, HEAD, torch.stack([LABELS, LABELS])),
        1,
    ),
    "three linears": (
        "qkv",
        lambda x, a, b, c: [F.linear(x, w) for w in (a, b, c)],
        (X, *LINEAR),
        1,
    ),
    "three biased linears": (
        "biased_qkv",
        lambda x, a, b, c, d, e, f: (F.linear(x, a, d), F.linear(x, b, e), F.linear(x, c, f)),
        (X, *LINEAR, *LINEAR_BIAS),
        1,
    ),
    "two linears": ("gate_up", lambda x, a, b: (F.linear(x, a), x @ b.t()), (X, *LINEAR[:2]), 1),
    "rotated": (
        "rope",
        lambda q, k: tuple(
            x * COS.to(x.dtype).unsqueeze(1) + turned(x) * SIN.to(x.dtype).unsqueeze(1)
            for x in (q, k)
        ),
        (Q, K),
        2,
    ),
    "rotated heads of a product": (
        "rope",
        lambda x: (lambda q: q * COS[0].to(x.dtype) + turned(q) * SIN[0].to(x.dtype))(
            x.view(B, S, H, D).transpose(1, 2)
        ),
        (X,),
        1,
    ),
    "dropout, residual last": (
        "bias_dropout_residual",
        lambda x, r: dropped(x + BIAS) + r,
        (X, Y),
        1,
    ),
    "dropout, then norm": (
        "bias_dropout_residual_layer_norm",
        lambda x, r: residual(lambda h: F.layer_norm(h, (M,), GAIN, BIAS))(dropped(BIAS + x), r),
        (X, Y),
        1,
    ),
    "attention": (
        "attention",
        lambda q, k, v: weights(q @ k.mT / math.sqrt(D)) @ v,
        (Q, K, VALUE),
        1,
    ),
    "attention, scaled query": (
        "attention",
        lambda q, k, v: weights((q * SCALE) @ k.transpose(2, 3)) @ v,
        (Q, K, VALUE),
        1,
    ),
    "causal by masked_fill": (
        "attention_causal",
        lambda q, k, v: (
            weights(
                (q @ k.mT * SCALE).masked_fill(
                    torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf
                )
            )
            @ v
        ),
        (Q, K, VALUE),
        1,
    ),
    "additive mask": (
        "attention_masked",
        lambda q, k, v, m: weights(q @ k.mT * SCALE + m) @ v,
        (Q, K, VALUE, draw(B, 1, S, S)),
        1,
    ),
}

NEAR_MISSES: dict[str, tuple[str, Callable[..., Any], tuple[Tensor, ...]]] = {
    "another activation": ("swiglu", lambda g, u: torch.sigmoid(g) * u, (X, Y)),
    "silu with a slope": ("swiglu", lambda g, u: g * torch.sigmoid(2 * g) * u, (X, Y)),
    "tanh for erf": ("geglu", lambda g, u: F.gelu(g, approximate="tanh") * u, (X, Y)),
    "erf for tanh": ("geglu_tanh", lambda g, u: F.gelu(g) * u, (X, Y)),
    "up broadcast": ("swiglu", lambda g, u: F.silu(g) * u, (X, GAIN)),
    "eps outside of the root": (
        "add_rms_norm",
        residual(lambda h: h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * GAIN),
        (X, Y),
    ),
    "norm over another axis": (
        "add_rms_norm",
        residual(lambda h: h * torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + 1e-6) * GAIN),
        (X, Y),
    ),
    "norm of one of the two": ("add_rms_norm", lambda x, y: (x + y, rms(x, GAIN)), (X, Y)),
    "softmax over another axis": ("softmax", lambda x: torch.softmax(x, 1), (X,)),
    "sum of losses": (
        "cross_entropy",
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        (LOGITS, LABELS),
    ),
    "another label that is ignored": (
        "cross_entropy",
        lambda x, y: F.cross_entropy(x, y, ignore_index=3),
        (LOGITS, LABELS),
    ),
    "one linear of another": (
        "gate_up",
        lambda x, a, b: (F.linear(x, a), F.linear(F.linear(x, a).relu(), b)),
        (X, LINEAR[0], LINEAR[1]),
    ),
    "two linears for three": (
        "qkv",
        lambda x, a, b: (F.linear(x, a), F.linear(x, b)),
        (X, *LINEAR[:2]),
    ),
    "halves not turned": ("rope", lambda q: q * COS[0] + q.flip(-1) * SIN[0], (Q,)),
    "turned the other way": ("rope", lambda q: q * COS[0] - turned(q) * SIN[0], (Q,)),
    "not rescaled": (
        "bias_dropout_residual",
        lambda x, r: (x + BIAS).masked_fill(random.bernoulli(KEY, 0.25, x.shape), 0) + r,
        (X, Y),
    ),
    "rescaled by another p": (
        "bias_dropout_residual",
        lambda x, r: dropped((x + BIAS) * 1.01) + r,
        (X, Y),
    ),
    "another scale": ("attention", lambda q, k, v: weights(q @ k.mT * 0.3) @ v, (Q, K, VALUE)),
    "no scale": ("attention", lambda q, k, v: weights(q @ k.mT) @ v, (Q, K, VALUE)),
    "weights over queries": (
        "attention",
        lambda q, k, v: torch.softmax(q @ k.mT * SCALE, -2) @ v,
        (Q, K, VALUE),
    ),
    "no mask": ("attention_causal", lambda q, k, v: weights(q @ k.mT * SCALE) @ v, (Q, K, VALUE)),
    "a mask of the past": (
        "attention_causal",
        lambda q, k, v: (
            weights(
                (q @ k.mT * SCALE).masked_fill(
                    torch.ones(S, S, dtype=torch.bool).triu(0), -math.inf
                )
            )
            @ v
        ),
        (Q, K, VALUE),
    ),
    "a finite mask": (
        "attention_causal",
        lambda q, k, v: (
            weights(
                (q @ k.mT * SCALE).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e9)
            )
            @ v
        ),
        (Q, K, VALUE),
    ),
}


def found(kernel: str, fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Counter[str]:
    return Counter(match.name for match in find(fn, KERNELS[kernel])(*args))


def differentiated(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Values and gradients of a function, of something behind it that is no constant."""
    moving = tuple(i for i, t in enumerate(args) if t.is_floating_point())

    def loss(*given: Tensor) -> tuple[Tensor, Any]:
        out = fn(*given)
        outs = out if isinstance(out, (tuple, list)) else [out]
        return sum(torch.sin(o).sum() for o in outs), out  # type: ignore[return-value]

    return torch.func.grad(loss, moving, has_aux=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_found_in_every_spelling(spelling: str, dtype: torch.dtype) -> None:
    kernel, fn, args, count = SPELLINGS[spelling]
    args = tuple(t.to(dtype) if t.is_floating_point() else t for t in args)
    assert found(kernel, fn, args) == {kernel: count}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_found_with_its_gradient(spelling: str, dtype: torch.dtype) -> None:
    kernel, fn, args, count = SPELLINGS[spelling]
    args = tuple(t.to(dtype) if t.is_floating_point() else t for t in args)
    matches = find(differentiated(fn, args), KERNELS[kernel])(*args)
    assert Counter(m.name for m in matches if m.phase == "backward")[f"{kernel}_backward"] == count


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_near_misses_are_none(miss: str) -> None:
    kernel, fn, args = NEAR_MISSES[miss]
    assert found(kernel, fn, args) == {}
