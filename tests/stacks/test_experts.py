"""Mixture of experts: experts and tokens split over one axis cross the network twice per pass.

The layer is GShard's (Lepikhin et al., arXiv:2006.16668), top-1 being Switch's (Fedus et al.,
arXiv:2101.03961): tokens come in groups, each expert takes so many tokens of each group, and what is too
much is left out. Every choice is made within a group, so groups are what the axis splits.

What is sent is pinned twice: where it is made, and where it goes. A pin alone is carried back to the
product that makes the value, which would then be made by expert, from tokens and masks that are gathered.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from seeds import whole

from torchard import Mesh, P, constrain, nn, place, random, shard

Params = dict[str, torch.Tensor]
Keep = Callable[[torch.Tensor, P], torch.Tensor]
GROUPS, TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 4, 6, 5, 7, 4, 2
# Of [experts, groups, capacity, width]. What splits experts is taken from the groups meanwhile.
BY_EXPERT, BY_GROUP = P("expert", "group"), P(None, "group")
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep=2": ({"ep": 2}, {"expert": "ep", "group": "ep"}),
    "ep=3": ({"ep": 3}, {"expert": "ep", "group": "ep"}),
    "ep=4": ({"ep": 4}, {"expert": "ep", "group": "ep"}),
    "dp=2 ep=2": ({"dp": 2, "ep": 2}, {"expert": "ep", "group": ("dp", "ep")}),
}


def one_hot(index: torch.Tensor, size: int) -> torch.Tensor:
    """index [...] -> booleans [..., size]; what is out of range is all False."""
    return index[..., None] == torch.arange(size)


def route(gates: torch.Tensor, k: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's k best experts, as masks over places in the experts' queues.

    Args:
        gates: [groups, tokens, experts].

    Returns:
        dispatch and combine, [groups, tokens, experts, capacity]: zeros and ones, and gates.
    """
    experts = gates.shape[-1]
    queued = torch.zeros_like(gates[:, :1])  # of each expert, by choices made before
    left, dispatch = gates, gates.new_zeros(*gates.shape, capacity)
    for _ in range(k):
        chosen = one_hot(left.argmax(-1), experts).to(gates.dtype)
        place = (chosen.cumsum(1) - 1 + queued) * chosen
        mine = one_hot(place.sum(-1).to(torch.int64), capacity).to(gates.dtype)
        dispatch = dispatch + chosen[..., None] * mine[:, :, None]
        queued, left = queued + chosen.sum(1, keepdim=True), left - 2 * chosen
    return dispatch, dispatch * gates[..., None]


def experts(p: Params, x: torch.Tensor, k: int, keep: Keep) -> torch.Tensor:
    """x [groups, tokens, width], replaced by what the tokens' experts make of them."""
    dispatch, combine = route(torch.softmax(x @ p["router"], -1), k, CAPACITY)
    sent = keep(keep(torch.einsum("gsec,gsd->egcd", dispatch, x), BY_GROUP), BY_EXPERT)
    hidden = nn.gelu(torch.einsum("egcd,edh->egch", sent, p["up"]) + p["bias"][:, None, None])
    made = keep(keep(torch.einsum("egch,ehd->egcd", hidden, p["down"]), BY_EXPERT), BY_GROUP)
    return torch.einsum("gsec,egcd->gsd", combine, made)


def loss(k: int, keep: Keep, p: Params, x: torch.Tensor) -> torch.Tensor:
    return (x + experts(p, x, k, keep)).square().mean()


