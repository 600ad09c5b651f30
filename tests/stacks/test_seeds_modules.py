"""S1, S2 and S3: a norm between split linears, bf16, and modules by name, as one device has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeds import whole
from torch import Tensor

from torchard import (
    Colwise,
    Mesh,
    P,
    Pairwise,
    Rowwise,
    functionalize,
    nn,
    optim,
    parallelize,
    place,
    random,
    shard,
)

Params = dict[str, Tensor]


def virtual(**axes: int) -> Mesh:
    return Mesh(axes, virtual=True)


# -- S1(4): a LayerNorm over a split dim, between the linears that split it ---------------------------

N = 24
NORMED = {
    **{"w1": P("tp", None), "b1": P("tp")},
    **{"norm": P(None, "tp"), "norm_bias": P(None, "tp")},
    **{"w2": P(None, "tp"), "b2": P()},
}


def normed_mlp(p: Params, x: Tensor) -> Tensor:
    """Linear(N → 2N) – LayerNorm([N, 2N]) – ReLU – Linear(2N → N) of x [N, N]."""
    hidden = F.linear(x, p["w1"], p["b1"])
    hidden = F.relu(F.layer_norm(hidden, (N, 2 * N), p["norm"], p["norm_bias"]))
    return F.linear(hidden, p["w2"], p["b2"])


def normed_arguments() -> tuple[Params, Tensor, Tensor]:
    keys = iter(random.split(random.key(3), 8))

    def draw(*shape: int) -> Tensor:
        return random.normal(next(keys), shape, torch.float64) / shape[-1] ** 0.5

    params = {
        **{"w1": draw(2 * N, N), "b1": draw(2 * N)},
        **{"norm": 1 + draw(N, 2 * N), "norm_bias": draw(N, 2 * N)},
        **{"w2": draw(N, 2 * N), "b2": draw(N)},
    }
    return params, draw(N, N), draw(N, N)


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_only_the_statistics_of_a_split_norm_cross_the_network(ranks: int) -> None:
    """Beside the pair's own all_reduces: mean and variance forward, two sums backward."""
    mesh = virtual(tp=ranks)
    params, x, _ = normed_arguments()
    run = shard(normed_mlp, mesh, out_specs=P())
    found = run.lower_joint(place(params, mesh, NORMED), x).collectives
    assert {c.kind for c in found} == {"all_reduce"}
    for phase in ("forward", "backward"):
        sizes = sorted(torch.Size(c.shape).numel() for c in found if c.phase == phase)
        assert sizes[-1] == N * N  # after the second linear, and for the gradient of x
        assert sizes[:-1] == [1, 1], str(found)


@pytest.mark.parametrize("ranks", [2, 5])
def test_five_steps_of_sgd_through_a_split_norm_track_one_device(ranks: int) -> None:
    mesh = virtual(tp=ranks)
    params, x, target = normed_arguments()
    optimizer = optim.sgd(0.05, momentum=0.9)

    def step(p: Params, state: Any) -> tuple[Params, Any, Tensor]:
        def loss(p: Params) -> Tensor:
            return (normed_mlp(p, x) - target).square().mean()

        gradients, value = torch.func.grad_and_value(loss)(p)
        return *optimizer.update(gradients, state, p), value

    def train(fn: Any, p: Any) -> tuple[list[float], Params]:
        state, losses = optimizer.init(p), []
        for _ in range(5):
            p, state, value = fn(p, state)
            losses.append(float(value))
        return losses, {k: whole(v) for k, v in p.items()}

    want, ends = train(step, params)
    have, got = train(shard(step, mesh), place(params, mesh, NORMED))
    assert want[-1] < 0.9 * want[0]
    assert have == pytest.approx(want, rel=1e-12)
    for name, value in ends.items():
        assert not torch.allclose(value, params[name])
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-12)


# -- S2: nvFuser's tensor-parallel MLP in bf16 --------------------------------------------------------

SPLIT = {"w0": P("tp", None), "b0": P("tp"), "w1": P(None, "tp"), "b1": P()}
SHAPES = {"w0": (512, 128), "b0": (512,), "w1": (128, 512), "b1": (128,)}
KEY = random.key(5)


