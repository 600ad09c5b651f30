"""Whatever a function reads besides its arguments may change between calls: it is never stale."""

from __future__ import annotations

import array
import functools
import linecache
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import checkpoint, jit
from torchard.functional.guards import reachable

X = torch.arange(4.0) + 1
Fn = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Config:
    """Plain data with a function, a list and a dict in it."""

    scale: float = 2.0
    act: Callable[[torch.Tensor], torch.Tensor] = torch.sin
    weights: list[Any] = field(default_factory=lambda: [X])
    table: dict[str, Any] = field(default_factory=lambda: {"a": 2.0})


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        self.act: Any = torch.sin
        self.unrelated = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.act(self.layers(x)))

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Static:
    """An argument compared by identity, and changed."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.weights = [1.0]


settings_ = {"scale": 2.0, "unrelated": 0}
registry: dict[str, Any] = {"a": 2.0}
module = types.ModuleType("a_users_module")
module.scale = 2.0  # type: ignore[attr-defined]
module.act = torch.sin  # type: ignore[attr-defined]


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def other_helper(x: torch.Tensor) -> torch.Tensor:
    return x * 3


original_helper = helper


def replace_global_function() -> None:
    global helper
    helper = other_helper if helper is original_helper else original_helper


# A case makes a function of one tensor, and the ways in which what it reads may change.
Case = tuple[Fn, list[Callable[[], object]]]


def a_list() -> Case:
    ws: list[Any] = [X]
    return (
        lambda x: sum(((x * w).sum() for w in ws), x.sum() * 0),
        [
            lambda: ws.append(X + len(ws)),
            lambda: ws.insert(0, 3.0),
            lambda: ws.reverse(),
            lambda: ws.__setitem__(0, X * 2),
            lambda: ws.append(ws[-1]),
            lambda: ws.__setitem__(0, torch.ones(())),
            lambda: len(ws) > 1 and ws.pop(0),
        ],
    )


def a_dict() -> Case:
    p: dict[str, Any] = {"a": X, "b": 2.0}
    return (
        lambda x: sum(((x * v).sum() * (len(k) + 1) for k, v in p.items()), x.sum() * 0),
        [
            lambda: p.__setitem__(f"key{len(p)}", X * len(p)),
            lambda: p.__setitem__("b", p.get("b", 1.0) + 1),
            lambda: p.__setitem__("renamed", p.pop("b", 2.0)),
            lambda: p.__setitem__("a", X + 1),
            lambda: p.__setitem__("b", True),
            lambda: p.__setitem__("b", 1),
        ],
    )


def odd_containers() -> Case:
    kept: deque[Any] = deque([1.0])
    chosen = {"sin"}
    ordered: OrderedDict[str, Any] = OrderedDict(a=1.0)
    holder: dict[str, Any] = {"shape": (1, 2)}
    array = np.ones(2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x.sin() if "sin" in chosen else x.cos()
        x = x * next(iter(ordered.values())) * (len(ordered) + 1)
        return x * sum(kept) * len(holder["shape"]) * float(array.sum())

    return (
        fn,
        [
            lambda: kept.appendleft(2.0),
            lambda: chosen.symmetric_difference_update({"sin"}),
            lambda: ordered.update({f"k{len(ordered)}": 2.0}),
            lambda: ordered.move_to_end(next(iter(ordered))),
            lambda: holder.__setitem__("shape", (1,) * (len(holder["shape"]) + 1)),
            lambda: array.__iadd__(1),
        ],
    )


class Described:
    """A class whose ``__match_args__`` is a descriptor, as nanobind's are."""

    __match_args__ = property(lambda self: ("scale",))
    scale = 2.0


