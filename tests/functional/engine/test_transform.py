"""Transformed under every transform of torch, nested and not, against plain functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from dummies import Halves, Identity, Mark, Pair, PairRuntime, Split, halves
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torchard.functional.core.errors import RetraceWarning
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import Program
from torchard.functional.tracing.signature import ShapeDtype

F64 = torch.float64
REWRITES = {"identity": Identity(), "mark": Mark(), "split": Split()}


def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ w)
    return (h * h.sin()).sum()


def whole(value: Any) -> Any:
    return value.full() if isinstance(value, Pair) else value


def make(rewrite: str, how: str) -> Callable[..., Any]:
    r = REWRITES[rewrite]
    if how == "T":
        return Transformed(f, [r])
    if how == "TT":
        return Transformed(Transformed(f, [r]), [r])
    inner = Transformed(f, [r])
    return Transformed(grad(inner), [r])


def plain(how: str) -> Callable[..., Any]:
    return grad(f) if how == "TgradT" else f


def scalar(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda *args: whole(function(*args)).square().sum()


CASES: dict[str, Callable[[Callable[..., Any], Any, Any], Any]] = {
    "call": lambda T, w, x: T(w, x),
    "grad": lambda T, w, x: grad(scalar(T))(w, x),
    "grad2": lambda T, w, x: grad(lambda w: grad(scalar(T))(w, x).sin().sum())(w),
    "grad3": lambda T, w, x: grad(
        lambda w: grad(lambda w: grad(scalar(T))(w, x).sin().sum())(w).cos().sum()
    )(w),
    "grad both": lambda T, w, x: grad(scalar(T), argnums=(0, 1))(w, x),
    "vmap": lambda T, w, x: vmap(lambda x: whole(T(w, x)))(torch.stack([x, x + 1, x * 2])),
    "vmap out": lambda T, w, x: vmap(lambda x: whole(T(w, x)), in_dims=1)(
        torch.stack([x, x + 1, x * 2], 1)
    ),
    "vmap vmap": lambda T, w, x: vmap(
        lambda w: vmap(lambda x: whole(T(w, x)))(torch.stack([x, x + 1]))
    )(torch.stack([w, w * 2, w - 1])),
    "vmap grad": lambda T, w, x: vmap(grad(scalar(T)), in_dims=(None, 0))(
        w, torch.stack([x, x + 1])
    ),
    "grad vmap": lambda T, w, x: grad(
        lambda w: vmap(scalar(T), in_dims=(None, 0))(w, torch.stack([x, x + 1])).sum()
    )(w),
    "jvp": lambda T, w, x: jvp(lambda w: whole(T(w, x)), (w,), (w.cos(),)),
    "jvp grad": lambda T, w, x: jvp(lambda w: grad(scalar(T))(w, x), (w,), (w.cos(),)),
    "grad jvp": lambda T, w, x: grad(
        lambda w: jvp(lambda w: whole(T(w, x)), (w,), (w.cos(),))[1].square().sum()
    )(w),
    "hessian": lambda T, w, x: hessian(scalar(T))(w, x),
    "jacrev": lambda T, w, x: jacrev(lambda w: whole(T(w, x)))(w),
    "jacfwd": lambda T, w, x: jacfwd(lambda w: whole(T(w, x)))(w),
    "make_fx grad": lambda T, w, x: make_fx(grad(scalar(T)))(w, x)(w, x),
    "make_fx vmap grad": lambda T, w, x: make_fx(vmap(grad(scalar(T)), in_dims=(None, 0)))(
        w, torch.stack([x, x])
    )(w, torch.stack([x, x + 1])),
}


def backward(T: Callable[..., Any], w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    scalar(T)(w, x).backward()
    return w.grad, x.grad


def double_backward(T: Callable[..., Any], w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    (first,) = torch.autograd.grad(scalar(T)(w, x), w, create_graph=True)
    first.sin().sum().backward()
    return first.detach(), w.grad, x.grad


def grad_below_backward(T: Callable[..., Any], w: torch.Tensor, x: torch.Tensor) -> Any:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    grad(scalar(T))(w, x).sin().sum().backward()
    return w.grad, x.grad


CASES |= {
    "backward": backward,
    "double backward": double_backward,
    "grad, then backward": grad_below_backward,
}


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-11) -> None:
    ours, theirs = (torch.utils._pytree.tree_leaves(x) for x in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


MATRIX = [
    (rewrite, how, case)
    for rewrite in ("identity", "split")
    for how in ("T", "TT", "TgradT")
    for case in CASES
    if how != "TT" or rewrite == "split"
    # Fourth derivatives are many programs: whose values are in parts says it for both.
    if (rewrite, how, case) != ("identity", "TgradT", "grad3")
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("rewrite", "how", "case"), MATRIX)
def test_every_transform_of_a_transform(rewrite: str, how: str, case: str) -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    ours = CASES[case](make(rewrite, how), w, x)
    assert_same(whole(ours), CASES[case](plain(how), w, x))


# -- placed values --------------------------------------------------------------------------------


def g(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def test_placed_values_go_in_and_come_out() -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    T = Transformed(g, [Split()])
    out = T(halves(w), x)
    assert isinstance(out, Pair)
    torch.testing.assert_close(out.full(), g(w, x))


def test_a_placed_argument_brings_its_own_rewrite() -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    out = Transformed(g, [Identity()])(halves(w), x)
    assert isinstance(out, Pair)
    torch.testing.assert_close(out.full(), g(w, x))


@pytest.mark.parametrize("placed", [(0,), (1,), (0, 1)])
def test_derivatives_of_placed_values(placed: tuple[int, ...]) -> None:
    args = [torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)]
    mixed = [halves(a) if i in placed else a for i, a in enumerate(args)]

    def loss(T: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda *args: whole(T(*args)).sin().sum()

    def penalty(T: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def of(*args: Any) -> torch.Tensor:
            gradients = grad(loss(T), argnums=(0, 1))(*args)
            return sum(whole(v).square().sum() for v in gradients)

        return of

    T = Transformed(g, [Split()])
    for what in (loss, penalty):
        ours = grad(what(T), argnums=(0, 1))(*mixed)
        for i, (a, b) in enumerate(zip(ours, grad(what(g), argnums=(0, 1))(*args), strict=True)):
            assert isinstance(a, Pair) == (i in placed)
            torch.testing.assert_close(whole(a), b, rtol=1e-11, atol=1e-11)


def test_jvp_of_placed_values() -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    T = Transformed(g, [Split()])
    value, tangent = jvp(lambda w: T(w, x), (halves(w),), (halves(w.cos()),))
    theirs = jvp(lambda w: g(w, x), (w,), (w.cos(),))
    assert_same([value.full(), tangent.full()], list(theirs))


def test_backward_of_placed_values() -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    held = halves(w)
    for part in held.parts:
        part.requires_grad_()
    Transformed(g, [Split()])(held, x).full().sum().backward()
    got = torch.cat([part.grad for part in held.parts if part.grad is not None])
    torch.testing.assert_close(got, grad(lambda w: g(w, x).sum())(w))


# -- composing, nesting ---------------------------------------------------------------------------


class Count(Identity):
    """Counts how often each method runs."""

    def __init__(self) -> None:
        object.__setattr__(self, "seen", [])

    def annotate(self, program: Program) -> Program:
        self.seen.append("annotate")
        return program

    def __call__(self, program: Program) -> Program:
        self.seen.append("call")
        return program.copy()

    def inline(self, program: Program) -> Program:
        self.seen.append("inline")
        return program.copy()

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def test_transforms_of_transforms_share_one_trace() -> None:
    calls = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin().sum()

    first, second = Count(), Count()
    T = Transformed(Transformed(fn, [first]), [second])
    assert T.rewrites == (first, second) and T.fn is fn
    x = torch.randn(3, requires_grad=True)
    for _ in range(3):
        T(x).backward()
        T(x.detach())
    assert calls == [1]
    assert first.seen == second.seen == ["annotate", "call", "call"]


def test_nothing_is_derived_twice() -> None:
    count = Count()
    T = Transformed(lambda x: x.sin().prod(), [count])
    x = torch.randn(3, dtype=F64)
    first = hessian(T)(x)
    seen = len(count.seen)
    assert_same(hessian(T)(x), first)
    assert len(count.seen) == seen


def test_only_the_gradients_asked_for() -> None:
    T = Transformed(lambda a, b: a @ b, [Identity()])
    a, b = torch.randn(2, 3), torch.randn(3, 2)
    T(a.requires_grad_(), b).sum().backward()
    (entry,) = T._entries.values()
    joint = entry.lowered.joint((True, False))
    assert sum("mm" in node.name for node in joint.calls) == 2
    assert a.grad is not None and b.grad is None


def test_inside_another_trace_the_pieces_are_inlined() -> None:
    piece = Count()
    inner = Transformed(g, [piece])
    outer = Transformed(lambda w, x: inner(w, x).sum() + inner(w, x + 1).sum(), [Identity()])
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    torch.testing.assert_close(outer(w, x), (g(w, x) + g(w, x + 1)).sum())
    assert piece.seen == ["annotate", "inline"]
    assert_same(grad(outer)(w, x), grad(lambda w, x: (g(w, x) + g(w, x + 1)).sum())(w, x))


def test_a_step_with_gradients_of_pieces() -> None:
    inner = Transformed(g, [Split()])

    def step(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x: w - 0.1 * grad(lambda w: f(w, f(w, x)).sum())(w)

    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    T = Transformed(step(inner), [Mark()])
    assert_same(T(w, x), step(g)(w, x))

    def squares(s: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        return lambda w: s(w, x).square().sum()

    assert_same(grad(squares(T))(w), grad(squares(step(g)))(w))


def test_what_nested_pieces_ask_for_is_done() -> None:
    class Asks(Identity):
        def inline(self, program: Program) -> Program:
            return replace(program.copy(), asks=(Split(),))

    inner = Transformed(g, [Asks()])
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)
    outer = Transformed(lambda w, x: inner(w, x), [Identity()])
    assert isinstance(outer(w, x), Pair)
    covered = Transformed(lambda w, x: inner(w, x), [Split()])
    assert isinstance(covered(w, x), Pair)
    assert isinstance(outer.lower(w, x).runtime, PairRuntime)


class Twice(torch.autograd.Function):
    """A derivative that no graph of the forward shows."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor) -> Any:
        return Twice.apply(x), dims[0]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return (Twice.apply(x * 3) * x.sin()).sum()


