"""Tensors of a trace have no value: what needs or keeps one is told so. Lazy bits are carried out."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch.func import grad, jvp, vmap

from torchard import Mesh, P, checkpoint, jit, shard, trace
from torchard.functional.core.errors import PurityError, UnexpectedTracerError

F64, C128 = torch.float64, torch.complex128
X = torch.linspace(0.1, 1.5, 12, dtype=F64).reshape(3, 4)
Fn = Callable[[torch.Tensor], torch.Tensor]

TRANSFORMS: dict[str, Callable[[Fn], Any]] = {
    "checkpoint": checkpoint,
    "jit": lambda f: jit(f, backend="eager"),
    "fuse": fuse,
    "grad": lambda f: grad(lambda x: checkpoint(f)(x).sum()),
    "grad inside": lambda f: checkpoint(grad(lambda x: f(x).sum())),
    "vmap": lambda f: vmap(checkpoint(f)),
}

kept: list[Any] = []


def keeps(x: torch.Tensor) -> torch.Tensor:
    kept.append(x * 2)
    return x.sin()


def keeps_its_result(x: torch.Tensor) -> torch.Tensor:
    kept.append(x.sin())
    return kept[-1]


def keeps_its_argument(x: torch.Tensor) -> torch.Tensor:
    kept.append(x)
    return x.sin()


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operation": lambda t: t + 1,
    "with a real one": lambda t: X[: t.shape[0]] * t,
    "a method": lambda t: t.sum().item(),
    "another trace closes over it": lambda t: jit(lambda x: x[: t.shape[0]] * t, backend="eager")(
        X
    ),
    "an argument": lambda t: jit(torch.sin, backend="eager")(t),
    "an argument of a plan": lambda t: checkpoint(lambda x: x * 2)(t),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fn", [keeps, keeps_its_result, keeps_its_argument])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_leaked_tracer_says_where_it_was_made(transform: str, fn: Fn, use: str) -> None:
    kept.clear()
    TRANSFORMS[transform](fn)(X)
    assert kept
    with pytest.raises(UnexpectedTracerError, match=r"test_tracers\.py|an argument or closed-over"):
        USES[use](kept[0])
    kept.clear()


READ: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda t: t.numpy(),
    "asarray": np.asarray,
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "index": lambda t: [1, 2, 3][t],
    "iteration": lambda t: list(t.reshape(-1)),
    "data_ptr": lambda t: t.data_ptr(),
    "storage": lambda t: t.untyped_storage(),
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "save": lambda t: torch.save(t, io.BytesIO()),
    "dlpack": lambda t: t.__dlpack__(),
    "backward": lambda t: t.sum().backward(),
    "in a list": lambda t: torch.stack([X.sum(), t.sum()]),
    "a wrong call": lambda t: t.view(17),
    "==": lambda t: t == 3,
    "where": lambda t: torch.where(t > 0, 1.0, 2.0),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("transform", ["checkpoint", "jit", "fuse", "vmap"])
def test_a_leaked_tracer_has_no_value_to_read(transform: str, read: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.extend((x * 2, x.sum(), (x > 0).any(), x.sum().long(), x))
        return x.sin()

    kept.clear()
    TRANSFORMS[transform](fn)(X)
    for tensor in kept:
        with pytest.raises(
            UnexpectedTracerError, match=r"test_tracers\.py|an argument or closed-over"
        ):
            READ[read](tensor)
    kept.clear()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_texts_of_tracers_name_dtype_and_shape(transform: str) -> None:
    texts: list[str] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        values = (x, x.float(), x > 0, x.long().sum())
        texts.extend(text for value in values for text in (repr(value), str(value), f"{value!r}"))
        return x.sin()

    kept.clear()
    TRANSFORMS[transform](fn)(X)
    shape = [4] if transform == "vmap" else [3, 4]
    kinds = [f"float64{shape}", f"float32{shape}", f"bool{shape}", "int64[]"]
    if transform != "vmap":
        assert texts[:12] == [f"Traced({kind})" for kind in kinds for _ in range(3)]
    if transform in ("checkpoint", "jit", "fuse"):
        assert repr(kept[0]) == f"Traced({kinds[0]})"
        assert kept[0].shape == X.shape
        assert kept[0].dtype == F64
    kept.clear()


generator = torch.Generator()


def saved_on_cpu(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.sin()


REFUSED: dict[str, tuple[Fn, str]] = {
    "numpy": (lambda x: x * x.numpy().sum(), "needs the value"),
    "asarray": (lambda x: x * np.asarray(x).sum(), "needs the value"),
    "tolist": (lambda x: x * x.tolist()[0][0], "needs the value"),
    "cond": (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "cond, while_loop"),
    "while_loop": (
        lambda x: torch._higher_order_ops.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x)
        )[1],
        "while_loop, scan and map of torchard",
    ),
    "scan": (
        lambda x: torch._higher_order_ops.scan(lambda c, x: (c + x, c * x), x[0], x)[1],
        "scan and map of torchard",
    ),
    "autograd.grad": (lambda x: torch.autograd.grad(x.sin().sum(), x)[0], "torch.func.grad"),
    "backward": (lambda x: x.sin().sum().backward() or x, "torch.func.grad"),
    "randn": (lambda x: x + torch.randn(3, 4, generator=generator), "torchard.random"),
    "bernoulli": (lambda x: x.bernoulli(0.5, generator=generator), "torchard.random"),
    "randperm": (lambda x: x[torch.randperm(3, generator=generator)], "torchard.random"),
    "hooks under a gradient": (grad(lambda x: saved_on_cpu(x).sum()), "torchard.checkpoint"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_traced_is_refused_by_name(what: str) -> None:
    fn, text = REFUSED[what]
    for run in (trace(fn), checkpoint(fn), shard(fn, Mesh({"x": 2}, virtual=True))):
        with pytest.raises(PurityError, match=text) as raised:
            run(X)
        assert "test_tracers.py:" in str(raised.value)


COVARIANCES: dict[str, Fn] = {
    "cov": torch.cov,
    "of one row": lambda x: x[0].cov(),
    "corrcoef": torch.corrcoef,
    "corrcoef of one row": lambda x: x[0].corrcoef(),
    "uncorrected": lambda x: torch.cov(x, correction=0),
    "frequencies": lambda x: x.cov(fweights=torch.tensor([1, 2, 1, 3])),
    "weights": lambda x: x.cov(aweights=torch.tensor([0.1, 0.2, 0.3, 0.1], dtype=F64)),
    "both": lambda x: torch.cov(
        x, fweights=torch.tensor([1, 2, 1, 3]), aweights=torch.arange(1.0, 5.0, dtype=F64)
    ),
    "complex": lambda x: torch.cov(torch.complex(x, x.sin().flip(1))).abs(),
    "corrcoef of complex": lambda x: torch.corrcoef(torch.complex(x, x.sin().flip(1))).abs(),
}


@pytest.mark.parametrize("what", COVARIANCES)
def test_covariances_are_traced(what: str) -> None:
    fn = COVARIANCES[what]
    for both in (fn, grad(lambda x: fn(x.sin()).square().sum())):
        got, want = checkpoint(both)(X), both(X)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_covariances_of_more_dims_are_refused_as_by_torch() -> None:
    for run in (torch.cov, checkpoint(torch.cov)):
        with pytest.raises(RuntimeError, match="expected input to have two or fewer dimensions"):
            run(X[None])


VARIANCES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda x, v: F.gaussian_nll_loss(x, x.sin(), v),
    "none, full": lambda x, v: F.gaussian_nll_loss(x, x.sin(), v, full=True, reduction="none"),
    "per row": lambda x, v: F.gaussian_nll_loss(x, x.cos(), v[:, 0], reduction="sum"),
    "per row, with its dim": lambda x, v: F.gaussian_nll_loss(x, x.cos(), v[:, :1], eps=1e-3),
    "a number": lambda x, v: F.gaussian_nll_loss(x, v, 0.5),
}


@pytest.mark.parametrize("what", VARIANCES)
def test_losses_with_variances_are_traced(what: str) -> None:
    """torch looks for negative ones; small ones are raised and have a gradient all the same."""
    fn, v = VARIANCES[what], X.square().index_fill(1, torch.tensor([0]), 1e-9)

    def loss(x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return fn(x, v).sum()

    for both in (fn, grad(loss, (0, 1)), grad(lambda x, v: grad(loss)(x, v).square().sum())):
        torch.testing.assert_close(checkpoint(both)(X, v), both(X, v), rtol=1e-9, atol=1e-9)
    outside = grad(checkpoint(loss), (0, 1))(X, v)
    torch.testing.assert_close(outside, grad(loss, (0, 1))(X, v), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="incorrect size"):
        checkpoint(F.gaussian_nll_loss)(X, X, v[0, :2])
    with pytest.raises(ValueError, match="most is not valid"):
        checkpoint(F.gaussian_nll_loss)(X, X, v, reduction="most")


def z() -> torch.Tensor:
    return torch.complex(X, X.cos())


LAZY: dict[str, Callable[[], torch.Tensor]] = {
    "conj": lambda: z().conj(),
    "conj.imag": lambda: z().conj().imag,
    "neg view": lambda: torch._neg_view(X),
    "conj, a slice": lambda: z().conj()[:, 1:],
    "conj.imag.t": lambda: z().conj().imag.t(),
    "H": lambda: z().mH,
}
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "product": lambda x: x * 2,
    "imag": lambda x: x.imag * 3 if x.is_complex() else x.abs(),
    "real": lambda x: x.real * 3 if x.is_complex() else x.sin(),
    "conj.imag": lambda x: x.conj().imag if x.is_complex() else x,
    "angle": lambda x: x.angle() if x.is_complex() else x.neg(),
    "itself": lambda x: x,
    "matmul": lambda x: (x @ x.mT.conj()).abs(),
}
MADE: dict[str, Callable[[Any], Any]] = {
    "checkpoint": checkpoint,
    "jit": lambda f: jit(f, backend="eager"),
    "fuse": fuse,
    "shard": lambda f: shard(f, Mesh({"x": 2}, virtual=True), P("x"), P()),
}


def resolved(value: Any) -> torch.Tensor:
    value = value.full() if hasattr(value, "full") else value
    return value.resolve_conj().resolve_neg()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("lazy", LAZY)
def test_lazy_bits_are_carried_out(lazy: str, made: str) -> None:
    for read in READS.values():
        value = LAZY[lazy]()
        run = MADE[made](read)
        torch.testing.assert_close(resolved(run(value)), resolved(read(value)), rtol=1e-12, atol=0)
        if made == "shard":
            continue
        closed = MADE[made](lambda x, read=read, value=value: read(value) * x.sum())
        torch.testing.assert_close(
            resolved(closed(X)), resolved(read(value) * X.sum()), rtol=1e-12, atol=0
        )

        def total(f: Fn) -> Fn:
            return lambda x: f(x).abs().square().sum()

        got, want = (grad(total(f))(value) for f in (run, read))
        torch.testing.assert_close(resolved(got), resolved(want), rtol=1e-10, atol=1e-12)
        got, want = (jvp(f, (value,), (LAZY[lazy](),))[1] for f in (run, read))
        torch.testing.assert_close(resolved(got), resolved(want), rtol=1e-10, atol=1e-12)


def test_compiled_code_reads_no_lazy_bits() -> None:
    """Its memory, that is; also of what one half hands to the other."""
    run = jit(lambda x, w: (x * w).sin())
    value, other = z().conj().imag, X.clone().requires_grad_()
    found = run(value, other)
    torch.testing.assert_close(found, (value * other).sin(), rtol=1e-12, atol=0)
    cotangent = z().conj().imag
    (got,) = torch.autograd.grad(found, other, cotangent)
    (want,) = torch.autograd.grad((value * other).sin(), other, cotangent)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


class _Holder:
    kept: Any = None


def test_what_a_refused_trace_has_left_has_no_value() -> None:
    def keep(x: torch.Tensor, holder: _Holder) -> torch.Tensor:
        holder.kept = x * 2
        return x

    holder = _Holder()
    with pytest.raises(PurityError, match=r"_Holder: args\[1\]\.kept is now a tensor of the trace"):
        jit(keep, backend="eager")(X, holder)
    with pytest.raises(UnexpectedTracerError):
        holder.kept + 1


PARAMETERS: dict[str, Fn] = {
    "grad": lambda x: grad(lambda y: (y * torch.nn.Parameter(x * 2)).sum())(x),
    "grad, of a constant": lambda x: grad(
        lambda y: F.linear(y, torch.nn.Parameter(torch.eye(4, dtype=F64))).square().sum()
    )(x),
    "jvp": lambda x: jvp(lambda y: y * torch.nn.Parameter(y * 2), (x,), (x,))[1],
    "vmap": lambda x: vmap(lambda y: y * torch.nn.Parameter(y * 2))(x),
    "vmap, a subclass": lambda x: vmap(
        lambda y: torch.Tensor._make_subclass(torch.Tensor, y) * 2  # type: ignore[attr-defined]
    )(x),
    "no level": lambda x: x * torch.nn.Parameter(x.detach() * 2).detach(),
}


@pytest.mark.parametrize("transform", ["jit", "checkpoint", "fuse"])
@pytest.mark.parametrize("made", PARAMETERS)
def test_parameters_made_inside_are_right_or_refused(made: str, transform: str) -> None:
    """Under functorch's levels torch makes them by no operator that a trace sees."""
    fn = PARAMETERS[made]
    try:
        have = TRANSFORMS[transform](fn)(X)
    except PurityError as error:
        assert "test_tracers.py" in str(error) and "nn.Parameter" in str(error)
    else:
        torch.testing.assert_close(have, fn(X))
