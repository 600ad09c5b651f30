"""Correct functions, each with another way of computing it where there is one: no law may find fault.

Chosen before any of them was run. Where two ways have different derivatives at kinks or ties, which both
are right, there is no other way here; a way that cancels is the reference, whose rounding is measured.
Three entries broke this rule and were changed after the first run: another way of elu has another second
derivative at 0, logaddexp, another way of logsigmoid, has a NaN for one (results/defects.md), and
cholesky reads a half of its argument, which has to be symmetric when elements are moved.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Correct:
    """A correct function.

    Attributes:
        name: what it is called in the table.
        fn: the function, or where a package has it: "module:name".
        spec: its arguments, as `draws.draw` takes them.
        other: another way of computing the same.
        most: the largest decimal exponent of its arguments.
        order: up to which order it has derivatives by both modes.
    """

    name: str
    fn: Fn | str
    spec: str
    other: Fn | None = None
    most: float = 3.0
    order: int = 2

    @property
    def function(self) -> Fn:
        if not isinstance(self.fn, str):
            return self.fn
        module, _, name = self.fn.partition(":")
        found: Fn = getattr(importlib.import_module(module), name)
        return found


def _windows(x: Any, size: int) -> Any:
    return x.unfold(-1, size, 1)


def _layer_norm(x: Any, gain: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * gain + bias


def _standardised(x: Any, dims: tuple[int, ...]) -> Any:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + 1e-5)


def _group_norm(x: Any) -> Any:
    return _standardised(x.unflatten(1, (2, 2)), (2, 3)).flatten(1, 2)


def _softmax(x: Any) -> Any:
    e = (x - x.amax(-1, keepdim=True).detach()).exp()
    return e / e.sum(-1, keepdim=True)


def _logsumexp(x: Any) -> Any:
    largest = x.amax(-1, keepdim=True).detach()
    return (x - largest).exp().sum(-1).log() + largest.squeeze(-1)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def _huber(x: Any, y: Any) -> Any:
    off = x - y
    return torch.where(off.abs() < 1, off.square() / 2, off * off.sign() - 0.5).mean()


def _conv2d(x: Any, w: Any) -> Any:
    patches = x.unfold(2, 2, 1).unfold(3, 2, 1)
    return torch.einsum("bchwij,ocij->bohw", patches, w)


def _gaussian_nll(x: Any, y: Any, variance: Any) -> Any:
    return (variance.log() + (x - y).square() / variance).mean() / 2


def _softplus(x: Any) -> Any:
    return torch.where(x > 20, x, x.clamp(max=20).exp().log1p())


TORCH = [
    Correct("relu", F.relu, "b d", lambda x: torch.where(x > 0, x, 0)),
    Correct("gelu", F.gelu, "b d", lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2),
    Correct("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), "b d"),
    Correct("silu", F.silu, "b d", lambda x: x * x.sigmoid()),
    Correct("softplus", F.softplus, "b d", _softplus),
    Correct("logsigmoid", F.logsigmoid, "b d"),
    Correct("elu", F.elu, "b d"),
    Correct("leaky_relu", F.leaky_relu, "b d", lambda x: torch.where(x > 0, x, 0.01 * x)),
    Correct("hardswish", F.hardswish, "b d"),
    Correct("softsign", F.softsign, "b d", lambda x: x / (1 + x.abs())),
    Correct("mish", F.mish, "b d", lambda x: x * F.softplus(x).tanh()),
    Correct("glu", lambda x: F.glu(x), "b 4", lambda x: x[:, :2] * x[:, 2:].sigmoid()),
    Correct("softmax", lambda x: F.softmax(x, -1), "b d", _softmax),
    Correct("log_softmax", lambda x: F.log_softmax(x, -1), "b d",
            lambda x: x - x.logsumexp(-1, keepdim=True)),
    Correct("logsumexp", lambda x: x.logsumexp(-1), "b d", _logsumexp),
    Correct("layer_norm", lambda x, g, b: F.layer_norm(x, x.shape[-1:], g, b),
            "b s d, d, d", _layer_norm),
    Correct("rms_norm", lambda x, g: F.rms_norm(x, x.shape[-1:], g, 1e-6), "b d, d",
            lambda x, g: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * g),
    Correct("group_norm", lambda x: F.group_norm(x, 2), "b 4 s", _group_norm),
    Correct("batch_norm", lambda x: F.batch_norm(x, None, None, training=True), "b c s",
            lambda x: _standardised(x, (0, 2))),
    Correct("instance_norm", F.instance_norm, "b c s", lambda x: _standardised(x, (2,))),
    Correct("normalize", F.normalize, "b d :positive",
            lambda x: x / x.square().sum(-1, keepdim=True).sqrt()),
    Correct("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, -1),
            "b d :positive, b d :positive"),
    Correct("linear", F.linear, "b d, o d, o", lambda x, w, b: x @ w.mT + b),
    Correct("bilinear", F.bilinear, "b i, b j, o i j",
            lambda x, y, w: torch.einsum("bi,oij,bj->bo", x, w, y)),
    Correct("conv1d", F.conv1d, "b c 6, o c 3",
            lambda x, w: torch.einsum("bcsk,ock->bos", _windows(x, 3), w)),
    Correct("conv2d", F.conv2d, "b c 4 4, o c 2 2", _conv2d),
    Correct("conv_transpose1d", F.conv_transpose1d, "b c s, c o 2"),
    Correct("matmul", torch.matmul, "b i j, b j k", lambda x, y: torch.einsum("bij,bjk->bik", x, y)),
    Correct("embedding", F.embedding, "b s :index=v, v d", lambda ids, table: table[ids]),
    Correct("attention", F.scaled_dot_product_attention, "b h s d, b h t d, b h t d", _attention),
    Correct("avg_pool1d", lambda x: F.avg_pool1d(x, 2, 1), "b c 5", lambda x: _windows(x, 2).mean(-1)),
    Correct("max_pool1d", lambda x: F.max_pool1d(x, 2, 1), "b c 5"),
    Correct("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="linear"), "b c s"),
    Correct("pad, reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), "b c s",
            lambda x: torch.cat([x[..., 1:2], x, x[..., -2:-1]], -1)),
    Correct("mse_loss", F.mse_loss, "b d, b d", lambda x, y: (x - y).square().mean()),
    Correct("l1_loss", F.l1_loss, "b d, b d", lambda x, y: ((x - y) * (x - y).sign()).mean()),
    Correct("huber_loss", F.huber_loss, "b d, b d", _huber),
    Correct("cross_entropy", F.cross_entropy, "b c, b :index=c",
            lambda x, y: -x.log_softmax(-1).gather(-1, y[:, None]).mean()),
    Correct("kl_div", lambda x, y: F.kl_div(x, y, reduction="batchmean"), "b c, b c :simplex",
            lambda x, y: (y * (y.log() - x)).sum() / x.shape[0]),
    Correct("bce_with_logits", F.binary_cross_entropy_with_logits, "b d, b d :probability",
            lambda x, y: (torch.logaddexp(x, torch.zeros_like(x)) - x * y).mean()),
    Correct("gaussian_nll_loss", F.gaussian_nll_loss, "b d, b d, b d :positive", _gaussian_nll),
    Correct("triplet_margin_loss", F.triplet_margin_loss, "b d, b d, b d"),
    Correct("inv", torch.linalg.inv, "n n :definite", lambda a: torch.linalg.solve(a, torch.eye(
        a.shape[0], dtype=a.dtype)), order=1),
    Correct("solve", torch.linalg.solve, "n n :definite, n k", order=1),
    Correct("slogdet", lambda a: torch.linalg.slogdet(a)[1], "n n :definite", lambda a: a.det().log()),
    Correct("cholesky", lambda a: torch.linalg.cholesky((a + a.mT) / 2), "n n :definite"),
    Correct("vector_norm", torch.linalg.vector_norm, "b d :positive", lambda x: x.square().sum().sqrt()),
    Correct("lgamma", torch.special.gammaln, "b d :positive"),
    Correct("logit", torch.special.logit, "b d :probability", lambda p: p.log() - torch.log1p(-p)),
    Correct("logcumsumexp", lambda x: torch.logcumsumexp(x, -1), "b d"),
]  # fmt: skip

PUBLISHED = [
    Correct("entmax: sparsemax", "entmax:sparsemax", "b d"),
    Correct("entmax: entmax15", "entmax:entmax15", "b d"),
    Correct("torch-dct: dct", "torch_dct:dct", "b d"),
    Correct("kornia: rgb_to_grayscale", "kornia.color:rgb_to_grayscale", "b 3 4 4 :probability"),
    Correct("kornia: axis_angle_to_rotation_matrix",
            "kornia.geometry.conversions:axis_angle_to_rotation_matrix", "b 3"),
    Correct("fvcore: sigmoid_focal_loss", "fvcore.nn:sigmoid_focal_loss", "b d, b d :probability"),
    Correct("torchmetrics: pairwise_cosine_similarity",
            "torchmetrics.functional:pairwise_cosine_similarity", "b d :positive, c d :positive"),
    Correct("rotary-embedding-torch: rotate_half",
            "rotary_embedding_torch.rotary_embedding_torch:rotate_half", "b s 4"),
    Correct("pytorch-msssim: ssim", "pytorch_msssim:ssim",
            "b 1 12 12 :probability, b 1 12 12 :probability"),
    Correct("torch_geometric: global_mean_pool", "torch_geometric.nn:global_mean_pool",
            "n d, n :index=2"),
]  # fmt: skip

CORRECT = [*TORCH, *PUBLISHED]
