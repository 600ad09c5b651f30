"""The library's Triton kernels, interpreted on the CPU in a process of their own.

Whether Triton compiles or interprets is decided when it is imported, and Inductor imports it, too. So
what is here runs where nothing has imported it yet: in a process started for that, see `interpreting`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from kernel_cases import LITERALS, Case, inputs_of, names_of, outputs, plain
from torch import Tensor

from torchard import random
from torchard.kernels import KERNELS, Kernel, Pattern
from torchard.kernels.execution.optional_backends import implementation
from torchard.kernels.rewriting.region import implementations_of

__all__ = ["NAMES", "interpreting"]

NAMES = tuple(name for name, kernel in sorted(KERNELS.items()) if "cuda" in kernel.implementations)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of more than 8 elements are gone through in blocks, tiles are of one row or two.
SMALL = {"tile": 16, "columns": 8, "whole": 8, "block": 8}
# Roundings in the dtype of the result: the interpreter cuts off bfloat16's where devices round.
ROUNDINGS = 4


@dataclass(frozen=True)
class Kind:
    """Of cases: sizes of ``...`` and of rows, how inputs lie, dtypes, sizes of tiles."""

    lead: tuple[int, ...]
    length: int
    layouts: tuple[str, ...] = ("plain",)
    dtypes: Sequence[torch.dtype] = DTYPES[:1]
    limits: Mapping[str, int] = field(default_factory=dict)

    def cases(self, pattern: Pattern) -> Iterator[Case]:
        rows = self.lead[0] if self.lead else 1
        sizes = {"n": rows, "b": rows, "h": 3, "s": 2, "d": self.length, "v": self.length}
        chosen = {name: sizes[name] for name in names_of(pattern)}
        lead = self.lead if chosen else (*self.lead, self.length)
        for dtype in self.dtypes:
            yield Case(chosen, lead, dtype, self.layouts, 3)


ROUNDED = Kind((2, 3), 5, dtypes=[torch.bfloat16])
KINDS = (
    Kind((2, 3), 5, dtypes=DTYPES),
    Kind((5,), 19, dtypes=DTYPES[1:3], limits=SMALL),  # rows longer than two blocks
    # In float32, which `inputs_of` draws in: a cast would lay them out anew. Rows of whole counters.
    Kind((3,), 24, ("strided", "transposed"), [torch.float32], SMALL),
    Kind((4, 3), 16, ("transposed", "strided", "plain"), [torch.float32]),
    Kind((2, 3), 5, ("cut", "plain"), [torch.float32]),  # each operand with a stride of its own
    Kind((5,), 19, ("plain", "cut"), [torch.float32], SMALL),
    Kind((), 1),
    Kind((0, 3), 4),
    Kind((2, 3), 0),
)

Function = Callable[..., Any]


@contextmanager
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """Where to submit what is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        process.submit(_prepare).result()
    with process:
        yield process


def _prepare() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # As on a device: what lanes outside of a tensor compute is not stored.
    np.seterr(all="ignore")


@contextmanager
def limits(**sizes: int) -> Iterator[None]:
    """Other sizes of tiles and blocks."""
    chosen = importlib.import_module("torchard.kernels.triton.launch").LIMITS
    kept = dict(vars(chosen))
    vars(chosen).update(sizes)
    try:
        yield
    finally:
        vars(chosen).update(kept)


def kernel_of(name: str, backward: bool) -> Kernel:
    found = KERNELS[name].backward if backward else KERNELS[name]
    assert found is not None
    return found


def interpreted(kernel: Kernel, pattern: Pattern) -> Function:
    """The implementation, as its reference would be called."""
    run = implementation(kernel.implementations, "cuda").run
    assert run is not None
    return functools.partial(run, **{name: LITERALS[name] for name in pattern.literals})


def check(name: str, backward: bool) -> None:
    """A kernel of each dims, in all cases; further references of the same dims, in few."""
    kernel = kernel_of(name, backward)
    seen = set()
    for pattern in kernel.patterns:
        if not implementations_of(kernel, pattern):
            continue  # its formulas read other values
        kinds = (ROUNDED,) if pattern.dims in seen else KINDS
        seen.add(pattern.dims)
        for kind in kinds:
            with limits(**kind.limits):
                for case in kind.cases(pattern):
                    compare(kernel, pattern, case)


def compare(kernel: Kernel, pattern: Pattern, case: Case) -> None:
    """As far from float64 as eager operations are, or some roundings further."""
    args = inputs_of(kernel, pattern, case)
    got = outputs(interpreted(kernel, pattern)(*args))
    try:
        eager = outputs(plain(pattern)(*args))
    except (RuntimeError, IndexError):
        assert not all(x.numel() for x in args)  # it has nothing to say of what is empty
        return
    first = next(p for p in kernel.patterns if p.dims == pattern.dims)
    exact = outputs(plain(first)(*(t.double() if t.is_floating_point() else t for t in args)))
    for a, b, c in zip(got, eager, exact, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), case
        if not a.numel():
            continue
        assert torch.equal(a.isnan(), c.isnan())
        known = ~c.isnan()
        if not known.any():
            continue
        a, b, c = a.double()[known], b.double()[known], c[known]
        allowed = 1e-12 + 2 * float((b - c).abs().max())
        allowed += ROUNDINGS * torch.finfo(got[0].dtype).eps * max(float(c.abs().max()), 1e-3)
        assert float((a - c).abs().max()) <= allowed, f"{case}: {a}, {c}"


