"""What is kept over many shapes is bounded: signatures, plans of patterns, choices."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torchard import checkpoint, jit
from torchard.functional.core.bounded import Recent
from torchard.functional.engine.transformed import Transformed
from torchard.functional.torch_internals.accessors import fakes
from torchard.kernels.execution import autotune as choice
from torchard.kernels.patterns import pattern
from torchard.kernels.terms import composites

W, B = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(0, 1, 8)


def block(x: Tensor) -> Tensor:
    return F.layer_norm(x + F.gelu(F.linear(x, W, B)), (8,), B, B).square().mean()


# The planner's caches without a bound: what they are keyed by does not vary with shapes.
BY_TEXT_OPERATION_OR_MESH = {
    *("_family_rule", "_groups", "_on_mesh", "parse"),
    *("_circle", "_host_group", "_joint_group", "_pair_group"),
    "is_pointwise",  # of an operation
    "note_end",  # without arguments
}


def graphs() -> int:
    """The live graphs of this process."""
    gc.collect()
    return sum(type(o) is fx.Graph for o in gc.get_objects())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of a few entries, which fill soon."""
    for module, name in ((pattern, "_PLANS"), (composites, "_TRACED"), (choice, "_CHOSEN")):
        monkeypatch.setattr(module, name, Recent(8))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: fuse(f, compiler="eager"),
        checkpoint,
        lambda f: jit(f, backend="eager"),
    ],
    ids=["fuse", "checkpoint", "jit"],
)
@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
def test_graphs_of_shapes_that_are_not_seen_again(
    small: None, transform: Callable[..., Transformed]
) -> None:
    run = transform(block)
    run.cache_size = 4
    counts = []
    for n in range(2, 14):
        torch.func.grad(run)(torch.ones(n, 8))
        counts.append(graphs())
    assert max(counts[9:]) <= max(counts[6:9])


@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("stops", [False, True], ids=["followed", "run again"])
def test_values_that_were_closed_over_and_replaced(derivative: bool, stops: bool) -> None:
    """Each of a new shape or of an old one, in turn; all are read anew, few are kept."""
    held: dict[str, Tensor] = {}

    def scaled(x: Tensor) -> Tensor:
        with torch.no_grad() if stops else contextlib.nullcontext():
            scale = held["w"] * 2
        return (x * scale * held["w"]).sum()

    transformed = checkpoint(scaled)
    run, plain = (torch.func.grad(f) if derivative else f for f in (transformed, scaled))
    alive: list[weakref.ref[Tensor]] = []
    for i in range(24):
        held["w"] = torch.full((1,), float(i))
        alive.append(weakref.ref(held["w"]))
        x = torch.ones(2 + i % 12)
        torch.testing.assert_close(run(x), plain(x))
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 5


def test_recent_forgets_the_least_recently_used() -> None:
    recent, made = Recent[int](2), list[str]()

    def get(key: str) -> int:
        return recent.get(key, lambda: made.append(key) or len(made))  # type: ignore[func-returns-value]

    assert [get(k) for k in "aba"] == [1, 2, 1]
    assert get("c") == 3 and len(recent) == 2
    assert get("a") == 1 and get("b") == 4 and made == ["a", "b", "c", "b"]


@pytest.mark.filterwarnings("ignore::torchard.RetraceWarning")
def test_the_cache_of_fake_results_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_MOST", 100)
    run = checkpoint(block)
    sizes = []
    for n in range(2, 12):
        torch.func.grad(run)(torch.ones(n, 8))
        sizes.append(FakeTensorMode.cache_info().size)
    assert max(sizes) < 400, sizes  # what one trace adds, and the bound


def test_caches_of_the_planner_are_bounded() -> None:
    """By a number of entries that some 250 shapes of a layer fill."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torchard.sharding")]
    sizes = {
        f"{module.__name__}.{name}": value.cache_parameters()["maxsize"]
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper)
    }
    unbounded = {name.split(".")[-1] for name, size in sizes.items() if size is None}
    assert unbounded <= BY_TEXT_OPERATION_OR_MESH
    assert max(size for size in sizes.values() if size is not None) <= 16384