@pytest.mark.parametrize(
    "case", ["grad", "grad2", "grad3", "vmap grad", "grad vmap", "jacrev", "double backward"]
)
def test_opaque_gradients(case: str) -> None:
    w, x = torch.randn(4, dtype=F64), torch.randn(4, dtype=F64)
    T = Transformed(rounded, [Identity()])
    # Also as a piece of another: the outer derivative may not replay what the inner knows better.
    outer = Transformed(lambda x: T(x * 1), [Identity()])
    for f in (T, outer):
        ours = CASES[case](lambda w, x, f=f: f(w + x), w, x)
        assert_same(ours, CASES[case](lambda w, x: rounded(w + x), w, x))


def test_autocast_is_part_of_the_signature() -> None:
    w, x = torch.randn(4, 4), torch.randn(2, 4)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        half = torch.softmax(x @ w, -1)
        with torch.autocast("cpu", enabled=False):
            full = x @ w
        return (half * full).square().sum()

    T = Transformed(loss, [Identity()])
    assert T(w, x).equal(loss(w, x))
    found = []
    for f in (T, loss):
        leaf = w.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = f(leaf, x)
        value.backward()
        found.append((value.detach(), leaf.grad))
    assert_same(*found, tolerance=0)


def test_a_second_run_has_the_autocast_of_the_first() -> None:
    """What computes without gradients is run again for them, wherever they are taken."""
    w, x = torch.randn(4, 4), torch.randn(2, 4)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x @ w).square().sum()
        return ((x @ w) * scale).sum()

    T = Transformed(loss, [Identity()])
    for narrow in (True, False):
        found = []
        for f in (T, loss):
            leaf = w.clone().requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
                value = f(leaf, x)
            value.backward()
            found.append((value.detach(), leaf.grad))
        assert_same(*found, tolerance=0)


