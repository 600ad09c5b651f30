"""A transform written against public names: `examples/quantize.py`, in every order with the others."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from any_size import fuse
from paths import EXAMPLES
from torch.func import grad, jvp, vmap

from torchard import (
    DerivativeError,
    Mesh,
    MeshTensor,
    P,
    UnrolledLoopWarning,
    checkpoint,
    jit,
    repeat,
    shard,
)
from torchard.testing import equal
from torchard.transforms import (
    Pass,
    Program,
    Rewrite,
    Stage,
    Transformed,
    ValueRewrite,
    inherit,
    op_name,
)

sys.path.append(str(EXAMPLES))

from quantize import quantize

Fn = Callable[..., Any]
F64 = torch.float64
STEP = 1 / 16


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w).square().sum()


def rounded(w: torch.Tensor) -> torch.Tensor:
    return (w / STEP).round() * STEP


def data(batch: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lead = () if batch is None else (batch,)
    w, x = (torch.randn(*lead, *s, generator=generator, dtype=F64) for s in ((6, 4), (8, 6)))
    return w, x


STACK: dict[str, Callable[[Fn], Fn]] = {
    "shard": lambda f: shard(f, Mesh({"dp": 2}, virtual=True), in_specs=(P(), P("dp"))),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "jit": lambda f: jit(f, backend="eager"),
    "quantize": quantize,
}
ORDERS = [order for size in (2, 3) for order in permutations(STACK, size) if "quantize" in order]


def full(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


def stacked(order: tuple[str, ...]) -> Fn:
    f: Fn = loss
    for word in order:
        f = STACK[word](f)
    return f


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", ORDERS, ids=" > ".join)
def test_every_order_equals_the_plain_function(order: tuple[str, ...]) -> None:
    w, x = data()
    want, slope = loss(rounded(w), x), grad(loss)(rounded(w), x)
    f = stacked(order)
    torch.testing.assert_close(f(w, x), want)
    torch.testing.assert_close(full(grad(f)(w, x)), slope)


T = torch.ones(6, 4, dtype=F64)
DERIVED: dict[str, tuple[Callable[[Fn], Fn], Callable[[], Any]]] = {
    "grad": (lambda f: grad(f), lambda: grad(loss)(rounded(data()[0]), data()[1])),
    "jvp": (
        lambda f: lambda w, x: jvp(lambda w: f(w, x), (w,), (T,))[1],
        lambda: jvp(lambda w: loss(w, data()[1]), (rounded(data()[0]),), (T,))[1],
    ),
    "second": (
        lambda f: grad(lambda w, x: grad(f)(w, x).square().sum()),
        lambda: grad(lambda w, x: grad(loss)(w, x).square().sum())(rounded(data()[0]), data()[1]),
    ),
}


@pytest.mark.parametrize("word", [word for word in STACK if word != "quantize"])
@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_inside_and_outside(name: str, word: str) -> None:
    derived, want = DERIVED[name]
    w, x = data()
    for f in (
        derived(STACK[word](quantize(loss))),
        STACK[word](derived(quantize(loss))),
        quantize(STACK[word](derived(loss))),
        STACK[word](quantize(derived(loss))),
    ):
        torch.testing.assert_close(full(f(w, x)), want())


@pytest.mark.parametrize("word", [word for word in STACK if word != "quantize"])
def test_vmap_inside_and_outside(word: str) -> None:
    w, x = data(3)
    want = vmap(loss)(rounded(w), x)
    shared = STACK["checkpoint"] if word == "shard" else STACK[word]  # its specs are of two dims
    inside, outside = shared(quantize(vmap(loss))), quantize(shared(vmap(loss)))
    for f in (vmap(STACK[word](quantize(loss))), inside, outside):
        torch.testing.assert_close(f(w, x), want)


def test_no_collective_and_no_kernel_is_lost() -> None:
    w, x = data()
    plan = shard(grad(quantize(loss)), Mesh({"dp": 2}, virtual=True), in_specs=(P(), P("dp")))
    assert [c.kind for c in plan.lower(w, x).collectives] == ["all_reduce"]


class Noise(ValueRewrite):
    """Adds one to every product."""

    def call(self, node: Any, args: Any, kwargs: Any) -> Any:
        value = super().call(node, args, kwargs)
        return value + 1 if node.target is torch.ops.aten.mm.default else value


def test_operations_may_be_replaced() -> None:
    w, x = data()
    noisy = Transformed(lambda w, x: (x @ w).square().sum(), [Noise()])
    torch.testing.assert_close(noisy(w, x), (x @ w + 1).square().sum())
    want = grad(lambda w: (x @ w + 1).square().sum())(w)
    compiled = jit(noisy, backend="eager")
    for f in (grad(noisy), grad(checkpoint(noisy)), checkpoint(grad(noisy)), grad(compiled)):
        torch.testing.assert_close(f(w, x), want)


def test_operations_without_their_gradient_are_not_replaced() -> None:
    def stopped(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = w.sum()
        return (w * scale).sum()

    with pytest.raises(DerivativeError, match=r"Noise replaces operations of stopped.*\n?.*detach"):
        Transformed(stopped, [Noise()])(T)
    torch.testing.assert_close(grad(quantize(stopped))(T), torch.full_like(T, 24.0))


class Doubles(Rewrite):
    """Changes values, and does not say so."""

    def __call__(self, program: Program) -> Program:
        program = program.copy()
        for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            with program.graph.inserting_after(node):
                twice = program.graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
            twice.meta.update(node.meta)
            node.replace_all_uses_with(
                twice, delete_user_cb=lambda user, new=twice: user is not new
            )
        return program


def test_equal_catches_a_rewrite_that_changes_values() -> None:
    w, x = data()
    with pytest.raises(AssertionError):
        equal(Transformed(loss, [Doubles()]), loss, w, x)


class Twice(Rewrite):
    """Notes what it sees at two stages."""

    def __init__(self, *stages: Stage, reads_loops: bool = True) -> None:
        self.stages, self.reads_loops = stages, reads_loops
        self.seen: list[tuple[Stage, list[str]]] = []

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(Pass(s, partial(self.note, s), self.reads_loops) for s in self.stages)

    def note(self, stage: Stage, program: Program) -> Program:
        self.seen.append((stage, [op_name(node) for node in program.calls]))
        return program

    def __call__(self, program: Program) -> Program:
        return program


def test_passes_of_one_rewrite_run_at_their_stages() -> None:
    """Whatever their order; the late ones see no dead code, and may change their graph."""

    class LeavesDeadCode(Rewrite):
        def __call__(self, program: Program) -> Program:
            program = program.copy()
            (node,) = program.calls
            with program.graph.inserting_after(node):
                inherit(program.graph.node_copy(node), node)
            return program

    notes = Twice(Stage.ORDER, Stage.RECOMPUTE, Stage.SCHEDULE)
    Transformed(lambda x: x.sin(), [notes, LeavesDeadCode()])(T)
    names = (Stage.RECOMPUTE, 2), (Stage.SCHEDULE, 1), (Stage.ORDER, 1)
    assert notes.seen == [(stage, ["aten.sin"] * count) for stage, count in names]

    class Cosine(Twice):
        def note(self, stage: Stage, program: Program) -> Program:
            program.calls[0].target = torch.ops.aten.cos.default
            return program

    run = Transformed(lambda x: -x.sin(), [Cosine(Stage.SCHEDULE)])
    torch.testing.assert_close(run(T), -T.cos())
    (entry,) = run._entries.values()
    assert [op_name(node) for node in entry.lowered.base.calls] == ["aten.sin", "aten.neg"]


def test_a_pass_says_whether_it_reads_loops() -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda w, x: x @ w, torch.ones(3, 4, 4, dtype=F64), x)

    reads = Twice(Stage.MARK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "unrolled" not in str(Transformed(layers, [reads]).lower(T))
    assert [names.count("aten.mm") for _, names in reads.seen] == [1]
    apart = Twice(Stage.MARK, Stage.PLAN, reads_loops=False)
    run = Transformed(layers, [apart])
    with pytest.warns(UnrolledLoopWarning) as caught:
        program = run.lower(T)
        run.lower(T[:2])
        grad(lambda x: run(x).sum())(T)
    (warning,) = caught
    assert re.search(
        r"(?s)partial \(stage MARK\) does not read loops: the 3 iterations of the loop at "
        r"\S*test_transform.py:\d+ in layers are unrolled.*with reads_loops=True",
        str(warning.message),
    )
    assert str(program).startswith("def layers:  # unrolled: <lambda> × 3, for partial\n")
    assert apart.seen[0][1].count("aten.mm") == 3


class Sines(Rewrite):
    """Sines become cosines, at two stages: those of the first operations, and all others."""

    def __init__(self, reads_loops: bool) -> None:
        self.reads_loops = reads_loops

    @property
    def passes(self) -> tuple[Pass, ...]:
        first = Pass(Stage.MARK, lambda program: self.changed(program, 1), self.reads_loops)
        return Pass(Stage.ORDER, lambda program: self.changed(program, 99), self.reads_loops), first

    def changed(self, program: Program, most: int) -> Program:
        program = program.copy()
        for node in [node for node in program.calls if op_name(node) == "aten.sin"][:most]:
            node.target = torch.ops.aten.cos.default
        return program


@pytest.mark.parametrize("reads_loops", [False, True])
@pytest.mark.filterwarnings("ignore::torchard.UnrolledLoopWarning")
def test_all_passes_run_inside_of_a_trace_on_bodies_of_loops_too(reads_loops: bool) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda w, x: (w * x).sin(), torch.ones(3, dtype=F64), x.sin()).sin()

    changed = Transformed(f, [Sines(reads_loops)])
    want = T
    for _ in range(5):
        want = want.cos()
    outer = jit(lambda x: changed(x) + 1, backend="eager")
    for run in (changed, lambda x: outer(x) - 1, jit(changed, backend="eager")):
        torch.testing.assert_close(run(T), want)
    torch.testing.assert_close(outer(T) - 1, want)  # and the trace that is cached is as it was
    names = [op_name(node) for node in outer.lower(T).calls]
    assert "aten.sin" not in names
    assert len([name for name in names if name == "aten.cos"]) == (3 if reads_loops else 5)


def test_passes_that_are_none_are_refused() -> None:
    class Method(Rewrite):
        def passes(self) -> Any:  # type: ignore[override]
            return (Pass(Stage.PLAN, self),)

    class Forgets(Rewrite):
        def __call__(self, program: Program) -> Program:
            return None  # type: ignore[return-value]

    class Nothing(Rewrite):
        pass

    with pytest.raises(TypeError, match="must be a property that returns a tuple:"):
        Transformed(torch.sin, [Method()])
    with pytest.raises(TypeError, match="returned None, and a pass must return a Program"):
        Transformed(torch.sin, [Forgets()])(T)
    with pytest.raises(TypeError, match="returned None, and a pass must return a Program"):
        jit(Transformed(torch.sin, [Forgets()]), backend="eager").lower(T)
    with pytest.raises(TypeError, match="returned None, and a pass must return a Program"):
        jit(lambda x: Transformed(torch.sin, [Forgets()])(x) + 1, backend="eager")(T)
    with pytest.raises(TypeError, match="has neither __call__ nor passes"):
        Transformed(torch.sin, [Nothing()])(T)


def test_what_is_no_rewrite_is_refused() -> None:
    with pytest.raises(TypeError, match=r"derive its class from torchard\.transforms\.Rewrite"):
        Transformed(loss, [lambda program: program])  # type: ignore[list-item]


def test_the_example_runs_and_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "quantize.py"
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out == "none\n"
    assert len(path.read_text().splitlines()) <= 40
