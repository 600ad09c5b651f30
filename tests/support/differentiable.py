"""Right functions with random arguments, and wrong derivatives to plant in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["FUNCTIONS", "PLANTS", "Function", "drawn", "planted"]

Fn = Callable[..., Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Function:
    """A function, the shapes of its arguments and which values it takes.

    Attributes:
        fn: of tensors.
        shapes: of its arguments.
        of: "reals", "positive" or "matrices" (far from singular; the first is positive definite).
    """

    fn: Fn
    shapes: tuple[Shape, ...] = ((3, 5),)
    of: str = "reals"


def _target(x: Tensor) -> Tensor:
    return torch.linspace(-1.3, 1.1, x.numel(), dtype=x.dtype).view_as(x)


def _classes(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]) % x.shape[1]


def _symmetric(a: Tensor) -> Tensor:
    return (a + a.mT) / 2


_ELEMENTWISE = {
    **{f.__name__: f for f in (F.relu, F.relu6, F.elu, F.selu, F.celu, F.leaky_relu, F.gelu, F.silu)},
    **{f.__name__: f for f in (F.mish, F.softplus, F.softsign, F.logsigmoid, F.hardswish, F.hardtanh)},
    **{f.__name__: f for f in (F.hardsigmoid, F.tanhshrink, F.softshrink, F.hardshrink)},
    **{f.__name__: f for f in (torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.exp, torch.expm1)},
    **{f.__name__: f for f in (torch.erf, torch.atan, torch.abs, torch.square, torch.sinh, torch.asinh)},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clamp": lambda x: x.clamp(-1, 0.5),
}
_POSITIVE = {
    **{f.__name__: f for f in (torch.log, torch.sqrt, torch.rsqrt, torch.log1p, torch.lgamma)},
    **{f.__name__: f for f in (torch.reciprocal, torch.digamma)},
    "entropy": lambda x: -(x / x.sum() * (x / x.sum()).log()).sum(),
}
_ROWS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(-1),
    "var": lambda x: x.var(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "prod": lambda x: x.prod(-1),
    "amax": lambda x: x.amax(-1),
    "sort": lambda x: x.sort(-1).values,
    "median": lambda x: x.median(-1).values,
    "mse_loss": lambda x: F.mse_loss(x, _target(x)),
    "l1_loss": lambda x: F.l1_loss(x, _target(x)),
    "huber_loss": lambda x: F.huber_loss(x, _target(x)),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, _target(x)),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), _target(x).softmax(-1), reduction="sum"),
    "cross_entropy": lambda x: F.cross_entropy(x, _classes(x)),
    "soft_margin_loss": lambda x: F.soft_margin_loss(x, _target(x).sign()),
    "bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, _target(x).sigmoid()),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, _target(x).exp()),
}
_OTHERS = {
    "linear": Function(F.linear, ((3, 4), (5, 4), (5,))),
    "bilinear": Function(F.bilinear, ((3, 2), (3, 4), (5, 2, 4))),
    "mlp": Function(lambda x, w, v: F.relu(x @ w) @ v, ((3, 4), (4, 6), (6, 2))),
    "attention": Function(F.scaled_dot_product_attention, ((3, 4), (5, 4), (5, 2))),
    "conv1d": Function(F.conv1d, ((2, 3, 6), (4, 3, 3))),
    "conv2d": Function(F.conv2d, ((1, 2, 4, 4), (2, 2, 3, 3))),
    "group_norm": Function(lambda x: F.group_norm(x, 2), ((2, 4, 3),)),
    "batch_norm": Function(lambda x: F.batch_norm(x, None, None, training=True), ((5, 3),)),
    "max_pool1d": Function(lambda x: F.max_pool1d(x, 2), ((2, 3, 6),)),
    "avg_pool1d": Function(lambda x: F.avg_pool1d(x, 2), ((2, 3, 6),)),
    "interpolate": Function(lambda x: F.interpolate(x, 5, mode="linear"), ((1, 2, 3),)),
    "cosine_similarity": Function(F.cosine_similarity, ((3, 4), (3, 4))),
    "pairwise_distance": Function(F.pairwise_distance, ((3, 4), (3, 4))),
    "atan2": Function(torch.atan2, ((4,), (4,))),
    "maximum": Function(torch.maximum, ((3, 2), (3, 1))),
    "solve": Function(torch.linalg.solve, ((4, 4), (4, 2)), "matrices"),
    "cholesky": Function(lambda a: torch.linalg.cholesky(_symmetric(a)), ((4, 4),), "matrices"),
    "det": Function(torch.linalg.det, ((4, 4),), "matrices"),
    "slogdet": Function(lambda a: torch.linalg.slogdet(a)[1], ((4, 4),), "matrices"),
    "inv": Function(torch.linalg.inv, ((3, 3),), "matrices"),
    "pow": Function(torch.pow, ((4,), (4,)), "positive"),
    "complex_abs": Function(lambda x, y: torch.complex(x, y).abs(), ((4,), (4,))),
    "fft": Function(lambda x: torch.fft.rfft(x).abs(), ((6,),)),
}
FUNCTIONS: dict[str, Function] = {
    **{name: Function(fn) for name, fn in _ELEMENTWISE.items()},
    **{name: Function(fn, of="positive") for name, fn in _POSITIVE.items()},
    **{name: Function(fn) for name, fn in _ROWS.items()},
    **_OTHERS,
}

SCALES = (1e-3, 0.1, 1.0, 1.0, 4.0, 20.0)


def drawn(name: str, seed: int) -> tuple[Tensor, ...]:
    """Arguments of a function: normal ones of a random scale, and at times small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    kind = int(torch.randint(len(SCALES) + 1, (), generator=generator))
    function = FUNCTIONS[name]
    found = []
    for i, shape in enumerate(function.shapes):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if function.of == "matrices":
            if i == 0:
                x = x @ x.mT / 4 + torch.eye(shape[0], dtype=x.dtype)
        elif kind == len(SCALES):
            x = (2 * x).round()
        else:
            x = SCALES[kind] * x
        found.append(x.abs() + 1e-3 if function.of == "positive" else x)
    return tuple(found)


