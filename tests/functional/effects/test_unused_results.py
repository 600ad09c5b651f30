"""An operator that is called for an effect is refused by name and line, and one that is used is not."""

from collections.abc import Callable, Iterator

import pytest
import torch
from any_size import fuse
from torch.func import grad, vmap

from torchard import PurityError, checkpoint, jit, register_rule, repeat

LIBRARY = torch.library.Library("unused_results", "DEF")
LIBRARY.define("shown(Tensor x) -> Tensor")
LIBRARY.define("ruled(Tensor x) -> Tensor")
for _name in ("shown", "ruled"):
    LIBRARY.impl(_name, lambda x: x.clone(), "CompositeExplicitAutograd")


@torch.library.custom_op("unused_results::printed", mutates_args=())
def printed(x: torch.Tensor) -> torch.Tensor:
    print("seen")
    return x.clone()


printed.register_fake(lambda x: torch.empty_like(x))
SHOWN: list[Callable[[torch.Tensor], torch.Tensor]] = [printed, torch.ops.unused_results.shown]


def _wrappers(
    show: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[Callable[..., torch.Tensor]]:
    def f(x):
        show(x.detach().mean())
        return (2 * x).sum()

    yield from (f, grad(f), vmap(f))
    yield lambda x: repeat(lambda row, c: (show(row.detach()), c * row)[1], x, x[0]).sum()


@pytest.mark.parametrize("show", SHOWN)
@pytest.mark.parametrize("transform", [lambda f: jit(f, backend="eager"), checkpoint, fuse])
def test_an_operator_whose_result_nobody_uses_is_refused(show, transform) -> None:
    for f in _wrappers(show):
        with pytest.raises(
            PurityError, match=r"test_unused_results.py:\d+ in .* calls unused_results"
        ):
            transform(f)(torch.ones(3, 2))


@pytest.mark.parametrize("show", SHOWN)
def test_an_operator_whose_result_is_used_is_not(show) -> None:
    assert jit(lambda x: show(x) * 2, backend="eager")(torch.ones(2)).tolist() == [2, 2]


def _written(show):
    def f(x):
        unread = torch.zeros_like(x)
        unread.copy_(show(x))
        return 2 * x

    return f


# What is computed of the operator's result is not used either.
ONCE_REMOVED: dict[str, Callable[..., Callable[..., object]]] = {
    "a sum": lambda show: lambda x: (show(x).sum(), 2 * x)[1],
    "a size": lambda show: lambda x: x.reshape(show(x).sum(0).shape[0], -1),
    "written to what nobody reads": _written,
    "a tuple's other item": lambda show: lambda x: (torch.stack([show(x), x]).unbind(), 2 * x)[1],
    "a nested call's other result": lambda show: (
        lambda x: checkpoint(lambda x: (2 * x, show(x)))(x)[0]
    ),
    "a gradient's other result": lambda show: (
        lambda x: grad(lambda x: (x.square().sum(), show(x.detach()).sum()), has_aux=True)(x)[0]
    ),
    "a loop": lambda show: lambda x: (repeat(lambda row, c: show(c) * row, x, x[0]), 2 * x)[1],
    "a loop's rows": lambda show: (
        lambda x: repeat(lambda row, c: (c * row, show(c)), x, x[0], collect=True)[0]
    ),
    "another carry": lambda show: (
        lambda x: repeat(lambda row, c: (c[0] * row, c[0] + show(c[1])), x, (x[0], x[1]))[0]
    ),
}


@pytest.mark.parametrize("unused", ONCE_REMOVED)
@pytest.mark.parametrize("transform", [lambda f: jit(f, backend="eager"), checkpoint])
def test_an_operator_that_no_result_depends_on_is_refused(unused, transform) -> None:
    with pytest.raises(PurityError, match=r"test_unused_results.py:\d+ in .* calls unused_results"):
        transform(ONCE_REMOVED[unused](printed))(torch.ones(3, 2))


# Each call counts, whether or not iterations, or calls, have the same operands.
CALLED: dict[str, Callable[..., object]] = {
    "twice": lambda x: printed(x) + printed(x),
    "of what all iterations share": lambda x: repeat(
        lambda row, c, shared: c * row + printed(shared), x, x[0], x[1]
    ),
    "of a constant": lambda x: repeat(lambda row, c: c * row + printed(torch.ones(2)), x, x[0]),
    "twice in an iteration": lambda x: repeat(lambda row, c: printed(c) + printed(c), x, x[0]),
    "of rows": lambda x: repeat(lambda row, c: (c * row, printed(c)), x, x[0], collect=True),
    "by a carry that is read later": lambda x: repeat(
        lambda row, c: (c[1] * row, printed(c[1])), x, (x[0], x[1])
    )[0],
    "through a write": lambda x: x.clone().copy_(printed(x)),
}


@pytest.mark.parametrize("calls", CALLED)
@pytest.mark.parametrize("transform", [lambda f: jit(f, backend="eager"), checkpoint, fuse])
def test_an_operator_is_called_as_often_as_in_the_plain_call(calls, transform, capsys) -> None:
    CALLED[calls](torch.ones(3, 2))
    plain = capsys.readouterr().out
    transformed = transform(CALLED[calls])
    for _ in range(2):
        transformed(torch.ones(3, 2))
        assert capsys.readouterr().out == plain


def test_an_operator_with_a_rule_has_no_effects() -> None:
    ruled = torch.ops.unused_results.ruled
    register_rule(ruled.default, text="i -> i")
    assert jit(lambda x: (ruled(x), x * 2)[1], backend="eager")(torch.ones(2)).tolist() == [2, 2]


def test_an_f_string_of_a_tensor_is_refused_by_line() -> None:
    with pytest.raises(PurityError, match=r"test_unused_results.py:\d+ in <lambda> "):
        jit(lambda x: (f"{x.mean():.2f}", x)[1], backend="eager")(torch.ones(2))
