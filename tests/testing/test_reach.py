"""Functions that no trace takes are compared, and what is not compared is said."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from untraceable import CACHE, FUNCTIONS, OldStyle, branched

from torchard import DerivativeError, Mesh, P, register_rule, shard
from torchard.testing import Differs, check_pure, check_sharding, check_stack, equal, localize

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CALLS = ("value", "backward", "no_grad", "inference_mode", "twice", "thread")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_equals_itself(name: str) -> None:
    CACHE.clear()
    assert equal(FUNCTIONS[name], FUNCTIONS[name], X).good


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mistake_in_one_is_found(name: str, dtype: torch.dtype) -> None:
    if name == "complex" and dtype == torch.bfloat16:
        return  # there is no such dtype
    fn, x = FUNCTIONS[name], X.to(dtype)
    if dtype != torch.float64:
        fn = {"batch norm": nn.BatchNorm1d(6, dtype=dtype), "recurrent": branched}.get(name, fn)
    CACHE.clear()

    def wrong(x: torch.Tensor) -> Any:
        results = fn(x)
        return tuple(r * 1.05 for r in results) if isinstance(results, tuple) else results * 1.05

    with pytest.raises(Differs):
        equal(wrong, fn, x, orders=("value",))


def test_derivatives_that_torch_lacks_are_left_out_only_if_all_are_asked_for() -> None:
    report = equal(OldStyle.apply, torch.square, X)
    assert report.good
    assert [row.path for row in report if row.skipped] == ["tangents of results"]
    assert "setup_context" in str(report)
    with pytest.raises(RuntimeError, match="setup_context"):
        equal(OldStyle.apply, torch.square, X, orders=("jvp",))


@pytest.mark.parametrize(("backward", "lacking"), [
    (True, ["tangents of results"]),
    (False, ["gradients", "tangents of results", "second gradients"]),
])  # fmt: skip
def test_derivatives_that_a_custom_operator_lacks_are_left_out(
    backward: bool, lacking: list[str]
) -> None:
    op = torch.library.custom_op(f"torchard_reach::twice_{backward}", twice, mutates_args=())
    op.register_fake(torch.empty_like)
    if backward:
        op.register_autograd(lambda ctx, g: 2 * g)
    register_rule(getattr(torch.ops.torchard_reach, f"twice_{backward}").default, text="... -> ...")
    mesh = Mesh({"x": 2}, virtual=True)
    report = check_sharding(lambda x: op(x), mesh, (P("x"),), X)
    assert report.good
    assert [row.path for row in report if row.skipped] == 2 * lacking  # of plain and placed arguments
    with pytest.raises((DerivativeError, RuntimeError), match="registered"):
        check_sharding(lambda x: op(x), mesh, (P("x"),), X, orders=["jvp"])


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_integers_have_values_only() -> None:
    report = equal(lambda i: i + 1, lambda i: 1 + i, torch.arange(3))
    assert [row.path for row in report] == ["out"]
    with pytest.raises(Differs, match="dtype"):
        equal(lambda i: i + 1.0, lambda i: i + 1, torch.arange(3))


def test_modules_are_compared_in_their_parameters_and_left_as_they_are() -> None:
    one, other = nn.BatchNorm1d(6, dtype=X.dtype), nn.BatchNorm1d(6, dtype=X.dtype)
    report = equal(one, other, X)
    assert report.good
    assert any(row.path == "gradient of args[1]['weight']" for row in report)
    assert int(one.num_batches_tracked) == 0
    with pytest.raises(Differs, match=re.escape("args[1]['weight']")):
        equal(_Stopped(one.weight, one.bias), other, X)


class _Stopped(nn.Module):
    """A batch norm without a gradient for its weight."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, self.weight.detach(), self.bias, True)


@pytest.mark.parametrize("order", CALLS)
def test_calls_as_users_call(order: str) -> None:
    assert equal(torch.sin, torch.sin, X, orders=(order,)).good
    assert equal(shard(torch.sin, Mesh({"a": 2}, virtual=True), (P("a"),)), torch.sin, X).good
    with pytest.raises(Differs):
        equal(_wrong_in(order), torch.sin, X, orders=(order,))


