"""An operator that is called for an effect is refused by name and line, and one that is used is not."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.func import grad, vmap

from torchard import PurityError, checkpoint, fuse, jit, register_rule, repeat

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


def _wrappers(show: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Callable[..., torch.Tensor]]:
    def f(x):
        show(x.detach().mean())
        return (2 * x).sum()

    yield from (f, grad(f), vmap(f))
    yield lambda x: repeat(lambda row, c: (show(row.detach()), c * row)[1], x, x[0]).sum()


@pytest.mark.parametrize("show", SHOWN)
@pytest.mark.parametrize("transform", [lambda f: jit(f, backend="eager"), checkpoint, fuse])
def test_an_operator_whose_result_nobody_uses_is_refused(show, transform) -> None:
    for f in _wrappers(show):
        with pytest.raises(PurityError, match=r"test_unused_results.py:\d+ in .* calls unused_results"):
            transform(f)(torch.ones(3, 2))


@pytest.mark.parametrize("show", SHOWN)
def test_an_operator_whose_result_is_used_is_not(show) -> None:
    assert jit(lambda x: show(x) * 2, backend="eager")(torch.ones(2)).tolist() == [2, 2]


def test_an_operator_with_a_rule_has_no_effects() -> None:
    ruled = torch.ops.unused_results.ruled
    register_rule(ruled.default, text="i -> i")
    assert jit(lambda x: (ruled(x), x * 2)[1], backend="eager")(torch.ones(2)).tolist() == [2, 2]


def test_an_f_string_of_a_tensor_is_refused_by_line() -> None:
    with pytest.raises(PurityError, match=r"test_unused_results.py:\d+ in <lambda> "):
        jit(lambda x: (f"{x.mean():.2f}", x)[1], backend="eager")(torch.ones(2))