# -- closures -------------------------------------------------------------------------------------


def test_closures_get_their_gradients() -> None:
    w, x = torch.randn(4, 4, dtype=F64), torch.randn(2, 4, dtype=F64)

    def outer(wrap: Callable[..., Any]) -> Callable[..., Any]:
        return lambda w, x: wrap(lambda h: g(w, h))(wrap(lambda h: g(w, h))(x)).sum()

    def T(fn: Callable[..., Any]) -> Transformed:
        return Transformed(fn, [Identity()])

    ours, theirs = outer(T), outer(lambda fn: fn)
    assert_same(grad(ours)(w, x), grad(theirs)(w, x))
    assert_same(hessian(ours)(w, x), hessian(theirs)(w, x))
    assert_same(grad(T(ours))(w, x), grad(theirs)(w, x))
    batch = torch.stack([w, w + 1])
    assert_same(vmap(ours, in_dims=(0, None))(batch, x), vmap(theirs, in_dims=(0, None))(batch, x))
    leaf = w.clone().requires_grad_()
    ours(leaf, x).backward()
    assert_same(leaf.grad, grad(theirs)(w, x))


def test_each_call_reads_closures_afresh() -> None:
    held = {"w": torch.randn(3), "times": 2}
    times = 2

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * held["w"] * times

    T = Transformed(fn, [Identity()])
    x = torch.randn(3)
    assert T(x).equal(fn(x))
    held["w"] = torch.randn(3)
    assert T(x).equal(fn(x))
    held["w"].mul_(2)
    assert T(x).equal(fn(x))
    assert T._traces == 1
    held["w"] = torch.randn(1)
    assert T(x).equal(fn(x))
    times = 3
    assert T(x).equal(fn(x))
    assert T._traces == 3


