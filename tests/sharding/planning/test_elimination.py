"""The minimum of sums over variables with few states, and bounds of it, beside all their assignments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchard.sharding.planning.minimum import bounds, elimination
from torchard.sharding.planning.minimum.bounds import Bounded, SweepBudget, proved, solved
from torchard.sharding.planning.minimum.elimination import Terms, TooWide, minimum

COSTS = st.one_of(st.integers(0, 9).map(float), st.just(float("inf")))


@st.composite
def problems(draw: st.DrawFn) -> Terms:
    """Up to six variables; tables may be shared, as those of equal layers are, and forbid states."""
    problem = Terms()
    count = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    for size in sizes:
        problem.variable(np.array(draw(st.lists(COSTS, min_size=size, max_size=size))))
    known: dict[tuple[int, int], np.ndarray] = {}
    for u, v in draw(st.lists(st.tuples(*[st.integers(0, count - 1)] * 2), max_size=8)):
        if u != v:
            shape = sizes[u], sizes[v]
            fresh = draw(st.booleans()) or shape not in known
            if fresh:
                each = draw(st.lists(COSTS, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
                known[shape] = np.array(each).reshape(shape)
            problem.add((u, v), known[shape])
    return problem


def best(problem: Terms) -> float:
    return min(map(problem.cost, itertools.product(*map(range, problem.sizes))))


@given(problems())
def test_the_minimum_is_that_of_all_assignments(problem: Terms) -> None:
    cost, states = minimum(problem)
    assert cost == best(problem)
    assert problem.cost(states) == cost


def dense(seed: int) -> Terms:
    """Six variables of three states, of which each two have a term in common."""
    random, problem = np.random.default_rng(seed), Terms()
    each = [problem.variable(random.integers(0, 9, 3).astype(float)) for _ in range(6)]
    for u, v in itertools.combinations(each, 2):
        problem.add((u, v), random.integers(0, 9, (3, 3)).astype(float))
    return problem


def test_what_is_too_wide_to_eliminate_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """No assignment costs less; what is in no cheaper one is left out, and the rest is eliminated."""
    monkeypatch.setattr(bounds, "_BEAMS", (2, 1))
    exact = certified = 0
    for seed in range(60):
        problem, largest = dense(seed), (3**5, 2**6)[seed % 2]
        monkeypatch.setattr(elimination, "_LARGEST", largest)
        (cost, states, bound), least = solved(problem, SweepBudget()), best(problem)
        assert cost == problem.cost(states) and bound - 1e-9 <= least <= cost
        certified += cost == bound
        exact += cost == least
    assert 10 < certified < exact < 60


def test_a_solution_that_costs_as_much_as_its_bound_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound may be above the cost by a rounding error; then, too, a solution is left."""
    monkeypatch.setattr(bounds, "_BEAMS", (2, 1))
    monkeypatch.setattr(elimination, "_LARGEST", 3**5)
    for seed in range(60):
        random, problem = np.random.default_rng(seed), Terms()
        each = [problem.variable(random.random(3) * 1e4) for _ in range(6)]
        for u, v in itertools.combinations(each, 2):
            problem.add((u, v), np.where(random.random((3, 3)) < 0.1, np.inf, 0.0))
        cost, states, bound = solved(problem, SweepBudget())
        assert cost == pytest.approx(best(problem), rel=1e-12)
        assert cost == pytest.approx(problem.cost(states), rel=1e-12)
        assert bound <= cost


def test_bounds_take_no_more_work_than_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, pairs = dense(0), 15
    monkeypatch.setattr(bounds, "_BEAMS", (2,))
    monkeypatch.setattr(elimination, "_LARGEST", 3**5)
    budget = SweepBudget(25 * pairs)
    solved(problem, budget)
    assert 0 <= budget.left <= 24 * pairs
    with pytest.raises(TooWide):
        solved(problem, SweepBudget(bounds._FEW * pairs - 1))
    monkeypatch.setattr(elimination, "_LARGEST", 2**5)  # even two states of each are too many
    budget = SweepBudget()
    before = budget.left
    with pytest.raises(TooWide):
        solved(problem, budget)
    assert budget.left == before


