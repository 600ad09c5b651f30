"""shard_map against plain torch, rank by rank: values, both derivatives, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import COLLECTIVES, run
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torchard
from torchard import (
    Mesh,
    MeshTensor,
    P,
    all_gather,
    axis_index,
    axis_size,
    jit,
    place,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    random,
    shard,
    shard_map,
)

X2, XY = Mesh({"x": 2}, virtual=True), Mesh({"x": 2, "y": 2}, virtual=True)

AXES = ["x", "y", ("x", "y"), ("y", "x")]


def cases() -> list[Any]:
    """Every collective over x on every mesh; over other axes those that differ by kind of step."""
    meshes = [
        ({"x": 2}, [P("x")]),
        ({"x": 3}, [P(None, "x")]),
        ({"x": 2, "y": 2}, [P("x", "y"), P(None, ("x", "y"))]),
    ]
    found = []
    for axes, specs in meshes:
        overs = [a for a in AXES if set((a,) if isinstance(a, str) else a) <= set(axes)]
        for spec, over, name in itertools.product(specs, overs, COLLECTIVES):
            several = name in ("psum", "all_gather tiled", "all_to_all", "ppermute", "axis_index")
            if (over == "x" and spec == specs[0]) or (several and over != "x"):
                label = "".join(over)
                ident = f"{name} {label}-{'×'.join(map(str, axes.values()))}-{spec}"
                found.append(pytest.param(axes, spec, over, name, id=ident))
    return found


def directional(f: Callable[..., Any], args: Any, tangents: Any) -> torch.Tensor:
    """Forward derivative by two backward ones: the transpose of the transpose."""
    y = f(*args)
    u = torch.zeros_like(y, requires_grad=True)
    pulled = torch.autograd.grad(y, args, u, create_graph=True)
    total = sum((g * t).sum() for g, t in zip(pulled, tangents, strict=True))
    return torch.autograd.grad(total, u)[0]


def full(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("axes", "spec", "over", "name"), cases())
def test_collective(axes: dict[str, int], spec: P, over: Any, name: str) -> None:
    fn, varies = COLLECTIVES[name]
    left = set(spec.axes) - (set() if varies else {over} if isinstance(over, str) else set(over))
    out_spec = P(tuple(sorted(left)) or None)
    specs = (spec, P())

    def body(c: Any, x: Any, w: Any) -> Any:
        return fn(c, over, torch.tanh(x * w), w).sin()

    n = {2: 8, 3: 18, 4: 32}[int(torch.tensor(list(axes.values())).prod())]
    x = torch.randn(n, n, dtype=torch.float64, requires_grad=True)
    w = torch.rand(1, 1, dtype=torch.float64, requires_grad=True)
    mapped = shard_map(lambda x, w: body(torchard, x, w), Mesh(axes, virtual=True), specs, out_spec)

    def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return full(mapped(x, w))

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return run(body, axes, specs, out_spec, x, w)

    want = reference(x, w)
    close(whole(x.detach(), w.detach()), want)
    ct = torch.randn_like(want)
    expected = torch.autograd.grad(want, (x, w), ct)
    pull = vjp(whole, x, w)[1]
    for a, b in zip(pull(ct), expected, strict=True):
        close(a, b)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    close(jvp(whole, (x, w), tangents)[1], directional(reference, (x, w), tangents))


def close(have: torch.Tensor, want: torch.Tensor) -> None:
    assert have.shape == want.shape
    assert have.dtype == want.dtype
    assert (have - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1.0)


# -- with other transforms, and inside ------------------------------------------------------------


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * w).sum()


def local_loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return psum(loss(w, x), "x")


mapped = shard_map(local_loss, X2, (P(), P("x")), P())
total = lambda w, x: mapped(w * 2, x.sin()) + x.sum()  # noqa: E731
dense_total = lambda w, x: loss(w * 2, x.sin()) + x.sum()  # noqa: E731


def inner(fn: Any, out: P | None = None) -> Any:
    return shard_map(fn, X2, (P(), P("x")), out or P())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)


def backward(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    leaf = w.clone().requires_grad_()
    mapped(leaf, x).backward()
    assert leaf.grad is not None
    return leaf.grad


def two(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, 2 * x])


STACKS: dict[str, tuple[Any, Any]] = {
    "call": (mapped, loss),
    "placed": (lambda w, x: mapped(w, place(x, X2, P("x"))), loss),
    "placed otherwise": (lambda w, x: mapped(w, place(x, X2, P(None, "x"))), loss),
    "grad": (grad(mapped), grad(loss)),
    "grad of the split one": (grad(mapped, 1), grad(loss, 1)),
    "backward": (backward, grad(loss)),
    "hessian": (hessian(mapped), hessian(loss)),
    "jacrev∘jacfwd": (jacrev(jacfwd(mapped)), hessian(loss)),
    "grad∘jvp": (
        grad(lambda w, x: jvp(lambda w: mapped(w, x), (w,), (w,))[1]),
        grad(lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,))[1]),
    ),
    "vmap": (lambda w, x: vmap(mapped, (None, 0))(w, two(x)), lambda w, x: two_of(loss, w, x)),
    "vmap∘grad": (
        lambda w, x: vmap(grad(mapped), (None, 0))(w, two(x)),
        lambda w, x: two_of(grad(loss), w, x),
    ),
    "grad∘vmap": (
        grad(lambda w, x: vmap(mapped, (None, 0))(w, two(x)).sum()),
        grad(lambda w, x: vmap(loss, (None, 0))(w, two(x)).sum()),
    ),
    "jit": (jit(mapped, backend="eager"), loss),
    "jit∘grad": (jit(grad(mapped), backend="eager"), grad(loss)),
    "grad∘jit": (grad(jit(mapped, backend="eager")), grad(loss)),
    "shard of it": (shard(mapped, X2), loss),
    "in shard": (shard(total, X2), dense_total),
    "in shard, split otherwise": (
        lambda w, x: shard(total, X2)(place(w, X2, P("x")), place(x, X2, P(None, "x"))),
        dense_total,
    ),
    "grad∘(in shard)": (grad(shard(total, X2)), grad(dense_total)),
    "shard∘grad∘(in shard)": (shard(grad(total), X2, out_specs=P()), grad(dense_total)),
    "hessian∘(in shard)": (hessian(shard(total, X2)), hessian(dense_total)),
    "closure": (
        grad(lambda w, x: shard_map(lambda x: local_loss(w, x), X2, P("x"), P())(x)),
        grad(loss),
    ),
    "grad inside": (inner(lambda w, x: grad(loss)(w, x)), grad(loss)),
    "step inside": (inner(lambda w, x: w - 0.1 * grad(local_loss)(w, x)), None),
    "hessian inside": (inner(hessian(local_loss)), hessian(loss)),
    "jvp inside": (
        inner(lambda w, x: jvp(lambda w: local_loss(w, x), (w,), (w,))[1]),
        lambda w, x: jvp(lambda w: loss(w, x), (w,), (w,))[1],
    ),
    "vmap inside": (
        inner(lambda w, x: vmap(lambda r: psum(torch.sin(r * w), "x"))(x)),
        lambda w, x: torch.sin(x[:2] * w) + torch.sin(x[2:] * w),
    ),
    "jit inside": (
        grad(inner(lambda w, x: psum(jit(loss)(w, x), "x"))),
        grad(loss),
    ),
    "grad∘jit inside": (inner(lambda w, x: grad(jit(loss))(w, x)), grad(loss)),
    "grad∘(grad inside)": (
        grad(inner(lambda w, x: grad(loss)(w, x).square().sum())),
        grad(lambda w, x: grad(loss)(w, x).square().sum()),
    ),
    "in place": (inner(lambda w, x: written(w, x)), lambda w, x: x[[0, 2]].sum(0) * 3 + 2 * w),
    "invariant, split when it leaves": (
        grad(lambda w, x: (shard_map(lambda w: w, X2, P(), P("x"))(w).full() * x[:2].view(-1)).sum()),
        lambda w, x: x[0] + x[1],
    ),
}
STACKS["step inside"] = (STACKS["step inside"][0], lambda w, x: w - 0.1 * grad(loss)(w, x))


def two_of(fn: Any, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([fn(w, x), fn(w, 2 * x)])


def written(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = pvary(torch.zeros(2, 6, dtype=x.dtype), "x")
    y[0] = x[0]
    y[:1].mul_(3)
    y[0] += w
    return psum(y, "x")[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STACKS)
def test_stack(name: str) -> None:
    have, want = STACKS[name]
    w, x = data()
    close(full(have(w, x)), want(w, x))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.T, -1) @ v


def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Keys and values travel round the ring; the softmax is completed part by part."""
    n = axis_size("x")
    top, mass, out = torch.full_like(q[:, :1], -torch.inf), 0.0, 0.0
    for _ in range(n):
        scores = q @ k.T
        new = torch.maximum(top, scores.amax(1, keepdim=True)).detach()
        part, kept = torch.exp(scores - new), torch.exp(top - new)
        mass, out, top = mass * kept + part.sum(1, keepdim=True), out * kept + part @ v, new
        k, v = (ppermute(t, "x", [(i, (i + 1) % n) for i in range(n)]) for t in (k, v))
    return out / mass


