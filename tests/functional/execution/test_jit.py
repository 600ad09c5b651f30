"""jit: compiled programs, under derivatives, with placed values, and donation."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from dummies import PairRuntime, Split, halves
from inductor_cache import last_lines
from torch.func import grad, hessian, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torchard.functional.compiling import compile_once
from torchard.functional.core.errors import DonatedError
from torchard.functional.engine.transformed import Transformed
from torchard.functional.jit import Compile, jit
from torchard.functional.programs.program import Program
from torchard.functional.trace import trace

# torch's own, on importing the compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh().square().sum()


def step(p: dict[str, torch.Tensor], x: torch.Tensor, lr: float) -> dict[str, torch.Tensor]:
    g = grad(lambda p: loss(p["w"], x))(p)
    return {key: p[key] - lr * g[key] for key in p}


@pytest.fixture
def w() -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 4, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_step(backend: str, w: torch.Tensor, x: torch.Tensor) -> None:
    run = jit(step, backend=backend)
    for lr in (0.1, 0.2):
        got, want = run({"w": w}, x, lr), step({"w": w}, x, lr)
        torch.testing.assert_close(got["w"], want["w"], rtol=1e-12, atol=1e-12)
    assert run._traces == 1


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_derivatives(backend: str, w: torch.Tensor, x: torch.Tensor) -> None:
    f = jit(loss, backend=backend)
    leaf = w.clone().requires_grad_()
    f(leaf, x).backward()
    torch.testing.assert_close(leaf.grad, grad(loss)(w, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grad(f)(w, x), grad(loss)(w, x), rtol=1e-12, atol=1e-12)
    rows = torch.stack([x, x * 2])
    torch.testing.assert_close(
        vmap(f, in_dims=(None, 0))(w, rows), vmap(loss, in_dims=(None, 0))(w, rows)
    )
    if backend == "eager":
        torch.testing.assert_close(hessian(f)(w, x), hessian(loss)(w, x))


def test_parts_of_other_strides_are_compiled_again() -> None:
    """Strides of plain arguments are in the key; those of a placed value's parts are not."""
    x = torch.randn(4, 4, dtype=torch.float64)
    run = Compile("inductor").bind(trace(lambda x: (x * 2).sin() @ x)(x))
    for value in (x, x.T, torch.randn(8, 8, dtype=x.dtype)[::2, ::2]):
        torch.testing.assert_close(run([value])[0], (value * 2).sin() @ value)


def test_a_foreign_tracer_sees_operations(w: torch.Tensor, x: torch.Tensor) -> None:
    f = jit(loss, backend="inductor")
    f(w, x)
    assert "aten.tanh" in make_fx(f)(w, x).code


def test_a_runtime_gives_the_graph_to_compile(w: torch.Tensor, x: torch.Tensor) -> None:
    class Local(PairRuntime):
        given: list[str] = []  # noqa: RUF012

        def graph(self, program: Program) -> torch.fx.GraphModule:
            self.given.append(program.name)
            run = self.bind(program)
            count = sum(1 if leaf.tag is None else leaf.tag.width for leaf in program.inputs)
            shapes = [
                p
                for node, leaf in zip(program.placeholders, program.inputs, strict=True)
                for p in _parts(node.meta["val"], leaf.tag)
            ]
            assert len(shapes) == count
            return make_fx(lambda *parts: run(parts))(*shapes)

    def _parts(value: torch.Tensor, tag: Any) -> list[torch.Tensor]:
        whole = torch.zeros(value.shape, dtype=value.dtype)
        return [whole] if tag is None else list(whole.chunk(2, tag.dim))

    class Place(Split):
        def covers(self, other: Any) -> bool:
            return True

        def __call__(self, program: Program) -> Program:
            program = super().__call__(program)
            program.runtime = Local()
            return program

    f = jit(Transformed(lambda w, x: (x @ w).tanh(), [Place()]))
    torch.testing.assert_close(f(halves(w), x).full(), (x @ w).tanh())
    assert Local.given == ["<lambda>"]


def test_values_die_inside_a_compiled_call() -> None:
    """Boxed: an input handed over is freed before the outputs are all there."""
    alive: list[bool] = []
    f = jit(lambda a: ((a * 2).sum(), a.sin()), backend="eager", donate_argnums=0)
    value = torch.randn(8)
    ref = weakref.ref(value.untyped_storage())
    f(value)
    gc.collect()
    alive.append(ref() is not None)
    assert alive == [False]


# -- donation -------------------------------------------------------------------------------------


