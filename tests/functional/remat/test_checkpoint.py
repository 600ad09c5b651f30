"""checkpoint in every stack of transforms, under every policy, equals the plain function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare, per_example, sgd
from hypothesis import settings
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from torchard import (
    Mesh,
    P,
    checkpoint,
    jit,
    name,
    nn,
    place,
    policies,
    random,
    scope,
    shard,
)
from torchard.functional.remat.policies import Shapes

Params = list[dict[str, torch.Tensor]]
WHERE = "block/*"


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Of tuples, views, products and labelled values."""
    var, mean = torch.var_mean(x, -1, keepdim=True)
    up = name(F.linear((x - mean) * (1 + var).rsqrt(), p["up"], p["b"]), "up")
    left, right = torch.tanh(up).chunk(2, -1)
    return name(x + (left * right) @ p["down"], "stream")


def f(params: Params, x: torch.Tensor) -> torch.Tensor:
    """Two blocks and a loss."""
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            x = block(p, x)
    return (x**2).mean()


def mixed(op: str, shapes: Shapes, scope: str, name: str | None) -> Any:
    """A user's own policy: a little of everything."""
    if op == "aten.tanh":
        return "offload"
    if scope == "block/0":
        return name == "up"
    return "save" if shapes.result[-1:] == (3,) and len(shapes.operands) > 1 else "recompute"


POLICIES: dict[str, Any] = {
    "nothing": policies.save_nothing,
    "everything": policies.save_everything,
    "dots": policies.save_dots,
    "dots without batch": policies.save_dots_with_no_batch_dims,
    "names": policies.save_names("up"),
    "all but names": policies.save_all_but_names("up", "stream"),
    "offload": policies.offload_names("up"),
    "collectives": policies.save_collectives,
    "a function": mixed,
    "either": policies.save_dots | policies.offload_names("stream") | mixed,
    "both": policies.save_all_but_names("up") & policies.save_dots,
}


class Setting:
    """A policy, the same arguments for all, and the part of them that is batched or moved along."""

    def __init__(self, policy: Any, blocks: int = 2) -> None:
        self.policy = policy
        keys = iter(random.split(random.key(5), 16))

        def draw(*shape: int) -> torch.Tensor:
            return random.normal(next(keys), shape, dtype=torch.float64)

        shapes = {"up": (4, 3), "b": (4,), "down": (2, 3)}
        self.p = [{k: draw(*shape) for k, shape in shapes.items()} for _ in range(blocks)]
        self.x, self.xs, self.v = draw(4, 3), draw(2, 4, 3), draw(4, 3)
        self.mesh = Mesh({"a": 2}, virtual=True)
        rows = {"up": P("a"), "b": P("a"), "down": P("a")}
        self.q, self.y = place(self.p, self.mesh, [rows] * blocks), place(self.x, self.mesh, P("a"))

    def C(self, fn: Callable[..., Any], where: Any = None) -> Any:
        return checkpoint(fn, policy=self.policy, where=where)

    def S(self, fn: Callable[..., Any]) -> Any:
        return shard(fn, self.mesh)

    def by_block(self, params: Params, x: torch.Tensor) -> torch.Tensor:
        """The model with its blocks checkpointed by hand."""
        for p in params:
            x = self.C(block)(p, x)
        return (x**2).mean()

    def closed(self, params: Params, x: torch.Tensor) -> torch.Tensor:
        """Its checkpointed functions close over what is differentiated."""
        for p in params:
            x = self.C(lambda h, p=p: block(p, h))(x)
        return (x**2).mean()

    def nested(self, params: Params, x: torch.Tensor) -> torch.Tensor:
        """A checkpoint of checkpoints, of two policies."""
        inner = checkpoint(block, policy=policies.save_dots)

        def outer(params: Params, x: torch.Tensor) -> torch.Tensor:
            for p in params:
                x = inner(p, x)
            return (x**2).mean()

        return self.C(outer)(params, x)


def eager(fn: Any) -> Any:
    return jit(fn, backend="eager")


def pushed(fn: Any, s: Setting) -> Any:
    return jvp(lambda x: fn(s.p, x), (s.x,), (s.v,))


def step(fn: Any) -> Any:
    return lambda p, x: [sgd(a, b) for a, b in zip(p, grad(fn)(p, x), strict=True)]


def backward(fn: Any, s: Setting) -> Any:
    leaves = [{k: t.detach().clone().requires_grad_() for k, t in p.items()} for p in s.p]
    value = fn(leaves, s.x)
    value.backward()
    return value.detach(), [{k: t.grad for k, t in p.items()} for p in leaves]


Case = tuple[Callable[[Setting], Any], Callable[[Setting], Any]]


def of_plain(transformed: Callable[[Any], Any]) -> Callable[[Setting], Any]:
    return lambda s: transformed(f)(s.p, s.x)


