"""What reaches a module's parameters by another way than the module: it has the values of the call."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchard as ta
from torchard import LoopError, PurityError

GLOBAL: dict[str, Any] = {}


def scaled(module: nn.Module, *args: Any) -> Any:
    return args[-1] * module.get_parameter("weight").sum()


def scaled_by(weight: Tensor, *args: Any) -> Any:
    return args[-1] * weight.sum()


class Holder:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def hook(self, *args: Any) -> Any:
        return scaled(self.module, *args)


class Slotted:
    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        return scaled(self.module, *args)


def by_itself(module: nn.Module) -> Callable[..., Any]:
    def hook(*args: Any) -> Any:
        return scaled(hook.module, *args)  # type: ignore[attr-defined]

    hook.module = module  # type: ignore[attr-defined]
    return hook


def by_a_function_within(module: nn.Module) -> Callable[..., Any]:
    weight = module.weight

    def total() -> Tensor:
        return weight.sum()

    return lambda *args: args[-1] * total()


def by_a_global(module: nn.Module) -> Callable[..., Any]:
    GLOBAL["module"] = module
    return lambda *args: scaled(GLOBAL["module"], *args)


def by_a_default(module: nn.Module) -> Callable[..., Any]:
    return lambda *args, module=module: scaled(module, *args)


def by_what_is_there_later(module: nn.Module) -> Callable[..., Any]:
    def hook(*args: Any) -> Any:
        return scaled(later, *args)

    later = module
    return hook


# Hooks that scale a result by a sum over the parameter of another module.
HOOKS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "a module": lambda m: lambda *args: scaled(m, *args),
    "a parameter": lambda m: functools.partial(lambda w: lambda *args: scaled_by(w, *args), m.weight)(),
    "a partial of a module": lambda m: functools.partial(scaled, m),
    "a partial of a parameter": lambda m: functools.partial(scaled_by, m.weight),
    "a partial of a function": lambda m: functools.partial(lambda *args: scaled(m, *args)),
    "a weak reference": lambda m: (lambda ref: lambda *args: scaled(ref(), *args))(weakref.ref(m)),
    "a weak proxy": lambda m: (lambda p: lambda *args: args[-1] * p.weight.sum())(weakref.proxy(m)),
    "a weak set": lambda m: (lambda s: lambda *args: scaled(*s, *args))(weakref.WeakSet([m])),
    "a list": lambda m: (lambda ms: lambda *args: scaled(ms[0], *args))([m]),
    "a dict": lambda m: (lambda ws: lambda *args: scaled_by(ws["w"], *args))({"w": m.weight}),
    "an object": lambda m: Holder(m).hook,
    "an object that a function reads": lambda m: (lambda h: lambda *args: h.hook(*args))(Holder(m)),
    "an object with slots": Slotted,
    "itself": by_itself,
    "a function within": by_a_function_within,
    "a global": by_a_global,
    "a default": by_a_default,
    "what is there later": by_what_is_there_later,
}
PLACES: dict[str, Callable[[nn.Module, Callable[..., Any]], Any]] = {
    "hook": lambda m, hook: m.register_forward_hook(hook),
    "pre hook": lambda m, hook: m.register_forward_pre_hook(lambda module, args: hook(args[0])),
    "forward": lambda m, hook: setattr(m, "forward", hook),
}
STACKS: dict[str, Callable[..., Any]] = {
    "plainly": lambda f: f,
    "checkpoint": ta.checkpoint,
    "jit": lambda f: ta.jit(f, backend="eager"),
}


def gradients(module: nn.Module, params: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """The gradients of the module itself with these parameters."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(params[name])
    module(x).square().sum().backward()
    return {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in module.named_parameters()}