def masked_arrays() -> Case:
    """Of which one is numpy's constant, which refuses to be read by its own methods."""
    values, described = np.ma.array([1.0, 2.0, 4.0], mask=[False, True, False]), Described()

    def fn(x: torch.Tensor) -> torch.Tensor:
        match described:
            case Described():
                x = x * described.scale
        return x * float(values.sum()) if values is not np.ma.masked else x

    constant = np.ma.masked

    def of_constant(x: torch.Tensor) -> torch.Tensor:
        return fn(x) + (1 if constant is np.ma.masked else 0)

    return (
        of_constant,
        [
            lambda: values.__setitem__(0, values[0] + 1),
            lambda: values.__setitem__(2, np.ma.masked),
            lambda: setattr(Described, "scale", Described.scale + 1),
        ],
    )


def buffers() -> Case:
    """Small, large and of objects: their contents are part of a trace."""
    small, large, objects = np.ones(2), np.zeros(1 << 16), np.array([1.0, None], dtype=object)
    raw, typed = bytearray(b"ab"), array.array("d", [1.0, 2.0])
    view = memoryview(bytearray(b"ab"))

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = x * float(small.sum()) + float(large[-1]) - objects[0]
        return x * sum(raw) + sum(typed) * view[0]

    return (
        fn,
        [
            lambda: small.__iadd__(1),
            lambda: large.__setitem__(-1, large[-1] + 1),
            lambda: objects.__setitem__(0, objects[0] + 1),
            lambda: raw.append(1),
            lambda: typed.__setitem__(0, typed[0] + 1),
            lambda: view.__setitem__(0, view[0] - 1),
        ],
    )


def a_cached_property() -> Case:
    class Layer:
        scale = 2.0

        @functools.cached_property
        def factor(self) -> float:
            return self.scale + 1

    layer = Layer()

    def again(scale: float) -> None:
        Layer.scale = scale
        vars(layer).pop("factor", None)

    return lambda x: x * layer.factor, [lambda: again(Layer.scale + 1), lambda: again(0.5)]


def an_object() -> Case:
    config = Config()

    def fn(x: torch.Tensor) -> torch.Tensor:
        x = config.act(x) * config.scale * len(config.table)
        return x + sum((x * w).sum() for w in config.weights)

    return (
        fn,
        [
            lambda: setattr(config, "act", torch.cos if config.act is torch.sin else torch.sin),
            lambda: setattr(config, "scale", config.scale + 1),
            lambda: config.weights.append(X),
            lambda: config.table.__setitem__(f"k{len(config.table)}", 1),
            lambda: setattr(config, "weights", [X, X]),
        ],
    )


def a_module() -> Case:
    torch.manual_seed(0)
    net = Net()

    def freeze(layer: Any, value: float) -> None:
        with torch.no_grad():
            layer.weight.fill_(value)

    return (
        lambda x: net(x),
        [
            lambda: net.layers.append(torch.nn.ReLU()),
            lambda: net.layers[0].register_forward_hook(lambda m, a, out: out * 2),
            lambda: net.register_forward_pre_hook(lambda m, a: (a[0] + 1,)),
            lambda: setattr(net, "act", torch.cos if net.act is torch.sin else torch.sin),
            lambda: setattr(net, "helper", lambda x: x * 3),
            lambda: setattr(net.layers[0], "bias", None),
            lambda: freeze(net.layers[0], 0.5),
            lambda: net.layers.__setitem__(1, torch.nn.Sigmoid()),
            lambda: setattr(net.layers[0], "weight", torch.nn.Parameter(torch.ones(4, 4))),
        ],
    )


def a_class() -> Case:
    class Layer:
        scale = 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale * self.size

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @property
        def size(self) -> int:
            return 2

    layer = Layer()
    return (
        lambda x: layer(x),
        [
            lambda: setattr(Layer, "inner", lambda self, x: x.cos()),
            lambda: setattr(Layer, "scale", Layer.scale + 1),
            lambda: setattr(Layer, "size", property(lambda self: 5)),
            lambda: setattr(layer, "scale", 7.0),
            lambda: setattr(Layer, "__call__", lambda self, x: x * 11),
        ],
    )


