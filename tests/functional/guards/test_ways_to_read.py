"""Ways to read state, each with a change of it: whatever the transform, no result is stale."""

from __future__ import annotations

import argparse
import builtins
import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import importlib
import logging
import math
import operator
import os
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchard import Mesh, MeshTensor, P, checkpoint, functionalize, jit, shard

X = torch.arange(1.0, 5)
Fn = Callable[[torch.Tensor], torch.Tensor]
Way = tuple[Fn, Callable[[], object]]

users = types.ModuleType("users_settings")
box: dict[str, Any] = {}
FACTOR = 1.0
KEY = "scale"
handles: list[Any] = []
contexts = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """State as it was: modules, globals, the environment, torch's settings."""
    users.scale = 1.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "users_settings", users)
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    monkeypatch.setitem(box, "scale", 1.0)
    monkeypatch.setenv("USERS_SCALE", "1")
    for owner, name in ((F, "gelu"), (math, "sqrt"), (np, "sqrt"), (builtins, "divmod")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def grow() -> None:
    users.scale = users.scale + 1  # type: ignore[attr-defined]


def by(read: Callable[[], float], change: Callable[[], object]) -> Way:
    """A function that multiplies by what it reads."""
    return lambda x: x * read(), change


def imported() -> Way:
    def read() -> float:
        import users_settings  # type: ignore[import-not-found]

        return users_settings.scale  # type: ignore[no-any-return]

    return by(read, grow)


def imported_from() -> Way:
    def read() -> float:
        from users_settings import scale

        return scale  # type: ignore[no-any-return]

    return by(read, grow)


def imported_as_replaced() -> Way:
    def read() -> float:
        import users_settings as other

        return other.scale  # type: ignore[no-any-return]

    def replace() -> None:
        sys.modules["users_settings"] = types.ModuleType("users_settings")
        sys.modules["users_settings"].scale = 5.0  # type: ignore[attr-defined]

    return by(read, replace)


def imported_if_there() -> Way:
    sys.modules.pop("users_settings")

    def read() -> float:
        try:
            import users_settings

            return users_settings.scale  # type: ignore[no-any-return]
        except ImportError:
            return 2.0

    return by(read, lambda: sys.modules.update(users_settings=users))


def found_in_modules() -> Way:
    return by(lambda: sys.modules["users_settings"].scale, grow)


def found_by_importlib() -> Way:
    return by(lambda: importlib.import_module("users_settings").scale, grow)


def a_global_by_key() -> Way:
    return by(lambda: globals()["FACTOR"], lambda: globals().update(FACTOR=5.0))


def an_evaluated_global() -> Way:
    return by(lambda: eval("FACTOR + 1"), lambda: globals().update(FACTOR=5.0))


def an_attribute_by_name() -> Way:
    return by(lambda: getattr(users, KEY), grow)


def an_attribute_or_not() -> Way:
    del users.scale  # type: ignore[attr-defined]
    return by(lambda: getattr(users, "scale", 2.0), lambda: setattr(users, "scale", 5.0))


def the_environment() -> Way:
    return by(lambda: float(os.environ["USERS_SCALE"]), lambda: os.environ.update(USERS_SCALE="5"))


def the_environment_or_not() -> Way:
    del os.environ["USERS_SCALE"]
    return by(
        lambda: float(os.getenv("USERS_" + "SCALE", "2")), lambda: os.environ.update(USERS_SCALE="5")
    )


def a_context_variable() -> Way:
    variable = contextvars.ContextVar("variable", default=1.0)
    return by(variable.get, lambda: variable.set(5.0))


def a_metaclass() -> Way:
    class Meta(type):
        scale = 1.0

        @property
        def doubled(cls) -> float:
            return cls.scale * 2

    class Options(metaclass=Meta):
        pass

    return by(lambda: Options.scale + Options.doubled, lambda: setattr(Meta, "scale", 5.0))


def a_weak_reference() -> Way:
    class Options:
        scale = 1.0

    options = Options()
    reference, proxy = weakref.ref(options), weakref.proxy(options)
    keep = [options]

    def read() -> float:
        return reference().scale * proxy.scale  # type: ignore[union-attr]

    return by(read, lambda: setattr(keep[0], "scale", 5.0))


def getters() -> Way:
    scale, second = operator.attrgetter("scale"), operator.itemgetter(1)
    items = [1.0, 1.0]

    def change() -> None:
        grow()
        items[1] += 1

    return by(lambda: scale(users) * second(items), change)


def a_called_method() -> Way:
    class Options:
        def scale(self) -> float:
            return 1.0

    call, options = operator.methodcaller("scale"), Options()
    return by(lambda: call(options), lambda: setattr(Options, "scale", lambda self: 5.0))


def bound_methods_of_builtins() -> Way:
    table = {"scale": 1.0}
    get, view, proxy = table.get, table.values(), types.MappingProxyType(table)

    def read() -> float:
        return get("scale", 0) + sum(view) + proxy["scale"]

    return by(read, lambda: table.update(scale=5.0))


def containers() -> Way:
    chain: Any = collections.ChainMap({"a": 1.0})
    listed: Any = collections.UserList([1.0])
    namespace = argparse.Namespace(scale=1.0)
    default: Any = collections.defaultdict(lambda: FACTOR)
    changes = [
        lambda: chain.maps[0].update(a=5.0),
        lambda: listed.append(5.0),
        lambda: setattr(namespace, "scale", 5.0),
        lambda: globals().update(FACTOR=5.0),
    ]
    change = random.Random(0).choice(changes)

    def read() -> float:
        made = default["made"]
        del default["made"]
        return chain["a"] * sum(listed) * namespace.scale * made  # type: ignore[no-any-return]

    return by(read, change)


def a_set_of_objects() -> Way:
    class Options:
        scale = 1.0

    options = Options()
    return by(
        lambda: sum(each.scale for each in {options} | frozenset([options])),
        lambda: setattr(options, "scale", 5.0),
    )


def a_descriptor() -> Way:
    class Reads:
        scale = 1.0

        def __get__(self, instance: Any, owner: Any) -> float:
            return self.scale

    reads = Reads()

    class Options:
        scale = reads
        fixed = functools.partialmethod(lambda self, by: by * FACTOR, 2.0)

    options = Options()
    return by(lambda: options.scale * options.fixed(), lambda: setattr(reads, "scale", 5.0))


def a_private_slot() -> Way:
    class Options:
        __slots__ = ("__scale",)

        def __init__(self) -> None:
            self.__scale = 1.0

        def read(self) -> float:
            return self.__scale

        def change(self) -> None:
            self.__scale = 5.0

    options = Options()
    return by(lambda: options.read(), lambda: options.change())


def a_constructor() -> Way:
    class Options:
        def __init__(self) -> None:
            self.scale = box["scale"]

    return by(lambda: Options().scale, lambda: box.update(scale=5.0))


def an_attribute_of_a_function() -> Way:
    def read() -> float:
        return read.scale  # type: ignore[attr-defined,no-any-return]

    read.scale = 1.0  # type: ignore[attr-defined]
    return by(read, lambda: setattr(read, "scale", 5.0))


def the_class_of_an_object() -> Way:
    class One:
        scale = 1.0

    class Five:
        scale = 5.0

    options: Any = One()
    return by(lambda: options.scale, lambda: setattr(options, "__class__", Five))


def an_enum() -> Way:
    class Kind(enum.Enum):
        ONE = 1.0
        FIVE = 5.0

    kinds = [Kind.ONE]
    return by(lambda: kinds[0].value, lambda: kinds.__setitem__(0, Kind.FIVE))


def subclasses() -> Way:
    class Base:
        pass

    made: list[type] = []
    return by(
        lambda: 1.0 + len(Base.__subclasses__()), lambda: made.append(type("Derived", (Base,), {}))
    )


def match_arguments() -> Way:
    @dataclasses.dataclass
    class Options:
        scale: float

    options = Options(1.0)

    def read() -> float:
        match options:
            case Options(scale):
                return scale
        return 0.0

    return by(read, lambda: setattr(options, "scale", 5.0))


def a_logger() -> Way:
    logger = logging.getLogger("users")
    logger.setLevel(logging.INFO)
    return by(lambda: 1.0 + logger.isEnabledFor(logging.DEBUG), lambda: logger.setLevel(logging.DEBUG))


def a_replaced_function_of_torch() -> Way:
    gelu = F.gelu
    return lambda x: torch.nn.functional.gelu(x), lambda: setattr(F, "gelu", lambda x: gelu(x) * 5)


def a_replaced_function_in_a_library_module() -> Way:
    layer, gelu = torch.nn.GELU(), F.gelu

    def replace() -> None:
        F.gelu = lambda x, **kwargs: gelu(x) * 5

    return lambda x: layer(x), replace


def replaced_functions_of_math_and_numpy() -> Way:
    change = random.Random(1).choice((math, np))
    return by(
        lambda: math.sqrt(2.0) * float(np.sqrt(2.0)), lambda: setattr(change, "sqrt", lambda x: 5.0)
    )


def a_replaced_builtin() -> Way:
    return by(lambda: divmod(7.0, 2.0)[0], lambda: setattr(builtins, "divmod", lambda a, b: (5.0, 0.0)))


def threads_of_torch() -> Way:
    return by(torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1))