def check(module: nn.Module, stack: str, x: Tensor) -> None:
    """Two calls of the functionalized module have the gradients of the module itself."""
    fn, params = ta.functionalize(module)
    loss = STACKS[stack](lambda params: fn(params, x).square().sum())
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        drawn = {k: torch.randn(p.shape, generator=generator) for k, p in params.items()}
        module.zero_grad()
        expected = gradients(module, drawn, x)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan)
        torch.testing.assert_close(torch.func.grad(loss)(drawn), expected)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_the_parameters_of_the_call(hook: str, place: str, stack: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    PLACES[place](model[1], HOOKS[hook](model[0]))
    check(model, stack, torch.linspace(-1, 1, 6).reshape(2, 3))


class Referring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weights = [self.linear.weight]
        self.apply_it = functools.partial(nn.functional.linear, weight=self.linear.weight)
        self.named = {"bias": (self.linear.bias,)}
        self.ref = weakref.ref(self.linear)
        self.function = lambda x: self.linear(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        both = self.apply_it(x) + x @ self.weights[0] + self.named["bias"][0]
        return both + self.ref()(x) + self.function(x)


@pytest.mark.parametrize("stack", STACKS)
def test_attributes_have_the_parameters_of_the_call(stack: str) -> None:
    check(Referring(), stack, torch.ones(2, 3))


def test_a_weak_reference_outlives_the_module() -> None:
    module = Referring()
    fn, params = ta.functionalize(module)
    expected = module(torch.ones(2, 3))
    del module
    gc.collect()
    torch.testing.assert_close(fn(params, torch.ones(2, 3)), expected)


@pytest.mark.parametrize("of", [lambda w: w.detach(), lambda w: w.T, lambda w: w.data[0]])
def test_a_function_that_closes_over_a_view_is_refused(of: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    view = of(model[0].weight)
    model[1].register_forward_hook(lambda _, args, out: out * view.sum())
    with pytest.raises(PurityError, match=r"test_module_references.py:\d+ in <lambda>, .* '0.weight'"):
        ta.functionalize(model)


def test_buffers_that_a_hook_writes_are_results() -> None:
    module = nn.Linear(3, 3)
    module.register_buffer("calls", torch.zeros(()))
    calls = module.calls
    module.register_forward_hook(lambda _, args, out: calls.add_(1) * out)
    fn, params = ta.functionalize(module)
    _, buffers = fn(params, torch.ones(3), buffers=fn.buffers)
    assert (buffers["calls"], calls, fn.buffers["calls"]) == (1, 0, 0)


def test_a_stacked_layers_parameter_is_refused() -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))})
    weight = model["layers"][1].weight
    model.forward = lambda x: model["layers"](x) @ weight  # type: ignore[method-assign]
    fn, params = ta.functionalize(model, stacked="layers")
    with pytest.raises(LoopError, match=r"test_module_references.py:\d+ .* 'layers.1.weight'"):
        fn(params, torch.ones(2, 3))


def total(w: Tensor) -> Tensor:
    return w.sin().sum()


# Hooks that give the parameter of another module to a transform.
IN_TRANSFORMS: dict[str, Callable[[Tensor], Callable[..., Any]]] = {
    "checkpoint": lambda w: lambda *args: args[-1] * ta.checkpoint(total)(w),
    "checkpoint's closure": lambda w: lambda *args: ta.checkpoint(lambda y: y * total(w))(args[-1]),
    "a checkpoint that is kept": lambda w: (lambda f: lambda *args: f(args[-1]))(
        ta.checkpoint(lambda y: y * total(w))
    ),
    "jit": lambda w: lambda *args: args[-1] * ta.jit(total, backend="eager")(w),
    "jit's closure": lambda w: lambda *args: ta.jit(lambda y: y * total(w), backend="eager")(args[-1]),
    "repeat": lambda w: lambda *args: ta.repeat(lambda p, y: y * total(p), w, args[-1]),
    "repeat's closure": lambda w: lambda *args: ta.repeat(
        lambda _, y: y * total(w), torch.ones(2), args[-1]
    ),
}
# Hooks that give the parameter of the original module to what no mode sees, by a global.
OF_THE_ORIGINAL: dict[str, Callable[[], Callable[..., Any]]] = {
    "grad": lambda: lambda *args: args[-1] * torch.func.grad(total)(GLOBAL["weight"]).sum(),
    "vmap": lambda: lambda *args: args[-1] * torch.func.vmap(total)(GLOBAL["weight"]).sum(),
    "vjp": lambda: lambda *args: args[-1] * torch.func.vjp(total, GLOBAL["weight"])[0],
    "jvp": lambda: lambda *args: args[-1] * torch.func.jvp(total, (GLOBAL["weight"],) * 1, (X,))[1],
}
OUT_OF_SIGHT: dict[str, Callable[[], Callable[..., Any]]] = {
    "another object": lambda: lambda *args: args[-1] * total(GLOBAL["weight"].as_subclass(nn.Parameter)),
    "a view": lambda: lambda *args: args[-1] * total(GLOBAL["view"]),
}
X = torch.ones(3, 3)


