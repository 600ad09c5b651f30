"""Statistics and linear algebra on rows that are split."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import P, repeat

from .case import DP, LOSS, TWO, Program, expert, gather, reduce, values

ROWS, DIM = 1024, 16
FEW = 64


def kernel(x: Tensor, y: Tensor, width: Tensor | float = 1.0) -> Tensor:
    return torch.exp(-torch.cdist(x, y).square() / (2 * DIM * width**2))


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """The coefficients of a kernel ridge regression on x [points, dim]."""
    gram = kernel(x, x) + 0.1 * torch.eye(len(x), dtype=x.dtype)
    return torch.cholesky_solve(y[:, None], torch.linalg.cholesky(gram))[:, 0]


# Points (1,024 numbers) are fewer than the kernel's rows (4,096); the factorisation is computed on
# every rank.
@expert("kernel ridge regression", [gather(FEW * DIM), gather(FEW)], repeats=4)
def _() -> Program:
    return Program(ridge, (values(FEW, DIM), values(FEW)), DP, P("dp"), P("dp"))


def likelihood(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """The negative log marginal likelihood of a Gaussian process."""
    gram = p["scale"] * kernel(x, x, p["width"]) + p["noise"] * torch.eye(len(x), dtype=x.dtype)
    factor = torch.linalg.cholesky(gram)
    white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    return 0.5 * white.square().sum() + factor.diagonal().log().sum()


@expert("Gaussian process, gradient", [gather(FEW * DIM), gather(FEW)], repeats=4)
def _() -> Program:
    p = {"scale": torch.tensor(1.0), "width": torch.tensor(1.5), "noise": torch.tensor(0.3)}
    args = p, values(FEW, DIM), values(FEW)
    return Program(torch.func.grad_and_value(likelihood), args, DP, (P(), P("dp"), P("dp")), P())


STEPS, SIZE = 10, 256


def symmetric() -> Tensor:
    a = values(SIZE, SIZE, scale=SIZE**-0.5)
    return a @ a.T + torch.eye(SIZE)


def power(a: Tensor, v: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue."""

    def step(_: Tensor, v: Tensor, a: Tensor) -> Tensor:
        w = a @ v
        return w / w.norm()

    return repeat(step, torch.zeros(STEPS), v, a)


# The product of a rank's rows is its share of the vector, which is gathered in each iteration.
@expert("power iteration, rows split", [gather(SIZE) * STEPS])
def _() -> Program:
    return Program(power, (symmetric(), values(SIZE)), DP, (P("dp"), P()), P())


