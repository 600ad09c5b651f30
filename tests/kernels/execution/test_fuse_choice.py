"""What runs a kernel that has no implementation: it is one of several, all alike, and said."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from effort import examples
from kernel_cases import LITERALS, Case, inputs_of, names_of, outputs
from torch import Tensor

from torchard.functional.core.bounded import Recent
from torchard.functional.execution.binding import bind
from torchard.kernels import KERNELS, Kernel
from torchard.kernels.execution import autotune as choice
from torchard.kernels.execution import blocked
from torchard.kernels.execution import rank_consensus as settle
from torchard.kernels.execution.blocked import RowLayout
from torchard.kernels.execution.compiled import compiled
from torchard.kernels.rewriting.region import KernelRegion
from torchard.kernels.terms.dims import Dims

ROWS, D = 13, 24
X, B = torch.randn(ROWS, D), torch.randn(D)

Run = Callable[..., Any]


def gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything is large, blocks are of a few rows, nothing is remembered, or really compiled."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(choice, "_SMALL", 1)
    monkeypatch.setattr(choice, "_CHOSEN", Recent(512))
    monkeypatch.setattr(blocked, "BLOCK", 3 * D)
    monkeypatch.setattr(choice, "compiled", lambda program, tensors: bind(program))
    yield
    torch.set_num_threads(threads)


def choosing(monkeypatch: pytest.MonkeyPatch, meant: str) -> list[list[str]]:
    """Nothing is timed: it is this one if it may run. Returned is what might have run, in time."""
    seen: list[list[str]] = []

    def chosen(candidates: dict[str, Run], tensors: Sequence[Tensor]) -> str:
        seen.append(list(candidates))
        return meant if meant in candidates else "eager"

    monkeypatch.setattr(choice, "fastest", chosen)
    return seen


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(program: Any, tensors: Any) -> Run:
        try:
            raise FileNotFoundError("no g++")
        except FileNotFoundError as error:
            raise RuntimeError("backend failed") from error

    monkeypatch.setattr(choice, "compiled", failing)


# -- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("meant", ["eager", "blocked", "inductor"])
def test_kernels_say_what_runs_once_it_is_known(
    meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = choosing(monkeypatch, meant)
    fused = fuse(gelu)
    assert str(fused.lower(X, B).kernels[0].how) == "inductor, blocked or eager, by time"
    torch.testing.assert_close(fused(X, B), gelu(X, B))
    (use,) = fused.lower(X, B).kernels
    assert use.how == f"{meant}, by time"
    assert f"  {meant}, by time  " in str(fused.lower(X, B).kernels)
    assert seen == [["inductor", "blocked", "eager"]]


def test_sums_over_rows_may_be_compiled_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "compiled", compiled)
    seen = choosing(monkeypatch, "blocked inductor")
    x, b = X.clone().requires_grad_(), B.clone().requires_grad_()
    fused = fuse(gelu)
    found = torch.autograd.grad(fused(x, b).square().sum(), [x, b])
    expected = torch.autograd.grad(gelu(x, b).square().sum(), [x, b])
    torch.testing.assert_close(found, expected)
    assert ["inductor", "blocked", "blocked inductor", "eager"] in seen


@pytest.mark.parametrize("meant", ["mine", "blocked", "inductor"])
def test_an_implementation_is_timed_if_it_asks_for_it(
    meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = choosing(monkeypatch, meant)

    def mine(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b)

    run = fuse(gelu, Kernel("mine", (gelu,), "... d, d -> ... d", {"cpu": mine}, by_time=True))
    torch.testing.assert_close(run(X, B), gelu(X, B))
    assert seen and {"blocked", "inductor"} < set(seen[0])


def test_small_ones_and_asked_for_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = choosing(monkeypatch, "blocked")
    asked = fuse(gelu, compiler="eager")
    asked(X, B)
    monkeypatch.setattr(choice, "_SMALL", 1 << 20)
    unasked = fuse(gelu)
    unasked(X, B)
    hows = [str(f.lower(X, B).kernels[0].how) for f in (asked, unasked)]
    assert hows == ["eager (requested)", "eager (small)"] and not seen


def test_layers_of_one_kind_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = choosing(monkeypatch, "blocked")
    fused = fuse(lambda x, b: gelu(gelu(gelu(x, b).sin(), b).sin(), b))
    fused(X, B)
    uses = fused.lower(X, B).kernels
    assert len(uses) == 3 and {str(use.how) for use in uses} == {"blocked, by time"}
    assert len(seen) == 1


def test_other_shapes_choose_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = choosing(monkeypatch, "blocked")
    fused = fuse(gelu)
    for rows in (ROWS, ROWS + 1, ROWS):
        fused(torch.randn(rows, D), B)
    assert len(seen) == 2


# -- a compiler that fails ------------------------------------------------------------------------


def test_a_compiler_that_fails_is_said_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)
    seen = choosing(monkeypatch, "blocked")
    fused = fuse(gelu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fused(X, B), gelu(X, B))
    assert seen == [["blocked", "eager"]]
    (use,) = fused.lower(X, B).kernels
    assert use.how == "blocked, by time (inductor failed: FileNotFoundError)"


def test_with_nothing_else_to_run_it_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)

    def whole(x: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x * b) + x

    fused = fuse(whole, whole, name="whole")
    torch.testing.assert_close(fused(X, B), whole(X, B))
    (use,) = fused.lower(X, B).kernels
    assert use.how == "eager (inductor failed: FileNotFoundError)"


# -- by blocks ------------------------------------------------------------------------------------


@dataclass
class Blocks:
    """A kernel's reference, whole and by blocks."""

    whole: Run
    by_blocks: Run | None
    tensors: list[Tensor]


