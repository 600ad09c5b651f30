"""fuse in every stack of transforms, in any order, equals the plain function."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from comparing import compare, per_example, sgd
from effort import examples
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import torchard
from torchard import (
    Kernel,
    Mesh,
    NoMatch,
    P,
    checkpoint,
    jit,
    name,
    place,
    policies,
    random,
    scope,
    shard,
)
from torchard.kernels.library.bias_activation import bias_gelu
from torchard.kernels.library.norms import rms_norm

WIDTH, HIDDEN = 6, 8
EPS = 1e-5


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A norm, a bias and an activation, a residual."""
    h = F.rms_norm(x, (WIDTH,), p["g"], EPS)
    h = name(F.gelu(F.linear(h, p["up"], p["b"])), "hidden")
    return x + h @ p["down"]


def f(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            x = block(p, x)
    return (x**2).mean()


def biased_gelu(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + b)


class Setting:
    """How a function is fused, and the arguments."""

    def __init__(self, how: str) -> None:
        self.how = how
        keys = iter(random.split(random.key(9), 16))

        def draw(*shape: int) -> torch.Tensor:
            return random.normal(next(keys), shape, dtype=torch.float64)

        shapes = {"g": (WIDTH,), "up": (HIDDEN, WIDTH), "b": (HIDDEN,), "down": (HIDDEN, WIDTH)}
        self.p = [{k: draw(*shape) for k, shape in shapes.items()} for _ in range(2)]
        self.x, self.xs, self.v = draw(4, WIDTH), draw(2, 4, WIDTH), draw(4, WIDTH)
        self.mesh = Mesh({"tp": 2}, virtual=True)
        specs = {"g": P(), "up": P("tp"), "b": P("tp"), "down": P("tp")}
        self.q, self.y = place(self.p, self.mesh, [specs] * 2), place(self.x, self.mesh, P())

    def T(self, fn: Callable[..., Any]) -> Any:
        return HOWS[self.how](fn)

    def by_block(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = self.T(block)(p, x)
        return (x**2).mean()

    def closed(self, params: Any, x: torch.Tensor) -> torch.Tensor:
        """Fused functions that close over what is differentiated."""
        for p in params:
            x = self.T(lambda h, p=p: block(p, h))(x)
        return (x**2).mean()


def eager(fn: Any) -> Any:
    return jit(fn, backend="eager")


HOWS: dict[str, Callable[[Any], Any]] = {
    "library": fuse,
    "a pattern": lambda fn: fuse(fn, biased_gelu),
    "a kernel": lambda fn: fuse(
        fn, Kernel("mine", (biased_gelu,), "... d, d -> ... d", {"any": biased_gelu})
    ),
    "fuse∘checkpoint": lambda fn: fuse(checkpoint(fn)),
    "checkpoint∘fuse": lambda fn: checkpoint(fuse(fn), policy=policies.save_dots),
    "jit∘fuse∘fuse": lambda fn: eager(fuse(fuse(fn))),
}


def step(fn: Any) -> Any:
    return lambda p, x: [sgd(a, b) for a, b in zip(p, grad(fn)(p, x), strict=True)]


def both(fn: Any) -> Any:
    return grad(fn, (0, 1))


def backward(fn: Any, s: Setting) -> Any:
    leaves = [{k: t.detach().clone().requires_grad_() for k, t in p.items()} for p in s.p]
    value = fn(leaves, s.x)
    value.backward()
    return value.detach(), [{k: t.grad for k, t in p.items()} for p in leaves]


def pushed(fn: Any, s: Setting) -> Any:
    return jvp(lambda x: fn(s.p, x), (s.x,), (s.v,))


CASES: dict[str, Callable[[Setting], tuple[Any, Any]]] = {
    "T": lambda s: (s.T(f)(s.p, s.x), f(s.p, s.x)),
    "grad∘T": lambda s: (both(s.T(f))(s.p, s.x), both(f)(s.p, s.x)),
    "T∘grad": lambda s: (s.T(both(f))(s.p, s.x), both(f)(s.p, s.x)),
    "T∘step": lambda s: (s.T(step(f))(s.p, s.x), step(f)(s.p, s.x)),
    "T∘grad∘T": lambda s: (s.T(both(s.T(f)))(s.p, s.x), both(f)(s.p, s.x)),
    "jit∘step∘T": lambda s: (eager(step(s.T(f)))(s.p, s.x), step(f)(s.p, s.x)),
    "by block": lambda s: (both(s.by_block)(s.p, s.x), both(f)(s.p, s.x)),
    "jit, by block": lambda s: (eager(both(s.by_block))(s.p, s.x), both(f)(s.p, s.x)),
    "closed over": lambda s: (both(s.closed)(s.p, s.x), both(f)(s.p, s.x)),
    "backward": lambda s: (backward(s.T(f), s), backward(f, s)),
    "vmap∘T": lambda s: (per_example(s.T(f))(s.p, s.xs), per_example(f)(s.p, s.xs)),
    "T∘vmap": lambda s: (s.T(per_example(f))(s.p, s.xs), per_example(f)(s.p, s.xs)),
    "vmap∘grad∘T": lambda s: (
        per_example(grad(s.T(f)))(s.p, s.xs),
        per_example(grad(f))(s.p, s.xs),
    ),
    "T∘vmap∘grad": lambda s: (
        s.T(per_example(grad(f)))(s.p, s.xs),
        per_example(grad(f))(s.p, s.xs),
    ),
    "grad∘vmap∘T": lambda s: (
        grad(lambda p: per_example(s.T(f))(p, s.xs).sum())(s.p),
        grad(lambda p: per_example(f)(p, s.xs).sum())(s.p),
    ),
    "jvp∘T": lambda s: (pushed(s.T(f), s), pushed(f, s)),
    "T∘jvp": lambda s: (
        s.T(lambda p, x, v: jvp(lambda x: f(p, x), (x,), (v,)))(s.p, s.x, s.v),
        pushed(f, s),
    ),
    "jvp∘grad∘T": lambda s: (pushed(grad(s.T(f), 1), s), pushed(grad(f, 1), s)),
    "grad∘grad∘T": lambda s: (
        grad(lambda x: grad(s.T(f), 1)(s.p, x).sin().sum())(s.x),
        grad(lambda x: grad(f, 1)(s.p, x).sin().sum())(s.x),
    ),
    "hessian∘T": lambda s: (hessian(s.T(f), 1)(s.p, s.x), hessian(f, 1)(s.p, s.x)),
    "T∘hessian": lambda s: (s.T(hessian(f, 1))(s.p, s.x), hessian(f, 1)(s.p, s.x)),
    "jacrev∘T": lambda s: (jacrev(s.T(block), 1)(s.p[0], s.x), jacrev(block, 1)(s.p[0], s.x)),
    "jacfwd∘T": lambda s: (jacfwd(s.T(block), 1)(s.p[0], s.x), jacfwd(block, 1)(s.p[0], s.x)),
    "make_fx∘T": lambda s: (make_fx(lambda x: s.T(f)(s.p, x))(s.x)(s.x), f(s.p, s.x)),
    "make_fx∘vmap∘grad∘T": lambda s: (
        make_fx(vmap(lambda x: grad(s.T(f), 1)(s.p, x)))(s.xs)(s.xs),
        vmap(lambda x: grad(f, 1)(s.p, x))(s.xs),
    ),
}


@pytest.mark.parametrize("how", HOWS)
def test_equals_the_plain_function(how: str) -> None:
    """The library in a third of the stacks, each of the others in a sixth; in `make explore`, in all."""
    setting, number = Setting(how), list(HOWS).index(how)
    every = examples(ci=6 if number else 3, explore=1)
    for case, run in itertools.islice(CASES.items(), number % every, None, every):
        try:
            compare(*run(setting))
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


STACKED = {
    "fuse": lambda fn: fuse(fuse(fn, bias_gelu), rms_norm),
    "shard": lambda fn: shard(fn, Mesh({"tp": 2}, virtual=True)),
    "checkpoint": lambda fn: checkpoint(fn, where="block/*"),
}


def test_every_order_with_shard_and_checkpoint() -> None:
    """The same values, the same kernels, the same collectives and residuals."""
    s = Setting("library")
    plans = {}
    for order in itertools.permutations(STACKED):
        fn: Any = f
        for transform in order:
            fn = STACKED[transform](fn)
        compare(both(fn)(s.q, s.y), both(f)(s.p, s.x))
        joint = fn.lower_joint(s.q, s.y)
        plans[order] = (
            Counter(map(str, joint.kernels)),
            list(map(str, joint.collectives)),
            sorted((r.what, r.name, r.bytes) for r in joint.residuals),
        )
    first, *others = plans.values()
    assert all(other == first for other in others), plans
    # Each kernel of the forward is there twice: in it, and in what the backward makes again.
    assert first[0] == {
        "bias_gelu": 4,
        "rms_norm": 4,
        "bias_gelu_backward": 2,
        "rms_norm_backward": 2,
    }


def test_where() -> None:
    s = Setting("library")
    one = fuse(f, bias_gelu, where="block/1").lower(s.p, s.x)
    assert [(u.kernel, u.scope) for u in one.kernels] == [("bias_gelu", "block/1")]
    joint = fuse(f, where=["block/0"]).lower_joint(s.p, s.x)
    assert {u.scope for u in joint.kernels} == {"block/0"}
    with pytest.raises(NoMatch, match=r"matches no scope of it; there are 'block/0', 'block/1'"):
        fuse(f, where="layer/*")(s.p, s.x)


def test_policies_are_given_kernels() -> None:
    """A policy is asked of a kernel by its name; what is inside of it is no value any more."""
    s = Setting("library")
    asked = set()

    def policy(op: str, shapes: Any, scope: str, name: str | None) -> str:
        asked.add(op)
        return "save" if op == "bias_gelu" else "recompute"

    fused = STACKED["fuse"](f)
    joint = checkpoint(fused, policy=policy, where="block/*").lower_joint(s.p, s.x)
    assert "bias_gelu" in asked and "rms_norm" in asked and "aten.gelu" not in asked
    saved = [r for r in joint.residuals if r.kind == "value"]
    assert {r.what for r in saved if r.scope.startswith("block")} >= {"bias_gelu"}
    assert Counter(map(str, joint.kernels))["bias_gelu"] == 2  # not made again


def test_no_kernel_crosses_the_boundary_of_a_segment() -> None:
    x, b = torch.randn(4, 6), torch.randn(6)

    def across(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(checkpoint(torch.add)(x, b))

    with pytest.raises(NoMatch, match="boundary of a checkpointed segment"):
        fuse(across, biased_gelu)(x, b)
    inside = fuse(checkpoint(biased_gelu), biased_gelu)
    torch.testing.assert_close(inside(x, b), biased_gelu(x, b))


def test_labels_that_are_meant_stay() -> None:
    """A label inside of a kernel goes with the value; one that a transform means keeps it."""

    def fn(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sin(F.gelu(name(x + b, "sum"))).sum()

    x, b = torch.ones(3, 4), torch.ones(4)
    assert len(fuse(fn).lower_joint(x, b).kernels) == 2
    kept = fuse(checkpoint(fn, policy=policies.save_names("sum"))).lower_joint(x, b)
    assert list(map(str, kept.kernels)) == ["bias_gelu_backward"]
    assert [n.meta["name"] for n in kept.calls if "name" in n.meta] == ["sum"]
    mesh = Mesh({"tp": 2}, virtual=True)
    pinned = fuse(shard(fn, mesh, constrain_at={"sum": P("tp")}))
    assert list(pinned.lower(x, b).kernels) == []


def test_operands_that_an_implementation_keeps_are_not_written() -> None:
    """Nor is the result that it keeps: a kernel may be a user's."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mine(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = biased_gelu(x, b)
        kept.extend((each, each.clone()) for each in (x, b, out))
        return out

    def fn(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y, twice = x * 2, b * 2
        out = biased_gelu(y, twice)
        first = torch.tensor([0])
        return y.index_fill(0, first, 7) + out.index_fill(0, first, 8) + twice.index_fill(0, first, 9)

    kernel = Kernel("mine", (biased_gelu,), "... d, d -> ... d", {"any": mine})
    run = fuse(fn, kernel)
    x, b = torch.ones(3, 4), torch.ones(4)
    for _ in range(2):
        assert torch.equal(run(x, b), fn(x, b))
    assert kept and all(torch.equal(one, before) for one, before in kept)


@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp")])
def test_attention_is_split_by_batch_and_heads(spec: P) -> None:
    """Its products merge both dims into one, of which either may be split."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v

    mesh = Mesh({"dp": 2}, virtual=True)
    q = torch.linspace(-1, 1, 4 * 4 * 8 * 2).reshape(4, 4, 8, 2)
    run = fuse(shard(attention, mesh, in_specs=spec, out_specs=spec))
    program = run.lower(q, q + 1, q)
    assert [use.kernel for use in program.kernels] == ["attention"]
    assert not program.kernels[0].how.startswith("decomposed") and not program.collectives
    torch.testing.assert_close(run(q, q + 1, q).full(), attention(q, q + 1, q))


def test_reasons_inside_another_transform() -> None:
    """What is left is listed as it is without one."""

    def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (F.silu(x @ w) * x).sum()

    run = jit(torch.func.grad(torchard.fuse(gated)), backend="eager")
    uses = run.lower(torch.ones(8, 8), torch.ones(8, 8)).kernels
    assert [(use.kernel, str(use.how)) for use in uses] == [
        ("swiglu", "as written (small)"),
        ("swiglu_backward", "as written (small)"),
    ]
    assert not uses.missed