# -- wrong derivatives --------------------------------------------------------------------------------

SIZE = 1e-5


class _Skewed(torch.autograd.Function):
    """The identity, with a derivative that is off by a factor in one of both modes."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor, mode: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor, ctx.mode = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (g * ctx.factor if ctx.mode != "forward" else g.clone()), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        return t * ctx.factor if ctx.mode != "reverse" else t.clone()


class _SkewedGradient(torch.autograd.Function):
    """The identity, whose gradient is right, and the derivative of that off in one of both modes."""

    @staticmethod
    def forward(x: Tensor, factor: Tensor, mode: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.factor, ctx.mode = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Skewed.apply(g, ctx.factor, ctx.mode), None, None

    @staticmethod
    def jvp(ctx: Any, t: Tensor, *_: Any) -> Tensor:
        return t.clone()


def _factor(y: Tensor, where: str, seed: int) -> Tensor:
    if where == "whole":
        return torch.full_like(y, 1 + SIZE)
    factor = torch.ones_like(y, memory_format=torch.contiguous_format)
    factor.view(-1)[seed % y.numel()] = 1 + SIZE
    return factor


# Where a derivative is wrong, in which mode, and of which order.
PLANTS = [
    (where, mode, order)
    for where in ("whole", "element")
    for mode in ("forward", "reverse", "both")
    for order in (1, 2)
]


def planted(fn: Fn, where: str, mode: str, order: int, seed: int = 0) -> Fn:
    """fn with a derivative of this order that is off by one part in 100,000.

    For order 2 it is the square of fn, whose gradient is a product with fn.
    """

    def wrong(*args: Tensor) -> Tensor:
        y = fn(*args)
        y = y.real if y.is_complex() else y
        factor = _factor(y.detach(), where, seed)
        if order == 1:
            skewed: Tensor = _Skewed.apply(y, factor, mode)
            return skewed
        z: Tensor = _SkewedGradient.apply(y, factor, mode)
        return z * z

    return wrong