GRAD = of_plain(lambda f: grad(f, (0, 1)))
STEP = of_plain(step)
# What is tried, and what must be had.
FIRST: dict[str, Case] = {
    "value": (lambda s: s.C(f, WHERE)(s.p, s.x), of_plain(lambda f: f)),
    "backward": (lambda s: backward(s.C(f, WHERE), s), lambda s: backward(f, s)),
    "grad": (lambda s: grad(s.C(f, WHERE), (0, 1))(s.p, s.x), GRAD),
    "grad, all of it": (lambda s: grad(s.C(f), (0, 1))(s.p, s.x), GRAD),
    "grad, block by block": (lambda s: grad(s.by_block, (0, 1))(s.p, s.x), GRAD),
    "grad, closed over": (lambda s: grad(s.closed, (0, 1))(s.p, s.x), GRAD),
    "grad, closed over, in one": (lambda s: grad(s.C(s.closed), (0, 1))(s.p, s.x), GRAD),
    "grad, nested": (lambda s: grad(s.nested, (0, 1))(s.p, s.x), GRAD),
    "grad, twice": (lambda s: grad(s.C(s.C(f, WHERE)), (0, 1))(s.p, s.x), GRAD),
    "grad, twice the same": (lambda s: grad(s.C(s.C(f)), (0, 1))(s.p, s.x), GRAD),
    "checkpointed step": (lambda s: s.C(step(f), WHERE)(s.p, s.x), STEP),
    "step with it inside": (lambda s: eager(step(s.C(f, WHERE)))(s.p, s.x), STEP),
    "checkpointed step of pieces": (lambda s: s.C(step(s.by_block))(s.p, s.x), STEP),
    "jit∘C": (lambda s: grad(eager(s.C(f, WHERE)), (0, 1))(s.p, s.x), GRAD),
    "C∘jit": (lambda s: grad(s.C(eager(f), WHERE), (0, 1))(s.p, s.x), GRAD),
    "make_fx∘grad": (
        lambda s: make_fx(lambda x: grad(s.C(f, WHERE), (0, 1))(s.p, x))(s.x)(s.x),
        GRAD,
    ),
    "vmap∘grad": (
        lambda s: per_example(grad(s.C(f, WHERE)))(s.p, s.xs),
        lambda s: per_example(grad(f))(s.p, s.xs),
    ),
    "grad∘vmap": (
        lambda s: grad(lambda p: per_example(s.C(f, WHERE))(p, s.xs).sum())(s.p),
        lambda s: grad(lambda p: per_example(f)(p, s.xs).sum())(s.p),
    ),
    "grad∘C∘vmap": (
        lambda s: grad(s.C(lambda p: per_example(f)(p, s.xs).sum(), WHERE))(s.p),
        lambda s: grad(lambda p: per_example(f)(p, s.xs).sum())(s.p),
    ),
    "vmap∘C∘grad": (
        lambda s: per_example(s.C(grad(f), WHERE))(s.p, s.xs),
        lambda s: per_example(grad(f))(s.p, s.xs),
    ),
    "jvp": (lambda s: pushed(s.C(f, WHERE), s), lambda s: pushed(f, s)),
    "jacrev": (lambda s: jacrev(s.C(f, WHERE), 1)(s.p, s.x), of_plain(lambda f: jacrev(f, 1))),
    "jacfwd": (lambda s: jacfwd(s.C(f, WHERE), 1)(s.p, s.x), of_plain(lambda f: jacfwd(f, 1))),
}
SHARDED: dict[str, Case] = {
    "S∘C": (lambda s: grad(s.S(s.C(f, WHERE)), (0, 1))(s.q, s.y), GRAD),
    "C∘S": (lambda s: grad(s.C(s.S(f), WHERE), (0, 1))(s.q, s.y), GRAD),
    "jit∘S∘C": (lambda s: grad(eager(s.S(s.C(f, WHERE))), (0, 1))(s.q, s.y), GRAD),
    "jit∘C∘S": (lambda s: grad(eager(s.C(s.S(f))), (0, 1))(s.q, s.y), GRAD),
    "S∘(step of pieces)": (lambda s: eager(s.S(step(s.by_block)))(s.q, s.y), STEP),
    "S∘(step of closures)": (lambda s: eager(s.S(step(s.closed)))(s.q, s.y), STEP),
    "S∘C∘step": (lambda s: s.S(s.C(step(f), WHERE))(s.q, s.y), STEP),
    "C∘S∘step": (lambda s: s.C(s.S(step(f)), WHERE)(s.q, s.y), STEP),
    "S∘(step of nested)": (lambda s: s.S(step(s.nested))(s.q, s.y), STEP),
}


def second(outer: Callable[[Any, Setting], Any]) -> Case:
    """Something of the gradient."""
    return lambda s: outer(s.C(f, WHERE), s), lambda s: outer(f, s)


