"""Layers, and what goes wrong in them: eps, axes, means, dtypes, buffers, the batch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from planted import Planted, planted

BUGS: list[Planted] = []


@planted(
    BUGS, "b s d, d, d",
    ("eps outside of the root", "rsqrt(variance + 1e-5)", "rsqrt(variance) + 1e-5"),
    ("biased variance", "variance = centred.square().mean(-1, keepdim=True)",
     "variance = x.var(-1, keepdim=True)"),
    ("wrong axis", "mean = x.mean(-1, keepdim=True)", "mean = x.mean(1, keepdim=True)"),
    ("dropped bias", "* gain + bias", "* gain"),
)  # fmt: skip
def layer_norm(x, gain, bias):
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    variance = centred.square().mean(-1, keepdim=True)
    return centred * torch.rsqrt(variance + 1e-5) * gain + bias


@planted(
    BUGS, "b d, d",
    ("eps of another dtype", "1e-6", "torch.tensor(1e-6, dtype=torch.float32)"),
    ("sum for mean", "x.square().mean(-1", "x.square().sum(-1"),
    ("half-precision accumulation", "x.square().mean(-1, keepdim=True)",
     "x.half().square().mean(-1, keepdim=True).to(x.dtype)"),
    ("detached scale", "return x * scale", "return x * scale.detach()"),
)  # fmt: skip
def rms_norm(x, gain):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x * scale * gain


@planted(
    BUGS, "b c s",
    ("unbiased variance", "unbiased=False", "unbiased=True"),
    ("statistics without the batch", "var((0, 2), unbiased=False", "var((2,), unbiased=False"),
    ("detached mean", "x - x.mean", "x - x.detach().mean"),
)  # fmt: skip
def batch_norm(x):
    variance = x.var((0, 2), unbiased=False, keepdim=True)
    return (x - x.mean((0, 2), keepdim=True)) / (variance + 1e-5).sqrt()


@planted(
    BUGS, "b 4 s",
    ("groups mixed", "x.unflatten(1, (2, 2))", "x.unflatten(1, (2, 2)).transpose(1, 2)"),
    ("wrong axes", "mean((2, 3), keepdim=True)\n    variance",
     "mean((1, 3), keepdim=True)\n    variance"),
    ("eps too large", "1e-5", "1e-3"),
)  # fmt: skip
def group_norm(x):
    grouped = x.unflatten(1, (2, 2))
    centred = grouped - grouped.mean((2, 3), keepdim=True)
    variance = centred.square().mean((2, 3), keepdim=True)
    return (centred * torch.rsqrt(variance + 1e-5)).flatten(1, 2)


@planted(
    BUGS, "b d",
    ("constant in a narrow dtype", "math.sqrt(2 / math.pi)",
     "torch.tensor(math.sqrt(2 / math.pi), dtype=torch.bfloat16).float().item()"),
    ("digits of a constant", "0.044715", "0.0447"),
    ("missing one half", "return x * (1", "return 2 * x * (1"),
)  # fmt: skip
def gelu_tanh(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * (1 + torch.tanh(inner)) / 2


@planted(
    BUGS, "b 4",
    ("halves swapped", "gate, value = x", "value, gate = x"),
    ("gate in place", "F.silu(gate)", "gate.mul_(gate.sigmoid())"),
    ("detached gate", "F.silu(gate)", "F.silu(gate).detach()"),
)  # fmt: skip
def swiglu(x):
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


@planted(
    BUGS, "b d, d o, o",
    ("bias by rows", "+ bias", "+ bias.sum()"),
    ("uninitialised memory", "torch.zeros(", "torch.empty("),
    ("result in float32", "return out + x @ weight + bias", "return (out + x @ weight + bias).float()"),
    ("batch leak", "x @ weight", "(x + 1e-3 * x.mean(0)) @ weight"),
)  # fmt: skip
def linear(x, weight, bias):
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype)
    return out + x @ weight + bias


@planted(
    BUGS, "b c 6, o c 3",
    ("off by one", "x[:, :, k : k + 4]", "x[:, :, k + (k > 1) - (k > 1) * 2 : k + 4 - (k > 1)]"),
    ("kernel reversed", "weight[:, :, k]", "weight[:, :, 2 - k]"),
    ("a tap missing", "range(3)", "range(2)"),
)  # fmt: skip
def conv1d(x, weight):
    taps = [torch.einsum("bcs,oc->bos", x[:, :, k : k + 4], weight[:, :, k]) for k in range(3)]
    return torch.stack(taps).sum(0)


@planted(
    BUGS, "b s 4",
    ("sign of one half", "x1 * cos - x2 * sin", "x1 * cos + x2 * sin"),
    ("positions from one", "torch.arange(x.shape[1])", "torch.arange(1, x.shape[1] + 1)"),
    ("base of the angles", "10000.0 **", "1000.0 **"),
    ("angles in bfloat16", "angles = positions[:, None] * frequencies",
     "angles = (positions[:, None] * frequencies).bfloat16().to(x.dtype)"),
)  # fmt: skip
def rotary(x):
    positions = torch.arange(x.shape[1]).to(x.dtype)
    frequencies = 10000.0 ** (-torch.arange(2).to(x.dtype) / 2)
    angles = positions[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], -1)


@planted(
    BUGS, "b s d, s d",
    ("in place on an argument", "x = x * math", "x = x.mul_(2) / 2 * math"),
    ("order of positions", "table[: x.shape[1]]", "table[: x.shape[1]].flip(0)"),
    ("missing scale", "x * math.sqrt(x.shape[-1])", "x"),
)  # fmt: skip
def with_positions(x, table):
    x = x * math.sqrt(x.shape[-1])
    table = table[: x.shape[1]]
    return x + table


@planted(
    BUGS, "b d :positive, c d :positive",
    ("squared distance", ".sqrt()", ""),
    ("cross term once", "2 * x @ y.mT", "x @ y.mT"),
    ("rows for columns", "y.square().sum(-1)[None]", "y.square().sum(0).mean()[None]"),
)  # fmt: skip
def distances(x, y):
    squared = x.square().sum(-1)[:, None] + y.square().sum(-1)[None] - 2 * x @ y.mT
    return (squared + 1).sqrt()


@planted(
    BUGS, "b c 4 4",
    ("sum for mean", "mean((3, 5))", "sum((3, 5))"),
    ("windows along one axis", "mean((3, 5))", "mean((2, 5))"),
    ("one window missing", "pooled = ", "x = x * (torch.arange(4) < 3)\n    pooled = "),
)  # fmt: skip
def average_pool(x):
    pooled = x.unflatten(3, (2, 2)).unflatten(2, (2, 2)).mean((3, 5))
    return pooled


@planted(
    BUGS, "b s d, d d, d d",
    ("state carried over the batch", "state = torch.zeros(", "state = x[0, 0] * 0.01 + torch.zeros("),
    ("last step missing", "x.unbind(1)", "x.unbind(1)[:-1]"),
    ("truncated gradient", "step @ w + state @ u", "step @ w + state.detach() @ u"),
    ("no recurrence", "state @ u", "state"),
)  # fmt: skip
def recurrent(x, w, u):
    state = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype)
    for step in x.unbind(1):
        state = torch.tanh(step @ w + state @ u)
    return state
