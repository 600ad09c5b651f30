"""What a function reads without being given it is read anew at every call, wherever it is kept."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torchard import jit

X = torch.arange(4.0)

settings = {"scale": 2.0, "on": True, "deep": {"k": [1.0, 2.0]}}
rate = 0.1
module = types.ModuleType("module")


class Holder:
    """A class that carries data, as configurations do."""

    weight = X
    scale = 2.0

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@dataclass(slots=True)
class Slotted:
    scale: float = 2.0
    weight: Any = None


holder = Holder()
slotted = Slotted()


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * rate


def set_rate(value: float) -> None:
    global rate
    rate = value


Case = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Any], None], Any, Any]


def in_a_deque() -> Case:
    kept = deque([X])
    return lambda x: x * kept[0], lambda v: kept.__setitem__(0, v), X + 1, X + 2


def in_slots() -> Case:
    kept = Slotted(1.0, X)
    return lambda x: x * kept.weight, lambda v: setattr(kept, "weight", v), X + 1, X + 2


def float_in_slots() -> Case:
    kept = Slotted(1.0)
    return lambda x: x * kept.scale, lambda v: setattr(kept, "scale", v), 3.0, 4.0


def on_a_class() -> Case:
    return lambda x: x * Holder.weight, lambda v: setattr(Holder, "weight", v), X + 1, X + 2


def on_the_class_of_self() -> Case:
    return Holder().times, lambda v: setattr(Holder, "weight", v), X + 3, X + 4


def another_shape_on_a_class() -> Case:
    return (
        lambda x: (x * Holder.weight).sum() + x,
        lambda v: setattr(Holder, "weight", v),
        X + 1,
        torch.ones(2, 4),
    )


def in_a_module() -> Case:
    module.weight = X
    return lambda x: x * module.weight, lambda v: setattr(module, "weight", v), X + 1, X + 2


def float_in_a_global_dict() -> Case:
    put = settings.__setitem__
    return lambda x: x * settings["scale"], lambda v: put("scale", v), 3.0, 4.0


def deep_in_a_global_dict() -> Case:
    def put(v: Any) -> None:
        settings["deep"]["k"][1] = v  # type: ignore[index]

    return lambda x: x * settings["deep"]["k"][1], put, 3.0, 4.0  # type: ignore[index]


def flag_in_a_global_dict() -> Case:
    put = settings.__setitem__
    return lambda x: x * 2 if settings["on"] else x * 3, lambda v: put("on", v), True, False


def global_read_by_a_helper() -> Case:
    return lambda x: helper(x), set_rate, 0.5, 0.7


def attribute_of_a_global_object() -> Case:
    return lambda x: x * holder.scale, lambda v: setattr(holder, "scale", v), 3.0, 4.0


def slot_of_a_global_object() -> Case:
    return lambda x: x * slotted.scale, lambda v: setattr(slotted, "scale", v), 3.0, 4.0


def in_a_partial() -> Case:
    kept = [X]
    part = functools.partial(lambda held, x: x * held[0], kept)
    return lambda x: part(x), lambda v: kept.__setitem__(0, v), X + 1, X + 2


def in_a_keyword_s_default() -> Case:
    def fn(x: torch.Tensor, *, weight: Any = X) -> torch.Tensor:
        return x * weight

    put: Any = fn.__kwdefaults__.__setitem__  # type: ignore[union-attr]
    return fn, lambda v: put("weight", v), X + 1, X + 2


def a_number_in_a_tensor_s_place() -> Case:
    kept = {"w": X}
    return lambda x: x * kept["w"], lambda v: kept.__setitem__("w", v), X + 1, 3.0


CASES = [
    in_a_partial,
    in_a_keyword_s_default,
    a_number_in_a_tensor_s_place,
    in_a_deque,
    in_slots,
    float_in_slots,
    on_a_class,
    on_the_class_of_self,
    another_shape_on_a_class,
    in_a_module,
    float_in_a_global_dict,
    deep_in_a_global_dict,
    flag_in_a_global_dict,
    global_read_by_a_helper,
    attribute_of_a_global_object,
    slot_of_a_global_object,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_read_anew(case: Callable[[], Case]) -> None:
    fn, put, *values = case()
    run = jit(fn, backend="eager")
    for value in (*values, values[0]):
        put(value)
        assert torch.equal(run(X), fn(X))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_read_anew_behind_a_transform_of_torchs(case: Callable[[], Case]) -> None:
    fn, put, *values = case()
    fn = torch.func.grad(lambda x, fn=fn: fn(x).square().sum())
    run = jit(fn, backend="eager")
    for value in (*values, values[0]):
        put(value)
        assert torch.equal(run(X), fn(X))


def test_what_a_transform_of_torchs_reads_does_not_retrace() -> None:
    traced, weight = [], X + 1

    def fn(x: torch.Tensor) -> torch.Tensor:
        traced.append(None)
        return (x * weight).square().sum()

    run = jit(torch.vmap(torch.func.grad(fn)), backend="eager")
    for _ in range(3):
        run(X[None])
    assert len(traced) == 1


def test_a_tensor_that_cannot_be_found_is_not_cached() -> None:
    """Kept where no walk looks: right numbers, at the price of a trace for each call."""

    class Hidden:
        def __init__(self) -> None:
            object.__setattr__(self, "_get", iter([X, X + 1, X + 2]).__next__)

    hidden = Hidden()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * hidden._get()  # type: ignore[attr-defined]

    run = jit(fn, backend="eager")
    for extra in range(3):
        assert torch.equal(run(X), X * (X + extra))


def test_a_global_that_the_function_does_not_name_does_not_retrace() -> None:
    traced = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        traced.append(None)
        return x * settings["scale"]

    run = jit(fn, backend="eager")
    for i in range(3):
        settings["unrelated"] = i
        run(X)
    assert len(traced) == 1
