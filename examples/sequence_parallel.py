"""Sequence parallelism on three ranks, which do not divide the weights evenly: ten steps of AdamW.

    python examples/sequence_parallel.py                         # three ranks inside this process
    torchrun --nproc-per-node 3 examples/sequence_parallel.py    # three processes

Activations are split by position, weights by hidden features: 32 over 3 ranks are 11, 11 and 10. Between
the linears every rank has all positions of its own features, so the input is gathered once and the
output scattered once; the backward mirrors them. PyTorch's own example of this model raises on 3 ranks.

A profiler trace of every rank is saved in out/, for https://ui.perfetto.dev or TensorBoard. Scopes and
collectives have the plan's names in it: "all_gather over tp, first forward".
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _mesh import mesh_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from torchard import P, name, nn, optim, place, random, scope, shard

Params = dict[str, Tensor]
OPTIMIZER = optim.adamw(0.25)


def mlp(params: Params, x: Tensor) -> Tensor:
    """An MLP: [batch, position, 10] -> [batch, position, 5]."""
    with scope("first"):
        hidden = name(nn.relu(nn.linear(x, params["w1"], params["b1"])), "hidden")
    with scope("second"):
        return nn.linear(hidden, params["w2"], params["b2"])


def step(params: Params, state: Any, x: Tensor, target: Tensor) -> tuple[Params, Any, Tensor]:
    def loss(params: Params) -> Tensor:
        return (mlp(params, x) - target).square().mean()

    grads, value = torch.func.grad_and_value(loss)(params)
    params, state = OPTIMIZER.update(grads, state, params)
    return params, state, value


SHAPES = {"w1": (32, 10), "b1": (32,), "w2": (5, 32), "b2": (5,)}
SPECS = {"w1": P("tp", None), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()}
BY_POSITION = P(None, "tp")
# A constraint: without it the plan would gather these tiny weights, which moves fewer bytes.
PINS = {"hidden": P(None, None, "tp")}


def train(fn: Any, params: Any, x: Any, target: Any, steps: int) -> list[float]:
    state, losses = OPTIMIZER.init(params), []
    for number in range(steps):
        with record_function(f"step {number}"):
            params, state, value = fn(params, state, x, target)
            losses.append(float(value))
    return losses


def main(steps: int = 10, out: Path = Path("out")) -> None:
    keys = random.split(random.key(0), 6).unbind()
    items = zip(SHAPES.items(), keys, strict=False)
    params = {k: nn.init_normal_fan_in(key, shape, 1.0) for (k, shape), key in items}
    x, target = random.normal(keys[4], (4, 12, 10)), random.normal(keys[5], (4, 12, 5))
    with mesh_of(tp=3) as mesh:
        placed = place(params, mesh, SPECS)
        data = [place(value, mesh, BY_POSITION) for value in (x, target)]

        forward = shard(mlp, mesh, out_specs=BY_POSITION, constrain_at=PINS)
        plan = forward.lower_joint(placed, data[0]).collectives
        print(f"The collectives of a forward and a backward over {mesh}:\n\n{plan}\n")
        expected = [
            ("forward", "all_gather"),  # of x
            ("forward", "psum_scatter"),  # the output
            ("backward", "all_gather"),  # of the output's cotangent
            ("backward", "psum_scatter"),  # the gradient of x
            ("backward", "all_reduce"),  # the gradient of b2, which is replicated
        ]
        assert sorted((c.phase, c.kind) for c in plan) == sorted(expected)

        run = shard(step, mesh, constrain_at=PINS)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            ours = train(run, placed, *data, steps)
        rank = 0 if mesh.coords is None else mesh.rank_of(mesh.coords)
        out.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(out / f"sequence_parallel-rank{rank}.json"))
        traced = Counter(event.name for event in trace.events())
        planned = Counter(c.title for c in run.lower(placed, OPTIMIZER.init(placed), *data).collectives)
        assert all(traced[title] == steps * count for title, count in planned.items())

        theirs = train(step, params, x, target, steps)
        print("step     three ranks  one device")
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            print(f"{number:4}   {a:13.6f} {b:11.6f}")
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=0)


if __name__ == "__main__":
    main()