def blocks_of(kernel: Kernel, rows: int, dtype: torch.dtype = torch.float32) -> Blocks:
    """Of its first reference."""
    pattern = kernel.patterns[0]
    assert pattern.dims is not None
    literals = tuple((name, LITERALS[name]) for name in pattern.literals)
    found: Any = SimpleNamespace(
        alternative=pattern.alternatives[0], literals=literals, operations=(), pattern=pattern
    )
    sizes = dict.fromkeys(names_of(pattern), D)
    if "b" in sizes:
        sizes["b"] = rows
    lead = (rows, 2) if sizes else (rows, 2, D)
    tensors = inputs_of(kernel, pattern, Case(sizes, lead, dtype, ("plain",), 0))
    tensors = [t if t.is_floating_point() else t.abs() for t in tensors]
    region_ = KernelRegion(kernel, found, "eager")
    return Blocks(region_.reference, region_._blocked(tensors), tensors)


WANTED = {"bias_gelu", "bias_relu_backward", "layer_norm", "rms_norm_backward", "swiglu"}
WANTED |= {"swiglu_backward", "add_rms_norm_backward", "softmax_backward", "geglu_tanh"}


def chosen() -> list[Kernel]:
    """Those of WANTED, dropout and a fourth of the others, with gradients; in `make explore`, all."""
    wanted, every = {name.removesuffix("_backward") for name in WANTED}, examples(ci=4, explore=1)
    wanted.add("bias_dropout_residual")
    kernels = [k for i, k in enumerate(KERNELS.values()) if k.name in wanted or i % every == 0]
    both = [k for kernel in kernels for k in (kernel, kernel.backward) if k is not None]
    return [k for k in both if k.patterns[0].dims is not None]


def test_blocks_are_the_whole() -> None:
    ran = []
    for kernel in chosen():
        case = blocks_of(kernel, ROWS)
        if case.by_blocks is None:
            continue
        ran.append(kernel.name)
        whole, found = outputs(case.whole(*case.tensors)), outputs(case.by_blocks(*case.tensors))
        for a, b in zip(found, whole, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride(), (
                kernel.name
            )
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-4, msg=lambda m, k=kernel: k.name + m
            )
    assert set(ran) >= WANTED
    assert not [name for name in ran if "dropout" in name or "cross_entropy" in name]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("name", ["bias_gelu", "rms_norm", "swiglu", "add_layer_norm"])
def test_any_number_of_rows(name: str, rows: int) -> None:
    for kernel in (KERNELS[name], KERNELS[name].backward):
        assert kernel is not None
        case = blocks_of(kernel, rows)
        run = case.by_blocks or case.whole
        for a, b in zip(
            outputs(run(*case.tensors)), outputs(case.whole(*case.tensors)), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_the_last_block_may_be_lower() -> None:
    case = blocks_of(KERNELS["rms_norm"], 7)
    run: Any = case.by_blocks
    assert run is not None and run.rows % run.step
    assert sorted(run.runs) == []
    run(*case.tensors)
    assert sorted(run.runs) == [run.rows % run.step, run.step]


def test_nothing_is_blocked_that_does_not_lie_in_rows() -> None:
    case = blocks_of(KERNELS["bias_gelu"], ROWS)
    pattern = KERNELS["bias_gelu"].patterns[0]
    found: Any = SimpleNamespace(
        alternative=pattern.alternatives[0], literals=(), operations=(), pattern=pattern
    )
    turned = torch.randn(D, ROWS).t()
    assert case.by_blocks is not None
    assert KernelRegion(KERNELS["bias_gelu"], found, "eager")._blocked([turned, B]) is None


def test_rounded_sums_are_not_summed() -> None:
    for dtype, sums in ((torch.float64, True), (torch.bfloat16, False), (torch.float16, False)):
        kernel = KERNELS["rms_norm"].backward
        assert kernel is not None
        assert (blocks_of(kernel, ROWS, dtype).by_blocks is not None) == sums
        assert blocks_of(KERNELS["rms_norm"], ROWS, dtype).by_blocks is not None


@pytest.mark.parametrize(
    "text, shapes, expected",
    [
        ("... d, d -> ... d", [(2, 3, 4), (4,)], RowLayout((2, None), (2,))),
        ("..., ... -> ...", [(2, 3), (2, 3)], RowLayout((2, 2), (2,))),
        ("n d, d v -> n v", [(5, 4), (4, 3)], RowLayout((1, None), (1,))),
        ("n d, n e -> d e", [(5, 4), (5, 3)], RowLayout((1, 1), (None,))),
        ("d n, n -> d", [(4, 5), (5,)], RowLayout((1, None), (1,))),
        ("n, d n -> d", [(5,), (4, 5)], RowLayout((None, 1), (1,))),
        ("d, ... d -> ... d", [(4,), (5, 4)], RowLayout((None, 1), (1,))),
        ("n m, d n -> d", [(5, 2), (4, 5)], None),
        ("n d -> n d | whole n", [(5, 4)], None),
        ("2:int64, ... d -> ... d | whole ... d", [(2,), (5, 4)], None),
        ("... d -> ... d", [(4,)], None),
    ],
)
def test_which_dims_are_rows(
    text: str, shapes: list[tuple[int, ...]], expected: RowLayout | None
) -> None:
    tensors = [torch.empty(shape) for shape in shapes]
    assert RowLayout.of(Dims.read(text, len(shapes), "f"), tensors) == expected


def test_results_are_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing(monkeypatch, "blocked")
    fused = fuse(gelu)
    first = fused(X, B)
    kept = first.clone()
    fused(-X, B)
    assert torch.equal(first, kept)


def test_the_fastest_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**6))
    monkeypatch.setattr(choice, "thread_time", lambda: float(next(now)))
    called: list[str] = []

    def slow(x: Tensor) -> Tensor:
        called.append("slow")
        next(now)
        return x

    def fast(x: Tensor) -> Tensor:
        called.append("fast")
        return x

    assert choice.fastest({"slow": slow, "fast": fast}, [X]) == "fast"
    assert called[:4] == ["slow", "fast"] * 2


