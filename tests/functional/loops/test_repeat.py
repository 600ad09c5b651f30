"""repeat: equal to the loop it stands for, in every derivation, while its block is traced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.profiler import ProfilerActivity, profile

import torchard as ta
from torchard import DerivativeError, LoopError, checkpoint, jit, random, repeat, stack, unstack
from torchard.functional.programs.program import Leaf
from torchard.functional.programs.tags import LOOP
from torchard.functional.programs.unrolled import has_loops, unrolled
from torchard.testing import equal
from torchard.transforms import Transformed, ValueRewrite

F64 = torch.float64
COUNT = 4
generator = torch.Generator().manual_seed(0)
P = {
    "w": torch.randn(COUNT, 3, 3, generator=generator, dtype=F64) / 2,
    "b": torch.randn(COUNT, 3, generator=generator, dtype=F64),
}
X = torch.randn(2, 3, generator=generator, dtype=F64)


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"]) + x


def scaled_layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    """A layer whose operations do not determine its gradient."""
    with torch.no_grad():
        mean = x.mean()
    return layer(p, x) * mean


def looped(p: Any, x: torch.Tensor) -> torch.Tensor:
    """The same, as users write it."""
    for i in range(COUNT):
        x = layer({name: leaf[i] for name, leaf in p.items()}, x)
    return x


def repeated(p: Any, x: torch.Tensor) -> torch.Tensor:
    return repeat(layer, p, x)


def loss(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda p, x: fn(p, x).square().sum()


def squared_gradients(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def total(p: Any, x: torch.Tensor) -> torch.Tensor:
        grads = grad(loss(fn), (0, 1))(p, x)
        return sum((g.square().sum() for g in ta.tree.leaves(grads)), start=torch.zeros(()))

    return total


def eager(fn: Callable[..., Any]) -> Any:
    return jit(fn, backend="eager")


def same(have: Any, want: Any) -> None:
    torch.testing.assert_close(have, want, rtol=1e-10, atol=1e-12)


# What is done to the function inside of a transform, and outside of one.
WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(loss(f), (0, 1)),
    "hessian": lambda f: hessian(loss(f), 1),
    "jacrev of jacrev": lambda f: jacrev(jacrev(loss(f), 1), 1),
    "grad of grad": lambda f: grad(squared_gradients(f), (0, 1)),
    "jvp": lambda f: lambda p, x: jvp(f, (p, x), (p, x)),
    "jvp of grad": lambda f: lambda p, x: jvp(lambda x: grad(loss(f))(p, x), (x,), (x,)),
    "grad of jvp": lambda f: grad(lambda p, x: jvp(lambda x: f(p, x), (x,), (x,))[1].sum(), (0, 1)),
    "vmap": lambda f: lambda p, x: vmap(f, (None, 1), 2)(p, torch.stack([x, -x], 1)),
    "vmap of grad": lambda f: lambda p, x: vmap(grad(loss(f)), (None, 0))(p, torch.stack([x, -x])),
    "grad of vmap": lambda f: grad(lambda p, x: vmap(f, (None, 0))(p, torch.stack([x, -x])).sum()),
}


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transform", [eager, checkpoint], ids=["jit", "checkpoint"])
def test_equals_the_loop(way: str, transform: Callable[..., Any]) -> None:
    want = WAYS[way](looped)(P, X)
    same(WAYS[way](repeated)(P, X), want)
    same(transform(WAYS[way](repeated))(P, X), want)
    same(WAYS[way](transform(repeated))(P, X), want)


def test_the_block_is_traced_once() -> None:
    calls = []

    def counted(p: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return layer(p, x)

    step = eager(grad(loss(lambda p, x: repeat(counted, p, x))))
    for _ in range(3):
        step(P, X)
    assert len(calls) == 1


@pytest.mark.parametrize("count", [2, 7])
def test_a_program_is_as_long_whatever_the_depth(count: int) -> None:
    p = {name: leaf[:1].expand(count, *leaf.shape[1:]) for name, leaf in P.items()}
    program = eager(grad(loss(repeated), (0, 1))).lower(p, X)
    in_loops = [node for node in program.calls if LOOP.on(node)]
    assert has_loops(program) and (len(program.calls), len(in_loops)) == (29, 18)
    assert not has_loops(unrolled(program))
    # Nothing of the forward is computed twice: one tanh, and its gradient.
    assert sum("tanh" in str(node.target) for node in program.calls) == 2


def test_a_key_a_number_and_results_of_each_layer() -> None:
    keys = random.split(random.key(3), COUNT)

    def block(p: Any, x: torch.Tensor, scale: torch.Tensor, *, key: Any, index: Any) -> Any:
        x = layer(p, x) * scale + random.normal(key, (3,), dtype=F64) * index
        return x, {"sum": x.sum(), "index": index}

    def whole(p: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return repeat(block, p, x, scale, collect=True, key=random.key(3), index=True)

    def plain(p: Any, x: torch.Tensor, scale: torch.Tensor) -> Any:
        sums = []
        for i in range(COUNT):
            one = {name: leaf[i] for name, leaf in p.items()}
            x, y = block(one, x, scale, key=keys[i], index=torch.tensor(i))
            sums.append(y["sum"])
        return x, {"sum": torch.stack(sums), "index": torch.arange(COUNT)}

    scale = torch.tensor(0.7, dtype=F64)
    same(whole(P, X, scale), plain(P, X, scale))
    same(eager(whole)(P, X, scale), plain(P, X, scale))
    wanted = grad(lambda *a: plain(*a)[1]["sum"].square().sum(), (0, 1, 2))(P, X, scale)
    got = grad(lambda *a: whole(*a)[1]["sum"].square().sum(), (0, 1, 2))
    same(eager(got)(P, X, scale), wanted)


def test_several_carries_that_change_places() -> None:
    def swap(p: Any, x: Any) -> Any:
        return x["b"], layer(p, x["a"])

    def block(p: Any, x: Any) -> Any:
        a, b = swap(p, x)
        return {"a": a, "b": b, "n": x["n"] + 1}

    def f(p: Any, x: torch.Tensor) -> Any:
        return repeat(block, p, {"a": x, "b": 2 * x, "n": torch.tensor(0)})

    same(eager(f)(P, X), f(P, X))
    assert eager(f)(P, X)["n"] == COUNT
    wanted = grad(lambda p, x: (f(p, x)["a"] * f(p, x)["b"]).sum(), (0, 1))
    same(eager(wanted)(P, X), wanted(P, X))


def test_values_of_outside_that_the_block_reads() -> None:
    def f(p: Any, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return repeat(lambda q, y: layer(q, y) * m + p["b"][0], p, x).sum()

    m = torch.tensor([0.5, -1.0, 2.0], dtype=F64)
    wanted = grad(f, (0, 1, 2))
    same(eager(wanted)(P, X, m), wanted(P, X, m))
    same(grad(eager(f), (0, 1, 2))(P, X, m), wanted(P, X, m))


def test_gradients_that_operations_do_not_determine() -> None:
    """Where gradients are off, also through a transform in a transform."""

    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return repeat(scaled_layer, p, x).square().sum()

    wanted = grad(f, (0, 1))
    inner = eager(f)
    same(eager(wanted)(P, X), wanted(P, X))
    same(grad(inner, (0, 1))(P, X), wanted(P, X))
    same(grad(eager(lambda p, x: inner(p, x) * 1), (0, 1))(P, X), wanted(P, X))


class _Halved(ValueRewrite):
    """Parameters are halved, with a gradient as if they were not."""

    def input(self, leaf: Leaf, value: torch.Tensor) -> torch.Tensor:
        return value - (value / 2).detach() if leaf.path != "args[1]" else value


class _Doubled(ValueRewrite):
    """Products are doubled."""

    def call(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        scale = 2 if node.target is torch.ops.aten.mm.default else 1
        return scale * super().call(node, args, kwargs)


@pytest.mark.parametrize("change", [_Halved(), _Doubled()], ids=["inputs", "operations"])
def test_changes_of_values(change: ValueRewrite) -> None:
    have = grad(loss(Transformed(repeated, [change])), (0, 1))(P, X)
    same(have, grad(loss(Transformed(looped, [change])), (0, 1))(P, X))
    assert not torch.allclose(have[1], grad(loss(looped), 1)(P, X))


def test_changes_of_values_where_operations_do_not_determine_the_gradient() -> None:
    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        return repeat(scaled_layer, p, x)

    def by_hand(p: Any, x: torch.Tensor) -> torch.Tensor:
        p = {name: leaf - (leaf / 2).detach() for name, leaf in p.items()}
        for each in unstack(p):
            x = scaled_layer(each, x)
        return x

    have = grad(loss(Transformed(run, [_Halved()])), (0, 1))(P, X)
    same(have, grad(loss(by_hand), (0, 1))(P, X))
    with pytest.raises(DerivativeError, match="Doubled replaces operations of run"):
        Transformed(run, [_Doubled()])(P, X)


def test_compared_with_the_loop_by_measured_bounds() -> None:
    p, x = ta.tree.map(torch.Tensor.float, (P, X))
    equal(repeated, looped, p, x, orders=("value", "gradient"))
    equal(looped, eager(repeated), p, x, orders=("value", "gradient"))


def test_a_loop_in_a_loop() -> None:
    def f(p: Any, x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda scale, x: repeat(layer, p, x) * scale, scales, x).sum()

    scales = torch.tensor([0.5, -0.25], dtype=F64)
    wanted = grad(f, (0, 1))
    same(eager(wanted)(P, X), wanted(P, X))


def test_an_error_names_the_layer() -> None:
    def fragile(row: Any, x: torch.Tensor) -> torch.Tensor:
        return x + x.index_select(0, row.reshape(1))

    run = eager(lambda p, x: repeat(fragile, p, x))
    with pytest.raises((RuntimeError, IndexError)) as error:
        run(torch.tensor([1, 0, 5, 1]), torch.eye(2))
    assert "in block/2 forward" in "".join(error.value.__notes__)


def test_ranges_of_a_profile_name_the_layer() -> None:
    run = eager(grad(loss(repeated)))
    run(P, X)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(P, X)
    names = {event.name for event in seen.events()}
    assert {f"block/{i} {phase}" for i in range(COUNT) for phase in ("forward", "backward")} <= names


def test_stack_and_unstack() -> None:
    layers = unstack(P)
    same(stack(layers), P)
    assert stack([{"w": ta.ShapeDtype((2,))}] * 3)["w"].shape == (3, 2)
    assert stack([{"w": ta.P("tp")}] * 3)["w"] == ta.P(None, "tp")
    with pytest.raises(ValueError, match=r"different specs: P\('tp'\), P\(\)"):
        stack([ta.P("tp"), ta.P()])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: repeat(layer, {"w": P["w"], "b": P["b"][:2]}, X), r"\['w'\] \[4, 3, 3\]"),
        (lambda: repeat(layer, {"w": torch.tensor(1.0)}, X), "without a leading dim"),
        (lambda: repeat(layer, P, "x"), "the carry must be tensors"),
        (lambda: repeat(lambda p, x: x.float(), P, X), r"is float64\[2, 3\], and the block returned"),
        (lambda: repeat(lambda p, x: (x, x), P, X), "pass collect=True"),
        (lambda: repeat(lambda p, x: x, P, X, collect=True), r"not a pair"),
        (lambda: repeat(layer, {}, X), "stacked has no layers"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(LoopError, match=said):
        call()