SECOND: dict[str, Case] = {
    "grad∘grad": second(lambda f, s: grad(lambda p, x: (grad(f, 1)(p, x) * s.v).sum())(s.p, s.x)),
    "hessian": second(lambda f, s: hessian(f, 1)(s.p, s.x)),
    "jvp∘grad": second(lambda f, s: pushed(grad(f), s)),
    "grad∘jvp": second(lambda f, s: grad(lambda p: pushed_at(f, p, s))(s.p)),
    "vmap∘grad∘grad": second(
        lambda f, s: per_example(grad(lambda p, x: (grad(f, 1)(p, x) * s.v).sum()))(s.p, s.xs)
    ),
    "grad∘C∘grad": (
        lambda s: grad(s.C(lambda p, x: (grad(f, 1)(p, x) * s.v).sum(), WHERE))(s.p, s.x),
        lambda s: grad(lambda p, x: (grad(f, 1)(p, x) * s.v).sum())(s.p, s.x),
    ),
    "grad∘grad∘nested": (
        lambda s: grad(lambda p, x: (grad(s.nested, 1)(p, x) * s.v).sum())(s.p, s.x),
        lambda s: grad(lambda p, x: (grad(f, 1)(p, x) * s.v).sum())(s.p, s.x),
    ),
}


def pushed_at(fn: Any, p: Params, s: Setting) -> torch.Tensor:
    tangent: torch.Tensor = jvp(lambda x: fn(p, x), (s.x,), (s.v,))[1]
    return tangent


@functools.cache
def wanted(want: Callable[[Setting], Any], blocks: int) -> Any:
    return want(Setting(None, blocks))


def check(
    cases: dict[str, Case], policy: str, limit: float, blocks: int = 2, each: int = 1
) -> None:
    """So many policies for each case, and as many cases for each policy; while exploring, all."""
    setting, mine = Setting(POLICIES[policy], blocks), [*POLICIES].index(policy)
    exploring = settings.get_current_profile_name() == "explore"
    for i, (case, (have, want)) in enumerate(cases.items()):
        if (i - mine) % len(POLICIES) not in (0, 4, 7)[:each] and not exploring:
            continue
        try:
            compare(have(setting), wanted(want, blocks), limit)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_first_derivatives(policy: str) -> None:
    check(FIRST, policy, 1e-12, each=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_over_a_mesh(policy: str) -> None:
    check(SHARDED, policy, 1e-12, each=2)


@pytest.mark.parametrize("policy", POLICIES)
def test_second_derivatives(policy: str) -> None:
    check(SECOND, policy, 1e-10, blocks=1)


def test_dropout_is_drawn_again_from_its_key() -> None:
    """To the bit: in each block, the outer and the inner one, and under vmap over keys."""
    s = Setting(None)

    def dropped(params: Params, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        for i, p in enumerate(params):
            with scope(f"block/{i}"):
                x = block(p, nn.dropout(random.fold_in(key, i), x, 0.4))
                x = name(nn.dropout(random.fold_in(key, 9 + i), x, 0.3), "dropped")
        return (x**2).mean()

    key, keys = random.key(11), random.split(random.key(12), 3)
    plain, each = grad(dropped, (0, 1))(s.p, s.x, key), (None, None, 0)
    assert not torch.equal(plain[1], grad(dropped, 1)(s.p, s.x, keys[0]))
    for policy, where in (
        (policies.save_nothing, WHERE),
        (policies.save_nothing, None),
        (policies.offload_names("dropped"), None),
        (mixed, WHERE),
    ):
        have = grad(checkpoint(dropped, policy=policy, where=where), (0, 1))(s.p, s.x, key)
        assert all(map(torch.equal, tree_leaves(have), tree_leaves(plain)))
    kept = vmap(grad(checkpoint(checkpoint(dropped, where=WHERE)), 1), each)(s.p, s.x, keys)
    assert torch.equal(kept, vmap(grad(dropped, 1), each)(s.p, s.x, keys))


@pytest.mark.parametrize(
    ("backend", "tried"),
    [("eager", ["nothing", "dots", "offload", "either"]), ("aot_eager", ["a function"])],
)
def test_attention_and_norms_of_torch(backend: str, tried: list[str]) -> None:
    """Operations of several results, which are kept or made again one by one."""
    s = Setting(None)
    w = {k: s.x.new_ones(*shape) * 0.1 for k, shape in (("qkv", (12, 4)), ("n", (4,)))}
    x = random.normal(random.key(2), (2, 6, 4), dtype=torch.float64)

    def attend(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for i in range(2):
            with scope(f"block/{i}"):
                up = name(F.linear(F.layer_norm(x, (4,), w["n"]), w["qkv"]), "up")
                q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in up.chunk(3, -1))
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = name(x + mixed.transpose(1, 2).flatten(2), "stream")
        return (x**2).mean()

    want = grad(attend, (0, 1))(w, x)
    for policy in tried:
        made = jit(checkpoint(attend, policy=POLICIES[policy], where=WHERE), backend=backend)
        compare(grad(made, (0, 1))(w, x), want, 1e-12)
