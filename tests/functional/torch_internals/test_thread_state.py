"""A trace leaves the thread as it was, whatever happens inside, and does not depend on where it runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils.checkpoint
from any_size import fuse
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C import _functorch as functorch_c
from torch._functorch import eager_transforms
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_version import TORCH

from torchard import Mesh, MeshTensor, P, checkpoint, jit, shard, trace
from torchard.functional import torch_internals as internals

F64 = torch.float64
X = torch.linspace(0.1, 1.5, 12, dtype=F64).reshape(3, 4)
Fn = Callable[[torch.Tensor], torch.Tensor]


class Failed(Exception):
    """Raised by the user's own code."""


class Quiet(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class QuietFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def raises(x: torch.Tensor) -> torch.Tensor:
    raise Failed


def caught(x: torch.Tensor) -> torch.Tensor:
    """Goes on after an error of a kernel's, printing included."""
    with contextlib.suppress(RuntimeError):
        torch.lerp(x, x[:, :3], x)
    with contextlib.suppress(RuntimeError):
        x.clone().lerp_(x[0, :3], x)
    return x.sin()


def kept(x: torch.Tensor) -> torch.Tensor:
    """Keeps the error, and with it the frames it came through."""
    try:
        x.clone().lerp_(x[0, :3], x)
    except RuntimeError as error:
        errors.append(error)
    return x.sin()


errors: list[BaseException] = []


@pytest.fixture(autouse=True)
def no_other_thread_uses_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's own threads do not."""
    monkeypatch.setattr(internals.functorch_levels, "is_only_thread", lambda: True)


# What may stop a function, in Python, in a kernel, in the middle of a change of torch's state.
FAILURES: dict[str, Fn] = {
    "raise": raises,
    "shapes": lambda x: x @ x,
    "an overload resolved by trying": lambda x: x.quantile(0.4, dim=-1),
    "broadcast of a write": lambda x: x[0].clone().lerp_(x, x),
    "value": lambda x: x * x.sum().item(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "dynamic shape": lambda x: x[x > 0.3],
    "nonzero": lambda x: x.nonzero().sum() * x,
    "numpy": lambda x: x * float(x.detach().numpy()[0, 0]),
    "print": lambda x: x * len(repr(x)),
    "caught": caught,
    "kept": kept,
    "dual level left open": lambda x: [x, forward_ad.enter_dual_level()][0],  # type: ignore[list-item]
    "grad level left open": lambda x: [x, functorch_c._grad_increment_nesting()][0],
    "vmap level left open": lambda x: [
        x,
        functorch_c._vmap_increment_nesting(3, "error"),
    ][0],
    "dispatch mode left on": lambda x: [x, Quiet().__enter__()][0],
    "function mode left on": lambda x: [x, QuietFunctions().__enter__()][0],
    "gradients left off": lambda x: [x * 2, torch.set_grad_enabled(False)][0],
    "keys left excluded": lambda x: [
        x,
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU, True),
    ][0],
    "backward": lambda x: torch.autograd.grad(x.sum(), x)[0],
    "in place": lambda x: x.mul_(2),
}


def under(context: Callable[[], Any]) -> Callable[[Fn], Fn]:
    def around(f: Fn) -> Fn:
        def run(x: torch.Tensor) -> torch.Tensor:
            with context():
                return f(x)

        return run

    return around


def as_summed(f: Fn) -> Fn:
    return lambda x: f(x).sum()


# What a function may have around it, inside the trace.
SURROUNDINGS: dict[str, Callable[[Fn], Fn]] = {
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[1],
    "grad": lambda f: grad(as_summed(f)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones(()).expand_as(f(x)))[0],
    "vmap": lambda f: vmap(f),
    "jacfwd": lambda f: jacfwd(as_summed(f)),
    "jacrev": lambda f: jacrev(as_summed(f)),
    "hessian": lambda f: hessian(as_summed(f)),
    "functionalize": functionalize,
    "no_grad": under(torch.no_grad),
    "inference mode": under(torch.inference_mode),
    "autocast": under(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "dual level": under(forward_ad.dual_level),
    "mode": under(Quiet),
    "saved tensors": under(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    ),
    "checkpoint": checkpoint,
}

HOW: dict[str, Callable[[Fn], Any]] = {
    "trace": lambda f: trace(f)(X),
    "checkpoint": lambda f: checkpoint(f)(X),
    "jit": lambda f: jit(f, backend="eager")(X),
    "gradient": lambda f: checkpoint(as_summed(f))(X.clone().requires_grad_()).backward(),
    "jvp": lambda f: jvp(checkpoint(f), (X,), (X,)),
    "vmap of grad": lambda f: vmap(grad(as_summed(checkpoint(lambda x: f(x[None])))))(X),
    "shard": lambda f: shard(f, Mesh({"x": 2}, virtual=True))(X),
}


def state() -> tuple[Any, ...]:
    """As torch's own functions tell it, not the library's."""
    return (
        str(torch._C._dispatch_tls_local_include_set()),
        str(torch._C._dispatch_tls_local_exclude_set()),
        functorch_c.get_dynamic_layer_stack_depth(),
        eager_transforms.JVP_NESTING,
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch.is_grad_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch.is_inference_mode_enabled(),
        forward_ad._current_level,
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch.compiler.is_compiling(),
        torch.get_default_dtype(),
        torch.utils.checkpoint.checkpoint,
    )


def works() -> None:
    """Programs that went wrong in a thread whose keys were left excluded."""
    mesh = Mesh({"x": 2}, virtual=True)
    x = X.clone().requires_grad_()
    y = checkpoint(lambda x: x * 2 + 1)(x)
    assert torch.equal(y, X * 2 + 1)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(gradient, 4 * (X * 2 + 1))
    assert torch.equal(shard(lambda x: (x * 2).cumsum(0), mesh)(X).full(), (X * 2).cumsum(0))
    assert torch.equal(vmap(grad(as_summed(fuse(torch.sin))))(X), X.cos())
    assert torch.equal(jvp(jit(torch.sin, backend="eager"), (X,), (X,))[1], X.cos() * X)


@given(
    st.sampled_from(sorted(FAILURES)),
    st.lists(st.sampled_from(sorted(SURROUNDINGS)), max_size=3),
    st.sampled_from(sorted(HOW)),
)
@settings(
    max_examples=examples(ci=10, explore=1500),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_the_thread_is_what_it_was(failure: str, around: list[str], how: str) -> None:
    fn = FAILURES[failure]
    for name in around:
        fn = SURROUNDINGS[name](fn)
    before = state()
    assert not torch.is_inference_mode_enabled()
    try:
        HOW[how](fn)
    except Exception as error:
        del error
    assert state() == before
    errors.clear()
    gc.collect()  # what was kept alive by the error has no effect either
    assert state() == before


@pytest.mark.parametrize("failure", FAILURES)
def test_programs_that_work_still_do(failure: str) -> None:
    for how in ("trace", "jvp", "gradient"):
        fn = SURROUNDINGS["jvp"](FAILURES[failure])
        with contextlib.suppress(Exception):
            HOW[how](fn)
    errors.clear()
    works()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.quantile(0.4, dim=-1),
        lambda x: x.nanquantile(0.4, dim=0),
        lambda x: x.clone().lerp_(x.sin(), x.cos()),
        lambda x: x.clone().addcmul_(x, x.cos()),
        lambda x: x.clone().pow_(x),
    ],
)
@pytest.mark.parametrize("make", [checkpoint, lambda f: jit(f, backend="eager")])
def test_kernels_that_try_overloads_work_under_forward_mode(make: Any, fn: Fn) -> None:
    if TORCH < (2, 12) and any("quantile" in name for name in fn.__code__.co_names):
        pytest.skip("torch 2.11 compares the values of what a quantile is interpolated from")
    both: Callable[[Fn], Any] = lambda f: lambda x: jvp(f, (x,), (x.cos(),))  # noqa: E731
    for ours in (make(both(fn))(X), both(make(fn))(X)):
        for mine, theirs in zip(ours, both(fn)(X), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def test_a_level_that_another_thread_opens_meanwhile_stays_open() -> None:
    """Around a kernel without forward mode; the level is the process's."""
    with contextlib.ExitStack() as others:
        with internals.below_forward_ad([internals.JVP]):
            others.enter_context(forward_ad.dual_level())
        assert internals.forward_ad_active()
        tangent = forward_ad.unpack_dual(forward_ad.make_dual(X, X.cos())).tangent
        assert tangent is not None and torch.equal(tangent, X.cos())


# -- first calls in odd places ----------------------------------------------------------------------


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x.sin() * 2).cos()


def whole(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


def in_dual_level(f: Fn) -> torch.Tensor:
    with forward_ad.dual_level():
        found = f(forward_ad.make_dual(X, X.cos()))
        tangent = forward_ad.unpack_dual(found).tangent
        assert tangent is not None
        return tangent


def in_dual_level_with_gradient(f: Fn) -> torch.Tensor:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X.clone().requires_grad_(), X.cos())
        (gradient,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        tangent = forward_ad.unpack_dual(gradient).tangent
        assert tangent is not None
        return tangent.detach()


def through_hooks(f: Fn) -> torch.Tensor:
    seen: list[type] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(type(tensor))
        return tensor

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = f(x).sum()
    assert set(seen) <= {torch.Tensor}
    (gradient,) = torch.autograd.grad(found, x)
    return gradient


def inside_torchs_checkpoint(f: Fn) -> torch.Tensor:
    x = X.clone().requires_grad_()
    run: Any = torch.utils.checkpoint.checkpoint
    (gradient,) = torch.autograd.grad(run(lambda x: f(x * 3).sin(), x, use_reentrant=False).sum(), x)
    return gradient


def saved_on_cpu(f: Fn) -> torch.Tensor:
    x = X.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        found = f(x).sum()
    (gradient,) = torch.autograd.grad(found, x)
    return gradient


def in_gradcheck(f: Fn) -> torch.Tensor:
    x = X[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        f, (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(f, (x,), check_fwd_over_rev=True)
    return f(X)


FIRST_CALLS: dict[str, Callable[[Fn], torch.Tensor]] = {
    "dual level": in_dual_level,
    "dual level, gradient": in_dual_level_with_gradient,
    "hooks": through_hooks,
    "torch.utils.checkpoint": inside_torchs_checkpoint,
    "save_on_cpu": saved_on_cpu,
    "gradcheck": in_gradcheck,
    "inference mode": lambda f: under(torch.inference_mode)(f)(X).clone(),
    "no_grad": lambda f: under(torch.no_grad)(f)(X),
    "dispatch mode": lambda f: under(Quiet)(f)(X),
    "function mode": lambda f: under(QuietFunctions)(f)(X),
    "jvp of vmap": lambda f: jvp(vmap(f), (X,), (X,))[1],
    "dual level inside": lambda f: in_dual_level(lambda x: f(x).sin()),
}

BODIES: dict[str, Fn] = {
    "plain": square,
    "jvp inside": lambda x: jvp(square, (x,), (x.cos(),))[1],
    "gradient inside": lambda x: grad(as_summed(square))(x),
    "no_grad inside": lambda x: square(x) * under(torch.no_grad)(square)(x),
}

TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "checkpoint": checkpoint,
    "fuse": fuse,
    "jit": lambda f: jit(f, backend="eager"),
    "shard": lambda f: shard(f, Mesh({"x": 2}, virtual=True), P("x"), P()),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", FIRST_CALLS)
@pytest.mark.parametrize("body", BODIES)
def test_a_first_call_may_be_anywhere(where: str, body: str) -> None:
    if (body == "jvp inside" and "dual" in where) or (where == "gradcheck" and body != "plain"):
        pytest.skip("torch refuses forward mode in forward mode, by one or the other of its doors")
    if body == "gradient inside" and where in ("hooks", "torch.utils.checkpoint", "save_on_cpu"):
        pytest.skip("torch.func.grad refuses hooks for what autograd saves")
    if TORCH < (2, 12) and where == "inference mode" and "inside" in body:
        pytest.skip("torch 2.11 takes wrong derivatives in inference mode")
    want = FIRST_CALLS[where](BODIES[body])
    # One transform a case, or all.
    at = (list(FIRST_CALLS).index(where) + list(BODIES).index(body)) % len(TRANSFORMS)
    names = [*TRANSFORMS][at:] + [*TRANSFORMS][:at]
    for name in names[: examples(ci=1, explore=len(names))]:
        transform = TRANSFORMS[name]
        before = state()
        transformed = transform(BODIES[body])
        for call in ("first", "second"):
            got = FIRST_CALLS[where](transformed)
            torch.testing.assert_close(whole(got), want, rtol=1e-11, atol=1e-13, msg=f"{name}, {call}")
        assert state() == before
