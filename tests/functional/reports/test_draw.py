"""A plan as a picture says what the plan says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import Mesh, P, ShapeDtype, checkpoint, jit, policies, repeat, scope, shard, trace
from torchard.functional.reports.draw import _total, layers_of

W = [torch.randn(8, 8) for _ in range(2)]
X = torch.randn(6, 8)


def loss(ws: list[Tensor], x: Tensor) -> Tensor:
    x = x * 2
    for i, w in enumerate(ws):
        with scope(f"block/{i}"), scope("linear"):
            x = (x @ w).tanh()
    return x.sum()


@pytest.fixture
def program() -> Any:
    mesh = Mesh({"dp": 2}, virtual=True)
    return shard(torch.func.grad(loss), mesh, in_specs=(P(), P("dp"))).lower(W, X)


def test_layers_are_scopes_of_a_phase(program: Any) -> None:
    layers = layers_of(program)
    names = [(layer.name, layer.phase) for layer in layers]
    forward = ["inputs", "block/0", "block/1"]
    assert names[:3] == [(name, "forward") for name in forward]
    assert ("block/0", "backward") in names and ("block/1", "backward") in names
    at = {name: i for i, name in enumerate(names)}
    flows = {i: set(layer.feeds) for i, layer in enumerate(layers)}
    assert at["block/1", "forward"] in flows[at["block/0", "forward"]]
    assert at["block/0", "backward"] in flows[at["block/1", "backward"]]
    assert at["block/0", "backward"] in flows[at["block/0", "forward"]], "residuals"
    assert sum(len(layer.nodes) for layer in layers) == len(program.calls)


def test_every_collective_is_counted_with_its_bytes(program: Any) -> None:
    lines = [line for layer in layers_of(program) for line in layer.lines if "×" in line]
    # Two gradients of 8 x 8 floats, merged: a ring of two sends them once.
    assert lines == ["1 × all_reduce(dp)  512 B"]
    assert _total(program).endswith(" nodes, 1 collective, 512 B per rank")
    assert ", 0 collectives, " in _total(jit(torch.sin, backend="eager").lower(X))


@pytest.mark.parametrize(("n", "shown"), [(100, "20 kB"), (1000, "2 MB"), (40_000, "3.2 GB")])
def test_bytes_of_large_collectives(n: int, shown: str) -> None:
    """Planned only: nothing of that size is allocated."""
    mesh, large = Mesh({"dp": 2}, virtual=True), ShapeDtype((n, n), torch.float32)
    plan = shard(lambda x: x.sum(0) * x, mesh, (P("dp"),), P()).lower(large)
    lines = [line for layer in layers_of(plan) for line in layer.lines]
    assert any(line.endswith(shown) for line in lines), lines


def test_a_loop_is_one_box() -> None:
    """With the number of its iterations, and the bytes that all of them send and keep."""
    mesh, ws = Mesh({"dp": 2}, virtual=True), torch.randn(6, 8, 8)

    def deep(ws: Tensor, x: Tensor) -> Tensor:
        return repeat(lambda w, x: (x @ w).tanh(), ws, x * 2).square().sum()

    program = shard(torch.func.grad(deep), mesh, (P(None, "dp"), P("dp"))).lower(ws, X)
    layers = {(layer.name, layer.phase): layer for layer in layers_of(program)}
    forward, backward = layers["block/*", "forward"], layers["block/*", "backward"]
    assert (forward.times, backward.times) == (6, 6)
    gathers = next(c for c in program.collectives if c.kind == "all_gather")
    assert f"6 × all_gather(dp)  {6 * gathers.bytes} B" in forward.lines
    order = list(layers)
    at = order.index(("block/*", "backward"))
    assert at in forward.feeds and at not in backward.feeds
    assert order.index(("block/*", "forward")) in layers["inputs", "forward"].feeds


def test_parts_of_a_loop_are_boxes_of_their_own() -> None:
    ws = torch.randn(8, 16, 16)

    def block(w: Tensor, x: Tensor) -> Tensor:
        return ((x @ w).tanh() @ w.T).sigmoid() * x

    loss = checkpoint(lambda w, x: repeat(block, w, x).sum(), policy=policies.budget(fraction=0.5))
    program = jit(torch.func.grad(loss), backend="eager").lower(ws, torch.randn(64, 16))
    parts = [layer for layer in layers_of(program) if layer.name.startswith("block/*")]
    first, second = ({layer.name: layer.times for layer in parts}.items())
    assert first[0] == f"block/* 0–{first[1] - 1}" and first[1] + second[1] == 8
    table, kept = str(program.residuals), [r for r in program.residuals if r.kind != "argument"]
    assert f"value × {first[1]}" in table and len(table.splitlines()) < len(kept)
    assert table.splitlines()[-1].startswith(f"{len(kept)} values, ")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_file(program: Any, tmp_path: Path, suffix: str) -> None:
    path = program.draw(tmp_path / f"plan.{suffix}")
    data = path.read_bytes()
    if suffix == "png":
        assert data.startswith(b"\x89PNG")
        return
    text = data.decode()
    for said in ("block/0", "(backward)", "all_reduce(dp)", "f32[6, 8] P(dp, None)", "residual"):
        assert said in text, said


def test_a_program_on_one_device_and_one_that_does_nothing(tmp_path: Path) -> None:
    assert "block/1" in trace(loss)(W, X).draw(tmp_path / "one.svg").read_text()
    assert "0 nodes" in trace(lambda x: x)(X).draw(tmp_path / "none.svg").read_text()


def test_without_matplotlib(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchard\[examples\]'"):
        program.draw("plan.svg")