def globals_() -> Case:
    return (
        lambda x: helper(x) * settings_["scale"] * sum(registry.values()) * module.scale,
        [
            replace_global_function,
            lambda: settings_.__setitem__("scale", settings_["scale"] + 1),
            lambda: registry.__setitem__(f"k{len(registry)}", 1.5),
            lambda: setattr(module, "scale", module.scale + 1),
        ],
    )


def a_function_and_its_defaults() -> Case:
    scale = 2.0

    def inner(x: torch.Tensor, by: float = 2.0, *, and_by: float = 1.0) -> torch.Tensor:
        return x * by * and_by * scale

    def rescale() -> None:
        nonlocal scale
        scale += 1

    def as_autoreload_does() -> None:
        def inner_again(x: torch.Tensor, by: float = 2.0, *, and_by: float = 1.0) -> torch.Tensor:
            return x - by * and_by * scale

        inner.__code__ = inner_again.__code__

    partial = functools.partial(inner, by=3.0)
    return (
        lambda x: inner(x) + partial(x),
        [
            rescale,
            as_autoreload_does,
            lambda: setattr(inner, "__defaults__", (4.0,)),
            lambda: inner.__kwdefaults__.__setitem__("and_by", 5.0),
            lambda: partial.keywords.__setitem__("by", 6.0),
        ],
    )


def surroundings() -> Case:
    """Not of the function: of the thread."""
    state: dict[str, Any] = {"grad": True, "device": "cpu"}

    def inner(x: torch.Tensor) -> torch.Tensor:
        made = torch.ones(4)
        return (x * 2 if torch.is_grad_enabled() else x * 3) * (2 if made.is_meta else 1)

    run: Any = jit(inner, backend="eager")

    def fn(x: torch.Tensor, f: Fn = inner) -> torch.Tensor:
        with torch.set_grad_enabled(state["grad"]), torch.device(state["device"]):
            return f(x)

    fn.transformed = functools.partial(fn, f=run)  # type: ignore[attr-defined]
    return (
        fn,
        [
            lambda: state.__setitem__("grad", not state["grad"]),
            lambda: state.__setitem__("device", "cpu" if state["device"] == "meta" else "meta"),
        ],
    )


def a_static_argument() -> Case:
    static = Static()

    def inner(x: torch.Tensor, static: Static) -> torch.Tensor:
        return x * static.scale * len(static.weights)

    run: Any = jit(inner, backend="eager")

    def fn(x: torch.Tensor, f: Callable[..., torch.Tensor] = inner) -> torch.Tensor:
        return f(x, static)

    fn.transformed = functools.partial(fn, f=run)  # type: ignore[attr-defined]
    return (
        fn,
        [
            lambda: setattr(static, "scale", static.scale + 1),
            lambda: static.weights.append(1.0),
        ],
    )


def tied() -> Case:
    """Weights that are one tensor, then two, then one."""
    p = {"a": X, "b": X}
    return (
        lambda x: (x * p["a"]).sum() + (x - p["b"]).square().sum(),
        [
            lambda: p.__setitem__("b", X + 1),
            lambda: p.__setitem__("b", p["a"]),
            lambda: p.update(a=X * 3, b=X * 4),
            lambda: p.update(a=p["b"], b=p["a"]),
        ],
    )


def an_iterator() -> Case:
    """Reading changes it: such functions are traced at every call."""
    numbers = iter(range(1, 1000))
    twin = iter(range(1, 1000))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * next(twin)

    fn.transformed = jit(lambda x: x * next(numbers), backend="eager")  # type: ignore[attr-defined]
    return fn, [lambda: None]


CASES = [
    a_list,
    a_dict,
    odd_containers,
    masked_arrays,
    buffers,
    a_cached_property,
    an_object,
    a_module,
    a_class,
    globals_,
    a_function_and_its_defaults,
    surroundings,
    a_static_argument,
    tied,
    an_iterator,
]

quiet = pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")


