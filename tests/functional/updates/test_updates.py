"""Updates of many parameters by one kernel: where there is one, and that values are as of operations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchard import (
    Mesh,
    MeshTensor,
    P,
    accumulate,
    checkpoint,
    jit,
    optim,
    random,
    repeat,
    shard,
    stack,
)
from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.loops import equal_layers

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((3, 4), (5,), (), (0, 2), (2, 1, 3), (8, 8), (1,))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of parameters that each kernel updated, and of its calls."""
    counted: Counter[str] = Counter()
    for name in ("fused_adamw", "fused_sgd"):
        _count(monkeypatch, name, counted)
    return counted


def _count(monkeypatch: pytest.MonkeyPatch, name: str, counted: Counter[str]) -> None:
    kernel = getattr(internals, name)

    def call(params: list[Tensor], *args: Any) -> None:
        counted["calls"] += 1
        counted["parameters"] += len(params)
        kernel(params, *args)

    monkeypatch.setattr(internals, name, call)


def normal(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return random.normal(random.key(number), shape, dtype=torch.float64).to(dtype)


def copied(value: Any) -> Any:
    """A tree with copies that have the strides of its tensors."""
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, value)


def whole(value: Any) -> list[Tensor]:
    """The full values in a tree."""
    if isinstance(value, (Tensor, MeshTensor)):
        return [value.full() if isinstance(value, MeshTensor) else value]
    each = value.values() if isinstance(value, dict) else value or ()
    return [x for item in each for x in whole(item)]


def assert_rounded(got: Any, eager: Any, exact: Any) -> None:
    """Each value is as near to the exact one as that of the operations, but for a few roundings."""
    for mine, other, true in zip(*(whole(x) for x in (got, eager, exact)), strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        if not mine.is_floating_point():
            assert torch.equal(mine, other)
            continue
        eps = torch.finfo(mine.dtype).eps
        scale = true.abs().max().item() if true.numel() else 0.0
        slack = (other.double() - true).abs().nan_to_num(math.inf) + 8 * eps * (true.abs() + scale)
        assert ((mine.double() - true).abs() <= slack).all()


def in_double(value: Any) -> Any:
    return tree.map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, value
    )


# -- where the kernels are ---------------------------------------------------------------------------

SHAPES_BY_NAME = {f"{k}{n}": shape for n in range(3) for k, shape in (("w", (3, 4)), ("b", (5,)))}
PARAMS = {k: normal(i, shape, torch.float32) for i, (k, shape) in enumerate(SHAPES_BY_NAME.items())}


def tensors(number: int) -> dict[str, Tensor]:
    return {k: normal(10 * number + i, p.shape, p.dtype) for i, (k, p) in enumerate(PARAMS.items())}


def updated_once(optimizer: optim.Optimizer) -> Callable[..., Any]:
    return lambda params, state, grads: optimizer.update(grads, state, params)


HALF = {k: 0.1 if k.startswith("w") else 0.0 for k in PARAMS}
OPTIMIZERS = {
    "adamw": (optim.adamw(1e-2), 1),
    "two decays": (optim.adamw(1e-2, weight_decay=HALF), 2),
    "low b1": (optim.adamw(1e-2, b1=0.3, b2=0.9, eps=1e-4), 1),
    "no numbers": (optim.adamw(0.0, b1=0.0, b2=0.0, eps=0.0), 1),
    "a tensor": (optim.adamw(torch.tensor(1e-2)), 1),
    "a schedule": (optim.adamw(optim.warmup_cosine(1e-2, 9, 3), weight_decay=HALF), 2),
    "sgd": (optim.sgd(0.1), 0),
    "momentum with decays": (optim.sgd(torch.tensor(0.1), momentum=0.9, weight_decay=HALF), 2),
    "momentum": (optim.sgd(0.1, momentum=0.9, weight_decay=0.1), 1),
    "nesterov": (optim.sgd(lambda n: 0.1 / (n + 1), momentum=0.9, nesterov=True), 1),
}
MESH = Mesh({"dp": 2}, virtual=True)
SPECS = {k: P("dp") if k.startswith("w") else P() for k in PARAMS}


