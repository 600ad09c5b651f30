"""localize on transformed functions: what their rewrites broke, at the line that they broke."""

from __future__ import annotations

import linecache
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from any_size import fuse
from torch.nn import functional as F

from torchard import Mesh, P, axis_index, checkpoint, jit, place, psum, shard, shard_map
from torchard.functional.programs.tags import STEP
from torchard.testing import localize
from torchard.transforms import Pass, Program, Rewrite, Stage, Transformed

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
SPECS = (P("dp"), P(None, "tp"), P("tp", None))


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    hidden = F.gelu(x @ up, approximate="tanh")
    return hidden @ down  # the reduction


def draw(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 6), (6, 8), (8, 2))
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


@dataclass(frozen=True)
class MaxForSum(Rewrite):
    """Breaks a sharded plan: its reductions over ranks take the largest value."""

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(Stage.SCHEDULE, self, reads_loops=True),)

    def __call__(self, program: Program) -> Program:
        for node in program.calls:
            step = STEP.get(node)
            if step is not None and step.reduction == "sum":
                broken = replace(step.collective, reduction="max")
                STEP.set(node, replace(step, collective=broken))
        return program


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_a_broken_reduction_of_a_plan(gradients: bool, placed: bool) -> None:
    args = draw()
    sharded = shard(mlp, MESH, None if placed else SPECS)
    given = place(args, MESH, SPECS) if placed else args
    assert localize(sharded, mlp, *given, gradients=gradients).agree
    found = localize(Transformed(sharded, [MaxForSum()]), mlp, *given, gradients=gradients)
    assert not found.agree
    assert any("in mlp" in o.source and o.op == "aten.mm" for o in found.reference), str(found)


STACKS = {
    "shard": lambda: shard(mlp, MESH, SPECS),
    "checkpoint": lambda: checkpoint(mlp),
    "fuse": lambda: fuse(mlp),
    "jit": lambda: jit(mlp, backend="eager"),
    "all": lambda: jit(checkpoint(fuse(shard(mlp, MESH, SPECS))), backend="eager"),
}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stack", STACKS)
def test_right_stacks_agree_in_every_dtype(stack: str, dtype: torch.dtype, gradients: bool) -> None:
    divergence = localize(STACKS[stack](), mlp, *draw(dtype), gradients=gradients)
    assert divergence.agree, str(divergence)
    assert str(divergence) == "the functions agree up to rounding"


def test_half_precision_is_as_good_as_it_can_be_and_no_better() -> None:
    def half(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return mlp(x.bfloat16(), up.bfloat16(), down.bfloat16()).to(x.dtype)

    def wrong(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(x.bfloat16() @ up.bfloat16())  # another activation
        return (hidden @ down.bfloat16()).to(x.dtype)

    assert localize(half, mlp, *draw()).agree
    found = localize(wrong, mlp, *draw())
    assert [o.op for o in found.fn] == ["aten.relu"]


def test_a_module_and_its_functional_rewrite() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Tanh()).double()
    w, b = module[0].weight.detach(), module[0].bias.detach()

    def rewritten(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.layer_norm(x @ w.T + b, (3,)))

    def mistaken(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.layer_norm(x @ w.T, (3,)) + b)  # the bias behind the norm

    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert localize(rewritten, module, x).agree
    assert any("in mistaken" in o.source for o in localize(mistaken, module, x).fn)


def by_hand(wrong: str = "") -> Callable[..., torch.Tensor]:
    """mlp with its rows over dp and its hidden units over tp; with a mistake if asked for."""

    def local(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(x @ up, approximate="tanh")
        if wrong == "before":
            hidden = hidden * (1 + axis_index("tp"))  # differs by rank
        out = hidden @ down
        if wrong == "terms":
            out = out + x[:, :2]  # on every rank
        return psum(out, "tp")

    return shard_map(local, MESH, SPECS, P("dp"))


@pytest.mark.parametrize("gradients", [False, True])
def test_values_of_single_ranks_are_put_together(gradients: bool) -> None:
    """Along dims over both axes, and as terms of a sum."""
    assert localize(by_hand(), mlp, *draw(), gradients=gradients).agree


@pytest.mark.parametrize(("wrong", "line"), [("before", "# differs by rank"), ("terms", "# on every")])
def test_a_mistake_on_every_rank(wrong: str, line: str) -> None:
    found = localize(by_hand(wrong), mlp, *draw())
    numbers = [int(re.search(r":(\d+) in", o.source)[1]) for o in found.fn]  # type: ignore[index]
    assert line in linecache.getline(__file__, numbers[0]), str(found)


def test_values_of_single_ranks_that_are_alike() -> None:
    """What a rank knows of all others occurs in the reference as it stands."""
    run = shard_map(lambda x: psum(x * x, "tp").exp(), MESH, P("tp"), P())

    def plain(x: torch.Tensor) -> torch.Tensor:
        return (x[:2] ** 2 + x[2:] ** 2).exp()

    assert localize(run, plain, torch.ones(4)).agree
    found = localize(run, lambda x: (x[:2] ** 2 + x[2:] ** 2).exp2(), torch.ones(4))
    assert [o.op for o in found.fn] == ["aten.exp"]


def test_long_runs_part_in_a_short_time() -> None:
    """In time that is linear in the number of operations: all pairs would take 16 times as long."""

    def waves(x: torch.Tensor, count: int, more: float) -> torch.Tensor:
        total = x
        for i in range(count):
            total = total + torch.sin(x * i) * (1 + more * (i == count // 3))
        return total

    def seconds(count: int) -> float:
        begin, x = time.process_time(), torch.linspace(0.1, 1, 8)
        found = localize(lambda x: waves(x, count, 0.1), lambda x: waves(x, count, 0.0), x)
        assert not found.agree and "aten.mul" in str(found)
        return time.process_time() - begin

    seconds(10)
    assert seconds(600) < 10 * seconds(150)
