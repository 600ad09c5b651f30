"""Wherever a module holds one of its tensors, and whatever is done with it: it is that of the call."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchard as ta
from torchard import PurityError

Two = namedtuple("Two", ["number", "tensor"])


class Slotted:
    __slots__ = ("unset", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def get(self) -> Tensor:
        return self.weight


def by_a_default(weight: Tensor) -> Callable[[], Tensor]:
    return lambda weight=weight: weight


def by_a_keyword(weight: Tensor) -> Callable[[], Tensor]:
    def get(*, weight: Tensor = weight) -> Tensor:
        return weight

    return get


def by_an_attribute(weight: Tensor) -> Callable[[], Tensor]:
    def get() -> Tensor:
        return get.weight  # type: ignore[attr-defined, no-any-return]

    get.weight = weight  # type: ignore[attr-defined]
    return get


def identity(weight: Tensor) -> Tensor:
    return weight


# How a module holds a tensor, and gets it.
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "list": (lambda w: [w], lambda held: held[0]),
    "list of lists": (lambda w: [[1, [w]]], lambda held: held[0][1][0]),
    "tuple": (lambda w: (1, w), lambda held: held[1]),
    "named tuple": (lambda w: Two(1, w), lambda held: held.tensor),
    "tuple in a dict": (lambda w: {"a": (w,)}, lambda held: held["a"][0]),
    "ordered dict": (lambda w: OrderedDict(a=1, b=w), lambda held: held["b"]),
    "key": (lambda w: {w: 1}, lambda held: next(iter(held))),
    "set": (lambda w: {w}, lambda held: next(iter(held))),
    "frozen set": (lambda w: frozenset({w}), lambda held: next(iter(held))),
    "deque": (lambda w: deque([w]), lambda held: held[0]),
    "object": (lambda w: types.SimpleNamespace(w=w), lambda held: held.w),
    "object with slots": (Slotted, lambda held: held.weight),
    "method": (lambda w: Slotted(w).get, lambda held: held()),
    "partial": (lambda w: functools.partial(identity, w), lambda held: held()),
    "keyword of a partial": (lambda w: functools.partial(identity, weight=w), lambda held: held()),
    "closure": (lambda w: lambda: w, lambda held: held()),
    "closure in a list": (lambda w: [lambda: w], lambda held: held[0]()),
    "closure in a tuple": (lambda w: (lambda: w,), lambda held: held[0]()),
    "list in a closure": (lambda w: (lambda ws: lambda: ws[0])([w]), lambda held: held()),
    "tuple in a closure": (lambda w: (lambda ws: lambda: ws[0])((w,)), lambda held: held()),
    "partial in a closure": (
        lambda w: (lambda f: lambda: f())(functools.partial(identity, w)),
        lambda held: held(),
    ),
    "closure in a closure": (lambda w: (lambda get: lambda: get())(lambda: w), lambda held: held()),
    "default": (by_a_default, lambda held: held()),
    "keyword": (by_a_keyword, lambda held: held()),
    "function's attribute": (by_an_attribute, lambda held: held()),
}


class Times(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x * w.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g * w.sum(), (g * x).sum().expand_as(w)


def total(w: Tensor) -> Tensor:
    return w.sin().sum()


def recomputed(w: Tensor, y: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda w, y: total(w) * y, w, y, use_reentrant=False)
    return result


# What a forward does with an own tensor, given that, the module and a value.
USES: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "operation": lambda w, m, y: y * total(w),
    "Function": lambda w, m, y: Times.apply(y, w),
    "grad": lambda w, m, y: y * torch.func.grad(total)(w).sum(),
    "vmap": lambda w, m, y: y * torch.func.vmap(total)(w).sum(),
    "jvp": lambda w, m, y: y * torch.func.jvp(total, (w,), (w,))[1],
    "checkpoint": lambda w, m, y: ta.checkpoint(lambda w, y: y * total(w))(w, y),
    "repeat": lambda w, m, y: ta.repeat(lambda row, y: y * total(row), w, y),
    "the same object": lambda w, m, y: y * (total(w) if w is m.linear.weight else 0),
    "in a list": lambda w, m, y: y * (total(w) if any(w is p for p in m.parameters()) else 0),
    "as a key": lambda w, m, y: y * total(w) * {m.linear.weight: 2.0}.get(w, 0.0),
}
OF_AUTOGRAD: dict[str, Callable[[Tensor, Any, Tensor], Tensor]] = {
    "torch's checkpoint": lambda w, m, y: recomputed(w, y),
}
STACKS: dict[str, Callable[..., Any]] = {
    "plainly": lambda f: f,
    "checkpoint": ta.checkpoint,
    "jit": lambda f: ta.jit(f, backend="eager"),
}


class Holding(nn.Module):
    def __init__(self, holder: str, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.held = HOLDERS[holder][0](self.linear.weight)
        self.get, self.use = HOLDERS[holder][1], (USES | OF_AUTOGRAD)[use]

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.get(self.held), self, self.linear(x))


def check(module: nn.Module, stack: str, levels: bool = True) -> None:
    """Calls with two sets of parameters have the gradients of the module itself, by both ways."""
    fn, params = ta.functionalize(module)
    x, run = torch.linspace(-1, 1, 6).reshape(2, 3), STACKS[stack](fn)
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        drawn = {k: torch.randn(p.shape, generator=generator) for k, p in params.items()}
        with as_own(module, drawn):
            module(x).square().sum().backward()
            expected = {k: p.grad for k, p in module.named_parameters()}
        if levels:
            loss = lambda p: run(p, x).square().sum()  # noqa: E731
            torch.testing.assert_close(torch.func.grad(loss)(drawn), expected)
        leaves = {k: p.clone().requires_grad_() for k, p in drawn.items()}
        run(leaves, x).square().sum().backward()
        torch.testing.assert_close({k: p.grad for k, p in leaves.items()}, expected)


@contextmanager
def as_own(module: nn.Module, params: dict[str, Tensor]) -> Iterator[None]:
    """The module has these values, and NaN afterwards."""
    module.zero_grad()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(params[name])
    yield
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("use", ["Function", "the same object"])
def test_a_tensor_that_a_module_holds_is_that_of_the_call(holder: str, use: str) -> None:
    check(Holding(holder, use), "plainly")
    check(Holding(holder, use), "jit")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("holder", ["list", "closure"])
@pytest.mark.parametrize("use", USES)
def test_whatever_is_done_with_it(use: str, holder: str, stack: str) -> None:
    check(Holding(holder, use), stack)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("holder", ["list", "closure"])
def test_torchs_checkpoint_is_given_that_of_the_call(holder: str, stack: str) -> None:
    check(Holding(holder, "torch's checkpoint"), stack, levels=stack != "plainly")


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_module_holds_is_as_before_after_a_call(holder: str) -> None:
    fn, params = ta.functionalize(Holding(holder, "operation"))
    held, own = fn.module.held, fn.module.linear.weight
    for _ in range(2):
        fn(params, torch.ones(2, 3))
        assert fn.module.held is held
        assert HOLDERS[holder][1](held) is own is fn.module.linear.weight
        assert own.is_meta


def test_calls_within_calls_have_their_own_values() -> None:
    """A module that calls its own function, with other parameters."""
    module = Holding("list", "operation")
    fn, params = ta.functionalize(module)
    params = {k: p.clone() for k, p in params.items()}
    x, doubled = torch.ones(2, 3), {k: 2 * p for k, p in params.items()}
    inner, outer = fn(doubled, x), fn(params, x)

    def hook(m: Any, args: Any, out: Tensor) -> Tensor:
        return out + fn(doubled, x) * m.held[0].sum() if m.held[0] is params["linear.weight"] else out

    fn.module.register_forward_hook(hook)
    for _ in range(2):
        torch.testing.assert_close(fn(params, x), outer + inner * params["linear.weight"].sum())


GLOBAL: dict[str, nn.Module] = {}


def test_a_function_that_is_given_the_original_is_refused() -> None:
    module = Holding("list", "operation")
    GLOBAL["module"] = module
    module.use = lambda w, m, y: Times.apply(y, GLOBAL["module"].linear.weight)
    fn, params = ta.functionalize(module)
    for run in (fn, ta.jit(fn, backend="eager")):
        with pytest.raises(PurityError, match=r"Function receives 'linear\.weight'.*self\.weight"):
            run(params, torch.ones(2, 3))


# -- what a module returns of what it holds ------------------------------------------------------------


class Noted:
    loss: Any = None


# What a module holds, and how it is filled.
NOTES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "list": (list, lambda held, value: (held.clear(), held.append(value))),  # type: ignore[func-returns-value]
    "dict": (dict, lambda held, value: held.update(loss=value)),
    "deque": (deque, lambda held, value: (held.clear(), held.append(value))),  # type: ignore[func-returns-value]
    "object": (Noted, lambda held, value: setattr(held, "loss", value)),
    "namespace": (types.SimpleNamespace, lambda held, value: setattr(held, "loss", value)),
    "list in a dict": (
        lambda: {"losses": []},
        lambda held, value: (held["losses"].clear(), held["losses"].append(value)),  # type: ignore[func-returns-value]
    ),
}


class Noting(nn.Module):
    def __init__(self, make: Callable[[], Any], note: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.w, self.notes, self.note = nn.Parameter(torch.arange(3.0) + 1), make(), note

    def forward(self, x: Tensor) -> Any:
        self.note(self.notes, (self.w**2).sum())
        return x * self.w, self.notes


def noted(notes: Any) -> Tensor:
    while not isinstance(notes, Tensor):
        notes = vars(notes) if hasattr(notes, "__dict__") else notes
        notes = next(iter(notes.values() if isinstance(notes, dict) else notes))
    return notes


@pytest.mark.parametrize("kind", NOTES)
@pytest.mark.parametrize("transform", [lambda f: f, functools.partial(ta.jit, backend="eager")])
def test_what_a_module_returns_of_what_it_holds(kind: str, transform: Any) -> None:
    fn, params = ta.functionalize(Noting(*NOTES[kind]))

    def loss(params: Any, x: Tensor) -> Tensor:
        y, notes = fn(params, x)
        return y.sum() + noted(notes)

    for shift in (0.0, 1.0):
        given = {"w": params["w"] + shift}
        gradient = transform(torch.func.grad(loss))(given, torch.ones(3))
        torch.testing.assert_close(gradient["w"], 1 + 2 * given["w"])
        _, notes = fn(given, torch.ones(3))
        assert noted(notes) == (given["w"] ** 2).sum()


def test_its_own_parameters_may_be_returned() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.all = [self.w]

        def forward(self) -> Any:
            return self.all, {"all": self.all}

    fn, params = ta.functionalize(Returning())
    first, second = fn({"w": params["w"] * 2})
    assert torch.equal(first[0], torch.full((3,), 2.0)) and first is second["all"]


def test_what_would_run_later_is_refused() -> None:
    class Yielding(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return (x @ w for w in self.parameters())

    fn, params = ta.functionalize(Yielding(3, 3))
    with pytest.raises(PurityError, match="returns a generator"):
        fn(params, torch.ones(3))


class Growing(list[Any]):
    def extend(self, values: Any) -> None:
        super().extend([*values, 1])


class Scaled(tuple[Any, ...]):
    scale = 1.0


def test_classes_derived_from_containers() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.grown, self.scaled = Growing([self.w]), Scaled((self.w,))
            self.scaled.scale = 5.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.grown[0] * self.scaled[0] * self.scaled.scale * len(self.grown)

    module, x = Holding(), torch.ones(3)
    fn, params = ta.functionalize(module)
    for _ in range(2):
        assert torch.equal(fn(params, x), module(x))


def test_a_variable_that_a_call_assigns_first() -> None:
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

            def get(assign: bool) -> Tensor:
                nonlocal c
                if assign:
                    c = 3.0
                return self.w * c if assign else self.w

            self.get = get
            if False:
                c = 0.0

        def forward(self, x: Tensor, assign: bool) -> Tensor:
            return x * self.get(assign)

    fn, params = ta.functionalize(Assigning())
    for assign in (False, True, False, True):
        value = fn(params, torch.ones(3), assign)
        assert torch.equal(value, torch.full((3,), 3.0 if assign else 1.0))


def test_views_in_containers_are_refused_as_those_in_attributes_are() -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.views = [self.w.detach()]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.views[0]

    fn, params = ta.functionalize(Viewing())
    with pytest.raises(PurityError, match="view of 'w'"):
        fn({"w": params["w"] * 2}, torch.ones(3))
