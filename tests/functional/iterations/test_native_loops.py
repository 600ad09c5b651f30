"""Loops in native code: the bits of the loop in Python around the same kernels, whatever the layouts.

The truth is the unrolled loop in float64. How many loops ran in native code is counted. One thing may
differ in the last bit: torch's products of rows that are not dense, which native code copies.
"""

from __future__ import annotations

import cProfile
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_bodies import Body, random_body
from torch import Tensor
from torch.func import grad
from torch.profiler import profile

from torchard import Mesh, P, full, jit, scan, shard, tree, value_and_grad, while_loop
from torchard import checked as checked_by
from torchard.functional.iterations import native_loop
from torchard.functional.iterations.native_loop import NativeLoop

STEPS = 20
generator = torch.Generator().manual_seed(0)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) / 2).to(dtype)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """By loop that might, whether it ran in native code."""
    found: list[bool] = []
    call = NativeLoop.__call__

    def noted(self: NativeLoop, *args: Any) -> Any:
        result = call(self, *args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(NativeLoop, "__call__", noted)
    yield found


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Calls a function whose loops then run in Python."""

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(native_loop, "_FEWEST", 10**9)
            patched.setattr(NativeLoop, "__call__", lambda *_: None)
            return fn(*args)

    return call


def as_scan(body: Body) -> Callable[..., Any]:
    def run(weights: Any, carries: Any, rows: Any) -> Any:
        return scan(lambda c, x: body.step(weights, c, x), carries, rows, reverse=body.reverse)

    return run


def squares(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: sum(x.square().sum() for x in tree.leaves(fn(*args)))


def same_bits(have: Any, want: Any) -> None:
    for x, y in zip(tree.leaves(have), tree.leaves(want), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def near(have: Any, want: Any) -> None:
    for x, y in zip(tree.leaves(have), tree.leaves(want), strict=True):
        size = y.abs().max().clamp(min=1).item()
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-4 * size)


# -- random bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 4, 5, 6, 7, 9])
def test_a_random_body(seed: int, ran: list[bool], in_python: Callable[..., Any]) -> None:
    body = random_body(seed, STEPS)
    args = body.weights, body.carries, body.rows
    exact = tree.map(torch.Tensor.double, args)
    run, slopes = jit(as_scan(body)), jit(grad(squares(as_scan(body)), argnums=(0, 1, 2)))
    for ours, plain in (
        (run, body.unrolled),
        (slopes, grad(squares(body.unrolled), argnums=(0, 1, 2))),
    ):
        have = ours(*args)
        near(have, plain(*exact))
        same_bits(have, in_python(ours, *args))
        same_bits(have, ours(*args))
    assert any(ran)


# -- recurrences ------------------------------------------------------------------------------------


def gated(w: dict[str, Tensor], h: Tensor, x: Tensor) -> Tensor:
    gates = torch.sigmoid(x @ w["in"] + h @ w["state"] + w["bias"])
    keep, new = gates.chunk(2, -1)
    return keep * h + (1 - keep) * torch.tanh(new)


def last_and_all(w: dict[str, Tensor], xs: Tensor) -> tuple[Tensor, Tensor]:
    def step(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = gated(w, h, x)
        return h, h

    return scan(step, xs.new_zeros(xs.shape[0], w["state"].shape[0]), xs.movedim(1, 0))


def unrolled(w: dict[str, Tensor], xs: Tensor) -> tuple[Tensor, Tensor]:
    h, found = xs.new_zeros(xs.shape[0], w["state"].shape[0]), []
    for x in xs.unbind(1):
        h = gated(w, h, x)
        found.append(h)
    return h, torch.stack(found)


def weights(width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {"in": (width, 2 * width), "state": (width, 2 * width), "bias": (2 * width,)}
    return {name: values(*shape, dtype=dtype) / 2 for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [4, 40])  # products in kernels, and by torch
def test_a_recurrence_and_its_gradient(
    width: int, dtype: torch.dtype, ran: list[bool], in_python: Callable[..., Any]
) -> None:
    run = jit(value_and_grad(squares(last_and_all)))
    for _ in range(2):  # other weights are elsewhere in memory
        w, xs = weights(width, dtype), values(3, STEPS, width, dtype=dtype)
        have = run(w, xs)
        exact = tree.map(torch.Tensor.double, (w, xs))
        near(have, value_and_grad(squares(unrolled))(*exact))
        same_bits(have, in_python(run, w, xs))
    assert ran == [True, True] * 2  # of each call: forward, backward


def test_ranks_of_a_mesh(ran: list[bool]) -> None:
    run = jit(shard(value_and_grad(squares(last_and_all)), Mesh({"dp": 2}, virtual=True), (P(), P("dp"))))
    w, xs = weights(4, torch.float64), values(4, STEPS, 4, dtype=torch.float64)
    near(tree.map(full, run(w, xs)), value_and_grad(squares(unrolled))(w, xs))
    assert ran and all(ran)


def test_carries_that_change_places(ran: list[bool]) -> None:
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return scan(lambda s, _: ((s[2] + 1, s[0], s[1]), s[1]), (a, b, c), length=STEPS)

    have = jit(fn)(*map(torch.tensor, (1.0, 2.0, 3.0)))
    a, b, c, found = 1.0, 2.0, 3.0, []
    for _ in range(STEPS):
        found.append(b)
        a, b, c = c + 1, a, b
    assert [x.item() for x in have[0]] == [a, b, c] and have[1].tolist() == found
    assert ran == [True]


def test_elements_in_one_place(ran: list[bool]) -> None:
    """Three elements over three, of which no two rows are dense, though they span as many as they are."""

    def fn(a: Tensor, b: Tensor) -> Any:
        return scan(lambda s, _: ((s[1], s[0] - s[1].mean()), s[1]), (a, b), length=STEPS)

    a, b = (values(2, 5)[:, :1].expand(2, 3) for _ in range(2))
    near(jit(fn)(a, b), fn(a.double(), b.double()))
    assert ran == [True]


@pytest.mark.parametrize("shape", [(20, 0, 3), (20, 3, 0)])
def test_rows_of_no_elements(shape: tuple[int, ...], ran: list[bool]) -> None:
    xs = torch.empty(shape).mT
    count, rows = jit(lambda xs: scan(lambda c, x: (c + x.sum() + 1, x), torch.zeros(()), xs))(xs)
    assert count == 20 and rows.shape == xs.shape
    assert ran == [True]


# -- loops of unknown length ------------------------------------------------------------------------


def collatz(n: Tensor) -> tuple[Tensor, Tensor]:
    def body(carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        n, steps = carry
        return torch.where(n % 2 == 0, n // 2, 3 * n + 1), steps + 1

    return while_loop(lambda carry: carry[0] > 1, body, (n, torch.zeros((), dtype=torch.int64)))


def test_while(ran: list[bool]) -> None:
    run = jit(collatz)
    for n, steps in ((27, 111), (1, 0), (837799, 524)):
        assert [x.item() for x in run(torch.tensor(n))] == [1, steps]
    assert ran == [True, False, True]  # there was nothing to do


def test_many_iterations_are_run_by_several_calls() -> None:
    run = jit(lambda n: while_loop(lambda i: i < n, lambda i: i + 1, torch.zeros((), dtype=torch.int64)))
    for n in (4095, 4096, 4097, 100_000):
        assert run(torch.tensor(n)).item() == n
    rows = jit(lambda xs: scan(lambda c, x: (c + x, c), xs.new_zeros(()), xs))
    xs = torch.arange(10_000)
    total, before = rows(xs)
    assert total.item() == xs.sum().item() and torch.equal(before, xs.cumsum(0) - xs)


def test_an_endless_loop_can_be_interrupted(ran: list[bool]) -> None:
    """Native code is left now and then, so that Python handles signals."""
    run = jit(lambda n: while_loop(lambda i: i != n, lambda i: i % 7 + 1, torch.tensor(0)))
    assert run(torch.tensor(5)).item() == 5

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGVTALRM, interrupt)  # by the process's own time
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
        with pytest.raises(KeyboardInterrupt):
            run(torch.tensor(-1))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
    assert ran == [True]  # the first one: this did not return


# -- around a call ----------------------------------------------------------------------------------


def test_gradients_outside_of_the_program(ran: list[bool]) -> None:
    """A backward of its own reads what the forward's iterations kept."""
    w, xs = weights(4, torch.float64), values(3, STEPS, 4, dtype=torch.float64)
    run, learned = jit(last_and_all), {name: torch.nn.Parameter(x) for name, x in w.items()}
    for _ in range(2):
        found = torch.autograd.grad(squares(run)(learned, xs), list(learned.values()))
        near(found, list(grad(squares(unrolled))(w, xs).values()))
    assert ran == [True] * 4


def test_parameters_are_plain_memory(ran: list[bool]) -> None:
    w, xs = weights(4, torch.float64), values(3, STEPS, 4, dtype=torch.float64)
    with torch.no_grad():
        near(jit(last_and_all)({k: torch.nn.Parameter(x) for k, x in w.items()}, xs), unrolled(w, xs))
    assert ran == [True]


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_before_and_after(first: bool, ran: list[bool]) -> None:
    run, xs = jit(running_sum), values(STEPS, 5)
    for mode in (first, not first, first):
        with torch.inference_mode(mode):
            torch.testing.assert_close(run(xs)[0], xs.sin().sum(0))
    assert ran == [True] * 3


def test_another_default_device(ran: list[bool]) -> None:
    xs = values(STEPS, 5)
    with torch.device("meta"):
        torch.testing.assert_close(jit(running_sum)(xs)[0], xs.sin().sum(0))


def test_loops_of_one_region_in_threads() -> None:
    """What one loop notes, while another one runs the same compiled code."""

    def twice(xs: Tensor) -> Tensor:
        return running_sum(running_sum(xs)[1])[0]

    xs = values(300, 5)
    want, _ = running_sum(running_sum(xs)[1])
    for _ in range(3):
        run, found = jit(twice), list[bool]()
        threads = [
            threading.Thread(target=lambda run=run, found=found: found.append(_near(run(xs), want)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 3


def _near(have: Tensor, want: Tensor) -> bool:
    return torch.allclose(have, want, rtol=1e-4, atol=1e-4)


# -- what stays in Python ---------------------------------------------------------------------------


def running_sum(xs: Tensor) -> Any:
    return scan(lambda c, x: (c + x.sin(), c), xs.new_zeros(xs.shape[1:]), xs)


def test_errors_of_kernels_are_raised() -> None:
    run = jit(lambda xs: scan(lambda c, x: (c // x, c), xs.new_ones(()), xs))
    assert run(torch.ones(STEPS, dtype=torch.int64))[0].item() == 1
    zeros = torch.ones(STEPS, dtype=torch.int64)
    zeros[7] = 0
    with pytest.raises((RuntimeError, ZeroDivisionError), match=r"(?i)zero"):
        run(zeros)


def test_what_is_large_stays_in_python(ran: list[bool]) -> None:
    """An iteration's own memory is not shared by iterations then."""
    run, large, small = jit(running_sum), values(STEPS, 600_000), values(STEPS, 60)
    torch.testing.assert_close(run(large)[0], large.sin().sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(small)[0], small.sin().sum(0), rtol=1e-4, atol=1e-4)
    assert ran == [False, True]


def test_what_torch_computes_stays_in_python(ran: list[bool]) -> None:
    """But for products, which native code calls."""

    def fn(xs: Tensor) -> Any:
        return scan(lambda c, x: (torch.linalg.inv(c + x) * 2, c), torch.eye(3), xs)

    xs = torch.eye(3) + values(STEPS, 3, 3) / 9
    have, _ = jit(fn)(xs)
    want = torch.eye(3, dtype=torch.float64)
    for x in xs.double():
        want = torch.linalg.inv(want + x) * 2
    torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-4)
    assert ran == [False]


def test_profilers_and_checks_see_each_operation(ran: list[bool]) -> None:
    run, xs = jit(running_sum), values(STEPS, 5)
    want = run(xs)
    with profile():
        same_bits(run(xs), want)
    assert ran == [True, False]
    same_bits(jit(checked_by(running_sum, nan=True))(xs), want)
    assert ran == [True, False, False]


def test_a_profiler_of_pythons_is_let_alone(ran: list[bool]) -> None:
    run, xs, profiler = jit(running_sum), values(STEPS, 5), cProfile.Profile()
    with profiler:
        want = run(xs)
    assert profiler.getstats()
    same_bits(run(xs), want)
    assert ran == [False, True]


def test_half_precision(ran: list[bool]) -> None:
    """Sums in it are left to torch."""
    w, xs = weights(4, torch.bfloat16), values(3, STEPS, 4, dtype=torch.bfloat16)
    run = jit(value_and_grad(squares(last_and_all)))
    loss, slopes = run(w, xs)
    exact = value_and_grad(squares(unrolled))(*tree.map(torch.Tensor.double, (w, xs)))
    torch.testing.assert_close(loss.double(), exact[0], rtol=0.03, atol=0.03)
    for name, slope in slopes.items():
        size = exact[1][name].abs().max().item()
        torch.testing.assert_close(slope.double(), exact[1][name], rtol=0.1, atol=0.1 * size)
    assert ran == [True, False]


def test_threads() -> None:
    """Each call has memory of its own."""
    run, inputs = jit(running_sum), [values(2000, 7) for _ in range(4)]
    want, found = [run(x) for x in inputs], dict[int, bool]()

    def work(i: int) -> None:
        found[i] = all(torch.equal(run(inputs[i])[0], want[i][0]) for _ in range(20))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(len(inputs)), True)


def test_results_are_in_memory_of_their_own() -> None:
    run, xs = jit(running_sum), values(STEPS, 5)
    first = run(xs)
    kept = tree.map(torch.Tensor.clone, first)
    run(-xs)
    same_bits(first, kept)
