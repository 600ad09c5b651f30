"""How a model runs is said beside it: an MLP on two devices, Slapo's first tutorial.

    python examples/slapo_mlp.py                          # two ranks inside this process
    torchrun --nproc-per-node 2 examples/slapo_mlp.py     # two processes

Slapo (Chen et al., arXiv:2302.08005) takes a schedule: split the first linear by its outputs and the
second by its inputs, synchronise after the one in the forward and after the other in the backward; a
synchronisation that is forgotten is a wrong number. Here the schedule is where the weights live, and the
synchronisations follow from it. They follow in any order in which transforms are stacked, too.
"""

from __future__ import annotations

import functools

import torch
from _mesh import mesh_of
from torch import Tensor

from torchard import P, ShapeDtype, initialize, jit, nn, random, shard, verify

Params = dict[str, Tensor]


def mlp(params: Params, x: Tensor) -> Tensor:
    hidden = nn.gelu(nn.linear(x, params["w1"], params["b1"]))
    return nn.linear(hidden, params["w2"], params["b2"])


SPECS = {"w1": P("tp", None), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()}


def fresh(name: str, key: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The value of a new parameter."""
    return nn.init_normal(key, shape, shape[-1] ** -0.5, dtype)


def main(width: int = 1024, rows: tuple[int, ...] = (2, 512)) -> None:
    shapes = {"w1": (width, width), "b1": (width,), "w2": (width, width), "b2": (width,)}
    empty = {name: ShapeDtype(shape) for name, shape in shapes.items()}
    with mesh_of(tp=2) as mesh:
        # No rank ever holds a whole weight, and yet the values are one device's.
        params = initialize(fresh, empty, mesh, SPECS, random.key(0))
        x = random.normal(random.key(1), (*rows, width))
        run = shard(mlp, mesh, out_specs=P())

        plan = run.lower_joint(params, x).collectives
        print(f"What a forward and a backward send over {mesh}:\n\n{plan}\n")
        assert [(c.phase, c.kind, c.axes) for c in plan] == [
            ("forward", "all_reduce", ("tp",)),
            ("backward", "all_reduce", ("tp",)),
        ]
        # The second one is for the gradient of x: who does not ask for it does not pay for it.
        assert len(run.lower_joint(params, x, argnums=0).collectives) == 1

        print("Against one device in float64; eager is what one device makes of it in float32:\n")
        print(verify(run, mlp, params, x))

        print("\nThe same in other orders, the largest error of each:\n")
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
            errors = [row.error for row in verify(fn, reference, params, x[:, :16])]
            print(f"{stack:22} {max(errors):.1e}")


if __name__ == "__main__":
    main()
