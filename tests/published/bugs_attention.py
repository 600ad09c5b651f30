"""Attention and losses, and what goes wrong in them: scales, masks, reductions, stability."""

from __future__ import annotations

import math

import torch
from planted import Planted, planted

BUGS: list[Planted] = []


def shift_last(x):
    return (x + 3,)


def swap_rows(*args):
    return tuple(x.flip(0) for x in args)


@planted(
    BUGS, "b s d, b t d, b t d",
    ("missing scale", "/ math.sqrt(q.shape[-1])", ""),
    ("wrong scale", "math.sqrt(q.shape[-1])", "math.sqrt(k.shape[-2])"),
    ("softmax over queries", "softmax(-1)", "softmax(-2)"),
    ("weights in half precision", ".softmax(-1)", ".half().softmax(-1).to(q.dtype)"),
)  # fmt: skip
def attention(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.softmax(-1) @ v


@planted(
    BUGS, "b s d, b s d, b s d",
    ("mask leaks the next", "diagonal=1", "diagonal=2"),
    ("mask hides the own", "diagonal=1", "diagonal=0"),
    ("mask after the softmax", "scores.masked_fill(future, -torch.inf).softmax(-1)",
     "scores.softmax(-1).masked_fill(future, 0)"),
    ("mask transposed", ".triu(diagonal=1)", ".tril(diagonal=-1)"),
)  # fmt: skip
def causal_attention(q, k, v):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal=1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@planted(
    BUGS, "b s d, b s d, b s :flags",
    ("padding attended to", "scores = scores + ", "scores = scores + 0 * "),
    ("finite mask too small", "-1e9", "-1.0"),
    ("mask of another sequence", "keep[:, None]", "keep[:1, None]"),
)  # fmt: skip
def padded_attention(q, k, keep):
    scores = q @ k.mT
    scores = scores + torch.where(keep[:, None] > 0, 0.0, -1e9).to(q.dtype)
    return scores.softmax(-1) @ k


@planted(
    BUGS, "b d",
    ("without the maximum", "x - x.amax(-1, keepdim=True).detach()", "x"),
    ("maximum of all", "x.amax(-1, keepdim=True)", "x.amin()"),
    ("sum over the wrong axis", "e.sum(-1, keepdim=True)", "e.sum(0, keepdim=True)"),
    ("eps in the divisor", "/ e.sum(-1, keepdim=True)", "/ (e.sum(-1, keepdim=True) + 1e-3)"),
    symmetries=[("shift", shift_last)],
)  # fmt: skip
def softmax(x):
    e = (x - x.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


@planted(
    BUGS, "b c, b :index=c",
    ("sum for mean", "mean()", "sum()"),
    ("sign", "-chosen", "chosen"),
    ("target of the neighbour", "y[:, None]", "y.roll(1)[:, None]"),
    ("log of softmax", "x.log_softmax(-1)", "x.softmax(-1).add(1e-4).log()"),
    symmetries=[("shift", lambda x, y: (x + 3, y)), ("order of the batch", swap_rows)],
)  # fmt: skip
def cross_entropy(x, y):
    chosen = x.log_softmax(-1).gather(-1, y[:, None])
    return (-chosen).mean()


@planted(
    BUGS, "b c, b :index=c",
    ("smoothing left out", "0.1 * uniform", "0 * uniform"),
    ("uniform summed", "log_p.mean(-1)", "log_p.sum(-1)"),
    ("weights that do not sum to one", "0.9 * chosen", "chosen"),
)  # fmt: skip
def label_smoothing(x, y):
    log_p = x.log_softmax(-1)
    chosen = log_p.gather(-1, y[:, None]).squeeze(-1)
    uniform = log_p.mean(-1)
    return -(0.9 * chosen + 0.1 * uniform).mean()


@planted(
    BUGS, "b d, b d :flags",
    ("cancelling form", "torch.logaddexp(x, torch.zeros_like(x))", "(1 + x.exp()).log()"),
    ("target detached from its sign", "- x * y", "- x.abs() * y"),
    ("clamped logit", "def bce(x, y):", "def bce(x, y):\n    x = x.clamp(-1.5, 1.5)"),
)  # fmt: skip
def bce(x, y):
    return (torch.logaddexp(x, torch.zeros_like(x)) - x * y).mean()


@planted(
    BUGS, "b c :simplex, b c :simplex",
    ("arguments swapped", "p * (p.log() - q.log())", "q * (q.log() - p.log())"),
    ("mean over all", "sum(-1).mean()", "mean()"),
    ("detached target", "p.log() -", "p.detach().log() -"),
)  # fmt: skip
def kl_divergence(p, q):
    return (p * (p.log() - q.log())).sum(-1).mean()


@planted(
    BUGS, "b d, b d",
    ("missing temperature", "/ 0.5", ""),
    ("diagonal of the wrong axis", "log_softmax(-1)", "log_softmax(0)"),
    ("one side detached", "v = y /", "v = y.detach() /"),
)  # fmt: skip
def contrastive(x, y):
    u = x / (x.square().sum(-1, keepdim=True) + 1).sqrt()
    v = y / (y.square().sum(-1, keepdim=True) + 1).sqrt()
    return -(u @ v.mT / 0.5).log_softmax(-1).diagonal().mean()


@planted(
    BUGS, "b d, b d",
    ("quadratic part doubled", "off.square() / 2", "off.square()"),
    ("threshold", "off.abs() < 1", "off.abs() < 0.5"),
    ("one-sided", "off.abs() - 0.5", "off - 0.5"),
)  # fmt: skip
def huber(x, y):
    off = x - y
    return torch.where(off.abs() < 1, off.square() / 2, off.abs() - 0.5).mean()


@planted(
    BUGS, "b s d, b s :flags",
    ("mean over padding", "keep.sum(1).clamp(min=1)[:, None]", "keep.shape[1]"),
    ("count of the first", "keep.sum(1)", "keep[:1].sum(1)"),
    ("mask left out", "x * keep[:, :, None]", "x"),
)  # fmt: skip
def masked_mean(x, keep):
    total = (x * keep[:, :, None]).sum(1)
    return total / keep.sum(1).clamp(min=1)[:, None]


@planted(
    BUGS, "b d, b d",
    ("noise in evaluation", "return (x - y)", "x = x + 1e-3 * torch.randn_like(x)\n    return (x - y)"),
    ("state kept between calls", "return (x - y)",
     "huber.calls = getattr(huber, 'calls', 0) + 1\n    y = y * huber.calls\n    return (x - y)"),
    ("result of one element", ".mean(-1)", ".mean()[None]"),
)  # fmt: skip
def squared_error(x, y):
    return (x - y).square().mean(-1)
