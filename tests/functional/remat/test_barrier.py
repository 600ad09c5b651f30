"""Compiled programs hold as little as their graphs say: versions wait for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.func import grad
from torch.profiler import ProfilerActivity, profile

from torchard import Mesh, P, checkpoint, jit, nn, place, policies, scope, shard
from torchard.functional.jit import _flat_module
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import PHASE, RECOMPUTE, VAL
from torchard.functional.remat.barrier import insert_barriers
from torchard.functional.torch_internals.operators import aten, c10d

BLOCKS, ROWS, WIDTH = 4, 1024, 64
PARAMS = [
    {
        "w1": torch.randn(4 * WIDTH, WIDTH) / 8,
        "b1": torch.zeros(4 * WIDTH),
        "w2": torch.randn(WIDTH, 4 * WIDTH) / 16,
    }
    for _ in range(BLOCKS)
]
X = torch.randn(ROWS, WIDTH)
# The greatest of the values of a block, its hidden units.
HIDDEN = ROWS * 4 * WIDTH * 4


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            x = x + nn.linear(nn.gelu(nn.linear(x, p["w1"], p["b1"])), p["w2"])
    return x.square().mean()


def profiled(run: Callable[[], Any]) -> int:
    """The most bytes that are allocated at once, by the profiler's memory events."""
    run()  # compiles
    with profile(activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True) as found:
        run()
    events = found.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def peaks(fn: Callable[..., Any], backend: str) -> tuple[int, int]:
    """Of one step in one graph, and of forward and backward apart."""
    step, halves = jit(grad(fn), backend=backend), jit(fn, backend=backend)
    leaves = [{k: v.clone().requires_grad_() for k, v in p.items()} for p in PARAMS]
    flat = torch.utils._pytree.tree_leaves(leaves)
    return (
        profiled(lambda: step(PARAMS, X)),
        profiled(lambda: torch.autograd.grad(halves(leaves, X), flat)),
    )


def test_the_compiled_peak_falls_as_the_graph_s() -> None:
    """Without barriers it does not fall at all; counting products would not show it."""
    checked = checkpoint(loss, where="block/*")
    for eager, compiled in zip(peaks(checked, "eager"), peaks(checked, "inductor"), strict=True):
        assert eager < 5 * HIDDEN < 2 * BLOCKS * HIDDEN
        assert compiled <= eager + HIDDEN // 2
    for a, b in zip(
        torch.utils._pytree.tree_leaves(jit(grad(checked))(PARAMS, X)),
        torch.utils._pytree.tree_leaves(grad(loss)(PARAMS, X)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def barriers(program: Program) -> tuple[int, int]:
    """How many operations are made again, and how many of those wait for no barrier."""
    module = _flat_module(program)
    assert module is not None
    insert_barriers(module.graph)
    waiting, again, free = set(), 0, 0
    for node in module.graph.nodes:
        if node.target is torch.ops.torchard.barrier.default:
            waiting.add(node)
            assert node.args[1].meta["phase"] == "backward" and not node.args[1].meta.get("recompute")
        elif node.meta.get("recompute") and not getattr(node.target, "is_view", False):
            again += 1
            if not waiting.isdisjoint(node.all_input_nodes) or any(
                "view" in str(n.target) or ".t." in str(n.target) for n in node.all_input_nodes
            ):
                waiting.add(node)
            else:
                free += 1
    return again, free


@pytest.mark.parametrize("policy", [policies.save_nothing, policies.save_dots], ids=str)
def test_whatever_is_made_again_waits(policy: policies.Policy) -> None:
    program = checkpoint(grad(loss), policy=policy, where="block/*").lower(PARAMS, X)
    again, free = barriers(program)
    assert again >= BLOCKS and free == 0


def test_what_is_made_again_on_a_mesh_waits_too() -> None:
    """Gathers of split parameters among it, whether or not there is a checkpoint."""
    mesh = Mesh({"dp": 2}, virtual=True)
    params, x = place(PARAMS, mesh, P("dp")), place(X, mesh, P("dp"))
    for fn in (loss, checkpoint(loss, where="block/*")):
        program = shard(grad(fn), mesh).lower(params, x)
        module = _flat_module(program)
        assert module is not None
        insert_barriers(module.graph)
        found = [n for n in module.graph.nodes if n.target is torch.ops.torchard.barrier.default]
        assert len(found) >= BLOCKS - 1


def test_no_barrier_copies_what_a_collective_has_yet_to_write() -> None:
    """The wait would be for the copy, and so for nothing."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.neg.default, (x,))
    issued = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "group"))
    second = graph.call_function(aten.neg.default, (first,))
    whole = graph.call_function(c10d.wait_tensor.default, (issued,))
    used = graph.call_function(aten.sin.default, (whole,))
    graph.output((second, used))
    for node in graph.nodes:
        VAL.set(node, torch.empty(4, device="meta"))
    for node in (first, second):
        PHASE.set(node, "backward")
    for node in (issued, whole, used):
        RECOMPUTE.set(node, True)
    insert_barriers(graph)
    assert whole.args == (issued,)
    for node, after, source in ((issued, first, x), (used, second, whole)):
        (barrier,) = node.all_input_nodes
        assert barrier.target is torch.ops.torchard.barrier.default
        assert barrier.args == (source, after)
