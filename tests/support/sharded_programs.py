"""Random programs, as `torchard.testing.strategies` draws them, and where their values live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from torchard.functional.core import tree
from torchard.functional.programs.program import Program
from torchard.sharding import Mesh, P, place, shard
from torchard.sharding.testing import meshes, random_spec
from torchard.testing import equal
from torchard.testing.strategies import RandomProgram, programs, random_program

__all__ = ["ShardedProgram", "equal_when_sharded", "numbered", "of_all", "sharded_programs"]


@dataclass(frozen=True)
class ShardedProgram:
    """A program, where its inputs and results live, and whether the inputs are placed there before."""

    program: RandomProgram
    mesh: Mesh
    in_specs: tuple[P, ...]
    out_specs: Any
    placed: bool

    def plan(self, *, gradients: bool = False) -> Program:
        """What `shard` makes of it, or of a function of its gradients, by the inputs' shapes."""
        inputs, mesh = self.program.inputs, self.mesh
        fn = of_all(self.program, inputs) if gradients else self.program
        out = None if gradients else self.out_specs
        if self.placed:
            return shard(fn, mesh, out_specs=out).lower(*place(inputs, mesh, self.in_specs))
        return shard(fn, mesh, self.in_specs, out).lower(*inputs)


def of_all(fn: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """A function with grad inside: the gradients of one number of all results."""

    def loss(*inputs: torch.Tensor) -> Any:
        return sum((out * out.detach().sign()).sum() for out in tree.leaves(fn(*inputs)))

    return torch.func.grad(loss, tuple(i for i, x in enumerate(inputs) if x.is_floating_point()))


def equal_when_sharded(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any = None,
    *,
    placed: bool = True,
    orders: Sequence[str] = ("value", "gradient"),
) -> None:
    """Assert that `shard` changes neither values nor gradients, of placed arguments or plain ones."""
    if placed:
        equal(shard(fn, mesh, out_specs=out_specs), fn, *place(args, mesh, in_specs), orders=orders)
    else:
        equal(shard(fn, mesh, in_specs, out_specs), fn, *args, orders=orders)


@st.composite
def sharded_programs(draw: st.DrawFn, *, max_steps: int) -> ShardedProgram:
    """Programs × meshes × specs × constraints."""
    mesh = draw(meshes())
    program = draw(programs(max_steps=max_steps, mesh=mesh))
    return _on(mesh, program, draw(st.randoms(use_true_random=False)))


def numbered(number: int, mesh: Mesh, *, steps: int) -> ShardedProgram:
    """One of them, without hypothesis."""
    return _on(mesh, random_program(number, steps=steps, mesh=mesh), Random(number))


def _on(mesh: Mesh, program: RandomProgram, rng: Random) -> ShardedProgram:
    def wanted(out: Any) -> P | None:
        return rng.choice((None, random_spec(rng, out.shape, mesh)))

    named = zip(program.input_sources, program.inputs, strict=True)
    in_specs = tuple(
        P() if name == "key" else random_spec(rng, x.shape, mesh, fused=True) for name, x in named
    )
    out_specs = tree.map(wanted, program(*program.inputs))
    return ShardedProgram(program, mesh, in_specs, out_specs, placed=rng.choice((False, True)))
