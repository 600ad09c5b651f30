"""What a call of a module changes in it is undone as a whole: every call is the module's next one."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from torchard import PurityError, functionalize, jit
from torchard.functional.modules.state import Contents

X = torch.arange(6.0).reshape(2, 3)


def plus_one(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + 1


class Lazy(nn.Module):
    """A module that prepares itself at its first call; `prepared` says whether it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.marks: list[Any] = []
        self.table: dict[str, Any] = {}
        self.settings = SimpleNamespace(seen=set())

    def forward(self, x: Tensor) -> Tensor:
        if not self.prepared():
            self.prepare()
        return self.linear(x)

    def prepared(self) -> bool:
        return hasattr(self, "_ready")

    def prepare(self) -> None:
        self.linear.register_forward_hook(plus_one)
        self._ready = True


class InAList(Lazy):
    def prepared(self) -> bool:
        return bool(self.marks)

    def prepare(self) -> None:
        self.marks.append(self.linear.register_forward_hook(plus_one))


class InADict(Lazy):
    def prepared(self) -> bool:
        return "hook" in self.table

    def prepare(self) -> None:
        self.table["hook"] = self.linear.register_forward_pre_hook(lambda m, args: (args[0] * 2,))


class InAnObject(Lazy):
    def prepared(self) -> bool:
        return "hook" in self.settings.seen

    def prepare(self) -> None:
        self.linear.register_forward_hook(plus_one)
        self.settings.seen.add("hook")


class OfAChild(Lazy):
    """The flag is the child's."""

    def prepared(self) -> bool:
        return hasattr(self.linear, "_ready")

    def prepare(self) -> None:
        self.linear.register_forward_hook(plus_one)
        self.linear._ready = True


class Removing(Lazy):
    """A hook that was there goes at the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.marks.append(self.linear.register_forward_hook(plus_one))

    def prepared(self) -> bool:
        return not self.marks

    def prepare(self) -> None:
        self.marks.pop().remove()


class WithABuffer(Lazy):
    def prepare(self) -> None:
        self.register_buffer("offset", torch.arange(3.0), persistent=False)
        self.linear.register_forward_hook(lambda m, args, out: out + self.offset)
        self._ready = True


class WithAModule(Lazy):
    def prepare(self) -> None:
        self.add_module("extra", nn.Softplus())
        self.linear.register_forward_hook(lambda m, args, out: self.extra(out))
        self._ready = True


PREPARED = {
    each.__name__: each
    for each in (Lazy, InAList, InADict, InAnObject, OfAChild, Removing, WithABuffer, WithAModule)
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", PREPARED)
def test_every_call_is_the_first(name: str, traced: bool) -> None:
    torch.manual_seed(0)
    module = PREPARED[name]()
    fn, params = functionalize(module)
    before = Contents(fn.module)
    for run in [jit(fn, backend="eager")] * 2 * traced + [fn] * 3:
        torch.testing.assert_close(run(params, X), module(X))
        assert not before.changed()
    with_both, both = functionalize(module)  # prepared
    torch.testing.assert_close(with_both(both, X), module(X))


def test_a_failing_call_is_undone_too() -> None:
    fn, params = functionalize(Lazy())
    before = Contents(fn.module)
    with pytest.raises(RuntimeError):
        fn(params, torch.ones(2, 5))
    assert not before.changed()


class Forgetful(Lazy):
    def prepared(self) -> bool:
        return False

    def prepare(self) -> None:
        self.linear.register_forward_hook(plus_one)


class Flagged(Lazy):
    """Its flag is there from the start, as a number is that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def prepared(self) -> bool:
        return self.ready

    def prepare(self) -> None:
        self.linear.register_forward_hook(plus_one)
        self.ready = True


class CountingInADict(Lazy):
    def __init__(self) -> None:
        super().__init__()
        self.table["calls"] = 0

    def prepare(self) -> None:
        self.table["calls"] += 1


