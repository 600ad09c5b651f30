"""The time of check_derivatives beside torch.autograd.gradcheck and gradgradcheck, for ten functions.

    python benchmarks/derivative_checks.py

Order 1 against gradcheck, order 2 against gradcheck and gradgradcheck, in one process and in turns. Each
round draws other arguments, so that those are in it whose derivatives are looked at with care.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timing import in_turns
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from workload import Rival

from torchard.testing import check_derivatives

Fn = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A function, and the shapes of its arguments."""

    fn: Fn
    shapes: tuple[tuple[int, ...], ...]


def mlp(x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return F.relu(F.linear(x, w1, b1)) @ w2


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, torch.tensor([1, 0, 4, 7]))


CASES = {
    "tanh(32)": Case(torch.tanh, ((32,),)),
    "gelu(32)": Case(F.gelu, ((32,),)),
    "softmax(4,8)": Case(lambda x: x.softmax(-1), ((4, 8),)),
    "layer_norm(4,8)": Case(lambda x: F.layer_norm(x, (8,)), ((4, 8),)),
    "attention 3x(6,4)": Case(F.scaled_dot_product_attention, ((6, 4),) * 3),
    "MLP (4,5)": Case(mlp, ((4, 5), (6, 5), (6,), (6, 3))),
    "logsumexp(4,8)": Case(lambda x: x.logsumexp(-1), ((4, 8),)),
    "cross_entropy(4,8)": Case(cross_entropy, ((4, 8),)),
    "conv1d (2,3,8)": Case(lambda x, w: F.conv1d(x, w, padding=1), ((2, 3, 8), (4, 3, 3))),
    "rms_norm(4,8)": Case(lambda x, w: F.rms_norm(x, (8,), w), ((4, 8), (8,))),
}


class Round:
    """Arguments that are drawn anew for each round of the rivals."""

    def __init__(self, case: Case, rivals: int) -> None:
        self.case, self.rivals = case, rivals
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def args(self) -> tuple[torch.Tensor, ...]:
        if self.calls % self.rivals == 0:
            self.drawn = tuple(
                torch.randn(shape, generator=self.generator, dtype=torch.float64)
                for shape in self.case.shapes
            )
        self.calls += 1
        return self.drawn


def compared(case: Case, rounds: int) -> tuple[float, float, float, float, float, float]:
    """The median seconds of both checks, of torch's, and the ratios, for orders 1 and 2."""
    draw = Round(case, rivals=4)

    def tracked() -> tuple[torch.Tensor, ...]:
        return tuple(x.requires_grad_() for x in draw.args())

    def torchs(order: int) -> Any:
        args = tracked()
        gradcheck(case.fn, args)
        if order == 2:
            gradgradcheck(case.fn, args)

    def ours(order: int) -> Any:
        args = tuple(x.detach() for x in draw.args())
        check_derivatives(case.fn, *args, order=order)

    rivals = [
        Rival("ours 1", lambda: ours(1), list),
        Rival("torch 1", lambda: torchs(1), list),
        Rival("ours 2", lambda: ours(2), list),
        Rival("torch 2", lambda: torchs(2), list),
    ]
    one, torch_one, two, torch_two = in_turns(rivals, rounds)
    return (
        *(one.median, torch_one.median, one.times(torch_one)),
        *(two.median, torch_two.median, two.times(torch_two)),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| function | order 1, ms | gradcheck | ratio | order 2, ms | + gradgradcheck | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, case in CASES.items():
        one, torch_one, ratio, two, torch_two, ratio_two = compared(case, rounds)
        cells = (f"{1e3 * x:.1f}" for x in (one, torch_one, two, torch_two))
        a, b, c, d = cells
        print(f"| {name} | {a} | {b} | {ratio:.2f} | {c} | {d} | {ratio_two:.2f} |", flush=True)


if __name__ == "__main__":
    main()
