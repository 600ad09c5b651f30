"""Objects among results that are no pytree nodes: their tensors are results, or refused by path."""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from any_size import fuse
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from torchard import (
    Mesh,
    P,
    accumulate,
    checkpoint,
    functionalize,
    jit,
    repeat,
    shard,
    shard_map,
    trace,
)
from torchard.functional.core.errors import PurityError
from torchard.testing import equal

MESH = Mesh({"x": 2}, virtual=True)
X, OTHER = torch.tensor([[0.5, 1.0], [2.0, -1.0]]), torch.tensor([[3.0, 0.1], [0.2, 7.0]])
CONSTANT = torch.ones(2)
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "planned": lambda f: jit(f, backend="eager", memory="planned"),
    "shard": lambda f: shard(f, MESH, out_specs=(P("x"), None)),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "accumulate": lambda f: accumulate(f, 2, batch=0),
    "nested": lambda f: jit(lambda x: checkpoint(lambda y: fuse(f)(y))(x), backend="eager"),
}


@dataclass(frozen=True)
class Frozen:
    value: Any
    label: str = "a label"


class Slotted:
    __slots__ = ("more", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Child(Slotted):
    """Slots of a base, and attributes of its own."""

    def __init__(self, value: Any) -> None:
        super().__init__(3)
        self.deep = [{"k": (value, CONSTANT)}]


class Uncopied:
    """With a lock, which cannot be copied, and itself."""

    def __init__(self, value: Any) -> None:
        self.value, self.lock, self.me = value, threading.Lock(), self


class Pair(NamedTuple):
    left: Any
    right: Any


class Listed(list[Any]):
    pass


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dataclass": (Frozen, lambda o: o.value),
    "slots": (Slotted, lambda o: o.value),
    "slots of a base": (Child, lambda o: o.deep[0]["k"][0]),
    "a lock, a cycle": (Uncopied, lambda o: o.me.value),
    "nested": (lambda y: Frozen(Slotted(Frozen([y]))), lambda o: o.value.value.value[0]),
    "namespace": (lambda y: types.SimpleNamespace(y=y), lambda o: o.y),
    "UserDict": (lambda y: UserDict(y=y), lambda o: o["y"]),
    "deque": (lambda y: Frozen(deque([y])), lambda o: o.value[0]),
    "subclass of list": (lambda y: Frozen(Listed([y])), lambda o: o.value[0]),
    "OrderedDict": (lambda y: Frozen(OrderedDict(y=y)), lambda o: o.value["y"]),
    "partial": (lambda y: functools.partial(torch.mul, y), lambda o: o(1.0)),
    "bound method": (lambda y: Frozen(y).__repr__, lambda o: o.__self__.value),
    "named tuple": (lambda y: Frozen(Pair(1, y)), lambda o: o.value.right),
    "distribution": (
        lambda y: torch.distributions.Normal(y, 1.0, validate_args=False),
        lambda o: o.mean,
    ),
}


def full(value: Any) -> Tensor:
    return value.full() if hasattr(value, "full") else value


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tensors_in_objects_are_those_of_the_call(transform: str, holder: str) -> None:
    make, get = HOLDERS[holder]

    def fn(x: Tensor) -> Any:
        return x.sin(), {"held": make(x.cos() * 2)}

    run = TRANSFORMS[transform](fn)
    for x in (X, OTHER):  # traced, and cached
        out, held = run(x)
        torch.testing.assert_close(full(out), x.sin())
        if holder == "partial" and transform == "shard":
            continue  # what the object does with a placed value is its own affair
        torch.testing.assert_close(full(get(held["held"])), x.cos() * 2)
    assert type(held["held"]) is type(make(X))


