"""What a functionalized module cannot be or return is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchard import Mesh, checkpoint, functionalize, jit, shard
from torchard.functional.core.errors import PurityError

X = torch.ones(2, 3)


class Returns(nn.Module):
    """Its results are used when the call has ended."""

    def __init__(self, more: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.more = nn.Linear(3, 3), more

    def forward(self, x: Tensor) -> Any:
        return self.inner(x), self.more(self, x)


READ_LATER: dict[str, Callable[[Any, Tensor], Any]] = {
    "lambda": lambda m, x: lambda y: m.inner(y),
    "of a weight's owner": lambda m, x: lambda inner=m.inner: inner.weight,
    "bound method": lambda m, x: m.inner.forward,
    "in a dict": lambda m, x: {"again": [lambda y: m(y)]},
    "view": lambda m, x: m.inner._parameters.values(),
    "view of modules": lambda m, x: m._modules.items(),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda f: f,
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda f: shard(f, Mesh({"x": 2}, virtual=True)),
}


@pytest.mark.parametrize("what", READ_LATER)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_reads_the_module_later_is_refused(transform: str, what: str) -> None:
    fn, params = functionalize(Returns(READ_LATER[what]))
    with pytest.raises(PurityError, match=r"the forward of Returns returns a .* that reads the module"):
        TRANSFORMS[transform](fn)(params, X)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functions_and_views_that_read_nothing_of_it_are_returned(transform: str) -> None:
    fn, params = functionalize(Returns(lambda m, x: (len, {"k": 1}.values(), lambda y: y * 2)))
    _, (length, view, double) = TRANSFORMS[transform](fn)(params, X)
    assert (length, list(view), double(3)) == (len, [1], 6)


UNCOPIED: dict[str, tuple[Callable[[], Any], str]] = {
    "lock": (threading.Lock, r"its 0.extra \(a lock\)"),
    "in a list": (lambda: [1, threading.Lock()], r"its 0.extra \(a list\)"),
    "computed": (lambda: torch.ones(3, requires_grad=True) * 2, r"its 0.extra .*if it is detached"),
    "generator": (lambda: (i for i in range(3)), r"its 0.extra \(a generator\)"),
}


@pytest.mark.parametrize("what", UNCOPIED)
def test_a_module_without_a_copy_is_refused_by_attribute(what: str) -> None:
    make, text = UNCOPIED[what]
    module: Any = nn.Sequential(nn.Linear(3, 3))
    module[0].extra = make()
    if what == "computed":
        module[0].extra = [module[0].extra]
    with pytest.raises(TypeError, match=rf"functionalize\(Sequential\) works on a copy.*{text}"):
        functionalize(module)
