"""Functions with side effects: how often they are traced, and what the warning says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchard import Mesh, RetraceWarning, jit, shard
from torchard.functional.guards.written_names import written_names

log: list[Any] = []
count = 0
stats = {"calls": 0}


def appends(x: torch.Tensor) -> torch.Tensor:
    log.append(x.shape)
    return x * 3


def counts(x: torch.Tensor) -> torch.Tensor:
    global count
    count += 1
    stats["calls"] += 1
    return x * 3


class Counter:
    def __init__(self) -> None:
        self.calls, self.seen, self.table = 0, [], {"n": 0}  # type: ignore[var-annotated]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x.shape))
        self.table["n"] += 1
        return x * 3


class Layer(torch.nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 3


def a_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * 3

    return fn


def traced(fn: Any, times: int = 10) -> tuple[int, str]:
    """How often a function is traced that is called with two signatures in turn, and the warning."""
    run = jit(fn, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(times):
            assert run(torch.ones(8 if i % 2 else 1)).shape
    assert all(issubclass(each.category, RetraceWarning) for each in caught)
    return run.traces, " ".join(str(each.message) for each in caught)


@pytest.mark.parametrize(
    "fn", [appends, counts, Counter(), Layer(), a_closure()], ids=lambda fn: type(fn).__name__
)
def test_what_is_only_written_is_no_reason_to_trace(fn: Any) -> None:
    assert traced(fn) == (2, "")


def reads_log(x: torch.Tensor) -> torch.Tensor:
    log.append(1)
    return x * len(log)


def reads_count(x: torch.Tensor) -> torch.Tensor:
    global count
    count += 1
    return x * count


class Reader(Counter):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


class Advances:
    def __init__(self) -> None:
        self.steps = iter(range(99))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        next(self.steps)
        return 2 * x


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (reads_log, "the global log["),
        (reads_count, "the global count (from "),
        (Reader(), "the attribute calls (from "),
        (Advances(), "the attribute steps is an iterator"),
    ],
)
def test_the_warning_names_what_changed(fn: Any, text: str) -> None:
    traces, message = traced(fn)
    assert traces == 10 and text in message and "args" not in message


def test_a_counter_that_another_function_reads_is_watched() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * count

    def fn(x: torch.Tensor) -> torch.Tensor:
        global count
        count += 1
        return helper(x)

    assert traced(fn, times=4)[0] == 4


def test_a_sharded_function_with_a_side_effect_is_traced_once() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * cotangent * ctx.saved_tensors[0]

    calls: list[int] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return Square.apply(x).mean()  # type: ignore[no-any-return,no-untyped-call]

    run = shard(fn, Mesh({"dp": 2}, virtual=True))
    for _ in range(5):
        torch.func.grad(run)(torch.ones(4, 2))
    assert run.traces == 1


# Uses of `n` (a global), each with whether it is only written.
USES = {
    "n += 1": True,
    "n.append(n2)": True,
    "n.append(n)": False,
    "n['k'] += 1": True,
    "n['k'] = 1": True,
    "n['k'] = n['j']": False,
    "o.n += 1": True,
    "o.n.append(x)": True,
    "o.n = 3": True,
    "o.n = p.n * q.n": False,
    "x = n": False,
    "n += n": False,
    "x = n.append(1)": False,
    "n.pop()": False,
    "for i in n: pass": False,
    "(y := n.append(1))": False,
    "print(n)": False,
    "x[n] = 1": False,
    "n.extend(i for i in x)": False,
    "n.update(a=o.n)": False,
    "m = lambda: n": False,
    "del n[0]": False,
    "n()": False,
}


@pytest.mark.parametrize(("text", "written"), USES.items())
def test_uses_of_a_name(text: str, written: bool) -> None:
    code = compile(f"def f(x, o, p, q):\n    global n\n    {text}\n", "<test>", "exec")
    parts = [c for c in code.co_consts if hasattr(c, "co_code")]
    parts += [c for part in parts for c in part.co_consts if hasattr(c, "co_code")]
    assert ("n" in written_names(parts)) == written