# -- one choice for all ---------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of a group of two processes, which this one takes to be in."""
    made = torch.distributed.HashStore()
    monkeypatch.setattr(settle.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(settle.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(settle.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(settle, "default_store", lambda: made)
    return made


def test_the_first_process_chooses_for_all(store: Any) -> None:
    assert settle.agreed_choice("gelu of [3]", "blocked") == "blocked"
    assert settle.agreed_choice("gelu of [3]", "inductor") == "blocked"
    assert settle.agreed_choice("gelu of [4]", "inductor") == "inductor"


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "default_store", lambda: pytest.fail("there is no store"))
    assert settle.agreed_choice("gelu of [3]", "blocked") == "blocked"


def test_what_others_run_is_run_here(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choosing(monkeypatch, "blocked")
    first = fuse(gelu)
    first(X, B)
    choosing(monkeypatch, "eager")
    monkeypatch.setattr(choice, "_CHOSEN", Recent(512))  # as in another process
    second = fuse(gelu)
    torch.testing.assert_close(second(X, B), gelu(X, B))
    hows = {str(f.lower(X, B).kernels[0].how) for f in (first, second)}
    assert hows == {"blocked, by time"}
    without_compiler(monkeypatch)
    monkeypatch.setattr(choice, "_CHOSEN", Recent(512))
    monkeypatch.setattr(choice.settle, "agreed_choice", lambda subject, mine: "inductor")
    third = fuse(gelu)
    third(X, B)
    said = str(third.lower(X, B).kernels[0].how)
    assert said.startswith("eager, by time; another process runs inductor (inductor failed")


def test_a_store_that_is_silent_is_an_error(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchard.functional.torch_internals import store as store_module

    asked = threading.Event()
    monkeypatch.setattr(store_module, "_GRACE", 0.0)
    monkeypatch.setattr(store_module, "_silent", [])
    monkeypatch.setattr(settle, "_PATIENCE", 0.01)
    silent = SimpleNamespace(compare_set=lambda *_: asked.wait())
    monkeypatch.setattr(settle, "default_store", lambda: silent)
    with pytest.raises(store_module.StoreError, match="which kernels they run does not answer"):
        settle.agreed_choice("gelu of [3]", "blocked")
    asked.set()


def test_deterministic_algorithms_are_not_a_matter_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = choosing(monkeypatch, "blocked")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    fused = fuse(gelu)
    fused(X, B)
    how = str(fused.lower(X, B).kernels[0].how)
    assert how == "inductor, not timed: deterministic algorithms are required" and not seen


@pytest.mark.parametrize(
    "read", [lambda y: y.t().view(-1), lambda y: y.t()[2:].view(2, -1), lambda y: y[:, 0].view(-1)]
)
def test_an_implementation_may_lay_its_results_out_as_it_likes(read: Run) -> None:
    """Here as a row after another, where the operations' own result is laid out as their operand is."""
    turned = torch.randn(D, ROWS).t()

    def rows(x: Tensor, b: Tensor) -> Tensor:
        return gelu(x, b).contiguous()

    def fn(x: Tensor, b: Tensor) -> Tensor:
        return read(gelu(x, b))  # type: ignore[no-any-return]

    torch.testing.assert_close(fuse(fn, gelu, rows)(turned, B), fn(turned, B))
    slopes = torch.func.grad(lambda x, b: (fn(x, b) ** 2).sum(), (0, 1))
    torch.testing.assert_close(
        fuse(slopes, gelu, Kernel("rows", (gelu,), None, {"any": rows}))(turned, B),
        slopes(turned, B),
    )
