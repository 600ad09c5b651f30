"""What Inductor would compute otherwise than eager: overlapping values that are written to, and values
that are compared with what was made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiler_programs import Trial, comparisons, expanded_writes, first_wrong
from torch import fx

from torchard.functional import checkpoint, jit, trace
from torchard.functional.execution.compiler_repairs import compute_once, copy_before_writes
from torchard.functional.programs.tags import INDUCTOR_REALIZE_TO_STRIDES

aten = torch.ops.aten
WRITES = expanded_writes()


# Forty compile as one. `scatter_reduce` of products asks for values in its gradient.
@pytest.mark.parametrize("start", range(2))
def test_writes_into_overlapping_values(start: int) -> None:
    trials = [trial for trial in WRITES if not trial.name.startswith("scatter_reduce")]
    assert not first_wrong(trials[start::6], jit)


def test_values_compared_with_what_was_made_of_them() -> None:
    """In float32; docs/limits.md says what remains in half precision."""
    trials = [trial for trial in comparisons(torch.float32, seed=3, every=12) if _runs(trial)]
    assert len(trials) > 25
    assert not first_wrong(trials, jit)


def _runs(trial: Trial) -> bool:
    try:
        trial()
    except (RuntimeError, IndexError):  # no derivative, or none in half precision
        return False
    return True


def loss(x: torch.Tensor) -> torch.Tensor:
    twice = torch.maximum(x.cos(), x.cos().amax(1, keepdim=True)).sum()
    return x.sin().amax(-1).sum() + 2 * twice + 3 * F.gelu(x).amax(-1).sum()


STACKS: dict[str, Callable[[Any], Any]] = {
    "inside": lambda f: jit(torch.func.grad(f)),
    "outside": lambda f: torch.func.grad(jit(f)),
    "checkpointed": lambda f: jit(torch.func.grad(checkpoint(f))),
    "checkpointed outside": lambda f: torch.func.grad(jit(checkpoint(f))),
    "batched": lambda f: jit(torch.func.vmap(torch.func.grad(lambda row: f(row[None])))),
}


@pytest.mark.parametrize("stack", STACKS)
def test_gradients_of_maxima(stack: str) -> None:
    xs = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    run, plain = STACKS[stack](loss), torch.func.grad(loss)
    for x in xs:
        torch.testing.assert_close(run(x), plain(x), rtol=1e-5, atol=1e-6)


def test_rows_selected_for_each_sample() -> None:
    rows, sign = torch.tensor([0, 2]), torch.tensor([1.0, -1.0])

    def selected(x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(x)).index_select(0, rows) * sign).sum()

    gradients, x = torch.func.vmap(torch.func.grad(selected)), torch.ones(4, 4)
    torch.testing.assert_close(jit(gradients)(x), gradients(x))


def repaired(fn: Callable[..., Any], x: torch.Tensor) -> fx.Graph:
    graph = trace(fn)(x).copy().graph
    copy_before_writes(graph)
    compute_once(graph)
    return graph


def stored(fn: Callable[..., Any]) -> list[str]:
    graph = repaired(fn, torch.randn(3, 4))
    return [node.name for node in graph.nodes if INDUCTOR_REALIZE_TO_STRIDES.get(node)]


def test_only_what_is_compared_is_stored() -> None:
    assert stored(lambda x: x.sin() * (x.sin() >= x.sin().amax(1, keepdim=True))) == ["sin"]
    assert stored(lambda x: (x.sin() - x.sin().amax(1, keepdim=True)).exp()) == []
    assert stored(lambda x: F.relu(x.sin() @ x.mT)) == []
    assert stored(lambda x: F.layer_norm(x.sin(), (4,)).relu()) == []
    assert stored(lambda x: (x == x.amax()) * x) == []


def test_only_what_overlaps_is_copied() -> None:
    def copies(fn: Callable[..., Any]) -> int:
        graph = repaired(fn, torch.randn(3, 4))
        return len(graph.find_nodes(op="call_function", target=aten.clone.default))

    index = torch.tensor([0, 1])
    assert copies(lambda x: x.sin().index_fill(0, index, 1.0)) == 0
    assert copies(lambda x: x.sin().mT.index_fill(0, index, 1.0)) == 0
    assert copies(lambda x: x[:1].sin().expand(3, 4).index_fill(0, index, 1.0)) == 1
    assert copies(lambda x: x.sin()[0].unfold(0, 2, 1).index_fill(0, index, 1.0)) == 1
