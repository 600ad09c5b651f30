"""Tensor parallelism specified outside of the model: an MLP on two devices, Slapo's first tutorial.

    python examples/slapo_mlp.py                          # two ranks inside this process
    torchrun --nproc-per-node 2 examples/slapo_mlp.py     # two processes

In Slapo (Chen et al., arXiv:2302.08005) a schedule splits the first linear by its outputs and the second
by its inputs, and adds a synchronization to the forward and one to the backward; where one is forgotten,
the result is wrong. Here the specs of the weights are the schedule, and the synchronizations are derived
from them, in whatever order the transforms are stacked.
"""

from __future__ import annotations

import functools

import torch
from _mesh import mesh_of
from torch import Tensor

from torchard import P, ShapeDtype, initialize, jit, nn, random, shard
from torchard.testing import equal

Params = dict[str, Tensor]


def mlp(params: Params, x: Tensor) -> Tensor:
    hidden = nn.gelu(nn.linear(x, params["w1"], params["b1"]))
    return nn.linear(hidden, params["w2"], params["b2"])


SPECS = {"w1": P("tp", None), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()}


def fresh(name: str, key: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The initial value of a parameter."""
    return nn.init_normal(key, shape, shape[-1] ** -0.5, dtype)


def main(width: int = 1024, rows: tuple[int, ...] = (2, 512)) -> None:
    shapes = {"w1": (width, width), "b1": (width,), "w2": (width, width), "b2": (width,)}
    empty = {name: ShapeDtype(shape) for name, shape in shapes.items()}
    with mesh_of(tp=2) as mesh:
        # No rank ever holds a whole weight, but the values are the same as on one device.
        params = initialize(fresh, empty, mesh, SPECS, random.key(0))
        x = random.normal(random.key(1), (*rows, width))
        run = shard(mlp, mesh, out_specs=P())

        plan = run.lower_joint(params, x).collectives
        print(f"The collectives of a forward and a backward over {mesh}:\n\n{plan}\n")
        assert [(c.phase, c.kind, c.axes) for c in plan] == [
            ("forward", "all_reduce", ("tp",)),
            ("backward", "all_reduce", ("tp",)),
        ]
        # The second one is for the gradient of x, and is left out if that is not needed.
        assert len(run.lower_joint(params, x, argnums=0).collectives) == 1

        print("Errors against one device in float64, and what rounding explains:\n")
        print(equal(run, mlp, params, x, orders=("value", "gradient")))

        print("\nOther stacks of transforms, and the largest error of each:\n")
        compiled = functools.partial(jit, backend="eager")  # "inductor" takes some seconds more
        whole = functools.partial(shard, mesh=mesh, out_specs=P())
        gradient = torch.func.grad(lambda params, x: mlp(params, x).square().mean())
        stacks = {
            "jit(shard(mlp))": (compiled(run), mlp),
            "shard(jit(mlp))": (whole(compiled(mlp)), mlp),
            "shard(grad(loss))": (shard(gradient, mesh, out_specs=SPECS), gradient),
            "jit(shard(vmap(mlp)))": (compiled(whole(torch.func.vmap(mlp, (None, 0)))), mlp),
        }
        for stack, (fn, reference) in stacks.items():
            report = equal(fn, reference, params, x[:, :16], orders=("value", "gradient"))
            errors = [row.error for row in report]
            print(f"{stack:22} {max(errors):.1e}")


if __name__ == "__main__":
    main()