# -- cache ----------------------------------------------------------------------------------------


def test_the_signature_decides() -> None:
    T = Transformed(lambda x, n=1, flag=True: x * n, [Identity()])
    x = torch.randn(2, 3)
    calls: list[Any] = [
        lambda: T(x), lambda: T(x, 2), lambda: T(x, n=2), lambda: T(x, 1, 1), lambda: T(x, 1, True),
        lambda: T(x.T), lambda: T(x.double()), lambda: T(torch.randn(3)),
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for call in calls:
            call()
    assert T._traces == len(calls)
    for call in calls:
        call()
    assert T._traces == len(calls)
    T(x, 1.5), T(x, 2.5)
    assert T._traces == len(calls) + 1
    assert T(x, 2.5).equal(x * 2.5)


def test_the_cache_is_bounded() -> None:
    T = Transformed(lambda x: x * 2, [Identity()], cache_size=2)
    for size in (1, 2, 3, 1, 3):
        T(torch.ones(size))
    assert len(T._entries) == 2 and T._traces == 4


def test_the_eighth_trace_says_which_leaf_changes() -> None:
    T = Transformed(lambda p, x: x * p["n"], [Identity()])
    x = torch.randn(3)
    for n in range(7):
        T({"n": n}, x)
    with pytest.warns(RetraceWarning, match=r"args\[0\]\['n'\] took 8 different values \(0, 1"):
        T({"n": 7}, x)


def test_the_eighth_trace_says_what_else_changes() -> None:
    x, kept = torch.randn(3), [1.0]
    T = Transformed(lambda x, part: x[part] * len(kept), [Identity()])
    for _ in range(7):
        assert T(x, slice(0, 2)).equal(x[:2] * len(kept))
        kept.append(1.0)
    with pytest.warns(RetraceWarning, match=r"the closure variable kept\[\d\] changed"):
        T(x, slice(0, 2))
    T = Transformed(lambda x, part: x[part], [Identity()])
    for n in range(7):
        T(x, slice(0, n))
    with pytest.warns(RetraceWarning, match=r"args\[1\] took 8 different values \(slice\(0, 0, None\)"):
        T(x, slice(0, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_a_number_given_to_a_piece_promotes_as_in_python(dtype: torch.dtype) -> None:
    inner = Transformed(lambda x, by: (x * by, by + x[0] + x[1]), [Identity()])
    x = torch.arange(1, 4).to(dtype)
    for outer in (Transformed(lambda x: inner(x, 2.5), [Identity()]), lambda x: inner(x, 2.5)):
        for have, want in zip(outer(x), (x * 2.5, 2.5 + x[0] + x[1]), strict=True):
            assert have.dtype == want.dtype and torch.equal(have, want)


def test_threads_share_a_cache() -> None:
    T = Transformed(lambda x: (x.sin() * 2).sum(), [Identity()])
    x = torch.randn(5)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: (T(x), grad(T)(x)), range(16)))
    for value, gradient in found:
        torch.testing.assert_close(value, (x.sin() * 2).sum())
        torch.testing.assert_close(gradient, 2 * x.cos())


def test_lower_plans_without_running() -> None:
    T = Transformed(g, [Split()])
    program = T.lower(torch.empty(4, 4, device="meta"), torch.empty(2, 4, device="meta"))
    assert program.outputs[0].tag == Halves()
    joint = T.lower_joint(ShapeDtype((4, 4)), ShapeDtype((2, 4)), argnums=0)
    assert [leaf.path for leaf in joint.outputs] == ["out", "gradient of args[0]"]
    assert joint.inputs[2].tag == Halves()


# torch's own: on importing the compiler, and in Dynamo's look at a tensor that is not a leaf.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_foreign_tracers_see_the_program() -> None:
    w, x = torch.randn(4, 4), torch.randn(2, 4)
    T = Transformed(g, [Identity()])
    assert "aten.tanh" in make_fx(T)(w, x).code
    compiled = torch.compile(lambda w, x: T(w * 2, x) + 1, backend="eager")
    torch.testing.assert_close(compiled(w, x), g(w * 2, x) + 1)
    leaf = w.clone().requires_grad_()
    compiled(leaf, x).sum().backward()
    torch.testing.assert_close(leaf.grad, grad(lambda w: g(w * 2, x).sum())(w))


def test_methods_can_be_transformed() -> None:
    class Model:
        scale = 3.0

        def loss(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        run = Transformed(loss, [Identity()])

    x = torch.randn(2)
    assert Model().run(x).equal(x * 3)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=30))
@settings(max_examples=examples(ci=10, explore=1000))
def test_looking_at_programs_does_not_change_what_is_kept(steps: list[tuple[bool, int]]) -> None:
    """Ranks that make the same calls trace at the same ones, whatever each of them looks at."""

    def traced(looking: bool) -> list[int]:
        at: list[int] = []
        T = Transformed(lambda x: x * 2, [Identity()], cache_size=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RetraceWarning)
            for called, n in steps:
                before = T._traces
                if called:
                    T(torch.ones(n))
                    at.append(T._traces - before)
                elif looking:
                    T.lower(torch.ones(n))
        return at

    # One that was looked at before need not be traced again; one that was called is never lost by it.
    assert all(a <= b for a, b in zip(traced(True), traced(False), strict=True))


def test_a_partial_has_the_name_of_its_function() -> None:
    def loss(scale: float, x: torch.Tensor) -> torch.Tensor:
        return (scale * x).sum()

    half = partial(loss, 0.5)
    for fn in (loss, half, partial(half), grad(half), torch.func.grad_and_value(half)):
        assert Transformed(fn, [Identity()]).__name__ == "loss"
    assert Transformed(torch.nn.Identity(), [Identity()]).__name__ == "Identity"