@pytest.mark.parametrize("holder", HOLDERS)
def test_their_derivatives(holder: str) -> None:
    make, get = HOLDERS[holder]

    def fn(x: Tensor) -> Any:
        return x.sin(), make(x.cos() * x)

    def loss(f: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: (get(f(x)[1]).square() + f(x)[0]).sum()

    run = checkpoint(fn)
    torch.testing.assert_close(grad(loss(run))(X), grad(loss(fn))(X))
    torch.testing.assert_close(checkpoint(grad(loss(run)))(X), grad(loss(fn))(X))
    torch.testing.assert_close(jvp(loss(run), (X,), (OTHER,)), jvp(loss(fn), (X,), (OTHER,)))
    torch.testing.assert_close(vmap(lambda x: get(run(x)[1]))(X), vmap(lambda x: get(fn(x)[1]))(X))
    x = X.clone().requires_grad_()
    get(run(x)[1]).square().sum().backward()
    torch.testing.assert_close(x.grad, grad(lambda x: get(fn(x)[1]).square().sum())(X))


def test_derivatives_where_the_function_runs_again() -> None:
    def fn(x: Tensor) -> Any:
        with torch.no_grad():
            scale = x.sum()
        return x.sin(), Frozen([x * scale, Slotted(x.exp())])

    def loss(f: Callable[..., Any]) -> Callable[[Tensor], Tensor]:
        return lambda x: (f(x)[1].value[0] * f(x)[1].value[1].value).sum()

    torch.testing.assert_close(grad(loss(checkpoint(fn)))(X), grad(loss(fn))(X))


def test_paths_and_specs_name_what_holds_a_tensor() -> None:
    def fn(x: Tensor) -> Any:
        return x.sin(), Frozen([x * 2, {"k": x * 3}])

    paths = [leaf.path for leaf in trace(fn)(X).outputs]
    assert paths == ["out[0]", "out[1].value[0]", "out[1].value[1]['k']"]
    run = shard(fn, MESH, out_specs=(P(), P("x")))
    assert run(X)[1].value[1]["k"].spec == P("x", None)


def test_what_is_shared_remains_so() -> None:
    def fn(x: Tensor) -> Any:
        held = Frozen(x * 2)
        return x, held, [held, Frozen(held)], Frozen((CONSTANT, x, MESH))

    out = jit(fn, backend="eager")(X)
    assert out[1] is out[2][0] is out[2][1].value
    assert out[3].value[0] is CONSTANT
    assert out[3].value[2] is MESH


def test_calls_return_objects_of_their_own() -> None:
    run = jit(lambda x: Frozen([x * 2]), backend="eager")
    first, second = run(X), run(X)
    first.value.append(1)
    assert len(second.value) == len(run(X).value) == 1


def test_objects_without_tensors_are_returned_as_they_are() -> None:
    plain, function = Frozen([1, "two", CONSTANT]), jit(torch.sin, backend="eager")
    function(X)  # its cache has tensors of another trace
    module = nn.Linear(2, 2)
    out = jit(lambda x: (x.sin(), plain, function, module, Frozen(module)), backend="eager")(X)
    assert out[1:4] == (plain, function, module)
    assert out[4].value is module


def generator(y: Any) -> Any:
    yield y


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "function": (
        lambda y: lambda: y,
        r"out\[1\] is a function, and out\[1\] \(its y\) is a tensor",
    ),
    "default": (lambda y: lambda z=y: z, r"\(a default of it\)"),
    "in an object": (
        lambda y: Frozen(lambda: y),
        r"out\[1\] is a Frozen, and out\[1\].value \(its y\)",
    ),
    "generator": (generator, r"out\[1\] is a generator, and out\[1\] \(its y\)"),
    "set": (lambda y: {y}, r"out\[1\] is a set"),
    "in a set": (lambda y: Frozen({y, 1}), r"out\[1\] is a Frozen"),
    "view": (lambda y: {"k": y}.values(), r"out\[1\] is a dict_values, and out\[1\]\['k'\]"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_has_no_copy_is_refused_by_path(transform: str, what: str) -> None:
    make, text = REFUSED[what]
    run = TRANSFORMS[transform](lambda x: (x.sin(), make(x * 2)))
    with pytest.raises(PurityError, match=text) as raised:
        run(X)
    assert "register" in str(raised.value)


KEEP: dict[str, Callable[[Any, Tensor], None]] = {
    "attribute": lambda memory, y: setattr(memory, "value", y),
    "list": lambda memory, y: memory.value.append(y),
    "function": lambda memory, y: setattr(memory, "value", lambda: y),
}


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("transform", ["jit", "checkpoint", "fuse"])
def test_a_tensor_that_an_argument_keeps_is_refused(transform: str, keep: str) -> None:
    def fn(x: Tensor, memory: Any) -> Tensor:
        KEEP[keep](memory, x * 2)
        return x.sin()

    run = TRANSFORMS[transform](fn)
    with pytest.raises(
        PurityError, match=r"changes args\[1\], a Slotted: args\[1\].value.* is now a tensor"
    ):
        run(X, Slotted([]))


def test_an_argument_may_hold_tensors_of_the_trace_around_it() -> None:
    def inner(x: Tensor, memory: Any) -> Tensor:
        return x + memory.value

    run = jit(lambda x: checkpoint(inner)(x, Slotted(x * 2)), backend="eager")
    torch.testing.assert_close(run(X), X * 3)
    torch.testing.assert_close(run(OTHER), OTHER * 3)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return x, Frozen([x * 2])


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: Tensor) -> Any:
        held = None
        for layer in self.layers:
            x, held = layer(x)
        return x, held


@pytest.mark.parametrize("stacked", [(), "layers"])
def test_objects_that_layers_return(stacked: Any) -> None:
    torch.manual_seed(0)
    module = Stack()
    fn, params = functionalize(module, stacked=stacked)
    want = module(X)
    for run in (fn, jit(fn, backend="eager"), shard(fn, MESH), checkpoint(fn)):
        out, held = run(params, X)
        torch.testing.assert_close(full(out), want[0])
        torch.testing.assert_close(full(held.value[0]), want[1].value[0])


def test_objects_in_shard_map_and_in_loops() -> None:
    def block(w: Tensor, x: Tensor) -> Any:
        return x * w, Frozen(x + w)

    mapped = shard_map(lambda x: Frozen(x * 2), MESH, P("x"), P("x"))
    torch.testing.assert_close(mapped(X).value.full(), X * 2)
    run = jit(lambda w, x: repeat(block, w, x, collect=True), backend="eager")
    assert run(X, X[0])[1].value.shape == (2, 2)


def test_tests_of_users_look_into_objects() -> None:
    equal(checkpoint(lambda x: (x, Slotted(x.cos()))), lambda x: (x, Slotted(x.cos())), X)
    with pytest.raises(AssertionError, match=r"out\[1\].value"):
        equal(lambda x: (x, Slotted(x.cos() * 2)), lambda x: (x, Slotted(x.cos())), X)


@pytest.mark.parametrize("transform", ["jit", "checkpoint", "fuse", "nested"])
def test_containers_in_a_result_are_a_call_s_own(transform: str) -> None:
    """What a caller does to one result is not in the next one."""

    def made(x: Tensor) -> Frozen:
        return Frozen([x * 2, {"seen": [1]}], deque(["a"]))  # type: ignore[arg-type]

    run = TRANSFORMS[transform](made)
    first = run(X)
    first.value[1]["seen"].append(2)
    first.label.append("b")
    second = run(OTHER)
    assert second.value[1] == {"seen": [1]} and second.label == deque(["a"])
    torch.testing.assert_close(second.value[0], OTHER * 2)


@pytest.mark.parametrize("held", [lambda a, b: deque([a, b]), lambda a, b: {(0, 1): a, (1, 1): b}])
def test_tensors_without_a_path_of_their_own(held: Callable[..., Any]) -> None:
    run = jit(lambda x: Frozen(held(x * 2, x + 1)), backend="eager")
    for x in (X, OTHER):
        found = run(x).value
        first, second = found.values() if isinstance(found, dict) else found
        torch.testing.assert_close([first, second], [x * 2, x + 1])
