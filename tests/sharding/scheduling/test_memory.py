"""What a rank holds: the bytes of live storages, against what ZeRO-3 promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from live_bytes import allowed
from torch.multiprocessing.reductions import StorageWeakRef

from torchard import Mesh, P, Schedule, jit, optim, place, shard


def of_one_rank(
    folder: Path, world: int, layers: int, width: int, *prefetch: int
) -> list[dict[str, int]]:
    """In a process of its own: its group would be every later test's."""
    numbers = (world, layers, width, *prefetch)
    found: list[dict[str, int]] = forked.told(
        "one_rank.py", *numbers, folder=folder, seconds=240
    )
    return found


def test_a_fully_sharded_step(tmp_path: Path) -> None:
    """Six layers over eight ranks: gathered weights, whole gradients and replaced values go."""
    (found,) = of_one_rank(tmp_path, 8, 6, 64, 1)
    assert found["peak"] <= allowed(found, 8), found
    assert found["parameters"] > 6 * found["layer"]
    two_layers_and_the_embeddings = 2 * 12 + 2
    assert found["waiting"] <= two_layers_and_the_embeddings


def test_prefetching_holds_a_layer_more_each(tmp_path: Path) -> None:
    """The activations of one row are small beside a layer's weights."""
    near, far = of_one_rank(tmp_path, 8, 6, 128, 1, 2)
    assert near["peak"] <= allowed(near, 8, slack=1.0)
    assert 0.7 * near["layer"] < far["peak"] - near["peak"] < 1.3 * near["layer"]


# -- donation ---------------------------------------------------------------------------------------


def test_donated_values_are_let_go_of() -> None:
    """Those in named tuples too: every old shard is freed before the last new one is made."""
    mesh, spec, adam = Mesh({"dp": 2}, virtual=True), P("dp"), optim.adamw(1e-3)

    def step(params: Any, state: Any, x: torch.Tensor) -> Any:
        slopes = torch.func.grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
        return adam.update(slopes, state, params)

    params = place({"w": torch.randn(8, 8)}, mesh, spec)
    state = adam.init(params)
    specs = (spec, optim.AdamState(P(), spec, spec))
    run = jit(shard(step, mesh, out_specs=specs), backend="eager", donate_argnums=(0, 1))
    values = (params["w"], state.mean["w"], state.square["w"])
    refs = [StorageWeakRef(part.untyped_storage()) for value in values for part in value.parts]
    run(params, state, torch.randn(4, 8))
    assert all(ref.expired() for ref in refs)


# -- how far ahead, how much at once ----------------------------------------------------------------


def two_layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = (x @ layer["w"]).tanh()
    return x.square().mean()


def order(how: Schedule | None) -> list[str]:
    """Forward: gathers of layers, and products."""
    mesh = Mesh({"dp": 2}, virtual=True)
    params = place({"layers": [{"w": torch.randn(8, 8)} for _ in range(4)]}, mesh, P("dp"))
    run = shard(two_layers, mesh, schedule=how)
    program = run.lower_joint(params, place(torch.randn(4, 8), mesh, P("dp")), argnums=0)
    named = {"all_gather": "gather", "mm": "product"}
    names = [getattr(n.target, "_opname", getattr(n.target, "__name__", "")) for n in program.calls]
    phases = [n.meta.get("phase") for n in program.calls]
    return [
        named[name] for name, p in zip(names, phases, strict=True) if p == "forward" and name in named
    ]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_gathers_are_so_many_layers_ahead(ahead: int) -> None:
    found = order(Schedule(prefetch=ahead))
    products = [i for i, name in enumerate(found) if name == "product"]
    before = [found[:at].count("gather") for at in products]
    assert before == [min(1 + ahead + k, 4) for k in range(4)], found


def test_one_layer_ahead_is_what_happens() -> None:
    assert order(None) == order(Schedule(prefetch=1)) != order(Schedule(prefetch=2))


def calls(bucket_bytes: int | None) -> list[int]:
    """Elements of each gradient all_reduce, data parallel."""
    mesh = Mesh({"dp": 2}, virtual=True)
    params = {"layers": [{"w": torch.randn(8, 8)} for _ in range(4)]}
    run = shard(two_layers, mesh, schedule=Schedule(bucket_bytes=bucket_bytes))
    plan = run.lower_joint(params, place(torch.randn(4, 8), mesh, P("dp")), argnums=0).collectives
    return [torch.Size(c.shape).numel() for c in plan if c.phase == "backward"]


def test_buckets_are_no_larger_than_asked_for() -> None:
    one = 64 * 4
    assert calls(None) == [4 * 64]
    assert calls(2 * one) == [2 * 64, 2 * 64]
    assert calls(2 * one + 1) == [2 * 64, 2 * 64]
    assert calls(1) == [64] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [({"prefetch": -1}, "cannot be gathered after"), ({"bucket_bytes": 0}, "at least one byte")],
)
def test_schedules_that_make_no_sense(options: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Schedule(**options)
