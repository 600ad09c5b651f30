"""Copies of parts that a forward makes, and of functionalized modules: each computes with what it has."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchard as ta
from torchard import LoopError, PurityError

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def by_hand(part: nn.Module) -> nn.Module:
    """As torch's data parallel replicates a module."""
    copied = type(part).__new__(type(part))
    copied.__dict__ = part.__dict__.copy()
    for table in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[table] = dict(part.__dict__[table])
    return copied


def shallow(part: nn.Module) -> nn.Module:
    copied = copy.copy(part)
    copied._parameters = dict(copied._parameters)
    return copied


# The copies of what a forward has, and what it does with them.
COPIES: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "shallow": shallow,
    "by hand": by_hand,
    "of a copy": lambda part: copy.deepcopy(copy.deepcopy(part)),
    "in a list": lambda part: copy.deepcopy([part])[0],
}


def replaced(part: Any, other: Any) -> Any:
    part.weight = nn.Parameter(other.weight.detach() * 3)
    return part


def scaled(part: Any, other: Any) -> Any:
    part.scale = 2.0
    return part


def of_another_class(part: Any, other: Any) -> Any:
    part.__class__ = Negated
    return part


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda part, other: part,
    "a parameter": replaced,
    "an attribute": scaled,
    "its class": of_another_class,
}
STACKS: dict[str, Callable[..., Any]] = {
    "plainly": lambda f: f,
    "jit": lambda f: ta.jit(f, backend="eager"),
}


class Part(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Negated(Part):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class Copying(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.use = Part(), Part(), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def check(module: nn.Module, stack: str) -> None:
    fn, params = ta.functionalize(module)
    generator = torch.Generator().manual_seed(1)
    drawn = {k: torch.randn(p.shape, generator=generator) for k, p in params.items()}
    module.load_state_dict({**module.state_dict(), **drawn})
    module.zero_grad()
    out = module(X)
    out.square().sum().backward()
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    expected = zeros | {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    run = STACKS[stack](fn)
    loss = lambda p: run(p, X).square().sum()  # noqa: E731
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(torch.nan)
    torch.testing.assert_close(run(drawn, X), out.detach())
    torch.testing.assert_close(torch.func.grad(loss)(drawn), expected)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_of_a_part_is_called_itself(copied: str, change: str, stack: str) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        part = CHANGES[change](COPIES[copied](m.a), m.b)
        return part(x).detach() * m.b(x) + m.a(x)

    check(Copying(use), stack)


@pytest.mark.parametrize("stack", STACKS)
def test_a_copys_forward_is_its_own(stack: str) -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        return m.b(x) + replaced(copy.deepcopy(m.a), m.b).forward(x).detach()

    check(Copying(use), stack)


class Fusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.norm.running_mean.fill_(0.5)
        self.norm.running_var.fill_(2.0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        fused = nn.utils.fusion.fuse_linear_bn_eval(self.linear, self.norm)
        return self.last(x) * fused(x).detach()


@pytest.mark.parametrize("stack", STACKS)
def test_a_linear_layer_and_a_batch_norm_that_a_forward_fuses(stack: str) -> None:
    check(Fusing(), stack)


def hooked() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(Part(), nn.Tanh(), Part())
    weight = module[0].weight
    module[1].register_forward_hook(lambda m, args, out: out * weight.sum())
    return module


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn, params = ta.functionalize(hooked())
        self.own = nn.ParameterDict({k.replace(".", "_"): p.clone() for k, p in params.items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.fn({k.replace("_", "."): p for k, p in self.own.items()}, x)


@pytest.mark.parametrize("stack", STACKS)
def test_a_functionalized_module_in_a_module(stack: str) -> None:
    check(Nested(), stack)


def repickled(fn: Any) -> Any:
    return pickle.loads(pickle.dumps(fn))


OF_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "shallow": copy.copy,
    "of a copy": lambda fn: copy.deepcopy(copy.copy(fn)),
    "in a list": lambda fn: copy.deepcopy([fn])[0],
    "pickle": repickled,
}
MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "plain": (lambda: nn.Sequential(Part(), nn.Tanh(), Part()), ()),
    "with a hook": (hooked, ()),
    "stacked": (lambda: nn.ModuleDict({"layers": nn.Sequential(Part(), Part())}), "layers"),
    "in a module": (Nested, ()),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("copied", OF_FUNCTIONS)
@pytest.mark.parametrize("kind", MODULES)
def test_copies_of_a_functionalized_module(kind: str, copied: str, stack: str) -> None:
    if copied == "pickle" and kind in ("with a hook", "in a module"):
        return  # functions that close over something cannot be pickled
    torch.manual_seed(0)
    make, stacked = MODULES[kind]
    module = make()
    if isinstance(module, nn.ModuleDict):
        module.forward = module["layers"].forward
    fn, params = ta.functionalize(module, stacked=stacked)
    params = {k: p.clone() for k, p in params.items()}
    other = OF_FUNCTIONS[copied](fn)
    del module
    gradient = torch.func.grad(lambda f, p: STACKS[stack](f)(p, X).square().sum(), argnums=1)
    torch.testing.assert_close(gradient(other, params), gradient(fn, params))
    before, x = fn(params, X), X
    for part in other.module.modules():
        part.scale = 2.0
    assert all(getattr(part, "scale", 1.0) == 1.0 for part in fn.module.modules())
    torch.testing.assert_close(fn(params, x), before)
    if kind != "in a module":  # whose scales nobody reads
        assert not torch.equal(STACKS[stack](other)(params, x), before)


def test_a_copy_has_the_scopes_of_its_function() -> None:
    fn, params = ta.functionalize(nn.Sequential(Part(), nn.Tanh()))
    texts = [str(ta.trace(f)(params, X)) for f in (fn, copy.deepcopy(fn))]
    assert texts[0] == texts[1]


def test_a_copy_refuses_what_differs_between_stacked_layers() -> None:
    module = nn.ModuleDict({"layers": nn.Sequential(Part(), Part())})
    module["layers"][1].scale = 3.0
    module.forward = module["layers"].forward
    fn, params = ta.functionalize(module, stacked="layers")
    for f in (fn, copy.deepcopy(fn), repickled(fn)):
        with pytest.raises(LoopError, match="'scale'"):
            f(params, X)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "to": lambda part: part.to(torch.float64),
    "double": lambda part: part.double(),
    "half": lambda part: part.half(),
    "of all": lambda part: nn.Sequential(part).double(),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_in_place_are_refused(conversion: str, stack: str) -> None:
    fn, params = ta.functionalize(Copying(lambda m, x: CONVERSIONS[conversion](m.a)(x)))
    kinds = [p.dtype for p in params.values()]
    for around in (lambda f: f, lambda f: torch.func.grad(lambda p, x: f(p, x).sum())):
        with pytest.raises(PurityError, match=r"test_module_copies\.py:\d+ .* converts a Part in place"):
            around(STACKS[stack](fn))(params, X)
    assert kinds == [p.dtype for p in params.values()]


@pytest.mark.parametrize("stack", STACKS)
def test_conversions_of_nothing_are_none(stack: str) -> None:
    check(Copying(lambda m, x: m.a.float()(x) + m.b.to(torch.float32).to("cpu")(x)), stack)