def parameters() -> Params:
    shapes = {
        "router": (WIDTH, EXPERTS),
        **{"up": (EXPERTS, WIDTH, HIDDEN), "bias": (EXPERTS, HIDDEN)},
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    keys = random.split(random.key(5), len(shapes))
    return {
        name: random.normal(key, shape, dtype=torch.float64)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


SPECS = {"router": P(), **dict.fromkeys(["up", "bias", "down"], P("expert"))}
X = random.normal(random.key(6), (GROUPS, TOKENS, WIDTH), dtype=torch.float64)


def alone(x: torch.Tensor, spec: P) -> torch.Tensor:
    return x


def step(k: int, keep: Keep = constrain) -> Callable[..., Any]:
    """Gradients of the parameters and the tokens, and the loss."""
    return torch.func.grad_and_value(functools.partial(loss, k, keep), argnums=(0, 1))


def sharded(k: int, on: str, keep: Keep = constrain) -> tuple[Any, Any]:
    axes, rules = MESHES[on]
    mesh, groups = Mesh(axes, virtual=True), P("group")
    run = shard(step(k, keep), mesh, out_specs=((SPECS, groups), P()), rules=rules)
    params = place(parameters(), mesh, SPECS, rules=rules)
    return run, (params, place(X, mesh, groups, rules=rules))


def one_by_one(p: Params, x: torch.Tensor, k: int) -> torch.Tensor:
    """The layer as a loop over tokens: what the masks stand for."""
    out = torch.zeros_like(x)
    for g in range(GROUPS):
        queued = [0] * EXPERTS
        gates = torch.softmax(x[g] @ p["router"], -1)
        order = gates.argsort(-1, descending=True)
        for choice in range(k):
            for s in range(TOKENS):
                e = int(order[s, choice])
                if queued[e] < CAPACITY:
                    hidden = nn.gelu(x[g, s] @ p["up"][e] + p["bias"][e])
                    out[g, s] += gates[s, e] * (hidden @ p["down"][e])
                queued[e] += 1
    return out


@pytest.mark.parametrize("k", [1, 2])
def test_the_layer_is_what_its_loop_says(k: int) -> None:
    """Some tokens are left out, or the capacity would not be tested."""
    p = parameters()
    torch.testing.assert_close(experts(p, X, k, alone), one_by_one(p, X, k))
    dispatch, _ = route(torch.softmax(X @ p["router"], -1), k, CAPACITY)
    assert dispatch.sum(-1).max() == 1
    assert GROUPS * TOKENS * k / 2 < dispatch.sum() < GROUPS * TOKENS * k


@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("k", [1, 2])
def test_equals_one_device(k: int, on: str) -> None:
    run, args = sharded(k, on)
    ((have, slope), value), ((want, dx), one) = run(*args), step(k, alone)(parameters(), X)
    torch.testing.assert_close(whole(value), one)
    torch.testing.assert_close(whole(slope), dx)
    for name in SPECS:
        torch.testing.assert_close(whole(have[name]), want[name])


def crossed(program: Any) -> Counter[Any]:
    return Counter(
        (c.phase, c.kind, torch.Size(c.shape).numel(), "·".join(c.axes))
        for c in program.collectives
    )


def there_and_back(elements: int) -> dict[Any, int]:
    return {(phase, "all_to_all", elements, "ep"): 2 for phase in ("forward", "backward")}


SENT = EXPERTS * GROUPS * CAPACITY * WIDTH
ROUTER, EACH = WIDTH * EXPERTS, 2 * WIDTH * HIDDEN + HIDDEN


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_cross_twice_in_each_pass(k: int) -> None:
    """There and back; besides, the gradient of the router and the loss: sums over tokens, in one call."""
    run, args = sharded(k, "ep=2")
    sums = {("backward", "all_reduce", ROUTER + 1, "ep"): 1}
    assert crossed(run.lower(*args)) == Counter({**there_and_back(SENT // 2), **sums})


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_stay_in_their_replica(k: int) -> None:
    """Over two axes they cross one; the experts' gradients are summed over the other, in one call."""
    run, args = sharded(k, "dp=2 ep=2")
    sums = {
        ("backward", "all_reduce", ROUTER + 1, "dp·ep"): 1,
        ("backward", "all_reduce", EXPERTS // 2 * EACH, "dp"): 1,
    }
    assert crossed(run.lower(*args)) == Counter({**there_and_back(SENT // 4), **sums})