def test_a_donated_tensor_is_gone(w: torch.Tensor, x: torch.Tensor) -> None:
    run = jit(step, backend="eager", donate_argnums=0)
    view = w[0]
    want, row = step({"w": w}, x, 0.1), w[0].clone()
    p = {"w": w}
    got = run(p, x, 0.1)
    torch.testing.assert_close(got["w"], want["w"])
    assert view.equal(row)
    for use in (
        lambda: w + 1,
        lambda: w.sum(),
        lambda: torch.sum(w),
        lambda: repr(w),
        lambda: run(p, x, 0.1),
        lambda: w.shape,
    ):
        with pytest.raises(DonatedError, match="had been donated"):
            use()


def test_a_chain_of_donations(w: torch.Tensor, x: torch.Tensor) -> None:
    run = jit(step, backend="eager", donate_argnums=(0,))
    ours, theirs = {"w": w.clone()}, {"w": w}
    for _ in range(3):
        ours, theirs = run(ours, x, 0.1), step(theirs, x, 0.1)
    torch.testing.assert_close(ours["w"], theirs["w"])
    assert run._traces == 1


def test_what_autograd_follows_is_not_given_up(w: torch.Tensor, x: torch.Tensor) -> None:
    """Its gradient needs it; without gradients it is donated as any other."""
    run, want = jit(loss, backend="eager", donate_argnums=0), grad(loss)(w, x)
    w.requires_grad_()
    run(w, x).backward()
    torch.testing.assert_close(w.grad, want)
    with torch.no_grad():
        run(w, x)
    with pytest.raises(DonatedError):
        w.sum()


def test_donating_a_value_that_is_passed_twice(w: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"donated value of shape \[.*\] is passed twice"):
        jit(lambda a, b: a + b, backend="eager", donate_argnums=0)(w, w)
    assert w.sum().isfinite()


def test_donating_a_placed_value_marks_it(w: torch.Tensor, x: torch.Tensor) -> None:
    held = halves(w)
    marked = []
    type(held).__torchard_donate__ = lambda self: marked.append(self)  # type: ignore[attr-defined]
    try:
        jit(lambda w, x: x @ w, backend="eager", donate_argnums=0)(held, x)
    finally:
        del type(held).__torchard_donate__  # type: ignore[attr-defined]
    assert marked == [held]


def test_compiled_graphs_are_kept_for_other_processes(tmp_path: Path) -> None:
    """By Inductor's cache, which says by itself when it does not take a graph."""
    code = """
import torch
import torch._inductor.config as config
from torch._dynamo.utils import counters
from torchard import jit

config.cpp.vec_isa_ok = True  # to find out takes longer than the rest
x = torch.arange(3.0)
assert torch.equal(jit(lambda x: x * 2 + 1)(x), x * 2 + 1)
assert torch.equal(jit(lambda x: x * 2 + 1)(x[:2]), x[:2] * 2 + 1)  # of another shape: none of a symbol
kinds = ("miss", "hit", "bypass")
print(*(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in kinds))
"""
    assert last_lines(code, tmp_path) == ["2 0 0", "0 2 0"]


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """One of two compiles each graph, and the other finds it in Inductor's cache."""
    code = """
import multiprocessing as mp

def run(barrier, queue):
    import torch
    import torch._inductor.config as config
    from torch._dynamo.utils import counters
    from torchard import jit

    config.cpp.vec_isa_ok = True  # to find out takes longer than the rest
    x = torch.arange(3.0)
    barrier.wait(120)
    assert torch.equal(jit(lambda x: x * 3 + 1)(x), x * 3 + 1)
    kinds = ("miss", "hit", "bypass")
    queue.put(tuple(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in kinds))

if __name__ == "__main__":
    fork = mp.get_context("fork")  # what is loaded has not computed yet
    barrier, queue = fork.Barrier(2), fork.Queue()
    processes = [fork.Process(target=run, args=(barrier, queue)) for _ in range(2)]
    [process.start() for process in processes]
    print(sorted(queue.get() for _ in processes))
    [process.join() for process in processes]
"""
    assert last_lines(code, tmp_path, runs=1) == ["[(0, 1, 0), (1, 0, 0)]"]


def test_a_lock_that_is_not_to_be_had_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, x = torch.fx.symbolic_trace(lambda x: x + 1), torch.ones(2)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_once, "_TIMEOUT", 0.0)
    with compile_once.compiled_once(module, [x]), compile_once.compiled_once(module, [x]):
        pass
    assert "waited 0 s for another process that compiles the same graph" in caplog.messages[0]
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    with compile_once.compiled_once(module, [x]):
        pass
    assert "no lock to compile a graph once per host" in caplog.messages[1]