def test_chains_between_others_are_eliminated_before_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """No work is done for their variables."""
    monkeypatch.setattr(bounds, "_BEAMS", (2, 1))
    monkeypatch.setattr(elimination, "_LARGEST", 3**5)
    for seed in range(20):
        problem, random = dense(seed), np.random.default_rng(seed)
        links = [random.integers(0, 9, (3, 3)).astype(float) for _ in range(3)]
        for start, end in ((0, 3), (1, 4)):
            last = start
            for link in 20 * links:
                here = problem.variable(np.zeros(3))
                problem.add((last, here), link)
                last = here
            problem.add((last, end), links[0])
        budget = SweepBudget()
        before = budget.left
        cost, states, bound = solved(problem, budget)
        assert cost == problem.cost(states) and bound <= cost + 1e-9
        assert 0 < before - budget.left <= bounds._SWEEPS * 15


def test_variables_of_one_state_widen_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "_LARGEST", 4)
    problem = Terms()
    alone = [problem.variable(np.ones(1)) for _ in range(70)]
    each = [problem.variable(np.array([2.0, 1.0])) for _ in range(70)]
    for u, v in itertools.product(alone[:3], each):
        problem.add((u, v), np.zeros((1, 2)))
    for u, v in itertools.combinations(alone, 2):
        problem.add((u, v), np.ones((1, 1)))
    assert minimum(problem) == (70 + 70 + 70 * 69 / 2, [0] * 70 + [1] * 70)


def test_a_known_solution_is_proved_or_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound rises until what may be cheaper is narrow enough to eliminate, or no longer."""
    monkeypatch.setattr(bounds, "_BEAMS", (2, 1))
    monkeypatch.setattr(elimination, "_LARGEST", 3**5)
    exact = 0
    for problem in map(dense, range(24)):
        least = best(problem)
        cost, states, bound = proved(problem, [0] * 6, SweepBudget())
        assert cost == problem.cost(states) <= problem.cost([0] * 6) and bound - 1e-9 <= least <= cost
        exact += bound == cost == least
    assert 5 < exact < 24
    pairs = 15
    with pytest.raises(TooWide):
        proved(dense(0), [0] * 6, SweepBudget(bounds._FEW * pairs - 1))
    few, sweeps, many = (
        proved(dense(1), [0] * 6, SweepBudget(count * pairs)).bound
        for count in (bounds._FEW, bounds._SWEEPS, 1000)
    )
    assert few < sweeps < many < best(dense(1))


def test_states_within_a_bound_contain_the_minimum() -> None:
    for problem in map(dense, range(60)):
        cost, states = minimum(problem)
        kept = bounds._Dual(problem, SweepBudget()).within(Bounded(cost, [0] * 6, cost))
        assert all(state in known for state, known in zip(states, kept, strict=True))


def test_a_chain_of_equal_links_is_combined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of any length is linear: no table is over more than two variables."""
    problem, link, alone = Terms(), np.array([[0.0, 2.0], [1.0, 0.0]]), np.array([1.0, 1.5])
    chain = [problem.variable(alone) for _ in range(2000)]
    for u, v in itertools.pairwise(chain):
        problem.add((u, v), link)
    monkeypatch.setattr("torchard.sharding.planning.minimum.elimination._LARGEST", 8)
    assert minimum(problem)[0] == 2000.0


def test_one_table_over_pairs_of_which_the_other_variable_is_eliminated_first() -> None:
    problem, link, alone = Terms(), np.array([[5.0, 0.0], [9.0, 9.0]]), np.zeros(2)
    first = [problem.variable(alone) for _ in range(4)]
    problem.add((first[0], first[1]), link)
    problem.add((first[3], first[2]), link)
    cost, states = minimum(problem)
    assert cost == problem.cost(states) == 0.0


def test_a_clique_is_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Terms()
    each = [problem.variable(np.zeros(10)) for _ in range(4)]
    for u, v in itertools.combinations(each, 2):
        problem.add((u, v), np.ones((10, 10)))
    monkeypatch.setattr("torchard.sharding.planning.minimum.elimination._LARGEST", 9999)
    with pytest.raises(TooWide):
        minimum(problem)