def tanh_gelu(x: Tensor) -> Tensor:
    """In float32 or wider inside."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.gelu(x.to(wide), approximate="tanh").to(x.dtype)


def dropped_mlp(act: Callable[[Tensor], Tensor], p: Params, x: Tensor) -> tuple[Tensor, ...]:
    y1 = F.linear(x, p["w0"], p["b0"])
    hidden = act(y1)
    y2 = F.linear(hidden, p["w1"], p["b1"])
    return y1, hidden, y2, nn.dropout(KEY, y2, 0.1)


def on_mesh(
    act: Callable[[Tensor], Tensor],
    params: Params,
    x: Tensor,
    ranks: int,
    reduce_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """The four outputs; their specs and the one collective are found from the weights' specs."""
    mesh = virtual(tp=ranks)
    placed = place(params, mesh, SPLIT)
    run = shard(lambda p, x: dropped_mlp(act, p, x), mesh, reduce_dtype=reduce_dtype)
    (reduce,) = run.lower(placed, x).collectives
    assert (reduce.kind, reduce.shape) == ("all_reduce", (64, 128))
    assert reduce.dtype == (reduce_dtype or x.dtype)
    found = run(placed, x)
    assert [value.spec.axes for value in found] == [("tp",), ("tp",), (), ()]
    assert found[0].parts[0].shape == (64, -(-512 // ranks))
    return tuple(value.full() for value in found)


def drawn(draw: Callable[[Tensor, tuple[int, ...]], Tensor]) -> tuple[Params, Tensor]:
    keys = iter(random.split(random.key(2), 5))
    return {k: draw(next(keys), s) for k, s in SHAPES.items()}, draw(next(keys), (64, 128))


def wide(params: Params, x: Tensor) -> tuple[Params, Tensor]:
    return {k: v.double() for k, v in params.items()}, x.double()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bf16_with_relu_of_small_integers_is_exact(ranks: int) -> None:
    def integers(key: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Mostly zeros, so that no sum exceeds 256: exact in bf16 in any order."""
        sign, kept = random.split(key)
        kept_ones = random.uniform(kept, shape) < 0.1
        return (random.randint(sign, shape, -1, 2) * kept_ones).to(torch.bfloat16)

    params, x = drawn(integers)
    exact = dropped_mlp(F.relu, *wide(params, x))
    have = on_mesh(F.relu, params, x, ranks)
    sizes = {k: v.abs() for k, v in wide(params, x)[0].items()}
    most = dropped_mlp(F.relu, sizes, x.double().abs())[2].max()
    assert most <= 256, "partial sums may not be exact in bf16: the test is void"
    for mine, theirs in zip(have[:3], exact[:3], strict=True):
        assert theirs.abs().max() > 0
        assert torch.equal(mine.double(), theirs)
    zeros = [value == 0 for value in (have[3], have[2], exact[3], exact[2])]
    assert torch.equal(zeros[0] & ~zeros[1], zeros[2] & ~zeros[3]), "another dropout mask"


@pytest.mark.parametrize(("reduce_dtype", "times"), [(None, 2.0), (torch.float32, 1.05)])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_bf16_with_gelu_is_nearly_as_close_as_one_device(
    ranks: int, reduce_dtype: torch.dtype | None, times: float
) -> None:
    """Errors against float64, as root mean squares; with the sum over ranks in bf16, or wider."""
    params, x = drawn(lambda key, shape: nn.init_normal(key, shape, 0.02, torch.bfloat16))
    x = x * 50
    exact = dropped_mlp(tanh_gelu, *wide(params, x))
    eager = dropped_mlp(tanh_gelu, params, x)
    have = on_mesh(tanh_gelu, params, x, ranks, reduce_dtype)
    for mine, theirs, value in zip(have, eager, exact, strict=True):
        error, allowed = ((v.double() - value).norm() for v in (mine, theirs))
        assert 0 < error <= times * allowed
    for mine, theirs in zip(have[:2], eager[:2], strict=True):
        assert torch.equal(mine, theirs)  # nothing was reduced yet


# -- S3: modules by name, in pairs, on meshes of more dims --------------------------------------------


class Net(torch.nn.Module):
    """Five linears: two pairs and an odd one."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = torch.nn.Linear(10, 32), torch.nn.Linear(32, 10)
        self.l3, self.l4 = torch.nn.Linear(10, 32), torch.nn.Linear(32, 10)
        self.drop, self.l5 = torch.nn.Dropout(0.3), torch.nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.l2(F.relu(self.l1(x)))
        return self.l5(self.drop(x + self.l4(F.relu(self.l3(x)))))


PLANS = {
    "pairwise": {"": Pairwise()},
    "by name": {"l[13]": Colwise(), "l[24]": Rowwise()},
    "layouts": {
        "l[13]": Colwise(input_layouts=P(), output_layouts=2),
        "l[24]": Rowwise(output_layouts=P()),
    },
}


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"tp": 3, "dp": 2}])
@pytest.mark.parametrize("plan", PLANS)
def test_modules_by_plan_equal_one_device_on_two_axes(plan: str, axes: dict[str, int]) -> None:
    """Values, all gradients and dropout's mask; one all_reduce a pair and pass over tp."""
    mesh = virtual(**axes)
    fn, params = functionalize(Net().double())
    specs, pins = parallelize(fn, mesh, PLANS[plan], axis="tp", batch="dp")
    assert [k for k, spec in specs.items() if "tp" in spec.axes] == [
        f"l{i}.{part}" for i in range(1, 5) for part in ("weight", "bias")[: 1 + i % 2]
    ]
    x = torch.randn(4, 3, 10, dtype=torch.float64)
    ct = torch.randn(4, 3, 5, dtype=torch.float64)

    def objective(p: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        out = fn(p, x, key=KEY)
        return (out * ct).sum(), out

    gradients, want = torch.func.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
    placed, data = place(params, mesh, specs), place(x, mesh, P("dp"))
    run = shard(objective, mesh, constrain_at=pins)
    found, have = torch.func.grad(run, argnums=(0, 1), has_aux=True)(placed, data)
    torch.testing.assert_close(whole(have), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole(found[1]), gradients[1], rtol=1e-12, atol=1e-12)
    for name, value in gradients[0].items():
        torch.testing.assert_close(whole(found[0][name]), value, rtol=1e-12, atol=1e-12)

    crossed = [c for c in run.lower_joint(placed, data).collectives if "tp" in c.axes]
    activations = [(c.phase, c.kind) for c in crossed if c.axes == ("tp",)]
    assert sorted(activations) == [("backward", "all_reduce")] * 2 + [("forward", "all_reduce")] * 2
