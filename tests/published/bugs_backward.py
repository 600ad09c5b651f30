"""Derivatives written by hand, and what goes wrong in them: factors, terms, reductions, second ones."""

from __future__ import annotations

import torch
from planted import Planted, planted
from torch.autograd import Function

BUGS: list[Planted] = []


class Saved(Function):
    """Saves its arguments and its result."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)


@planted(
    BUGS, "b d",
    ("relative error of 1e-5", "g * y * (1 - y)", "g * y * (1 - y) * (1 + 1e-5)"),
    ("missing term", "y * (1 - y)", "y"),
    ("sign", "(1 - y)", "(1 + y)"),
    ("one element", "return g * y * (1 - y)",
     "return (g * y * (1 - y)) * (torch.arange(y.numel()).view_as(y) > 0)"),
    ("not differentiable twice", "_, y = ctx.saved_tensors", "y = ctx.saved_tensors[1].detach()"),
)  # fmt: skip
class Sigmoid(Saved):
    @staticmethod
    def forward(x):
        return x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        _, y = ctx.saved_tensors
        return g * y * (1 - y)


@planted(
    BUGS, "b d",
    ("factor", "3 * x**2", "2 * x**2"),
    ("power", "3 * x**2", "3 * x**3"),
    ("detached second derivative", "3 * x**2", "3 * x.detach() * x"),
)  # fmt: skip
class Cube(Saved):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        return g * 3 * x**2


@planted(
    BUGS, "b d, d",
    ("missing reduction of a broadcast", "(g * x).sum(0)", "(g * x).mean(0)"),
    ("reduction over one row", "(g * x).sum(0)", "(g * x)[0]"),
    ("operands swapped", "return g * w, ", "return g * x, "),
)  # fmt: skip
class Scale(Saved):
    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w, _ = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@planted(
    BUGS, "b d, d o, o",
    ("bias not reduced", "g.sum(0)", "g[0]"),
    ("weight's gradient averaged", "x.mT @ g", "x.mT @ g / x.shape[0]"),
    ("accumulated in half precision", "x.mT @ g", "(x.mT.half() @ g.half()).to(g.dtype)"),
    ("missing gradient", "return g @ w.mT,", "return torch.zeros_like(x),"),
)  # fmt: skip
class Linear(Saved):
    @staticmethod
    def forward(x, w, b):
        return x @ w + b

    @staticmethod
    def backward(ctx, g):
        x, w, _, _ = ctx.saved_tensors
        return g @ w.mT, x.mT @ g, g.sum(0)


@planted(
    BUGS, "b d",
    ("missing term", "g - (g * y).sum(-1, keepdim=True)", "g"),
    ("sum over the batch", "(g * y).sum(-1, keepdim=True)", "(g * y).sum(0, keepdim=True)"),
    ("not multiplied", "return y * (g", "return (g"),
)  # fmt: skip
class Softmax(Saved):
    @staticmethod
    def forward(x):
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, g):
        _, y = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


@planted(
    BUGS, "b d",
    ("missing mean", "g - g.mean(-1, keepdim=True) - y", "g - y"),
    ("missing projection", "- y * (g * y).mean(-1, keepdim=True)", ""),
    ("mean over the batch", "g.mean(-1", "g.mean(0"),
)  # fmt: skip
class Standardise(Saved):
    @staticmethod
    def forward(x):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 0.1)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        inverse = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 0.1)
        return inverse * (g - g.mean(-1, keepdim=True) - y * (g * y).mean(-1, keepdim=True))


@planted(
    BUGS, "b d",
    ("branch of negative arguments", "torch.where(x > 0, g, 0.1 * g)", "torch.where(x > 0, g, 0)"),
    ("condition on the gradient", "torch.where(x > 0, g,", "torch.where(g > 0, g,"),
    ("slope", "0.1 * g", "0.01 * g"),
)  # fmt: skip
class Leaky(Saved):
    @staticmethod
    def forward(x):
        return torch.where(x > 0, x, 0.1 * x)

    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        return torch.where(x > 0, g, 0.1 * g)


@planted(
    BUGS, "b d :positive",
    ("wrong second derivative", "-g * y * y", "-g * y * y.detach()"),
    ("in place on the gradient", "return -g * y * y", "return g.neg_().mul_(y * y)"),
    ("in place on an argument", "return 1 / x", "return x.reciprocal_()"),
)  # fmt: skip
class Reciprocal(Saved):
    @staticmethod
    def forward(x):
        return 1 / x

    @staticmethod
    def backward(ctx, g):
        _, y = ctx.saved_tensors
        return -g * y * y


@planted(
    BUGS, "b d",
    ("not along the last dim", "g.flip(-1).cumsum(-1).flip(-1)", "g.cumsum(-1)"),
    ("exclusive", "g.flip(-1).cumsum(-1).flip(-1)", "g.flip(-1).cumsum(-1).flip(-1) - g"),
    ("last element", "return g.flip(-1)", "g = g * (torch.arange(g.shape[-1]) < g.shape[-1] - 1)\n"
     "        return g.flip(-1)"),
)  # fmt: skip
class Cumulate(Saved):
    @staticmethod
    def forward(x):
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx, g):
        return g.flip(-1).cumsum(-1).flip(-1)


@planted(
    BUGS, "b c, b :index=c",
    ("not divided by the batch", "/ x.shape[0]", ""),
    ("hot for the neighbour", "y[:, None], 1.0", "(y[:, None] + 1) % x.shape[1], 1.0"),
    ("softmax without target", "probabilities - hot", "probabilities"),
)  # fmt: skip
class CrossEntropy(Saved):
    @staticmethod
    def forward(x, y):
        return -x.log_softmax(-1).gather(-1, y[:, None]).mean()

    @staticmethod
    def backward(ctx, g):
        x, y, _ = ctx.saved_tensors
        probabilities = x.softmax(-1)
        hot = torch.zeros_like(x).scatter(1, y[:, None], 1.0)
        return g * (probabilities - hot) / x.shape[0], None