def test_ring_attention() -> None:
    mesh = Mesh({"x": 3}, virtual=True)
    qkv = [torch.randn(12, 4, dtype=torch.float64) for _ in range(3)]
    ring = shard_map(ring_attention, mesh, P("x"), P("x"))
    have, pull = vjp(lambda *t: ring(*t).full(), *qkv)
    want, expected = vjp(attention, *qkv)
    close(have, want)
    ct = torch.randn_like(want)
    for a, b in zip(pull(ct), expected(ct), strict=True):
        close(a, b)
    assert [str(c) for c in ring.lower(*qkv).collectives] == ["ppermute(x) [4, 4] float64"] * 4


def test_megatron_by_hand_has_its_two_sums_and_no_more() -> None:
    """Tensor parallel over x, data parallel over y: gradients of weights are summed over y alone."""

    def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return psum(torch.tanh(x @ p["a"]) @ p["b"], "x")

    def dense(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ p["a"]) @ p["b"]

    specs = {"a": P(None, "x"), "b": P("x")}
    params = {k: torch.randn(4, 4, dtype=torch.float64) for k in specs}
    x = torch.randn(6, 4, dtype=torch.float64)
    run = shard_map(mlp, XY, (specs, P("y")), P("y"))
    placed = place(params, XY, specs), place(x, XY, P("y"))
    have = grad(lambda p, x: sum(part.square().sum() for part in run(p, x).parts), (0, 1))(*placed)
    want = grad(lambda p, x: dense(p, x).square().sum(), (0, 1))(params, x)
    for a, b in ((have[0]["a"], want[0]["a"]), (have[0]["b"], want[0]["b"]), (have[1], want[1])):
        close(a.full(), b)
    found = [(c.kind, c.axes, c.phase) for c in run.lower_joint(*placed).collectives]
    assert found[0] == ("all_reduce", ("x",), "forward")
    assert sorted(found[1:]) == [("all_reduce", ("x",), "backward")] + [
        ("all_reduce", ("y",), "backward")
    ] * 2