# A rank's terms of half of the rows are added up over tp, and the halves gathered over dp.
@expert(
    "power iteration, rows and columns split, 2x2",
    [reduce(SIZE // 2, 2) * STEPS, gather(SIZE, 2) * STEPS],
)
def _() -> Program:
    return Program(power, (symmetric(), values(SIZE)), TWO, (P("dp", "tp"), P()), P())


def conjugate_gradients(a: Tensor, b: Tensor) -> Tensor:
    """The solution of a x = b after ten iterations."""

    def step(_: Tensor, carry: Any, a: Tensor) -> Any:
        x, r, p, rr = carry
        ap = a @ p
        alpha = rr / (p @ ap)
        x, r = x + alpha * p, r - alpha * ap
        new = r @ r
        return x, r, r + new / rr * p, new

    start = torch.zeros_like(b), b, b, b @ b
    return repeat(step, torch.zeros(STEPS), start, a)[0]


# As above: vectors are on all ranks, so that their products need no sums.
@expert("conjugate gradients, rows split", [gather(SIZE) * STEPS])
def _() -> Program:
    return Program(conjugate_gradients, (symmetric(), values(SIZE)), DP, (P("dp"), P()), P())


def cluster(x: Tensor, centers: Tensor) -> Tensor:
    """A step of k-means on x [points, dim]."""
    nearest = torch.cdist(x, centers).argmin(1)
    members = F.one_hot(nearest, len(centers)).to(x.dtype)
    return members.T @ x / members.sum(0).clamp(min=1)[:, None]


def cluster_by_index(x: Tensor, centers: Tensor) -> Tensor:
    nearest = torch.cdist(x, centers).argmin(1)
    sums = torch.zeros_like(centers).index_add(0, nearest, x)
    counts = x.new_zeros(len(centers)).index_add(0, nearest, torch.ones_like(x[:, 0]))
    return sums / counts.clamp(min=1)[:, None]


# The sums and counts of the clusters are added up.
@expert("k-means step", [reduce(8 * DIM), reduce(8)])
def _() -> Program:
    return Program(cluster, (values(ROWS, DIM), values(8, DIM)), DP, (P("dp"), P()), P())


@expert("k-means step, index_add", [reduce(8 * DIM), reduce(8)])
def _() -> Program:
    return Program(cluster_by_index, (values(ROWS, DIM), values(8, DIM)), DP, (P("dp"), P()), P())


def lloyd(x: Tensor, centers: Tensor) -> Tensor:
    return repeat(lambda _, centers, x: cluster(x, centers), torch.zeros(5), centers, x)


@expert("k-means, five steps", [reduce(8 * DIM) * 5, reduce(8) * 5])
def _() -> Program:
    return Program(lloyd, (values(ROWS, DIM), values(8, DIM)), DP, (P("dp"), P()), P())


def principal(x: Tensor) -> Tensor:
    """The projection on the four largest principal components, up to signs: its squares."""
    centered = x - x.mean(0)
    _, vectors = torch.linalg.eigh(centered.T @ centered / (len(x) - 1))
    return (centered @ vectors[:, -4:]).square()


# The mean and the covariance are added up; every rank factorises the covariance.
@expert("principal components", [reduce(DIM), reduce(DIM * DIM)], repeats=1.1)
def _() -> Program:
    return Program(principal, (values(ROWS, DIM),), DP, P("dp"), P("dp"))


def newton(x: Tensor, y: Tensor) -> Tensor:
    """Five Newton steps of a logistic regression with a ridge."""

    def step(_: Tensor, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p = torch.sigmoid(x @ w)
        gradient = x.T @ (p - y) + w
        hessian = (x.T * (p * (1 - p))) @ x + torch.eye(DIM, dtype=x.dtype)
        return w - torch.linalg.solve(hessian, gradient)

    return repeat(step, torch.zeros(5), x.new_zeros(DIM), x, y)


# The gradient and the Hessian are added up in each step.
@expert(
    "logistic regression by Newton's method",
    [reduce(DIM) * 5, reduce(DIM * DIM) * 5],
    repeats=1.1,
)
def _() -> Program:
    x = values(ROWS, DIM)
    return Program(newton, (x, (x[:, 0] > 0).float()), DP, P("dp"), P())


def mixture(x: Tensor, means: Tensor, logits: Tensor) -> Any:
    """An iteration of expectation maximisation for Gaussians of unit variance."""
    shares = (-torch.cdist(x, means).square() / 2 + logits).softmax(-1)
    mass = shares.sum(0)
    return shares.T @ x / mass[:, None], (mass / len(x)).log()


@expert("expectation maximisation", [reduce(8 * DIM), reduce(8)])
def _() -> Program:
    args = values(ROWS, DIM), values(8, DIM), values(8)
    return Program(mixture, args, DP, (P("dp"), P(), P()), P())


def sinkhorn(cost: Tensor) -> Tensor:
    """The transport plan of uniform marginals (Cuturi, arXiv:1306.0895)."""
    mass = torch.exp(-cost)

    def step(_: Tensor, v: Tensor, mass: Tensor) -> Tensor:
        u = 1 / (mass @ v)
        return 1 / (mass.T @ u)

    v = repeat(step, torch.zeros(STEPS), cost.new_ones(cost.shape[1]), mass)
    return mass * v / (mass @ v)[:, None]


# u is split like the rows; v is a sum over them in each iteration.
@expert("Sinkhorn, rows split", [reduce(SIZE) * STEPS])
def _() -> Program:
    return Program(sinkhorn, (values(SIZE, SIZE),), DP, P("dp"), P("dp"))


def least_squares(x: Tensor, y: Tensor) -> Any:
    """The coefficients by normal equations, and the mean squared residual."""
    w = torch.linalg.solve(x.T @ x, x.T @ y)
    return w, (x @ w - y).square().mean()


@expert("least squares", [reduce(DIM * DIM), reduce(DIM), LOSS], repeats=1.1)
def _() -> Program:
    return Program(least_squares, (values(ROWS, DIM), values(ROWS)), DP, P("dp"), P())