def _wrong_in(order: str) -> Any:
    """sin, but in calls of one kind."""
    calls = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(order)
        kinds = {
            "value": True,
            "backward": x.requires_grad,
            "no_grad": not torch.is_grad_enabled(),
            "inference_mode": torch.is_inference_mode_enabled(),
            "twice": len(calls) == 2,
            "thread": threading.current_thread() is not threading.main_thread(),
        }
        return x.sin() * (1.5 if kinds[order] else 1)

    return fn


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        cosine = ctx.saved_tensors[0].cos()
        return g * (cosine + 1e-3)  # the mistake


def line_of(mark: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"test_reach.py:{next(i for i, text in enumerate(lines, 1) if text.endswith(mark))}"


def test_a_failure_names_the_line_in_a_wrong_backward() -> None:
    with pytest.raises(Differs) as caught:
        equal(lambda x: WrongBackward.apply(x).tanh(), lambda x: x.sin().tanh(), X)
    assert line_of("# the mistake") in str(caught.value)
    assert "not compared: You must implement the jvp" in str(caught.value)


def test_a_failure_names_the_cast() -> None:
    def narrow(x: torch.Tensor) -> torch.Tensor:
        half = x.half()  # the cast
        return (half @ half.T).to(x.dtype)

    with pytest.raises(Differs) as caught:
        equal(narrow, lambda x: x @ x.T, X, allow_narrower=False)
    assert line_of("# the cast") in str(caught.value)


def test_functions_that_draw_elsewhere_are_called_random() -> None:
    generator = torch.Generator()

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(6, generator=generator, dtype=x.dtype)

    with pytest.raises(Differs, match="fn is random"):
        equal(noisy, noisy, X)
    assert equal(F.dropout, F.dropout, X).good


def test_results_of_another_number_shape_or_dtype_are_differences() -> None:
    for other in (lambda x: (x, x), lambda x: x[:1], lambda x: x.float()):
        with pytest.raises(Differs):
            equal(other, lambda x: x, X)
        found = localize(other, lambda x: x, X)
        assert not found.agree and found.problem and str(found)


def test_a_pure_function_that_cannot_be_traced_is_pure() -> None:
    found = check_pure(branched, X)
    assert not found.traceable
    assert "untraceable.py" in str(found) and "not pure" not in str(found)


LOG: list[Any] = []
LAST: Any = None


def appends(x: torch.Tensor) -> torch.Tensor:
    LOG.append(1)
    return x * 2


def assigns(x: torch.Tensor) -> torch.Tensor:
    global LAST
    LAST = x
    return x * 2


class Remembers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return x * 2


GENERATOR = torch.Generator()
BUFFER = torch.zeros(6, dtype=X.dtype)


def writes(x: torch.Tensor) -> torch.Tensor:
    BUFFER.add_(1)
    return x * 2


def draws_in_vain(x: torch.Tensor) -> torch.Tensor:
    torch.rand(1, generator=GENERATOR)
    return x * 2


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (appends, "LOG (a list of 1 item"),
        (lambda x: appends(x), "LOG (a list"),
        (assigns, "LAST (to a tensor"),
        (Remembers(), "Remembers.last"),
        (writes, "BUFFER (values of"),
        (draws_in_vain, "GENERATOR (the state"),
        (nn.BatchNorm1d(6, dtype=X.dtype), "running_mean"),
    ],
)
def test_what_a_call_changes_is_named(fn: Any, what: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(what)):
        check_pure(fn, X.clone())


class Scaled(NamedTuple):
    scale: float

    @staticmethod
    def times(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.times(x, self.scale)


def test_pure_functions_with_surroundings() -> None:
    weights = {"w": torch.ones(6, dtype=X.dtype)}
    fns = (
        lambda x: x * weights["w"],
        nn.LayerNorm(6, dtype=X.dtype),
        torch.sin,
        functools.partial(torch.softmax, dim=0),
        Scaled(2.0),
    )
    for fn in fns:
        assert check_pure(fn, X).traceable


@pytest.mark.parametrize("way", CALLS[1:])
def test_stacks_are_called_as_users_call(way: str) -> None:
    words = [("jit", way), ("shard", "grad", way), ("grad", way, "twice")]
    assert check_stack(torch.sin, words[: 2 if way == "backward" else 3], X).good
    with pytest.raises(Differs, match=f"the stack {way}"):
        check_stack(_wrong_in(way), [(way,)], X)
