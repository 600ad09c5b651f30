"""A kernel takes the place of operations where a trial of both is faster; else nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, grad_and_value

from torchard import Mesh, P, fuse, jit, place, scope, shard, trace
from torchard.functional.core.bounded import Recent
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import own_tags
from torchard.functional.programs.tags import USE
from torchard.kernels.fuse import Fuse
from torchard.kernels.rewriting import search, trials, worth
from torchard.kernels.rewriting.fused_loss_grad import let_go_of_losses

DRAW = torch.Generator().manual_seed(0)
SMALL, FASTER = "as written (small)", "as written (faster)"


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


X, Y, W, V, B = draw(12, 6), draw(12, 6), draw(6, 6), draw(6, 6), draw(6)
LABELS = torch.arange(12) % 6


def attention(x: Tensor, *weights: Tensor) -> Tensor:
    q, k, v = ((x.view(3, 4, 6) @ w).view(3, 4, 2, 3).transpose(1, 2) for w in weights)
    return (torch.softmax(q @ k.transpose(-1, -2) / 3**0.5, -1) @ v).square().sum()


def linear_loss(x: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, LABELS)


def biased_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b)).square().sum()


def added_norm(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    total = x + y
    return (total.sin() * F.rms_norm(total, (6,), w)).sum()


def norm_of_sum(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x + 2 * b, (6,), w[0], b).square().sum()


# Functions, their operands, and the kernels that are found in them.
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "a product with a bias": (biased_gelu, (X, W, B), ["bias_gelu"]),
    "a kernel and its gradient": (
        grad(biased_gelu, (0, 1, 2)), (X, W, B), ["bias_gelu", "bias_gelu_backward"]
    ),
    "a kernel and its gradient as one": (
        grad_and_value(linear_loss, (0, 1)), (X, W), ["linear_cross_entropy_with_backward"]
    ),
    "a gradient that waits": (
        grad_and_value(lambda x, w: linear_loss(x, w).exp(), (0, 1)),
        (X, W),
        ["linear_cross_entropy", "linear_cross_entropy_backward"],
    ),
    "two results": (
        lambda x, y, w: ((total := x + y), F.rms_norm(total, (6,), w), total.sin()),
        (X, Y, B),
        ["add_rms_norm"],
    ),
    "gradients of two results": (
        grad(added_norm, (0, 1, 2)), (X, Y, B), ["add_rms_norm", "add_rms_norm_backward"]
    ),
    "sums with more terms": (
        grad(norm_of_sum, (0, 1, 2)), (X, W, B), ["layer_norm", "layer_norm_backward"]
    ),
    "the same value twice": (lambda x, b: F.gelu(x + b) * F.gelu(b + x), (X, B), ["bias_gelu"]),
    "products side by side": (
        grad(attention, (0, 1, 2, 3)), (X, W, V, W.cos()), ["qkv", "qkv_backward"]
    ),
}  # fmt: skip

every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[int]]:
    """Everything is tried, and kernels win or lose; what is returned counts the trials."""

    def outcome(wins: bool) -> list[int]:
        runs: list[int] = []

        def seconds(parts: Sequence[Any]) -> list[float]:
            for run, values in parts:
                run(tuple(values))  # what is tried can be run
            runs.append(len(parts))
            return [2.0, 1.0] if wins else [1.0, 2.0]

        monkeypatch.setattr(trials, "_least_seconds", seconds)
        return runs

    monkeypatch.setattr(trials, "_VERDICTS", Recent(512))
    monkeypatch.setattr(worth.Profitability, "why_not_tried", lambda self, kernel: "")
    monkeypatch.setattr(worth.Profitability, "least_elements", lambda self, kernel: 0)
    monkeypatch.setattr(worth, "LARGE", 1)
    monkeypatch.setattr(worth, "WORTH_COMPILING", -(1 << 60))
    return outcome


@pytest.fixture
def never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_VERDICTS", Recent(512))
    monkeypatch.setattr(trials, "_least_seconds", lambda runs: pytest.fail("there was a trial"))


def lines(program: Program) -> list[Any]:
    """The nodes and their tags, other than the report of kernels."""

    def tags(node: torch.fx.Node) -> dict[str, str]:
        return {tag.name: str(value) for tag, value in own_tags(node).items() if tag is not USE}

    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), tags(n)) for n in program.graph.nodes
    ]


def hows(program: Program) -> list[tuple[str, str]]:
    return [(use.kernel, str(use.how)) for use in program.kernels]


def has_kernels(program: Program) -> bool:
    return any(isinstance(node.target, Fused) for node in program.calls)


@every_case
def test_a_lost_trial_leaves_no_trace(name: str, tried: Callable[[bool], list[int]]) -> None:
    fn, args, _ = CASES[name]
    runs = tried(False)
    program = trace(fn)(*args).copy()
    let_go_of_losses(program)
    before = lines(program)
    one = search.Search(program, Fuse(None))
    terms = {term: list(nodes) for term, nodes in one.reading.nodes.items()}
    values = dict(one.reading.values)
    one.carry_out()
    assert runs and lines(program) == before
    assert one.reading.nodes == terms and one.reading.values == values
    program.graph.lint()
    fused = fuse(fn)
    assert {how for _, how in hows(fused.lower(*args))} == {FASTER}
    torch.testing.assert_close(fused(*args), fn(*args))


@every_case
def test_a_kernel_that_wins_replaces_operations(
    name: str, tried: Callable[[bool], list[int]]
) -> None:
    fn, args, kernels = CASES[name]
    runs = tried(True)
    fused = fuse(fn)
    program = fused.lower(*args)
    assert runs and [str(use) for use in program.kernels] == kernels
    assert all("as written" not in how for _, how in hows(program)) and has_kernels(program)
    torch.testing.assert_close(fused(*args), fn(*args))


def test_a_gradient_may_win_without_its_kernel(
    tried: Callable[[bool], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried(False)
    step, args, (_, gradient) = CASES["a gradient that waits"]

    def pays(trial: trials.Trial, inserted: Sequence[torch.fx.Node], results: Any) -> bool:
        return [str(n.target) for n in inserted if isinstance(n.target, Fused)] == [gradient]

    monkeypatch.setattr(trials.Trial, "pays", pays)
    fused = fuse(step)
    program = fused.lower(*args)
    assert [str(node.target) for node in program.calls if isinstance(node.target, Fused)] == [gradient]
    assert "as written" not in dict(hows(program))[gradient]
    torch.testing.assert_close(fused(*args), step(*args))


def test_equal_layers_are_tried_once(tried: Callable[[bool], list[int]]) -> None:
    def layers(x: Tensor, b: Tensor) -> Tensor:
        for _ in range(3):
            x = F.gelu(x.cos() + b)
        return x

    runs = tried(True)
    program = fuse(layers).lower(X, B)
    assert [str(use) for use in program.kernels] == ["bias_gelu"] * 3
    assert len(runs) == 1
    fuse(layers).lower(X[:5], B)
    assert len(runs) == 2


@pytest.mark.usefixtures("never_tried")
@pytest.mark.parametrize("name", ["a product with a bias", "two results", "the same value twice"])
def test_small_programs_are_as_they_are_written(name: str) -> None:
    fn, args, kernels = CASES[name]
    fused, plain = fuse(fn), jit(fn, backend="eager")
    for have, want in (
        (fused.lower(*args), plain.lower(*args)),
        (fused.lower_joint(*args), plain.lower_joint(*args)),
    ):
        assert lines(have) == lines(want) and not has_kernels(have)
        assert kernels[0] in {use.kernel for use in have.kernels}
        assert {how for _, how in hows(have)} == {SMALL}
    assert SMALL in str(fused.lower(*args).kernels)
    torch.testing.assert_close(fused(*args), fn(*args), rtol=0, atol=0)


@pytest.mark.usefixtures("never_tried")
def test_what_is_asked_for_is_not_tried() -> None:
    def gelu(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(x + b)

    for fused in (fuse(biased_gelu, gelu), fuse(biased_gelu, prefer="memory")):
        program = fused.lower(X, W, B)
        assert has_kernels(program) and "as written" not in str(program.kernels)


@pytest.mark.usefixtures("tried", "never_tried")
def test_on_a_mesh_bytes_decide() -> None:
    mesh = Mesh({"dp": 2}, virtual=True)
    step = grad(added_norm, (0, 1, 2))
    placed = place(X, mesh, P("dp"))
    specs = (P("dp"), P("dp"), P())
    for run, args in (
        (fuse(shard(step, mesh, in_specs=specs)), (X, Y, B)),
        (shard(fuse(step), mesh, in_specs=specs), (X, Y, B)),
        (fuse(step), (placed, Y, B)),
    ):
        assert "as written" not in str(run.lower(*args).kernels)
        assert len(run.lower(*args).kernels) == 2


@pytest.mark.usefixtures("tried", "never_tried")
def test_if_algorithms_must_be_deterministic_bytes_decide() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        program = fuse(added_norm).lower(X, Y, B)
    finally:
        torch.use_deterministic_algorithms(False)
    assert hows(program) and FASTER not in str(program.kernels)


@pytest.mark.usefixtures("tried", "never_tried")
@pytest.mark.parametrize("fn", [added_norm, lambda x, y, w: F.gelu(x + w) * y])
def test_a_compiler_fuses_all_but_products(fn: Callable[..., Tensor]) -> None:
    program = jit(fuse(fn)).lower(X, Y, B)
    assert {how for _, how in hows(program)} == {"as written (the compiler fuses it)"}


def test_a_scope_is_searched_alone(tried: Callable[[bool], list[int]]) -> None:
    def fn(x: Tensor, b: Tensor) -> Tensor:
        return F.gelu(scope("mine")(lambda x: F.gelu(x + b))(x).cos() + b)

    tried(False)
    (use,) = fuse(fn, where="mine").lower(X, B).kernels
    assert (use.scope, str(use.how)) == ("mine", FASTER)


def test_the_faster_of_both_is_found() -> None:
    """With nothing replaced: a run that does more is slower."""

    def part(count: int) -> tuple[Any, list[Tensor]]:
        def run(values: Sequence[Tensor]) -> Any:
            for _ in range(count):
                values = [values[0].exp()]
            return values

        return run, [torch.zeros(100_000)]

    once, often = trials._least_seconds([part(1), part(50)])
    assert 0 < once < often


def test_what_several_calls_leave_is_listed_once() -> None:
    def two(x: Tensor, b: Tensor) -> Tensor:
        with scope("first"):
            y = F.gelu(x + b)
        with scope("second"):
            return F.silu(y + b)

    apart = fuse(fuse(two, where="first"), where="second").lower(X, B).kernels
    assert [(use.kernel, use.how) for use in apart] == [("bias_gelu", SMALL), ("bias_silu", SMALL)]
    named = fuse(fuse(two, where="first"), lambda x, b: F.silu(x + b), name="mine").lower(X, B)
    assert [use.kernel for use in named.kernels] == ["mine", "bias_gelu"]


def test_what_is_left_has_its_reason_where_it_was_never_looked_for() -> None:
    """Norms with a residual are too small for a trial in a program that is not."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
    params = dict(layer.named_parameters())

    def encoded(params: Any, x: Tensor) -> Any:
        return torch.func.functional_call(layer, params, (x,))

    uses = fuse(encoded).lower_joint(params, torch.ones(2, 512, 64)).kernels
    assert {use.kernel for use in uses} >= {"add_layer_norm", "add_layer_norm_backward"}
    assert {str(use.how) for use in uses} == {SMALL}
