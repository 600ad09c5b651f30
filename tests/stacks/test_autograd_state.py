"""What a function reads of autograd is that of the plain call, under every stack, or refused by line."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from any_size import fuse
from effort import examples
from torch.autograd.graph import register_multi_grad_hook
from torch.func import grad, vmap

from torchard import (
    Mesh,
    MeshTensor,
    P,
    PurityError,
    checkpoint,
    functionalize,
    jit,
    repeat,
    shard,
)

MESH = Mesh({"dp": 3}, virtual=True)
SPECS = (P(), P("dp"))
F = Callable[..., torch.Tensor]


class _Calling(torch.nn.Module):
    def __init__(self, f: F) -> None:
        super().__init__()
        self.f = lambda *args: f(*args)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.f(*args)


def _in_a_module(f: F) -> F:
    fn, _ = functionalize(_Calling(f))
    return jit(lambda w, x: fn({}, w, x), backend="eager")


STACKS: dict[str, Callable[[F], F]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda f: shard(f, MESH, in_specs=SPECS),
    "fuse": fuse,
    "shard of jit": lambda f: shard(jit(f, backend="eager"), MESH, in_specs=SPECS),
    "checkpoint inside": lambda f: jit(lambda w, x: checkpoint(f)(w, x), backend="eager"),
    "function inside": lambda f: jit(lambda w, x: f(w, x), backend="eager"),
    "module": _in_a_module,
}


def _twice_if(seen: bool, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if seen else h


def derived(w, x):
    h = x @ w
    return _twice_if(h.requires_grad, h).sum()


def argument(w, x):
    return _twice_if(w.requires_grad, x @ w).sum() + _twice_if(x.requires_grad, x @ w).sum()


def leaves(w, x):
    h = x @ w
    return _twice_if(w.is_leaf, h).sum() + _twice_if(h.is_leaf, h).sum()


def function_of_grad(w, x):
    h = x @ w
    return _twice_if(h.grad_fn is None, h).sum()


def by_name(w, x):
    h = x @ w
    return _twice_if(getattr(h, "requires" + "_grad"), h).sum()


def detached(w, x):
    h = (x @ w).detach()
    return _twice_if(h.requires_grad, x @ w).sum()


def of_a_constant(w, x):
    return _twice_if(torch.ones_like(w).requires_grad or torch.ones(2).requires_grad, x @ w).sum()


def written(w, x):
    h = torch.zeros(3, 2)
    h[0] = w[0]
    return _twice_if((h + 1).requires_grad, x @ w).sum()


def without(w, x):
    with torch.no_grad():
        h = x @ w
    return _twice_if(h.requires_grad, x @ w).sum()


def switched_on(w, x):
    with torch.enable_grad():
        h = x @ w
    return _twice_if(h.requires_grad, h).sum()


def grad_mode(w, x):
    return _twice_if(torch.is_grad_enabled(), x @ w).sum()


def hook(w, x):
    h = x @ w
    h.register_hook(lambda g: 10 * g)
    return h.sum()


def guarded_hook(w, x):
    h = x @ w
    if h.requires_grad:
        h.register_hook(lambda g: 10 * g)
    return h.sum()


def several_hooks(w, x):
    h, seen = x @ w, []
    if torch.is_grad_enabled() and h.requires_grad:
        register_multi_grad_hook([h], lambda gs: seen.append(gs))
    return h.sum() + len(seen)


def module_hook(w, x):
    layer = torch.nn.Identity()
    layer.register_full_backward_hook(lambda m, before, after: (before[0] * 10,))
    return layer(x @ w).sum()


def retained(w, x):
    h = x @ w
    if h.requires_grad:
        h.retain_grad()
    return _twice_if(h.retains_grad, h).sum()


def switched_off(w, x):
    h = (x @ w).detach().requires_grad_(False)
    return (h * w.sum()).sum()


def version(w, x):
    h = x @ w
    return _twice_if(h._version + w._version > 0, h).sum()


def own_gradient(w, x):
    return (x @ w if w.grad is None else x @ w.grad).sum()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(h):
        return h * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return 3 * g


def of_own_function(w, x):
    h = Own.apply(x @ w)
    return _twice_if(h.requires_grad, h).sum()


class Closed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.full((2,), 0.5))

    def forward(self, w, x):
        h = _twice_if(self.p.requires_grad, x @ w)
        return (_twice_if((self.p * 2).requires_grad, h) + self.p).sum()


OBSERVERS = [
    *(derived, argument, leaves, function_of_grad, by_name, detached, of_a_constant, written),
    *(without, switched_on, grad_mode, hook, guarded_hook, several_hooks, module_hook, retained),
    *(switched_off, version, own_gradient, of_own_function, Closed()),
]


def _values() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4.0).reshape(2, 2) + 1, torch.arange(6.0).reshape(3, 2) - 2


def backward(f: F) -> Any:
    w, x = _values()
    out = f(w.requires_grad_(), x)
    return out.detach(), torch.autograd.grad(out, w, allow_unused=True)[0]


def backward_of_other(f: F) -> Any:
    w, x = _values()
    out = f(w, x.requires_grad_())
    return out.detach(), torch.autograd.grad(out, x, allow_unused=True)[0] if out.requires_grad else None


def no_gradient(f: F) -> Any:
    return f(*_values()).detach()


def no_grad(f: F) -> Any:
    w, x = _values()
    with torch.no_grad():
        return f(w.requires_grad_(), x)


def outside(f: F) -> Any:
    return grad(f)(*_values())


def outside_of_other(f: F) -> Any:
    return grad(f, argnums=1)(*_values())


def twice(f: F) -> Any:
    w, x = _values()
    return grad(lambda x: grad(f)(w, x).sum())(x)


def mapped(f: F) -> Any:
    w, x = _values()
    return vmap(grad(f), (0, None))(torch.stack([w, 2 * w]), x)


MODES = [
    *(backward, no_gradient, outside, backward_of_other, no_grad, outside_of_other, twice, mapped),
]


def _outcome(mode: Callable[[F], Any], f: F) -> Any:
    """The result, or the error that the plain call ends in as well."""
    try:
        return mode(f)
    except PurityError as error:
        assert "test_autograd_state.py:" in str(error), error
        return error
    except RuntimeError as error:
        return type(error)


def _same(have: Any, want: Any) -> bool:
    have = have.full() if isinstance(have, MeshTensor) else have
    if isinstance(want, type):  # what torch does not support may work
        return True
    if isinstance(want, tuple):
        return all(map(_same, have, want))
    if isinstance(want, torch.Tensor):
        return isinstance(have, torch.Tensor) and torch.equal(have, want)
    return have is want


@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
@pytest.mark.parametrize("observer", OBSERVERS, ids=lambda f: getattr(f, "__name__", "closed"))
def test_a_function_reads_the_autograd_state_of_the_plain_call(observer: F) -> None:
    turn, every = OBSERVERS.index(observer), examples(ci=3, explore=1)
    for name, stack in islice(STACKS.items(), turn % every, None, every):
        transformed = stack(observer)
        for mode in MODES * 2:
            want, have = _outcome(mode, observer), _outcome(mode, transformed)
            refused = isinstance(have, PurityError)
            assert refused or _same(have, want), (name, mode.__name__, have, want)


@pytest.mark.parametrize("observer", [f for f in OBSERVERS if f not in (version, own_gradient)])
def test_gradients_taken_inside(observer: F) -> None:
    want = _outcome(no_gradient, grad(observer))
    for name in ("jit", "checkpoint", "shard", "fuse"):
        have = _outcome(no_gradient, STACKS[name](grad(observer)))
        assert isinstance(have, PurityError) or _same(have, want), (name, have, want)


@pytest.mark.parametrize("observer", [derived, argument, leaves, detached, Closed()])
@pytest.mark.parametrize("mode", [backward, no_gradient, outside, no_grad])
def test_what_arguments_and_operations_tell_is_answered(observer: F, mode: Any) -> None:
    for stack in ("jit", "checkpoint", "shard", "fuse"):
        assert not isinstance(_outcome(mode, STACKS[stack](observer)), PurityError), stack


def test_a_frozen_parameter_is_not_a_trained_one() -> None:
    module = Closed()
    run = jit(module, backend="eager")
    for requires in (True, False, True):
        module.p.requires_grad_(requires)
        assert torch.equal(run(*_values()), module(*_values()))


def test_the_body_of_a_loop_cannot_tell_what_its_carry_requires() -> None:
    def body(row, carry):
        return _twice_if(carry.requires_grad, carry @ row)

    def f(w, x):
        return repeat(body, torch.stack([w, w]), torch.zeros(2, 2) + x[:2]).sum()

    with pytest.raises(PurityError, match=r"test_autograd_state.py:\d+ in body reads"):
        backward(jit(f, backend="eager"))


def test_a_hook_in_a_gradient_taken_inside_runs() -> None:
    assert torch.equal(jit(grad(hook), backend="eager")(*_values()), grad(hook)(*_values()))