def settings_of_torch() -> Way:
    def read() -> float:
        return (1.0 + torch.are_deterministic_algorithms_enabled()) * (
            2.0 if torch.get_float32_matmul_precision() == "high" else 1.0
        )

    return by(read, lambda: torch.set_float32_matmul_precision("high"))


def a_backend() -> Way:
    backend = torch.backends.mkldnn
    return by(
        lambda: 1.0 + torch.backends.mkldnn.enabled,
        # Not assigned: torch's own tests, once imported, forbid that.
        lambda: contexts.enter_context(backend.flags(enabled=not backend.enabled)),
    )


def a_hook_of_all_modules() -> Way:
    layer = torch.nn.Identity()
    install = torch.nn.modules.module.register_module_forward_hook
    return lambda x: layer(x), lambda: handles.append(install(lambda module, args, out: out * 5))


class Scaled(torch.nn.Module):
    """A module that reads state outside of it, in a layer, in a function that it holds, and in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.act = lambda x: x * FACTOR
        self.linear.register_forward_hook(lambda module, args, out: out * box["scale"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from users_settings import scale

        return self.act(self.linear(x)) * scale  # type: ignore[no-any-return]


def a_functionalized_module(change: Callable[[], object]) -> Way:
    torch.manual_seed(0)
    fn, params = functionalize(Scaled())
    return lambda x: fn(params, x), change


WAYS: list[Callable[[], Way]] = [
    *(imported, imported_from, imported_as_replaced, imported_if_there, found_in_modules),
    *(found_by_importlib, a_global_by_key, an_evaluated_global, an_attribute_by_name),
    *(an_attribute_or_not, the_environment, the_environment_or_not, a_context_variable, a_metaclass),
    *(a_weak_reference, getters, a_called_method, bound_methods_of_builtins, containers),
    *(a_set_of_objects, a_descriptor, a_private_slot, a_constructor, an_attribute_of_a_function),
    *(the_class_of_an_object, an_enum, subclasses, match_arguments, a_logger),
    *(a_replaced_function_of_torch, a_replaced_function_in_a_library_module),
    *(replaced_functions_of_math_and_numpy, a_replaced_builtin, threads_of_torch, settings_of_torch),
    *(a_backend, a_hook_of_all_modules),
    functools.partial(a_functionalized_module, grow),
    functools.partial(a_functionalized_module, lambda: globals().update(FACTOR=5.0)),
    functools.partial(a_functionalized_module, lambda: box.update(scale=5.0)),
]

TRANSFORMS: dict[str, Callable[[Fn], Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda f: shard(f, Mesh({"dp": 2}, virtual=True), out_specs=P()),
    "nested": lambda f: checkpoint(lambda x: jit(f, backend="eager")(x) * 1),
}


def full(value: Any) -> torch.Tensor:
    return value.full() if isinstance(value, MeshTensor) else value  # type: ignore[no-any-return]


# Setting one flag of mkldnn sets them all, also that of other devices.
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: getattr(way, "__name__", "functionalized"))
def test_what_is_read_is_never_stale(way: Callable[[], Way], name: str) -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    fn, change = way()
    run = TRANSFORMS[name](fn)
    try:
        before = [full(run(X)), full(run(X))]
        assert run.traces == 1
        assert all(torch.equal(each, fn(X)) for each in before)
        change()
        after = fn(X)
        assert not torch.equal(after, before[0])  # or else the change is none
        torch.testing.assert_close(full(run(X)), after, rtol=1e-6, atol=1e-6)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        contexts.close()
        while handles:
            handles.pop().remove()