class CountingInAnObject(Lazy):
    def __init__(self) -> None:
        super().__init__()
        self.settings.calls = 0

    def prepare(self) -> None:
        self.settings.calls += 1


REFUSED = [
    (Forgetful, "installs or removes hooks, and nothing in the module records"),
    (Flagged, "changes its attribute 'ready'.*run the module once before functionalize"),
    (CountingInADict, "changes 'calls' in a dict or object.*make it a buffer"),
    (CountingInAnObject, "changes 'calls' in a dict or object"),
]


@pytest.mark.parametrize(("kind", "message"), REFUSED)
def test_state_that_calls_would_keep_is_refused(kind: Any, message: str) -> None:
    fn, params = functionalize(kind())
    for run in (fn, fn, jit(fn, backend="eager")):
        with pytest.raises(PurityError, match=message):
            run(params, X)


def test_a_module_that_ran_once_has_its_flag() -> None:
    module = Flagged()
    module(X)
    fn, params = functionalize(module)
    torch.testing.assert_close(fn(params, X), module(X))


def test_buffers_that_a_call_creates_are_no_result() -> None:
    fn, params = functionalize(WithABuffer())
    with pytest.raises(PurityError, match=r"the forward creates 'offset'.*Run the module once"):
        fn(params, X, buffers=fn.buffers)


def test_hidden_states_are_those_of_the_call() -> None:
    """Hooks that collect what modules compute, and are installed when that is first asked for."""
    module = Collecting()
    fn, params = functionalize(module)
    run = jit(lambda p, x: fn(p, x, collect=True), backend="eager")
    for _ in range(3):
        want = copy.deepcopy(module)(X, collect=True)
        for have in (fn(params, X, collect=True), run(params, X)):
            torch.testing.assert_close(have, want)
        torch.testing.assert_close(fn(params, X), want[-1])


class Collecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, collect: bool = False) -> Any:
        found = [] if collect else None
        if collect and not getattr(self, "_installed", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda m, args, out: self._note(out))
            self._installed = True
        self._found = found
        for layer in self.layers:
            x = layer(x)
        return x if found is None else [*found, x]

    def _note(self, out: Tensor) -> None:
        if self._found is not None:
            self._found.append(out)


# -- trained and frozen -----------------------------------------------------------------------------


def test_frozen_parameters_are_split_off() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    module(X).sum().backward()
    want = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    fn, params = functionalize(module)
    trained, frozen = fn.split(params)
    assert {**trained, **frozen}.keys() == params.keys()
    loss = lambda trained, x: fn({**trained, **frozen}, x).sum()  # noqa: E731
    for run in (torch.func.grad(loss), jit(torch.func.grad(loss), backend="eager")):
        torch.testing.assert_close(run(trained, X), want)
    with pytest.raises(KeyError, match=r"params lack 1\.bias"):
        fn.split({k: v for k, v in params.items() if k != "1.bias"})


def test_frozen_layers_of_a_stack_are_split_off() -> None:
    module = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))})
    for layer in module["layers"]:
        layer.weight.requires_grad_(False)
    fn, params = functionalize(module, stacked="layers")
    assert [list(part) for part in fn.split(params)] == [["layers.*.bias"], ["layers.*.weight"]]


# -- results, and functions that are equal ----------------------------------------------------------


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return Registered(a=x), [Registered(b=x + 1, c=Registered(d=x))]


class Registered(dict[str, Any]):
    """A class that torch's pytrees know, and that no other test returns."""


torch_pytree.register_pytree_node(
    Registered,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: Registered(zip(keys, values, strict=True)),
)


def test_several_results_of_one_class() -> None:
    fn, params = functionalize(Twice())
    for run in (fn, jit(fn, backend="eager")):
        torch.testing.assert_close(run(params, X), Twice()(X))


def scaled(by: float) -> Any:
    return lambda x: x * by


