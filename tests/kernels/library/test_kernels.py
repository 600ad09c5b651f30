"""Every kernel of the library is found in its own references, and is what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from any_size import fuse
from effort import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import NAMES, Case, inputs_of, names_of, outputs, plain
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import torchard
from torchard import Mesh, P, place, shard
from torchard.kernels import KERNELS, Kernel, Pattern

TP = Mesh({"tp": 2}, virtual=True)
SIZES = (2, 3, 5, 8, 17)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("plain", "transposed", "last dim first", "strided")
FEW = settings(
    max_examples=3,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate,),
)
ONE = settings(FEW, max_examples=1)

every_kernel = pytest.mark.parametrize("name", NAMES)


def cases(
    pattern: Pattern, sizes: Sequence[int] = SIZES, dtypes: Sequence[torch.dtype] = DTYPES
) -> st.SearchStrategy[Case]:
    names = names_of(pattern)
    assert pattern.dims is not None
    lead = any("..." in dims for dims in pattern.dims.inputs)
    return st.builds(
        Case,
        st.fixed_dictionaries({n: st.sampled_from(sizes) for n in names}),
        st.lists(st.sampled_from(sizes), min_size=1, max_size=2).map(tuple)
        if lead
        else st.just(()),
        st.sampled_from(dtypes),
        st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3).map(tuple),
        st.sampled_from(range(100)),  # not integers: those are drawn from loaded modules, too
    )


def drawn(name: str, run: Callable[[Kernel, Pattern, Case], None], how: Any, **cases_: Any) -> None:
    """One reference after another, in cases of their own."""
    kernel = KERNELS[name]

    @how
    @given(st.data())
    def check(data: st.DataObject) -> None:
        pattern = data.draw(st.sampled_from(kernel.patterns))
        run(kernel, pattern, data.draw(cases(pattern, **cases_)))

    check()


def fused(kernel: Kernel, fn: Callable[..., Any]) -> Any:
    return fuse(fn, kernel, compiler="eager")


def subject(kernel: Kernel, fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a kernel is found in: its reference, or gradients of it, if only these are looked for.

    Their cotangents are no products, which would be one with the reference's own.
    """
    if not kernel.gradient_only:
        return fn
    return lambda *args: gradients(lambda *given: [out.sin() for out in outputs(fn(*given))], args)


def use_of(kernel: Kernel) -> str:
    """The kernel in a report."""
    return f"{kernel.name}_backward" if kernel.gradient_only else kernel.name


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def exactly(kernel: Kernel, pattern: Pattern) -> Callable[..., Any]:
    """What the kernel computes, by its first reference of these dims: others may round on the way."""
    return subject(kernel, plain(next(p for p in kernel.patterns if p.dims == pattern.dims)))


