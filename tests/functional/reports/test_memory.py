"""Program.memory: the peak and who holds it, against liveness and what is alive in a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from live_bytes import LiveBytes, OneRank
from torch import Tensor

from torchard import Mesh, P, checkpoint, jit, policies, repeat, scope, shard, trace
from torchard.functional.memory.planned import Planned
from torchard.testing.strategies import RandomProgram, programs


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    for i, w in enumerate(params):
        with scope(f"block/{i}"):
            x = torch.tanh(x @ w) + x
    return x.square().mean()


def gradient(params: list[Tensor], x: Tensor) -> Any:
    return torch.func.grad(loss)(params, x)


PARAMS, X = [torch.ones(16, 16) for _ in range(3)], torch.ones(8, 16)


@settings(max_examples=examples(ci=30, explore=500), deadline=None)
@given(programs())
def test_views_are_those_that_are_observed(program: RandomProgram) -> None:
    """Two readings of one list agree: by what nodes declare, and by their results on fake tensors."""
    lowered = jit(program, backend="eager").lower(*program.inputs)
    on_a_rank = replace(lowered, runtime=OneRank())
    assert on_a_rank.memory.peak == on_a_rank.peak == lowered.memory.peak == lowered.peak


def test_the_peak_is_what_a_run_has() -> None:
    run = jit(gradient, backend="eager")
    run(PARAMS, X)
    with LiveBytes([*PARAMS, X]) as live:
        run(PARAMS, X)
    memory = run.lower(PARAMS, X).memory
    assert live.peak() == memory.peak == sum(holder.bytes for holder in memory.holders)


@pytest.mark.parametrize("order", [1, 2])
def test_the_peak_of_a_loop(order: int) -> None:
    """What a run of generated code has is what planned memory has, second derivatives included."""
    stacked = torch.ones(5, 16, 16)

    def looped(ws: Tensor, x: Tensor) -> Tensor:
        return repeat(lambda w, x: torch.tanh(x @ w) + x, ws, x).square().mean()

    def second(ws: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda ws: torch.func.grad(looped)(ws, x).sin().sum())(ws)

    run = jit(torch.func.grad(looped) if order == 1 else second, backend="eager")
    run(stacked, X)
    with LiveBytes([stacked, X]) as live:
        run(stacked, X)
    lowered = run.lower(stacked, X)
    assert live.peak() == lowered.peak == lowered.memory.peak


def test_holders() -> None:
    memory = jit(gradient, backend="eager").lower(PARAMS, X).memory
    arguments = [holder.what for holder in memory.holders if holder.kind == "argument"]
    assert arguments == ["args[0][0]", "args[0][1]", "args[0][2]", "args[1]"]
    scopes = {holder.scope for holder in memory.holders if holder.kind != "argument"}
    assert {"block/0 forward", "block/1 forward"} <= scopes
    text = str(memory)
    assert "block/* forward" in text
    assert "test_memory.py" in text
    assert f"{memory.peak:,} bytes at the peak" in text


def test_the_block_is_that_of_a_run() -> None:
    """What is planned before the program runs is what planned memory reserves."""
    lowered = jit(gradient, backend="eager", memory="planned").lower(PARAMS, X)
    plan = Planned(lowered.graph, lowered.bind(), "f").plan([*PARAMS, X])
    assert sum(plan.sizes.values()) == lowered.memory.block


@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_dots])
def test_joint_programs(policy: Any) -> None:
    kept = checkpoint(loss, policy=policy)
    joint = kept.lower_joint(PARAMS, X)
    assert joint.memory.peak == joint.peak
    assert joint.memory.block >= joint.memory.bound


def test_donated_arguments() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin().cos()

    x = torch.ones(1024)
    kept, donated = (
        jit(f, backend="eager", donate_argnums=given).lower(x).memory for given in ((), 0)
    )
    assert kept.peak == 3 * 4096
    assert donated.peak == 2 * 4096
    assert kept.planned == 3 * 4096  # argument, result, sin
    assert donated.planned == 2 * 4096  # the argument becomes the result


def test_loops() -> None:
    """Code with a loop frees what all iterations read when it ends; planned memory does so before."""

    def looped(w: Tensor, x: Tensor) -> Tensor:
        return repeat(lambda w, x: torch.tanh(x @ w) + x, w, x).square().mean()

    ws = torch.stack(PARAMS)
    lowered = jit(lambda w, x: torch.func.grad(looped)(w, x), backend="eager").lower(ws, X)
    assert 0.9 * lowered.peak <= lowered.memory.peak <= lowered.peak


def test_operations_with_memory_of_their_own() -> None:
    memory = trace(lambda x: torch.nn.functional.layer_norm(x, (4,)).sum())(torch.ones(3, 4)).memory
    assert memory.own == {"native_layer_norm": (3, 72)}
    assert "3 × native_layer_norm (72)" in str(memory)


def test_over_a_mesh() -> None:
    """One rank: as much whatever the number of ranks, with the buffer of the merged all_reduce.

    Two ranks exchange small buckets, for which they need a second buffer.
    """
    peaks = set()
    for size in (4, 1024):
        mesh = Mesh({"dp": size}, virtual=True)
        params = [torch.ones(64, 64) for _ in range(3)]
        step = shard(gradient, mesh, in_specs=(P(), P("dp")), out_specs=P())
        lowered = step.lower(params, torch.ones(size, 64))
        (merged,) = lowered.collectives
        assert merged.note == "3 merged"
        memory = lowered.memory
        (bucket,) = (h for h in memory.holders if h.what == "cat")
        assert (bucket.kind, bucket.bytes) == ("result", 3 * 64 * 64 * 4)
        # Arguments, gradients, and the bucket that they are copied to; in planned memory they are not.
        assert memory.peak >= 9 * 64 * 64 * 4
        batch = size * 64 * 4
        assert memory.planned - batch < 7 * 64 * 64 * 4
        peaks.add(memory.peak - batch)
    assert len(peaks) == 1


def test_gathered_parameters_are_held_by_collectives() -> None:
    mesh = Mesh({"dp": 4}, virtual=True)
    params = [torch.ones(64, 64) for _ in range(3)]
    lowered = shard(gradient, mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp")).lower(
        params, torch.ones(16, 64)
    )
    held = [h for h in lowered.memory.holders if h.kind == "collective"]
    assert held
    assert all(h.scope.startswith("block/") for h in held)


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib, which is optional")
    memory = jit(gradient, backend="eager").lower(PARAMS, X).memory
    text = memory.draw(tmp_path / "memory.svg").read_text()
    assert "of the bound" in text
    assert f"{memory.block:,} bytes" in text