def fused_with_its_gradient(name: str) -> set[str]:
    """What runs a kernel and its gradient, as `fuse` says, where they are for the CPU."""
    given = KERNELS[name]
    assert isinstance(given.vjp, Mapping)
    kernel = dataclasses.replace(
        given,
        implementations={"cpu": given.implementations["cuda"]},
        vjp={"cpu": given.vjp["cuda"]},
    )
    pattern = kernel.patterns[0]
    sizes = dict.fromkeys(names_of(pattern), 6)
    args = inputs_of(kernel, pattern, Case(sizes, (3,), torch.float64, ("plain",), 3))
    moving = tuple(i for i, x in enumerate(args) if x.is_floating_point())

    def slope(fn: Function) -> Any:
        return torch.func.grad(lambda *given: sum(map(squares, outputs(fn(*given)))), moving)

    def squares(x: Tensor) -> Tensor:
        return (x * x).sum()

    fused = fuse(slope(plain(pattern)), kernel)
    torch.testing.assert_close(fused(*args), slope(plain(pattern))(*args), rtol=1e-9, atol=1e-9)
    return {str(use.how) for use in fused.lower(*args).kernels}


def check_masks(length: int, threshold: int) -> None:
    """Exactly what the library draws, forward and backward."""
    key = torch.tensor([-(2**63) + 5, 2**62 + 12345])
    ones, bias = torch.ones(3, 2, length), torch.zeros(length)
    zeros, weight = torch.zeros_like(ones), torch.ones(length)
    kept = random.bits(key, ones.shape) >= threshold
    assert kept.any() and not kept.all()

    def run(name: str, backward: bool, *args: Tensor, **literals: float) -> Sequence[Tensor]:
        found = implementation(kernel_of(name, backward).implementations, "cuda").run
        assert found is not None
        return outputs(found(*args, threshold=threshold, **literals))

    norm = "bias_dropout_residual_layer_norm"
    forward = (ones, bias, zeros, key)
    for small in ({}, SMALL):
        with limits(**small):
            masked = [
                run("bias_dropout_residual", False, *forward)[0],
                run("bias_dropout_residual", True, key, ones)[0],
                run(norm, False, *forward, weight, bias, eps=1e-5)[0],
                # Without a weight nothing but the value's own cotangent comes back.
                run(norm, True, key, bias, ones, ones, ones, eps=1e-5)[0],
            ]
        for x in masked:
            assert torch.equal(x != 0, kept)
            assert float((x[kept] - 1 / (1 - threshold / 2**32)).abs().max()) < 1e-6


def check_labels() -> None:
    """Ones that do not count, ones that are none, and logits of -inf."""
    kernel, gradient = KERNELS["cross_entropy"], kernel_of("cross_entropy", True)
    given = (kernel.implementations, gradient.implementations, kernel.joint)
    loss, slope, both = (implementation(each, "cuda").run for each in given)
    assert loss is not None and slope is not None and both is not None
    one = torch.ones((), dtype=torch.float64)
    logits = torch.randn(6, 19, dtype=torch.float64)
    logits[:, 3] = -torch.inf
    logits[1, :10] = -torch.inf
    for labels in ([0, 12, -100, 18, -100, 2], [-100] * 6):
        some = torch.tensor(labels)
        moving = logits.clone().requires_grad_()
        want = F.cross_entropy(moving, some)
        wanted = (want.detach(), *torch.autograd.grad(want, moving))
        with limits(**SMALL):
            for got in ((loss(logits, some), slope(logits, some, one)), both(logits, some, one)):
                torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-12, atol=1e-12)
    for label in (-1, 19, 1 << 40):
        assert loss(logits, torch.tensor([0, 1, 2, label, 4, 5])).isnan()


def check_infinite_rows() -> None:
    """Softmax of -inf, in all of a row or in whole blocks of it."""
    run = implementation(KERNELS["softmax"].implementations, "cuda").run
    assert run is not None
    x = torch.randn(3, 19, dtype=torch.float64)
    x[0] = -torch.inf
    x[1, :10] = -torch.inf
    for small in ({}, SMALL):
        with limits(**small):
            torch.testing.assert_close(run(x), torch.softmax(x, -1), equal_nan=True)


def check_not_a_number() -> None:
    """NaN stays NaN, also where a comparison decides."""
    x, b = torch.randn(3, 5), torch.zeros(5)
    x[1, 2] = torch.nan
    for name in ("bias_relu", "bias_gelu", "bias_silu"):
        run = implementation(KERNELS[name].implementations, "cuda").run
        assert run is not None
        assert torch.equal(run(x, b).isnan(), x.isnan()), name


def check_short_gelu() -> None:
    """What half precisions are given is itself good to 1e-6: seen in float32."""
    activations = importlib.import_module("torchard.kernels.triton.activations")
    run, slope = (
        implementation(kernel_of("bias_gelu", b).implementations, "cuda").run for b in (False, True)
    )
    assert run is not None and slope is not None
    x, b = torch.linspace(-6, 6, 97), torch.zeros(97)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "_SHORT", (torch.float32,))
        got = run(x, b), slope(x, b, torch.ones(97))[0]
    moving = x.double().requires_grad_()
    exact = F.gelu(moving)
    wanted = exact.detach(), *torch.autograd.grad(exact.sum(), moving)
    for a, c in zip(got, wanted, strict=True):
        assert float((a - c).abs().max()) < 1e-6