def assert_as_exact(
    got: Any, eager: Any, exact: Any, tolerance: float, roundings: float = 4
) -> None:
    """As far from float64 as the reference's own operations are, or some roundings further."""
    for a, b, c in zip(outputs(got), outputs(eager), outputs(exact), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if not a.numel():
            continue
        allowed = tolerance * float((b.double() - c).abs().max())
        allowed += roundings * torch.finfo(a.dtype).eps * max(float(c.abs().max()), 1e-3)
        assert float((a.double() - c).abs().max()) <= allowed


def loss_of(fn: Callable[..., Any], args: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """A number of the floating inputs, and those."""
    floats = [i for i, t in enumerate(args) if t.is_floating_point()]

    def loss(*moving: Tensor) -> Tensor:
        given = list(args)
        for i, value in zip(floats, moving, strict=True):
            given[i] = value
        found: Any = 0
        for j, out in enumerate(outputs(fn(*given))):
            weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64)
            found = found + ((out * out * weights.view(out.shape).to(out.dtype)).sum() * (j + 1))
        return found  # type: ignore[no-any-return]

    return loss, [args[i] for i in floats]


def gradients(fn: Callable[..., Any], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss, moving = loss_of(fn, args)
    found: tuple[Tensor, ...] = torch.func.grad(loss, tuple(range(len(moving))))(*moving)
    return found


def second(fn: Callable[..., Any], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss, moving = loss_of(fn, args)
    every = tuple(range(len(moving)))

    def slope(*moving: Tensor) -> Tensor:
        return sum((g * g).sum() for g in torch.func.grad(loss, every)(*moving))  # type: ignore[return-value]

    found: tuple[Tensor, ...] = torch.func.grad(slope, every)(*moving)
    return found


def tangents(fn: Callable[..., Any], args: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss, moving = loss_of(fn, args)
    directions = tuple(torch.ones_like(m) for m in moving)
    found: tuple[Tensor, ...] = torch.func.jvp(loss, tuple(moving), directions)
    return found


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(
        list(outputs(got)), list(outputs(want)), rtol=1e-9, atol=1e-9, check_stride=False
    )


@every_kernel
def test_found_once_and_as_exact_as_its_reference(name: str) -> None:
    def run(kernel: Kernel, pattern: Pattern, case: Case) -> None:
        fn, args = subject(kernel, plain(pattern)), inputs_of(kernel, pattern, case)
        one = fused(kernel, fn)
        assert [str(use) for use in one.lower(*args).kernels] == [use_of(kernel)]
        exact = exactly(kernel, pattern)(*wide(args))
        assert_as_exact(one(*args), fn(*args), exact, kernel.tolerance)

    drawn(name, run, FEW)


@every_kernel
def test_any_sizes_are_right(name: str) -> None:
    """Where a dim is 0 or 1 long, other things are the same, too: found or not, values are."""

    def run(kernel: Kernel, pattern: Pattern, case: Case) -> None:
        fn, args = subject(kernel, plain(pattern)), inputs_of(kernel, pattern, case)
        try:
            want = fn(*args)
        except (RuntimeError, IndexError, ZeroDivisionError):  # the reference has nothing to say of these
            return
        try:
            got = fused(kernel, fn)(*args)
        except torchard.NoMatch:
            return
        torch.testing.assert_close(got, want, equal_nan=True, check_stride=False)

    drawn(name, run, FEW, sizes=(0, 1, 1, 2), dtypes=(torch.float64,))


@pytest.mark.sampled(6)
@every_kernel
def test_gradients_are_as_exact(name: str) -> None:
    def run(kernel: Kernel, pattern: Pattern, case: Case) -> None:
        fn, args = subject(kernel, plain(pattern)), inputs_of(kernel, pattern, case)
        got, want = gradients(fused(kernel, fn), args), gradients(fn, args)
        exact = gradients(exactly(kernel, pattern), wide(args))
        assert_as_exact(got, want, exact, kernel.tolerance, 64)

    drawn(name, run, ONE)


@pytest.mark.sampled(6)
@every_kernel
def test_derivatives_and_batches_are_the_plain_functions(name: str) -> None:
    def run(kernel: Kernel, pattern: Pattern, case: Case) -> None:
        fn, args = subject(kernel, plain(pattern)), inputs_of(kernel, pattern, case)
        first = exactly(kernel, pattern)
        stacked = [torch.stack([t, t.flip(0)]) for t in args]
        again = gradients if kernel.gradient_only else second
        for derived in (again, tangents):
            found = [derived(f, args) for f in (fused(kernel, fn), fn, first)]
            assert_as_exact(*found, kernel.tolerance, 1e3)
        found = [torch.vmap(f)(*stacked) for f in (fused(kernel, fn), fn, first)]
        assert_as_exact(*found, kernel.tolerance)

    drawn(name, run, ONE, sizes=(2, 3, 5), dtypes=(torch.float64,))


@every_kernel
def test_traced_and_compiled(name: str) -> None:
    kernel = KERNELS[name]
    pattern = kernel.patterns[0]
    case = Case(dict.fromkeys(names_of(pattern), 5), (2,), torch.float64, ("plain",), 1)
    fn, args = subject(kernel, plain(pattern)), inputs_of(kernel, pattern, case)
    close(make_fx(fused(kernel, fn))(*args)(*args), fn(*args))
    close(torchard.jit(fused(kernel, fn), backend="eager")(*args), fn(*args))


@pytest.mark.sampled(8)
@every_kernel
def test_split_over_a_mesh(name: str) -> None:
    kernel = KERNELS[name]
    pattern = kernel.patterns[0]
    names = names_of(pattern)
    case = Case({n: 4 + 2 * i for i, n in enumerate(names)}, (2, 4), torch.float64, ("plain",), 2)
    fn, args = subject(kernel, plain(pattern)), inputs_of(kernel, pattern, case)
    assert pattern.dims is not None
    assert [str(use) for use in fused(kernel, fn).lower(*args).kernels] == [use_of(kernel)]
    splits = [*names, *(["..."] if any("..." in d for d in pattern.dims.inputs) else [])]
    for i, split in enumerate(splits):
        placed = [
            place(x, TP, P(*_axes(dims, split, len(case.lead))))
            for x, dims in zip(args, pattern.dims.inputs, strict=True)
        ]
        ways = [shard(fused(kernel, fn), TP)]
        if i % examples(ci=2, explore=1) == 0:  # here the kernel is found before anything is split
            ways.append(fused(kernel, shard(fn, TP)))
        for way in ways:
            close([whole(out) for out in outputs(way(*placed))], fn(*args))


def whole(value: Any) -> Any:
    return value.full() if hasattr(value, "full") else value


def _axes(dims: Sequence[str], split: str, lead: int) -> list[str | None]:
    """The dim called so over the mesh; of those in front, the first."""
    found: list[str | None] = []
    for n in dims:
        width = lead if n == "..." else 1
        found += ["tp" if n == split and i == 0 else None for i in range(width)]
    return found