@quiet
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=examples(ci=4, explore=150))
def test_nothing_is_stale(case: Callable[[], Case], seed: int) -> None:
    fn, changes = case()
    run = getattr(fn, "transformed", None) or jit(fn, backend="eager")
    draw = random.Random(seed)
    for _ in range(6):
        for _ in range(draw.choice([0, 1, 1, 2])):
            draw.choice(changes)()
        torch.testing.assert_close(run(X), fn(X), rtol=0, atol=0)


@quiet
@pytest.mark.parametrize("case", [a_list, a_dict, an_object, a_module, tied])
def test_gradients_are_not_stale(case: Callable[[], Case]) -> None:
    fn, changes = case()
    run = checkpoint(fn)
    for change in changes:
        change()
        got, want = (torch.func.grad(lambda x, f=f: f(x).sum())(X) for f in (run, fn))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@quiet
def test_more_objects_than_are_guarded_are_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_OBJECTS", 100)
    boxes: list[list[float]] = [[1.0] for _ in range(101)]
    run = jit(lambda x: x * boxes[-1][0], backend="eager")
    for _ in range(3):
        assert torch.equal(run(X), X * boxes[-1][0])
        boxes[-1][0] += 1


def traces_of(fn: Fn, change: Callable[[], object], times: int = 4) -> int:
    """How often a function is traced that is called before and after each of some changes."""
    run = jit(fn, backend="eager")
    run(X)
    for _ in range(times):
        change()
        run(X)
    return run._traces


def test_what_is_not_read_does_not_retrace() -> None:
    net, config = Net(), Config()
    history: list[float] = []

    class Trainer:
        def __init__(self) -> None:
            self.net, self.history, self.step = net, history, 0

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).sum()

        def train(self, x: torch.Tensor) -> None:
            self.history.append(float(self.loss(x).detach()))
            self.step += 1

    trainer = Trainer()
    assert traces_of(lambda x: net(x), lambda: net.unrelated.append(1)) == 1
    assert traces_of(lambda x: x * config.scale, lambda: config.weights.append(X)) == 1
    assert traces_of(trainer.loss, lambda: trainer.train(X)) == 1
    assert traces_of(lambda x: x * settings_["scale"], lambda: settings_.update(unrelated=X)) == 1


def test_new_tensors_and_equal_values_do_not_retrace() -> None:
    weights = {"a": X, "b": X * 2}
    config = Config()
    box: dict[str, Any] = {"options": {"scale": 2.0, "names": ["a"]}}
    assert (
        traces_of(
            lambda x: x * weights["a"] - weights["b"],
            lambda: weights.update(a=X + 1, b=weights["b"] * 2),
        )
        == 1
    )
    assert traces_of(lambda x: x * config.scale, lambda: setattr(config, "scale", float("2.0"))) == 1
    assert (
        traces_of(
            lambda x: x * box["options"]["scale"] * len(box["options"]["names"]),
            lambda: box.update(options={"scale": 2.0, "names": ["a"]}),
        )
        == 1
    )


def test_a_cell_of_a_notebook_that_is_run_again() -> None:
    """Its functions come anew, from another file of the same name."""
    names: dict[str, Any] = {"torch": torch}

    def cell(text: str) -> None:
        linecache.cache["<ipython-input-1>"] = (len(text), None, text.splitlines(True), "")
        exec(compile(text, "<ipython-input-1>", "exec"), names)

    cell("def act(x):\n    return x * 2\ndef fn(x):\n    return act(x)")
    run = jit(names["fn"], backend="eager")
    assert torch.equal(run(X), X * 2)
    cell("def act(x):\n    return x * 3")
    assert torch.equal(run(X), X * 3)


@pytest.mark.parametrize("modules", [1, 8])
def test_a_cached_call_looks_at_slots_not_at_structure(modules: int) -> None:
    """Counted, not timed: the quick question calls no Python function per thing that is held."""

    net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(modules)])
    run = jit(lambda x: net(x), backend="eager")
    run(X)
    (entry,) = run._entries.values()
    calls = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    sys.setprofile(count)
    try:
        assert entry.environment.unchanged()
    finally:
        sys.setprofile(None)
    assert calls[0] <= 4
