"""Memory and bytes of programs that write in place: reports say what is measured (write_peaks.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, note, settings
from live_bytes import LiveBytes
from random_writes import Program, Step
from torch import Tensor
from write_cases import Case
from write_peaks import check, peak_cases

from torchard import jit


@settings(max_examples=20)
@given(peak_cases())
def test_reports_say_what_is_measured(case: Case) -> None:
    note(str(case))
    assert check(case).startswith(("right", "refused", "torch refuses"))


@pytest.mark.parametrize("donated", [(0,), (1,), (0, 1)])
def test_donated_arguments_that_nothing_reads_are_there_when_the_call_begins(
    donated: tuple[int, ...],
) -> None:
    program = jit(lambda x, y: x.sum(), backend="eager", donate_argnums=donated).lower(
        torch.zeros(4), torch.zeros(64)
    )
    assert program.peak == sum(holder.bytes for holder in program.memory.holders)
    assert program.peak == 4 * (4 + 64 + (1 not in donated))


def test_reports_of_a_joint_program_whose_loop_writes() -> None:
    """Its backward computes views of the forward's loop again."""
    clone = Step("y.clone()", 0, 0)
    body = (Step("y.index_copy(0, at, o[:2])", 0, 0), clone)
    repeated, loop = Step("repeat", 0, 2, 2, body), Step("for", 0, 2, 3, body)
    program = Program((Step("y[None]", 4, 1, 1), repeated, loop, clone), (0, 1))
    case = Case(program, "backward twice")
    assert check(case) == "right"
    lower, _ = case.lowered_and_called()
    assert "in place" in str(lower())


SCATTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "select": lambda part, x: part.select_scatter(x[0], 0, 1),
    "slice": lambda part, x: part.slice_scatter(x[:2], 0, 1, 3),
    "diagonal": lambda part, x: part.diagonal_scatter(x[0]),
}


@pytest.mark.parametrize("memory", ["allocated", "planned"])
@pytest.mark.parametrize("view", [lambda y: y[3], lambda y: y[3].t(), lambda y: y[3, :, ::2]])
@pytest.mark.parametrize("scatter", SCATTERS.values(), ids=SCATTERS)
def test_a_part_of_an_argument_is_copied_without_the_rest(
    scatter: Callable[[Tensor, Tensor], Tensor], view: Callable[[Tensor], Tensor], memory: str
) -> None:
    """torch's own scatters copy all of the storage."""

    def fn(y: Tensor, x: Tensor) -> Tensor:
        return scatter(view(y), x[:, : view(y).shape[1]])

    y, x = torch.arange(64.0 * 16).view(64, 4, 4), torch.ones(4, 4)
    x = x if view(y).shape[1] == 4 else torch.ones(4, 2)
    run = jit(fn, backend="eager", memory=memory)  # type: ignore[arg-type]
    have, want = run(y, x), fn(y, x)
    assert torch.equal(have, want) and have.stride() == want.stride()
    assert have.untyped_storage().nbytes() <= 64
    with LiveBytes([y, x]) as live:
        run(y, x)
    assert live.peak() == run.lower(y, x).peak