ACTIVATIONS = {
    "partials": lambda i: functools.partial(nn.functional.gelu, approximate="tanh"),
    "partials of partials": lambda i: functools.partial(functools.partial(torch.add, 1.0), alpha=2),
    "lambdas": lambda i: lambda x: x.tanh(),
    "closures": lambda i: scaled(2.0),
}
OTHERS = {
    "partials": lambda i: functools.partial(nn.functional.gelu, approximate="tanh" if i else "none"),
    "closures": lambda i: scaled(2.0 + i),
    "defaults": lambda i: lambda x, by=float(i): x * by,
}


class Activated(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(3, 3), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


class Stack(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Activated(activation(i)) for i in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layers_with_equal_functions_are_stacked(name: str) -> None:
    module = Stack(ACTIVATIONS[name])
    fn, params = functionalize(module, stacked="layers")
    torch.testing.assert_close(fn(params, X), module(X))


@pytest.mark.parametrize("name", OTHERS)
def test_layers_with_other_functions_are_refused(name: str) -> None:
    fn, params = functionalize(Stack(OTHERS[name]), stacked="layers")
    with pytest.raises(ValueError, match="reads its attribute 'activation', which differs"):
        fn(params, X)


# -- copies -----------------------------------------------------------------------------------------


class ClosingOver(nn.Module):
    """A hook and a function that close over the module itself, as a class's own hooks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(3))
        by = lambda out: out * self.scale  # noqa: E731
        self.linear.register_forward_hook(lambda module, args, out: by(out))
        self.last = lambda x: self.linear(x) + self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


def test_functions_close_over_the_copy() -> None:
    torch.manual_seed(0)
    module = ClosingOver()
    fn, params = functionalize(module)
    module(X).sum().backward()
    want = {k: p.grad for k, p in module.named_parameters()}
    loss = lambda p, x: fn(p, x).sum()  # noqa: E731
    for run in (torch.func.grad(loss), jit(torch.func.grad(loss), backend="eager")):
        torch.testing.assert_close(run(params, X), want)


def test_lazy_modules_run_once_first() -> None:
    module = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0\.weight' gets its shape in the first call.*Run the module"):
        functionalize(module)
    module(X)
    fn, params = functionalize(module)
    torch.testing.assert_close(fn(params, X), module(X))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.running_mean.mul_(0.5)
        self.calls += 1
        return self.norm(x) + self.calls


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("around", [lambda f: f, lambda f: jit(f, backend="eager"), torch.func.grad])
def test_a_refused_update_changes_no_buffer(around: Any, train: bool) -> None:
    module = Counting().train(train)
    fn, params = functionalize(module)
    before = copy.deepcopy(fn.buffers)
    for _ in range(2):
        with pytest.raises(PurityError, match=r"calls|running_mean|in place"):
            around(lambda x: fn(params, x).sum())(X)
        torch.testing.assert_close(fn.buffers, before)
        torch.testing.assert_close(dict(module.named_buffers()), before)
    _, after = fn(params, X, buffers=fn.buffers)
    assert after["calls"].tolist() == [1, 1, 1]
    torch.testing.assert_close(fn.buffers, before)


@pytest.mark.parametrize("made", [True, False], ids=["made in it", "made before"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_calls_in_inference_mode(train: bool, made: bool) -> None:
    """Tensors made in it have no versions, by which updates of buffers are noticed."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).train(train)
    want = functionalize(module)[0](functionalize(module)[1], X, buffers=functionalize(module)[0].buffers)
    with torch.inference_mode(made):
        fn, params = functionalize(copy.deepcopy(module))
        params, buffers = ({k: v.clone() for k, v in d.items()} for d in (params, fn.buffers))
    with torch.inference_mode():
        for run in (fn, jit(fn, backend="eager")):
            torch.testing.assert_close(run(params, X, buffers=buffers), want)
        if train:
            with pytest.raises(PurityError, match="updates its buffer"):
                fn(params, X)
        else:
            torch.testing.assert_close(fn(params, X), want[0])
