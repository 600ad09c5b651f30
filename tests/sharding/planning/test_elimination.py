"""The minimum of sums over variables with few states, and bounds of it, beside all their assignments."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchard.sharding.planning.minimum import bounds
from torchard.sharding.planning.minimum.bounds import SweepBudget, solved
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


def tree(seed: int) -> Terms:
    """Seven variables of three states, each with a term in common with one before it."""
    random, problem = np.random.default_rng(seed), Terms()
    for v in range(7):
        problem.variable(random.integers(0, 9, 3).astype(float))
        if v:
            problem.add((int(random.integers(v)), v), random.integers(0, 9, (3, 3)).astype(float))
    return problem


def fixed(problem: Terms, variable: int, state: int) -> Terms:
    """The same problem with one variable in one state."""
    other = Terms()
    other.sizes, other.terms = problem.sizes, [*problem.terms]
    only = np.full(problem.sizes[variable], np.inf)
    only[state] = 0.0
    other.add((variable,), only)
    return other


def test_what_is_too_wide_to_eliminate_has_a_bound() -> None:
    """No assignment costs less; what is in no cheaper one is left out, and the rest is eliminated."""
    exact = certified = 0
    for seed in range(60):
        problem = dense(seed)
        cost, states, bound = solved(problem, SweepBudget(), largest=2**6)
        least = best(problem)
        assert cost == problem.cost(states) and bound - 1e-9 <= least <= cost
        certified += cost == bound
        exact += cost == least
    assert 10 < certified < exact


def test_a_bound_is_raised_until_it_rises_no_more() -> None:
    """On trees messages are exact, so that the bound is the minimum."""
    for seed in range(20):
        problem, random = tree(seed), np.random.default_rng(seed)
        dual = bounds._Dual(problem, np.inf)
        dual.improve(20)
        least = best(problem)
        assert dual.bound == pytest.approx(least, abs=1e-9)
        assert problem.cost(dual.solution()) == pytest.approx(least, abs=1e-9)
        # What a state costs at least beside the best is no more than it does.
        v = int(random.integers(len(problem.sizes)))
        for state, excess in enumerate(dual.excess[v]):
            assert dual.bound + excess <= best(fixed(problem, v, state)) + 1e-9


def test_a_solution_that_costs_as_much_as_its_bound_up_to_rounding() -> None:
    """The bound may be above the cost by a rounding error; then, too, a solution is left."""
    for seed in range(60):
        random, problem = np.random.default_rng(seed), Terms()
        each = [problem.variable(random.random(3) * 1e4) for _ in range(6)]
        for u, v in itertools.combinations(each, 2):
            problem.add((u, v), np.where(random.random((3, 3)) < 0.1, np.inf, 0.0))
        cost, states, bound = solved(problem, SweepBudget(), largest=3**5)
        assert cost == pytest.approx(best(problem), rel=1e-12)
        assert cost == pytest.approx(problem.cost(states), rel=1e-12)
        assert bound <= cost


def test_bounds_take_no_more_work_than_is_left() -> None:
    problem, sweeps = dense(0), bounds._EACH * 2 * 15
    budget = SweepBudget(sweeps + 7)
    solved(problem, budget, largest=2**5)
    assert budget.left == 7
    with pytest.raises(TooWide):
        solved(problem, SweepBudget(sweeps - 1), largest=2**5)


def test_chains_between_others_are_eliminated_before_a_bound() -> None:
    """No work is done for their variables."""
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
        cost, states, bound = solved(problem, budget, largest=2**5)
        assert cost == problem.cost(states) and bound <= cost + 1e-9
        used = before - budget.left
        assert used > 0 and used % (bounds._EACH * 2 * 15) == 0


def test_variables_of_one_state_widen_no_table() -> None:
    problem = Terms()
    alone = [problem.variable(np.ones(1)) for _ in range(70)]
    each = [problem.variable(np.array([2.0, 1.0])) for _ in range(70)]
    for u, v in itertools.product(alone[:3], each):
        problem.add((u, v), np.zeros((1, 2)))
    for u, v in itertools.combinations(alone, 2):
        problem.add((u, v), np.ones((1, 1)))
    assert minimum(problem, 4) == (70 + 70 + 70 * 69 / 2, [0] * 70 + [1] * 70)


def test_a_known_solution_is_proved_or_improved() -> None:
    exact = 0
    for problem in map(dense, range(24)):
        least = best(problem)
        near = solved(problem, SweepBudget(), largest=2**5).states
        for known in ([0] * 6, near):
            cost, states, bound = solved(problem, SweepBudget(), known, largest=2**5)
            assert cost == problem.cost(states) <= problem.cost(known)
            assert bound - 1e-9 <= least <= cost
        exact += bound == cost == least
    assert 5 < exact < 24