def run_on_mesh(optimizer: optim.Optimizer, **how: Any) -> Callable[..., Any]:
    def specs_like(state: Any) -> Any:
        return type(state)(P(), *(None if x is None else SPECS for x in state[1:]))

    specs = SPECS, specs_like(optimizer.init(PARAMS)), SPECS
    fn = shard(updated_once(optimizer), MESH, in_specs=specs, out_specs=specs[:2])
    return jit(fn, backend="eager", **how) if how else fn


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_call_for_each_decay(name: str, kernels: Counter[str]) -> None:
    optimizer, calls = OPTIMIZERS[name]
    state = tree.map(lambda x: x if x is None else x + 1, optimizer.init(PARAMS))
    args = PARAMS, state, tensors(3)
    eager = updated_once(optimizer)(*args)
    exact = updated_once(optimizer)(*in_double(args))
    assert not kernels
    got = jit(updated_once(optimizer), backend="eager")(*args)
    assert kernels == ({"calls": calls, "parameters": len(PARAMS)} if calls else {})
    assert_rounded(got, eager, exact)


@pytest.mark.parametrize("how", [{}, {"donate_argnums": (0, 1)}, {"memory": "planned"}])
def test_on_a_mesh(how: dict[str, Any], kernels: Counter[str]) -> None:
    """One call for each layout, and rank that holds a part of its own."""
    optimizer, _ = OPTIMIZERS["adamw"]
    args = PARAMS, optimizer.init(PARAMS), tensors(3)
    eager = updated_once(optimizer)(*args)
    got = run_on_mesh(optimizer, **how)(*copied(args))
    assert kernels == {"calls": 3, "parameters": 3 + 2 * 3}
    assert_rounded(got, eager, updated_once(optimizer)(*in_double(args)))


def test_donated_memory_is_written(kernels: Counter[str]) -> None:
    """Results are where the arguments were, and the caller's own tensors are not written otherwise."""
    optimizer, _ = OPTIMIZERS["adamw"]
    run = jit(updated_once(optimizer), backend="eager", donate_argnums=(0, 1))
    given = copied((PARAMS, optimizer.init(PARAMS)))
    places = {x.data_ptr() for x in tree.leaves(given) if x.ndim}
    lowered = run.lower(*given, tensors(3))
    sizes = sum(x.nbytes for x in tree.leaves(PARAMS))
    assert lowered.peak < 4 * sizes + 100  # parameters, two moments and gradients: nothing is copied
    assert str(lowered).count("= adamw[") == 1
    got = run(*given, tensors(3))
    assert {x.data_ptr() for x in tree.leaves(got) if x.ndim} == places
    before = copied(PARAMS)
    plain = jit(updated_once(optimizer), backend="eager")
    assert plain.lower(PARAMS, optimizer.init(PARAMS), tensors(3)).peak > 7 * sizes
    plain(PARAMS, optimizer.init(PARAMS), tensors(3))
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(before), tree.leaves(PARAMS), strict=True))
    assert kernels["calls"] == 2