def test_a_float_argument_still_promotes_like_one() -> None:
    _, x = data()
    run = inner(lambda rate, x: psum(x.sum() * rate, "x"))
    assert run(0.1, x.float()).dtype == torch.float32
    inside = inner(lambda rate, x: psum(grad_and_value(lambda x: x.sum() * rate)(x)[1], "x"))
    assert inside(0.1, x.float()).dtype == torch.float32


def test_bools_are_counted() -> None:
    _, x = data()
    close(shard_map(lambda x: psum(x > 0, "x"), X2, P("x"), P())(x), (x[:2] > 0) * 1 + (x[2:] > 0) * 1)


def test_each_rank_draws_its_own_numbers() -> None:
    run = shard_map(
        lambda k: random.uniform(random.fold_in(k, axis_index("x")), (3,)), X2, P(), P("x")
    )
    want = [random.uniform(random.fold_in(random.key(3), i), (3,)) for i in range(2)]
    assert torch.equal(run(random.key(3)).full(), torch.cat(want))


def test_an_axis_of_one() -> None:
    mesh = Mesh({"x": 2, "y": 1}, virtual=True)
    w, x = data()

    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = ppermute(all_gather(x * w, "y", tiled=True), "y", [(0, 0)])
        return psum(psum_scatter(y, "y", tiled=True).sin().sum(), ("x", "y"))

    run = shard_map(fn, mesh, (P(), P("x", "y")), P())
    close(grad(run)(w, x), grad(loss)(w, x))
    assert [c.axes for c in run.lower(w, x).collectives] == [("x", "y")]


OF_CONSTANTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "returned": lambda c: c,
    "pvary": lambda c: psum(pvary(c, "x"), "x"),
    "all_gather": lambda c: all_gather(c, "x", invariant=True).sum(),
    "ppermute": lambda c: psum(ppermute(c, "x", [(0, 1), (1, 0)]), "x"),
    "times a shard's index": lambda c: psum(c * axis_index("x"), "x") * 2,
}


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_constants(name: str, shape: tuple[int, ...]) -> None:
    """Of one element, which traces know the value of."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return OF_CONSTANTS[name](torch.tensor([3.0] if shape else 3.0))

    mapped, x = shard_map(fn, X2, P("x"), P()), torch.ones(4)
    want = torch.full(shape if name != "all_gather" else (), 3.0 if name == "returned" else 6.0)
    assert torch.equal(mapped(x), want)
    assert torch.equal(grad(lambda x: (mapped(x) * x).sum())(x), want.expand(4))
