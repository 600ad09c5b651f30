"""shard_map with some axes manual and the others automatic: values, derivatives, and what is sent.

Along automatic axes values are whole inside, so the reference knows nothing of them: plain torch on the
ranks of the manual axes alone (``ranks.py``), or on one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import COLLECTIVES, run
from torch.func import grad, vjp
from torch.nn import functional as F

import torchard
from torchard import (
    Link,
    Machine,
    Mesh,
    MeshTensor,
    P,
    constrain,
    machines,
    place,
    pmax,
    psum,
    shard,
    shard_map,
    tree,
)

GRID = Mesh({"dp": 2, "tp": 2}, virtual=True)
WIDE = Mesh({"tp": 2, "dp": 3}, virtual=True)
ENDLESS = float("inf")
COMPUTES_AT_ONCE = Machine("computes at once", {"float32": ENDLESS}, ENDLESS, link=Link(1e9))
SENDS_AT_ONCE = Machine("sends at once", {"float32": 1e12}, ENDLESS, link=Link(ENDLESS))


def full(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


def close(have: torch.Tensor, want: torch.Tensor) -> None:
    assert have.shape == want.shape
    assert have.dtype == want.dtype
    assert (have - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1.0)


def sent(program: Any, phase: str | None = None) -> list[str]:
    return [str(c) for c in program.collectives if phase in (None, c.phase)]


# -- tensor parallelism by hand, data parallelism by itself ---------------------------------------


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return psum(torch.tanh(x @ p["up"]) @ p["down"], "tp")


def dense(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["up"]) @ p["down"]


SPECS = {"up": P(None, "tp"), "down": P("tp")}


def weights() -> dict[str, torch.Tensor]:
    return {
        "up": torch.randn(4, 12, dtype=torch.float64),
        "down": torch.randn(12, 4, dtype=torch.float64),
    }


@pytest.mark.parametrize("dp, tp", [(2, 2), (2, 3), (3, 2)])
def test_megatron_by_hand_in_a_batch_that_is_split_by_itself(dp: int, tp: int) -> None:
    """Its two sums, each of this rank's rows, and one of the gradients over dp; rows are not gathered."""
    mesh = Mesh({"dp": dp, "tp": tp}, virtual=True)
    mapped = shard_map(mlp, mesh, (SPECS, P()), P(), axis_names={"tp"})
    params, x = weights(), torch.randn(7, 4, dtype=torch.float64)
    placed = place(params, mesh, SPECS), place(x, mesh, P("dp"))
    out = mapped(*placed)
    assert out.spec == P("dp", None)
    close(out.full(), dense(params, x))
    have = grad(lambda p, x: mapped(p, x).full().sin().sum(), (0, 1))(*placed)
    want = grad(lambda p, x: dense(p, x).sin().sum(), (0, 1))(params, x)
    assert have[0]["up"].spec == SPECS["up"] and have[1].spec == P("dp", None)
    for a, b in ((have[0]["up"], want[0]["up"]), (have[0]["down"], want[0]["down"]), (have[1], want[1])):
        close(a.full(), b)
    rows, hidden = -(-7 // dp), 12 // tp
    assert sent(mapped.lower(*placed)) == [f"all_reduce(tp) [{rows}, 4] float64"]
    joint = mapped.lower_joint(*placed)
    assert sent(joint, "forward") == [f"all_reduce(tp) [{rows}, 4] float64"]
    assert sorted(sent(joint, "backward")) == [
        f"all_reduce(dp) [{2 * 4 * hidden}] float64",  # both gradients, in one call
        f"all_reduce(tp) [{rows}, 4] float64",
    ]


@pytest.mark.parametrize("machine", [None, COMPUTES_AT_ONCE, SENDS_AT_ONCE, machines.cpu()])
@pytest.mark.parametrize("dp, tp", [(2, 2), (2, 3), (3, 2)])
def test_a_machine_plans_what_is_around_and_along_other_axes(
    dp: int, tp: int, machine: Machine | None
) -> None:
    mesh = Mesh({"dp": dp, "tp": tp}, virtual=True)
    mapped = shard_map(mlp, mesh, (SPECS, P()), P(), axis_names={"tp"})

    def slopes(p: dict[str, torch.Tensor], x: torch.Tensor, apply: Any = mapped) -> Any:
        return grad(lambda p, x: apply(p, x).sin().sum(), (0, 1))(p, x)

    params, x = weights(), torch.randn(7, 4, dtype=torch.float64)
    run = shard(slopes, mesh, (SPECS, P("dp")), machine=machine)
    for a, b in zip(tree.leaves(run(params, x)), tree.leaves(slopes(params, x, dense)), strict=True):
        close(a.full(), b)
    if machine is COMPUTES_AT_ONCE:  # seven rows are fewer than the gradients, which dp would sum
        known = shard(slopes, mesh, (SPECS, P("dp"))).lower(params, x).collectives
        found = run.lower(params, x).collectives
        assert bytes_of(found) <= bytes_of(known)
        assert not any(each.kind == "all_reduce" and each.axes == ("dp",) for each in found)


def bytes_of(collectives: Any) -> int:
    return sum(c.bytes * c.times for c in collectives)


def step(p: dict[str, torch.Tensor], x: torch.Tensor, apply: Any = mlp) -> dict[str, torch.Tensor]:
    slopes = grad(lambda p: apply(p, x).square().mean())(p)
    return {k: p[k] - 0.1 * slopes[k] for k in p}


def test_parameters_split_by_hand_and_by_themselves() -> None:
    """Fully sharded over dp inside what tp has: each rank gathers and scatters its own part alone."""
    specs = {"up": P("dp", "tp"), "down": P(("tp", "dp"))}
    params, x = weights(), torch.randn(64, 4, dtype=torch.float64)
    placed = place(params, GRID, specs), place(x, GRID, P("dp"))
    train = shard_map(step, GRID, (SPECS, P()), SPECS, axis_names={"tp"})
    out = train(*placed)
    want = step(params, x, dense)
    for k in want:
        close(out[k].full(), want[k])
        assert out[k].layout == placed[0][k].layout
    assert sent(train.lower(*placed)) == [
        "all_gather(dp) [2, 6] float64",
        "all_gather(dp) [3, 4] float64",
        "all_reduce(tp) [32, 4] float64",
        "psum_scatter(dp) [6, 4] float64",
        "all_gather(dp) [3, 4] float64",  # for the gradient of what came before, rather than kept
        "psum_scatter(dp) [4, 6] float64",
    ]


def test_specs_settle_the_manual_part_of_a_result() -> None:
    """Even of what is an argument that is split otherwise, or its update."""
    w = torch.randn(4, 4, dtype=torch.float64)
    same = shard_map(lambda w: w, GRID, P(), P(), axis_names={"tp"})
    assert same(place(w, GRID, P("tp"))).spec == P(None, None)
    assert same(place(w, GRID, P("tp", "dp"))).spec == P(None, "dp")
    update = shard_map(lambda w: w - 0.1, GRID, P(None, "tp"), P(None, "tp"), axis_names={"tp"})
    assert update(place(w, GRID, P("tp"))).spec == P(None, "tp")
    assert update(place(w, GRID, P("dp", "tp"))).spec == P("dp", "tp")
    close(update(place(w, GRID, P("tp"))).full(), w - 0.1)


def test_along_a_manual_axis_nothing_is_split_that_does_not_vary() -> None:
    """As one reads it off the specs: y's ranks do the same, though the weight was split over it."""
    mesh = Mesh({"x": 2, "y": 2, "dp": 2}, virtual=True)
    mapped = shard_map(
        lambda x, w: torch.tanh(x @ w), mesh, (P("x"), P()), P("x"), axis_names={"x", "y"}
    )
    x, w = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    placed = place(x, mesh, P(("x", "dp"))), place(w, mesh, P(None, "y"))
    assert sent(mapped.lower(*placed)) == ["all_gather(y) [4, 3] float64"]
    assert mapped(*placed).spec == P(("x", "dp"), None)
    close(mapped(*placed).full(), torch.tanh(x @ w))


# -- what moves send of a value that is split otherwise, too --------------------------------------

ROWS, COLUMNS = P(("tp", "dp")), P("tp", "dp")
SENT = {  # of a local [8, 16] with rows or columns split over dp
    ("psum", ROWS): ["all_reduce(tp) [4, 16]"],
    ("psum", COLUMNS): ["all_reduce(tp) [8, 8]"],
    ("pvary", ROWS): [],
    ("all_gather tiled", ROWS): ["all_gather(tp) [4, 16]"],
    ("all_gather tiled", COLUMNS): ["all_gather(tp) [8, 8]"],
    ("all_gather invariant", COLUMNS): ["all_gather(tp) [8, 8]"],
    ("psum_scatter tiled", ROWS): ["psum_scatter(tp) [4, 16]"],
    ("psum_scatter tiled", COLUMNS): ["all_to_all(dp) [8, 8]", "psum_scatter(tp) [8, 8]"],
    ("all_to_all tiled", ROWS): ["all_to_all(tp) [4, 16]"],
    ("all_to_all tiled", COLUMNS): ["all_to_all(dp) [8, 8]", "all_to_all(tp) [8, 8]"],
    ("ppermute", COLUMNS): ["ppermute(tp) [8, 8]"],
    ("axis_index", ROWS): [],
}


@pytest.mark.parametrize("key", SENT, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_move_keeps_what_the_other_axes_split(key: tuple[str, P]) -> None:
    fn, varies = COLLECTIVES[key[0]]
    mapped = shard_map(
        lambda x, w: fn(torchard, "tp", x, w), GRID, (P("tp"), P()), P("tp") if varies else P(),
        axis_names={"tp"},
    )  # fmt: skip
    x = place(torch.randn(16, 16, dtype=torch.float64), GRID, key[1])
    program = mapped.lower(x, torch.rand(1, 1, dtype=torch.float64))
    assert sent(program) == [f"{c} float64" for c in SENT[key]]


def test_a_sum_over_the_batch_is_made_before_a_maximum_and_passes_a_sum() -> None:
    x = torch.randn(8, 6, dtype=torch.float64)
    placed = place(x, GRID, P("dp", "tp"))
    left, right = x.sum(0).chunk(2)
    for over, want, order in (
        (pmax, torch.maximum(left, right), ["dp", "tp"]),
        (psum, left + right, ["tp", "dp"]),
    ):
        mapped = shard_map(
            lambda x, over=over: over(x.sum(0), "tp"), GRID, P(None, "tp"), P(), axis_names={"tp"}
        )
        close(full(mapped(placed)), want)
        assert [axis for c in mapped.lower(placed).collectives for axis in c.axes] == order


ENTERED = [
    (P(("tp", "dp")), []),
    (P("tp", "dp"), []),
    (P("dp"), ["all_gather(dp) [4, 3] float64"]),
    (P(("dp", "tp")), ["all_gather(tp) [2, 3] float64", "all_gather(dp) [4, 3] float64"]),
]


@pytest.mark.parametrize(("spec", "want"), ENTERED, ids=str)
def test_a_dim_is_split_by_hand_first(spec: P, want: list[str]) -> None:
    """What is placed so enters as it is; what is split otherwise comes together, and is split so."""
    mapped = shard_map(torch.sin, GRID, P("tp"), P("tp"), axis_names={"tp"})
    x = torch.randn(8, 3, dtype=torch.float64)
    out = mapped(place(x, GRID, spec))
    close(out.full(), x.sin())
    assert out.spec == (P("tp", "dp") if spec == P("tp", "dp") else P(("tp", "dp"), None))
    assert sent(mapped.lower(place(x, GRID, spec))) == want


# -- every collective, and every kind of operation between them -----------------------------------

LAID = {  # a mesh, what is manual on it, and how the argument is placed and enters
    "inside": (GRID, P("tp"), P(("tp", "dp"))),
    "another dim": (GRID, P(None, "tp"), P("dp", "tp")),
    "outside, uneven": (WIDE, P("tp"), P(("dp", "tp"))),
}
SPLIT_LATER = {"psum", "all_gather tiled", "psum_scatter", "all_to_all one dim", "ppermute"}
CASES = [(collective, laid) for collective in COLLECTIVES for laid in LAID]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("collective", "laid"), CASES, ids=str)
def test_collective(collective: str, laid: str) -> None:
    fn, varies = COLLECTIVES[collective]
    mesh, spec, placed = LAID[laid]
    out_spec = P("tp") if varies else P()

    def body(c: Any, x: Any, w: Any) -> Any:
        y = torch.tanh(x * w) * x.sum()  # a sum over dp, still to be made
        if c is torchard and collective in SPLIT_LATER:
            y = constrain(y, P(None, "dp"))
        return fn(c, "tp", y, w).sin()

    mapped = shard_map(
        lambda x, w: body(torchard, x, w), mesh, (spec, P()), out_spec, axis_names={"tp"}
    )
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    w = torch.rand(1, 1, dtype=torch.float64, requires_grad=True)
    out, pull = vjp(lambda x, w: full(mapped(place(x, mesh, placed), w)), x.detach(), w.detach())
    want = run(body, {"tp": 2}, (spec, P()), out_spec, x, w)
    close(out, want)
    ct = torch.randn_like(want)
    for a, b in zip(pull(ct), torch.autograd.grad(want, (x, w), ct), strict=True):
        close(a, b)


def attend(c: Any, x: Any, w: Any) -> Any:
    """Softmax over columns that the ranks share, of rows that are whole."""
    top = c.pmax(x.amax(1, keepdim=True).detach(), MANUAL)
    mass = torch.exp(x - top)
    return mass / c.psum(mass.sum(1, keepdim=True), MANUAL)


def position(c: Any, x: Any, w: Any) -> Any:
    """Each rank its own row of those all have, by place."""
    table = (w * torch.arange(24.0, dtype=x.dtype)).reshape(-1, 3)
    own = table.index_select(0, c.axis_index(MANUAL).reshape(1))
    return c.psum(x * own.sum(), MANUAL).mean(0, keepdim=True) + x


FUNCTIONS: dict[str, Any] = {
    "contraction": lambda c, x, w: torch.tanh(c.psum(x.T @ x, MANUAL)) @ x.T,
    "norm": lambda c, x, w: F.layer_norm(x, x.shape[1:]) + c.psum(x.var(0), MANUAL),
    "softmax of rows": lambda c, x, w: torch.softmax(x, 0) * c.psum(x.sum(), MANUAL),
    "attend": attend,
    "neighbours": lambda c, x, w: c.psum(x.cumsum(0), MANUAL) + x.roll(1, 0) * x[:1],
    "position": position,
    "folded": lambda c, x, w: (x.reshape(2, -1, x.shape[1]) * c.psum(x, MANUAL).mean()).flatten(0, 1),
    "sorted": lambda c, x, w: x.sort(0).values * x.argmax(0),
}
MANUAL = ("x", "y")


@given(st.randoms(use_true_random=False), st.sampled_from(sorted(FUNCTIONS)))
@settings(max_examples=12, database=None)
def test_function(rng: Any, which: str) -> None:
    """Any of them, two axes manual among one or two that are not, and a value placed in any way."""
    automatic = {a: rng.choice([2, 3]) for a in ("a", "b")[: rng.choice([1, 1, 2])]}
    axes = [*automatic.items(), ("x", 2), ("y", 1 if automatic.get("b") else 2)]
    rng.shuffle(axes)
    mesh = Mesh(dict(axes), virtual=True)
    manual = {a: mesh.shape[a] for a in MANUAL}
    entries: list[list[str]] = [[], []]
    for a in MANUAL:
        rng.choice(entries).append(a)
    spec = P(*map(tuple, entries))
    for a in automatic:
        entry = rng.choice(entries)
        entry.insert(rng.randint(0, len(entry)), a)
    x = torch.randn(16, 16, dtype=torch.float64, requires_grad=True)
    w = torch.rand((), dtype=torch.float64, requires_grad=True)

    def body(c: Any, x: Any, w: Any) -> Any:
        return FUNCTIONS[which](c, (x * w).sin(), w).sum(0)

    mapped = shard_map(
        lambda x, w: body(torchard, x, w), mesh, (spec, P()), P(MANUAL), axis_names=MANUAL
    )
    placed = place(x.detach(), mesh, P(*map(tuple, entries)))
    have, pull = vjp(lambda w: full(mapped(placed, w)), w.detach())
    want = run(body, manual, (spec, P()), P(MANUAL), x, w)
    close(have, want)
    ct = torch.randn_like(want)
    close(pull(ct)[0], torch.autograd.grad(want, w, ct)[0])
