"""Looking for patterns stays cheap where there is much to look at."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor

from torchard import find, trace
from torchard.kernels import KERNELS
from torchard.kernels.patterns import verify
from torchard.kernels.patterns.effort import EVALUATION
from torchard.kernels.patterns.match import Finder
from torchard.kernels.patterns.match_plan import MatchPlan
from torchard.kernels.patterns.unify import Unifier
from torchard.kernels.terms.reading import Reading

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def weights(count: int) -> list[Tensor]:
    return [torch.linspace(-1, i + 1, 64).reshape(8, 8) for i in range(count)]


def linears(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, w) for w in weights]


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often which operation has been evaluated on what a proposal said."""
    counts: Counter[Any] = Counter()
    value_of = verify.value_of

    def counted(store: Any, node: Any, env: Any) -> Any:
        counts[node.target] += 1
        return value_of(store, node, env)

    monkeypatch.setattr(verify, "value_of", counted)
    return counts


def test_products_side_by_side_are_all_taken() -> None:
    found = find(linears, KERNELS["qkv"])(X, weights(12))
    assert [match.name for match in found] == ["qkv"] * 4
    products = [node for match in found for node in match.nodes]
    assert len(products) == len(set(products))


def test_what_is_wrong_shows_at_its_first_product(evaluated: Counter[Any]) -> None:
    """A second derivative is full of products, three of which the gradient of three sums up."""
    # Square, so that everything could be anything, in either orientation.
    x, given, kernel = X[:, :4], [w[:4, :4] for w in weights(3)], KERNELS["qkv"]

    def loss(x: Tensor, *weights: Tensor) -> Tensor:
        return sum(y.sin().sum() for y in linears(x, list(weights)))  # type: ignore[return-value]

    def slope(*args: Tensor) -> Tensor:
        found = torch.func.grad(loss, (0, 1, 2, 3))(*args)
        return sum(g.square().sum() for g in found)  # type: ignore[return-value]

    find(torch.func.grad(slope, (0, 1, 2, 3)), kernel)(x, *given)
    assert 0 < evaluated[torch.ops.aten.mm.default] < 200


def test_the_inputs_of_the_first_product_come_first() -> None:
    def pattern(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w) + b

    program = trace(pattern)(X, X[0], weights(1)[0])
    steps = MatchPlan(program).course(0)
    assert [step.number for step in steps] == [0, 2, 1]
    assert [[n.name for n in step.nodes] for step in steps] == [[], ["mm", "tanh"], ["add"]]
    # The sum may be part of a larger one; what it is of must be there.
    assert [sorted(n.name for n in step.firm) for step in steps] == [[], ["mm", "tanh"], []]
    assert [step.decided for step in steps] == [False, False, True]


def test_sums_of_many_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients of many products meet, any two or three of them could be a kernel's."""
    steps: Counter[str] = Counter()
    unify = Unifier._unify

    def counted(*args: Any) -> Any:
        steps["all"] += 1
        return unify(*args)

    monkeypatch.setattr(Unifier, "_unify", counted)

    def loss(x: Tensor, weights: list[Tensor]) -> Tensor:
        return sum(y.square().sum() for y in linears(x, weights))  # type: ignore[return-value]

    gradients = torch.func.grad(loss, (0, 1))
    fuse(gradients, compiler="eager").lower(X, weights(16))
    assert 0 < steps["all"] < 150_000


def test_a_search_ends_after_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are linear in the program; what was found until then counts."""
    reading = Reading(trace(linears)(X, weights(12)))
    (pattern,) = KERNELS["qkv"].patterns
    whole = Finder(reading)
    everything = whole.find(pattern)
    assert everything and not whole.stopped
    taken = whole.effort.limit - whole.effort.left
    monkeypatch.setattr("torchard.kernels.patterns.effort._LEAST", taken // 2)
    monkeypatch.setattr("torchard.kernels.patterns.effort._PER_VALUE", 0)
    half = Finder(reading)
    some = half.find(pattern)
    assert half.stopped == [pattern] and len(some) < len(everything)
    assert -EVALUATION <= half.effort.left < 0


def test_a_search_that_was_given_up_is_reported() -> None:
    program = fuse(lambda x: torch.softmax(x + 1, -1) @ x, compiler="eager")
    assert not any("given up" in missed.why for missed in program.lower(X[:, :4]).kernels.missed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torchard.kernels.patterns.effort._LEAST", 0)
        patched.setattr("torchard.kernels.patterns.effort._PER_VALUE", 1)
        again = fuse(lambda x: torch.softmax(x + 1, -1) @ x, compiler="eager")
        missed = again.lower(X[:, :4]).kernels.missed
    assert any("the search was stopped after" in one.why for one in missed)


def test_gradients_are_looked_for_by_the_references_that_were_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one reference has found, no other looks for again, nor for its gradient."""
    looked: list[tuple[Any, bool]] = []
    find_all = Finder.find

    def spied(self: Finder, pattern: Any, **how: Any) -> Any:
        looked.append((pattern, how["partly"]))
        return find_all(self, pattern, **how)

    monkeypatch.setattr(Finder, "find", spied)
    labels, kernel = torch.tensor([1, 0, 3, 2]), KERNELS["cross_entropy"]

    def loss(x: Tensor) -> Tensor:
        return -torch.log_softmax(x, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()

    step = torch.func.grad_and_value(loss)
    torch.testing.assert_close(fuse(step, kernel, compiler="eager")(X), step(X))
    monkeypatch.undo()
    forward = [pattern for pattern, partly in looked if not partly]
    assert [forward.count(pattern) for pattern in kernel.patterns] == [2] * 3  # checked, then replaced
    assert {pattern.origin for pattern, partly in looked if partly} == {kernel.patterns[1]}


def test_what_one_reference_has_found_no_other_looks_for() -> None:
    reading = Reading(trace(lambda x: F.silu(x) * (x + 1))(X))
    (pattern,) = KERNELS["swiglu"].patterns[:1]
    finder = Finder(reading)
    (found,) = finder.find(pattern)
    assert not finder.find(pattern, known=[root.term for root in found.roots])
