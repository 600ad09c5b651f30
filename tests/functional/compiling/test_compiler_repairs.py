"""What Inductor would compute otherwise than eager: overlapping values that are written to, and values
that are compared with what was made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from compiler_faults import FAULTS
from compiler_programs import Trial, comparisons, expanded_writes, first_wrong
from sums_of_terms import lost_reads, sums_of_terms
from torch import fx

from torchard.functional import checkpoint, jit, saved_residuals, torch_internals, trace
from torchard.functional.compiling.compiler_repairs import compute_once, copy_before_writes
from torchard.functional.programs.tags import INDUCTOR_REALIZE_TO_STRIDES

aten = torch.ops.aten
WRITES = expanded_writes()
SUMS = (57, 309)  # of which kernels lose reads, if Inductor is as it is


# All compile as one; `make inductor` has all of them. `scatter_reduce` of products asks for values in its
# gradient.
def test_writes_into_overlapping_values() -> None:
    trials = [trial for trial in WRITES if not trial.name.startswith("scatter_reduce")]
    assert not first_wrong(trials[::45], jit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_compared_with_what_was_made_of_them(dtype: torch.dtype) -> None:
    trials = [trial for trial in comparisons(dtype, seed=3, every=150) if _runs(trial)]
    assert len(trials) > 1
    assert not first_wrong(trials, jit)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_written_in_place_is_read_after(dtype: torch.dtype) -> None:
    """Also by kernels whose loops change."""
    with lost_reads() as lost:
        assert not first_wrong(list(sums_of_terms(dtype, SUMS)), jit)
    assert not lost


def test_faults() -> None:
    """Those of one function compile as one."""
    faults = [fault for fault in FAULTS if fault.transform is jit]
    calls = [list(call) for fault in faults for call in fault.calls[:1]]
    plain = [fault for fault in faults for _ in fault.calls[:1]]
    have = jit(lambda calls: [f.fn(*call) for f, call in zip(plain, calls, strict=True)])(calls)
    for fault, call, value in zip(plain, calls, have, strict=True):
        assert fault.is_right(value, call), fault.what


# Operations of a value and a number, or a tensor without dims.
NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, c: x + c,
    "-": lambda x, c: x - c,
    "from": lambda x, c: c - x,
    "*": lambda x, c: x * c,
    "/": lambda x, c: x / c,
    "by": lambda x, c: c / x,
    "//": lambda x, c: x // c,
    "truncated": lambda x, c: torch.div(x, c, rounding_mode="trunc"),
    "%": lambda x, c: x % c,
    "fmod": torch.fmod,
    "**": lambda x, c: x**c,
    "power": lambda x, c: c**x,
    "==": lambda x, c: (x == c).to(x.dtype),
    ">=": lambda x, c: (x >= c).to(x.dtype),
    "where": lambda x, c: torch.where(x > 1, c, x),
}
FILLS: dict[str, Callable[[Any, float], Any]] = {
    "full_like": torch.full_like,
    "full": lambda x, c: torch.full((3, 1), c, dtype=x.dtype),
    "new_full": lambda x, c: x.new_full((3, 1), c),
    "fill_": lambda x, c: x.clone().fill_(c),
    "clamp": lambda x, c: x.clamp(min=c),
    "masked_fill": lambda x, c: x.masked_fill(x > 1, c),
    "assigned": lambda x, c: x.index_fill(1, torch.tensor([1]), c),
    "constant": lambda x, c: torch.atan2(x, torch.tensor(c, dtype=x.dtype)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_where_eager_rounds_them(dtype: torch.dtype) -> None:
    """Bit for bit, whatever is done next."""
    x = (torch.rand(3, 512, generator=torch.Generator().manual_seed(0)) * 2 + 0.1).to(dtype)
    wide = torch.tensor(0.3)

    def both(x: torch.Tensor, wide: torch.Tensor) -> dict[str, Any]:
        numbers = {f"{name} 0.3": op(x, 0.3) for name, op in NUMBERS.items()}
        rounded = {name: op for name, op in NUMBERS.items() if name not in ("*", "/", "by", "where")}
        scalars = {f"{name} wide": op(x, wide) for name, op in rounded.items()}
        scalars |= {f"{name} constant": op(x, torch.tensor(0.3)) for name, op in rounded.items()}
        made = {name: fill(x, 0.3) * x for name, fill in FILLS.items()}
        return {name: y * 1.7 - 0.1 for name, y in (numbers | scalars | made).items()}

    have, want = jit(both)(x, wide), both(x, wide)
    wrong = [name for name in want if not torch.equal(have[name], want[name])]
    assert not wrong


NARROW = (torch.bfloat16, torch.float16, torch.float32)
CONSTANTS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "full": lambda a, to: a * torch.full(a.shape, 0.7, dtype=a.dtype).to(to).to(a.dtype),
    "computed": lambda a, to: a * (torch.ones_like(a) * 0.7).to(to).to(a.dtype),
    "without dims": lambda a, to: a * torch.tensor(0.7, dtype=a.dtype).to(to).to(a.dtype),
    "expanded": lambda a, to: a * (a.new_full((1,), 0.7).expand(8).to(to)[None].to(a.dtype)),
    "compared": lambda a, to: (a * 0 + 0.7 == a.new_full((8,), 0.7).to(to).to(a.dtype)).to(a.dtype),
    "gradient": lambda a, to: torch.func.grad(lambda a: (a.to(to).to(a.dtype) * 0.7).sum())(a),
    "of an argument": lambda a, to: (a * 0.7).to(to).to(a.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_are_rounded_where_they_are_converted(dtype: torch.dtype) -> None:
    a = torch.ones(8, dtype=dtype)

    def each(a: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"{name}, {to}": fn(a, to) for name, fn in CONSTANTS.items() for to in NARROW}

    have, want = jit(each)(a), each(a)
    wrong = [name for name in want if not torch.equal(have[name], want[name])]
    assert not wrong


@pytest.mark.parametrize("options", [{}, {"backend": "aot_eager"}], ids=str)
def test_kernels_conjugate_in_every_call(options: dict[str, Any]) -> None:
    """Also in the first, which torch runs under a mode."""
    x = torch.randn(9, 12, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    run, want = jit(torch.linalg.pinv, **options), torch.linalg.pinv(x)
    for _ in range(4):
        torch.testing.assert_close(run(x), want)


def test_kept_maxima_of_recomputed_values() -> None:
    (fault,) = [fault for fault in FAULTS if "recomputes" in fault.what]
    assert not fault.wrong()


def _runs(trial: Trial) -> bool:
    try:
        trial()
    except (RuntimeError, IndexError):  # no derivative, or none in half precision
        return False
    return True


def loss(x: torch.Tensor) -> torch.Tensor:
    twice = torch.maximum(x.cos(), x.cos().amax(1, keepdim=True)).sum()
    return 2 * twice + 3 * F.gelu(x).amax(-1).sum()


STACKS: dict[str, Callable[[Any], Any]] = {
    "checkpointed": lambda f: jit(torch.func.grad(checkpoint(f))),
    "batched": lambda f: jit(torch.func.vmap(torch.func.grad(lambda row: f(row[None])))),
}


@pytest.mark.parametrize("stack", STACKS)
def test_gradients_of_maxima(stack: str) -> None:
    xs = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    run, plain = STACKS[stack](loss), torch.func.grad(loss)
    for x in xs:
        torch.testing.assert_close(run(x), plain(x), rtol=1e-5, atol=1e-6)


def test_rows_selected_for_each_sample() -> None:
    rows, sign = torch.tensor([0, 2]), torch.tensor([1.0, -1.0])

    def selected(x: torch.Tensor) -> torch.Tensor:
        return (torch.stack(list(x)).index_select(0, rows) * sign).sum()

    gradients, x = torch.func.vmap(torch.func.grad(selected)), torch.ones(4, 4)
    torch.testing.assert_close(jit(gradients)(x), gradients(x))


def repaired(fn: Callable[..., Any], x: torch.Tensor) -> fx.Graph:
    graph = trace(fn)(x).copy().graph
    copy_before_writes(graph)
    compute_once(graph)
    return graph


def stored(fn: Callable[..., Any]) -> list[str]:
    graph = repaired(fn, torch.randn(3, 4))
    return [node.name for node in graph.nodes if INDUCTOR_REALIZE_TO_STRIDES.get(node)]


def test_only_what_is_compared_is_stored() -> None:
    assert stored(lambda x: x.sin() * (x.sin() >= x.sin().amax(1, keepdim=True))) == ["sin"]
    assert stored(lambda x: (x.sin() - x.sin().amax(1, keepdim=True)).exp()) == []
    assert stored(lambda x: F.relu(x.sin() @ x.mT)) == []
    assert stored(lambda x: F.layer_norm(x.sin(), (4,)).relu()) == []
    assert stored(lambda x: (x == x.amax()) * x) == []


def test_only_what_overlaps_is_copied() -> None:
    def copies(fn: Callable[..., Any]) -> int:
        graph = repaired(fn, torch.randn(3, 4))
        return len(graph.find_nodes(op="call_function", target=aten.clone.default))

    index = torch.tensor([0, 1])
    assert copies(lambda x: x.sin().index_fill(0, index, 1.0)) == 0
    assert copies(lambda x: x.sin().mT.index_fill(0, index, 1.0)) == 0
    assert copies(lambda x: x[:1].sin().expand(3, 4).index_fill(0, index, 1.0)) == 1
    assert copies(lambda x: x.sin()[0].unfold(0, 2, 1).index_fill(0, index, 1.0)) == 1


def test_only_what_is_compared_is_kept() -> None:
    def kept(fn: Callable[..., Any]) -> list[str]:
        run = jit(checkpoint(fn, policy=lambda op, shapes, scope, name: op == "aten.amax"))
        found = saved_residuals(run, torch.randn(3, 4))
        return [row.what for row in found if row.kind == "value"]

    assert kept(lambda x: (x.sin() * x.sin().amax(1, keepdim=True)).sum()) == ["aten.sin", "aten.amax"]
    shifted = kept(lambda x: (x.sin() - x.sin().amax(1, keepdim=True).detach()).exp().sum())
    assert shifted == ["aten.amax"]


def test_settings_that_compilers_read_are_part_of_the_key() -> None:
    run, x, was = jit(lambda x: x.sin() + 1), torch.ones(3), torch.get_float32_matmul_precision()
    spied = mock.patch.object(torch_internals, "compile_graph", wraps=torch_internals.compile_graph)
    with spied as compile_graph:
        run(x), run(x)
        assert compile_graph.call_count == 1
        try:
            torch.set_float32_matmul_precision("medium")
            torch.use_deterministic_algorithms(True)
            torch.testing.assert_close(run(x), x.sin() + 1)
        finally:
            torch.set_float32_matmul_precision(was)
            torch.use_deterministic_algorithms(False)
        run(x)
        assert compile_graph.call_count == 2


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("places", [[0, 2], [1, 3], [1, 0]])
@pytest.mark.parametrize("name", ["index_copy", "index_add"])
def test_a_write_of_what_is_written_over(name: str, places: list[int], donated: bool) -> None:
    """Inductor (torch 2.13) reads the source while it writes: torch.compile is wrong here."""

    def fn(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        y = x + 2
        return getattr(y, name)(0, at, y[:2])

    x, at = torch.arange(16.0).reshape(4, 4), torch.tensor(places)
    have = jit(fn, donate_argnums=0 if donated else ())(x.clone(), at)
    assert torch.equal(have, fn(x, at))