def test_under_inductor(kernels: Counter[str]) -> None:
    """What is compiled is everything else: before updates, and after them."""
    optimizer, _ = OPTIMIZERS["adamw"]

    def train(params: dict[str, Tensor], state: Any, shift: Tensor) -> Any:
        grads = {k: (p + shift).sin() for k, p in params.items()}
        params, state = optimizer.update(grads, state, params)
        return params, state, sum(p.square().sum() for p in params.values())

    args = PARAMS, optimizer.init(PARAMS), torch.tensor(0.5)
    want = train(*args)
    for how in ({}, {"donate_argnums": (0, 1)}):
        kernels.clear()
        got = jit(train, **how)(*copied(args[:2]), args[2])
        assert kernels == {"calls": 1, "parameters": len(PARAMS)}
        for one, other in zip(whole(got), whole(want), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_under_other_compilers_operations_stay() -> None:
    optimizer, _ = OPTIMIZERS["adamw"]
    lowered = jit(updated_once(optimizer), backend="aot_eager").lower(
        PARAMS, optimizer.init(PARAMS), tensors(3)
    )
    assert "adamw" not in str(lowered)


# -- arithmetic that is not, or not all, an optimizer's ----------------------------------------------


def by_hand(p: Tensor, m: Tensor, s: Tensor, g: Tensor, count: Tensor, change: str) -> Any:
    b1 = 0.8 if change == "two numbers" else 0.9
    m = torch.add(m, g - m, alpha=1 - 0.9)
    s = torch.addcmul(0.999 * s, g, p if change == "another factor" else g, value=1 - 0.999)
    shift, root = 0.01 / (1 - b1**count), (1 - 0.999**count).sqrt()
    ratio = m / (s.sqrt() / root + 1e-8)
    new = p * 0.999 - shift * (ratio.abs() if change == "another operation" else ratio)
    return (new, m, s, ratio) if change == "read" else (new, m, s)


@pytest.mark.parametrize(
    ("change", "merged"),
    [("", 2), ("two numbers", 0), ("another factor", 0), ("another operation", 0), ("read", 0)],
)
def test_by_hand(change: str, merged: int, kernels: Counter[str]) -> None:
    """A user's own AdamW is one, too; not if any operation or number differs, or a value is read."""

    def update(rows: list[tuple[Tensor, ...]], count: Tensor) -> list[Any]:
        return [by_hand(*row, count, change) for row in rows]

    args = [tuple(normal(i, (3, 4), torch.float32).abs() for i in range(4)) for _ in range(2)]
    count = torch.tensor(3.0, dtype=torch.float64)
    got = jit(update, backend="eager")(args, count)
    assert_rounded(got, update(args, count), update(in_double(args), count))
    assert kernels["parameters"] == merged


@pytest.mark.parametrize(("momentum", "merged"), [(0.0, 0), (0, 0), (0.9, 1)])
def test_momentum_of_nothing(momentum: float, merged: int, kernels: Counter[str]) -> None:
    """A velocity that forgets all is still a result; a kernel without momentum has none."""

    def update(p: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        v = momentum * v + g
        return p - 0.1 * v, v

    args = tuple(normal(i, (3, 4), torch.float32) for i in range(3))
    got = jit(update, backend="eager")(*args)
    assert_rounded(got, update(*args), update(*in_double(args)))
    assert kernels["parameters"] == merged


def test_large_updates_are_several(kernels: Counter[str]) -> None:
    """Without donation, gradients are freed before all updates are computed."""
    params = {str(i): torch.ones(2**19) for i in range(32)}
    optimizer = optim.adamw(0.1)

    def step(params: dict[str, Tensor], state: Any) -> Any:
        return optimizer.update({k: p.sin() for k, p in params.items()}, state, params)

    run, args = jit(step, backend="eager"), (params, optimizer.init(params))
    each, total = params["0"].nbytes, sum(p.nbytes for p in params.values())
    assert run.lower(*args).peak < 6 * total + 4 * each
    run(*args)
    assert kernels == {"calls": 16, "parameters": 32}


@pytest.mark.parametrize("way", ["repeat", "a loop of Python"])
@pytest.mark.parametrize("how", [{"backend": "eager"}, {"backend": "eager", "donate_argnums": (0, 1)}])
def test_equal_layers_are_updated_at_once(
    how: dict[str, Any], way: str, kernels: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in each iteration of the loop that they would become."""
    monkeypatch.setattr(equal_layers, "MIN_SAVED", 1)
    monkeypatch.setattr(equal_layers, "MIN_SAVED_PER_LOOP", 1)
    optimizer, _ = OPTIMIZERS["adamw"]
    shapes = {"w": (4, 4), "b": (4,)}
    rows = [{k: normal(i, s, torch.float32) for k, s in shapes.items()} for i in range(4)]

    def block(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"] + p["b"])

    def loss(params: Any, x: Tensor) -> Tensor:
        if way == "repeat":
            return repeat(block, stack(params), x).square().sum()
        for p in params:
            x = block(p, x)
        return x.square().sum()

    def step(params: Any, state: Any, x: Tensor) -> Any:
        return optimizer.update(torch.func.grad(loss)(params, x), state, params)

    args = rows, optimizer.init(rows), normal(8, (3, 4), torch.float32)
    want, exact = step(*args), step(*in_double(args))
    run = jit(step, **how)
    text = str(run.lower(*args))
    got = run(*copied(args))
    assert kernels == {"calls": 1, "parameters": 8}
    assert_rounded(got, want, exact)
    assert text.count("= adamw[") == 1


@pytest.mark.parametrize("how", [{}, {"donate_argnums": (0, 1)}])
def test_gradients_in_another_order(how: dict[str, Any], kernels: Counter[str]) -> None:
    """Kernels read memory, not strides."""
    optimizer = optim.adamw(0.1)
    params = {k: normal(i, (3, 4), torch.float32) for i, k in enumerate("ab")}
    grads = {"a": normal(2, (4, 3), torch.float32).t(), "b": normal(3, (3, 4), torch.float32)}
    args = params, optimizer.init(params), grads
    eager, exact = updated_once(optimizer)(*args), updated_once(optimizer)(*in_double(args))
    got = jit(updated_once(optimizer), backend="eager", **how)(*copied(args[:2]), grads)
    assert_rounded(got, eager, exact)
    assert kernels["parameters"] == 2


def test_several_updates(kernels: Counter[str]) -> None:
    """Steps in one program: each reads the results of the one before, also between updates."""
    optimizer = optim.adamw(0.05)

    def loss(params: dict[str, Tensor], shift: int) -> Tensor:
        return sum(((p + shift).sin() * p).sum() for p in params.values())

    def train(params: dict[str, Tensor], state: Any) -> Any:
        values = []
        for i in range(3):
            grads, value = torch.func.grad_and_value(loss)(params, i)
            params, state = optimizer.update(grads, state, params)
            values.append(value)
        return params, state, values

    args = PARAMS, optimizer.init(PARAMS)
    exact, eager = train(*in_double(args)), train(*args)
    for how in ({}, {"donate_argnums": (0, 1)}, {"donate_argnums": (0, 1), "memory": "planned"}):
        kernels.clear()
        assert_rounded(jit(train, backend="eager", **how)(*copied(args)), eager, exact)
        assert kernels == {"calls": 3, "parameters": 3 * len(PARAMS)}


# -- any dtype, shape, order and way -----------------------------------------------------------------


@st.composite
def trees(draw: Any) -> tuple[list[list[Any]], torch.dtype]:
    """Trees of parameters, gradients and moments: of one dtype, in various orders, some absent."""
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    absent = [draw(st.integers(0, 5)) == 0 for _ in shapes]

    def leaf(number: int, shape: tuple[int, ...], kind: int) -> Tensor:
        x = normal(number, shape, dtype)
        way = draw(st.integers(0, 6))
        if way == 0 and x.ndim > 1:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        if way == 1:
            x = torch.cat([x.reshape(-1), x.reshape(-1)])[x.numel() :].view(shape)
        if way == 2 and kind == 1 and x.ndim:
            x = x[..., :1].expand(shape)
        return x.abs() if kind == 3 else x

    numbered = [*enumerate(zip(shapes, absent, strict=True))]
    rows = [
        [None if gone else leaf(7 * i + k, shape, k) for i, (shape, gone) in numbered]
        for k in range(4)
    ]
    return rows, dtype


RATES: dict[str, Any] = {
    "number": 0.01,
    "tensor": torch.tensor(0.01),
    "double": torch.tensor(0.01, dtype=torch.float64),
    "schedule": optim.warmup_cosine(0.02, 20, 5),
}
WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "donated": {"donate_argnums": (0, 1)},
    "planned": {"memory": "planned"},
    "donated, planned": {"donate_argnums": (0, 1), "memory": "planned"},
}


@settings(max_examples=examples(60, 3000), deadline=None)
@given(st.data())
def test_any_update(data: st.DataObject) -> None:
    (params, grads, mean, square), dtype = data.draw(trees())
    rate = RATES[data.draw(st.sampled_from(list(RATES)))]
    decays = [data.draw(st.sampled_from([0.0, 0.1, 1 / 3])) for _ in params]
    kind = data.draw(st.sampled_from(["adamw", "sgd", "momentum", "nesterov"]))
    count = torch.tensor(data.draw(st.integers(0, 3)))
    if kind == "adamw":
        b1, eps = data.draw(st.sampled_from([0.9, 0.4])), 1e-3 if dtype == torch.float16 else 1e-8
        optimizer = optim.adamw(rate, b1=b1, eps=eps, weight_decay=decays)
        state: Any = optim.AdamState(count, mean, square)
    else:
        momentum = 0.0 if kind == "sgd" else 0.9
        optimizer = optim.sgd(rate, momentum, nesterov=kind == "nesterov", weight_decay=decays)
        state = optim.SgdState(count, mean if momentum else None)
    update, args = updated_once(optimizer), (params, state, grads)
    eager, exact = update(*args), update(*in_double(args))
    before = copied(args)
    way = WAYS[data.draw(st.sampled_from(list(WAYS)))]
    given_up = copied(args) if "donate_argnums" in way else args
    got = jit(update, backend="eager", **way)(*given_up)
    assert_rounded(got, eager, exact)
    for mine, other in zip(tree.leaves(args), tree.leaves(before), strict=True):
        assert mine is other is None or torch.equal(mine, other)


@pytest.mark.parametrize("how", list(WAYS))
def test_tied_parameters(how: str) -> None:
    """One tensor under two names is updated twice, each time from its first value."""
    optimizer = optim.adamw(0.1)
    w = normal(0, (3, 4), torch.float32)
    params = {"a": w, "b": w, "c": w[1:]}
    grads = {k: normal(i, p.shape, p.dtype) for i, (k, p) in enumerate(params.items())}
    args = params, optimizer.init(params), grads
    want = updated_once(optimizer)(*args)
    exact = updated_once(optimizer)(*in_double(args))
    way = {k: v if k == "memory" else (1,) for k, v in WAYS[how].items()}
    got = jit(updated_once(optimizer), backend="eager", **way)(params, copied(args[1]), grads)
    assert_rounded(got, want, exact)


# -- under transforms the function stays the plain one ------------------------------------------------


def meta_loss(update: Callable[..., Any]) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    optimizer = optim.adamw(0.05, eps=1e-3)

    def fn(params: dict[str, Tensor], shift: Tensor) -> Tensor:
        grads = torch.func.grad(lambda p: sum(((x * shift).sin() * x).sum() for x in p.values()))(params)
        new, _ = update(optimizer)(params, optimizer.init(params), grads)
        return sum((p * p).sum() for p in new.values())

    return fn


@pytest.mark.parametrize("derive", ["grad", "hessian", "vmap", "jvp", "vmap of grad", "backward"])
def test_derivatives(derive: str) -> None:
    def derived(fn: Callable[..., Any]) -> Any:
        many = torch.linspace(0.1, 2, 3, dtype=torch.float64)
        shift = many[1]
        if derive == "grad":
            return torch.func.grad(fn)(params, shift)
        if derive == "hessian":
            return torch.func.grad(lambda x: torch.func.grad(fn, argnums=1)(params, x))(shift)
        if derive == "vmap":
            return torch.func.vmap(fn, in_dims=(None, 0))(params, many)
        if derive == "jvp":
            return torch.func.jvp(lambda x: fn(params, x), (shift,), (torch.ones_like(shift),))
        if derive == "vmap of grad":
            return torch.func.vmap(torch.func.grad(fn, argnums=1), in_dims=(None, 0))(params, many)
        leaves = {k: p.clone().requires_grad_() for k, p in params.items()}
        fn(leaves, shift).backward()
        return [p.grad for p in leaves.values()]

    params = in_double(PARAMS)
    want = derived(meta_loss(updated_once))
    for transform in (lambda f: jit(f, backend="eager"), checkpoint):
        inner = meta_loss(lambda optimizer, transform=transform: transform(updated_once(optimizer)))
        for fn in (inner, transform(meta_loss(updated_once))):
            got = derived(fn)
            pairs = zip(tree.leaves(got), tree.leaves(want), strict=True)
            assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in pairs)


def test_traced_by_torch() -> None:
    """A tracer of torch's sees operations that have derivatives, of real and of fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    optimizer, _ = OPTIMIZERS["adamw"]
    run = jit(updated_once(optimizer), backend="eager")
    args = PARAMS, optimizer.init(PARAMS), tensors(3)
    flat, structure = tree.leaves(args), tree.structure(args)
    run(*args)
    want = tree.leaves(updated_once(optimizer)(*args))
    for mode in ("real", "fake"):
        traced = make_fx(
            lambda *xs: tree.leaves(run(*tree.unflatten(structure, list(xs)))), tracing_mode=mode
        )(*flat)
        assert "_fused" not in traced.code
        assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(traced(*flat), want, strict=True))


@pytest.mark.parametrize("specs", [P(), P("dp")])
def test_steps_by_any_plan(specs: P, kernels: Counter[str]) -> None:
    """Data parallel, fully sharded, with microbatches, or several: the step is the plain one."""
    optimizer = optim.adamw(0.01, weight_decay=0.1)
    params = {f"w{i}": normal(i, (6, 6), torch.float64) for i in range(3)}

    def step(params: dict[str, Tensor], state: Any, x: Tensor) -> Any:
        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            for w in params.values():
                x = (x @ w).tanh()
            return x.square().mean()

        grads, value = torch.func.grad_and_value(loss)(params, x)
        return (*optimizer.update(grads, state, params), value)

    args = params, optimizer.init(params), normal(9, (8, 6), torch.float64)
    want = step(*args)
    by_name = dict.fromkeys(params, specs)
    placed = by_name, optim.AdamState(P(), by_name, by_name)
    for inner in (step, accumulate(step, 2, batch=(None, None, 0))):
        run = shard(inner, MESH, in_specs=(*placed, P("dp")), out_specs=(*placed, P()))
        for fn in (run, jit(run, backend="eager", donate_argnums=(0, 1))):
            kernels.clear()
            got = fn(*copied(args))
            assert kernels["parameters"] == 3 * (1 + (specs == P("dp")))
            pairs = zip(whole(got), whole(want), strict=True)
            assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in pairs)