def hooked(hook: Callable[..., Callable[..., Any]], *, by_a_global: bool = False) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    weight = module[0].weight
    GLOBAL.update(weight=weight, view=weight.detach()[:2])
    module[1].register_forward_hook(hook() if by_a_global else hook(weight))
    return module


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", IN_TRANSFORMS)
def test_transforms_in_a_call_have_its_parameters(name: str, stack: str) -> None:
    check(hooked(IN_TRANSFORMS[name]), stack, torch.ones(2, 3))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", OF_THE_ORIGINAL)
def test_torchs_transforms_of_the_original_are_of_the_call(name: str, stack: str) -> None:
    check(hooked(OF_THE_ORIGINAL[name], by_a_global=True), stack, torch.ones(2, 3))


@pytest.mark.parametrize("name", OUT_OF_SIGHT)
def test_other_tensors_in_the_memory_of_the_original_are_refused(name: str) -> None:
    module = hooked(OUT_OF_SIGHT[name], by_a_global=True)
    fn, params = ta.functionalize(module)
    new = {k: torch.ones_like(p) for k, p in params.items()}
    for run in (fn, ta.jit(fn, backend="eager")):
        with pytest.raises(PurityError, match=r"^test_module_references\.py:\d+ in .*'0\.weight'"):
            run(new, torch.ones(2, 3))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", IN_TRANSFORMS)
def test_transforms_in_a_call_pass_gradients_on(name: str, stack: str) -> None:
    """By autograd as well, whose graph a transform in the call joins with what it was given."""
    module, x = hooked(IN_TRANSFORMS[name]), torch.ones(2, 3)
    fn, params = ta.functionalize(module)
    for value in (0.5, 0.75):
        drawn = {k: torch.full_like(p, value).requires_grad_() for k, p in params.items()}
        module.zero_grad()
        expected = gradients(module, drawn, x)
        STACKS[stack](lambda params: fn(params, x).square().sum())(drawn).backward()
        torch.testing.assert_close({k: p.grad for k, p in drawn.items()}, expected)


class Forgotten(nn.Module):
    """Nobody has it when its function is called, and it is freed within the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(8))
        self.itself = [self]  # a cycle

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        for layer in self.layers:
            x = layer(x).sin()
        many = [x + i for i in range(64)]
        return torch.stack([a * b for a, b in itertools.pairwise(many)]).sum(0)


@pytest.mark.parametrize("transform", [lambda f: f, functools.partial(ta.jit, backend="eager")])
def test_a_module_that_is_freed_in_a_call(transform: Any) -> None:
    """What is made then may lie where its tensors lay."""
    x, wanted = torch.ones(2, 3), Forgotten()
    gc.disable()
    try:
        fn, params = ta.functionalize(_with(Forgotten(), wanted))
        have = transform(fn)(params, x)
    finally:
        gc.enable()
    torch.testing.assert_close(have, wanted(x))


def _with(module: nn.Module, values: nn.Module) -> nn.Module:
    module.load_state_dict(values.state_dict())
    return module
