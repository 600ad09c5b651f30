"""Second derivatives, and derivatives in both modes, of data parallel losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, jvp, vmap

from torchard import P, nn, optim

from .case import DP, LOSS, Program, expert, reduce, values, weights

BATCH, IN, HIDDEN = 256, 16, 32
SIZE = HIDDEN * IN + HIDDEN


def critic(p: Any, x: Tensor) -> Tensor:
    return nn.linear(torch.tanh(nn.linear(x, p["up"])), p["down"])[..., 0]


def error(p: Any, x: Tensor) -> Tensor:
    return critic(p, x).square().mean()


def penalised(p: Any, real: Tensor, fake: Tensor) -> Tensor:
    """WGAN-GP (Gulrajani et al., arXiv:1704.00028): the norms of gradients in the input are near 1."""
    slopes = vmap(grad(critic, 1), (None, 0))(p, (real + fake) / 2)
    penalty = (slopes.norm(dim=-1) - 1).square().mean()
    return critic(p, fake).mean() - critic(p, real).mean() + 10 * penalty


def network() -> Any:
    return weights(up=(HIDDEN, IN), down=(1, HIDDEN))


# Gradients in the inputs are those of a rank's rows; their gradients in parameters are added up.
@expert("WGAN with gradient penalty", [reduce(SIZE), LOSS])
def _() -> Program:
    args = network(), values(BATCH, IN), values(BATCH, IN)
    return Program(grad_and_value(penalised), args, DP, (P(), P("dp"), P("dp")), P())


def curvature(p: Any, v: Any, x: Tensor) -> Any:
    """The product of the Hessian and v."""
    return jvp(lambda p: grad(error)(p, x), (p,), (v,))[1]


# The Hessian's product is a sum over the batch, like the gradient.
@expert("product with the Hessian", [reduce(SIZE)])
def _() -> Program:
    return Program(curvature, (network(), network(), values(BATCH, IN)), DP, (P(), P(), P("dp")), P())


def sharpness_aware(p: Any, x: Tensor) -> Any:
    """A step of SAM (Foret et al., arXiv:2010.01412)."""
    grads = grad(error)(p, x)
    norm = sum(g.square().sum() for g in grads.values()).sqrt()
    climbed = {k: p[k] + 0.05 * grads[k] / norm for k in p}
    again = grad(error)(climbed, x)
    return optim.sgd(0.1).update(again, optim.sgd(0.1).init(p), p)[0]


# The first gradient's norm is that of the sum: both gradients are added up.
@expert("SAM step", [reduce(SIZE), reduce(SIZE)])
def _() -> Program:
    return Program(sharpness_aware, (network(), values(BATCH, IN)), DP, (P(), P("dp")), P())


def gauss_newton(p: Any, x: Tensor) -> Tensor:
    """The matrix of the last layer's Gauss-Newton approximation, with a ridge, and its step."""
    features = torch.tanh(nn.linear(x, p["up"]))
    residual = nn.linear(features, p["down"])[:, 0] - x[:, 0]
    matrix = features.T @ features + torch.eye(HIDDEN, dtype=x.dtype)
    return p["down"][0] - torch.linalg.solve(matrix, features.T @ residual)


# Two sums over the batch; every rank solves.
@expert("Gauss-Newton step", [reduce(HIDDEN * HIDDEN), reduce(HIDDEN)], repeats=1.2)
def _() -> Program:
    return Program(gauss_newton, (network(), values(BATCH, IN)), DP, (P(), P("dp")), P())


def influence(p: Any, x: Tensor, probe: Tensor) -> Tensor:
    """The product of each example's gradient with that of a probe."""
    reference = grad(error)(p, probe)

    def product(x: Tensor) -> Tensor:
        grads = grad(error)(p, x[None])
        return sum(((grads[k] * reference[k]).sum() for k in p), torch.zeros((), dtype=x.dtype))

    return vmap(product)(x)


# Examples are independent of each other; every rank computes the probe's gradient.
@expert("influence of examples")
def _() -> Program:
    args = network(), values(BATCH, IN), values(4, IN)
    return Program(influence, args, DP, (P(), P("dp"), P()), P("dp"))
