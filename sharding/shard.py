"""shard: run a function written for global arrays on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchard.functional.core.arguments import checked
from torchard.functional.engine.transformed import Transformed
from torchard.functional.machines.machine import Machine
from torchard.sharding.scheduling.precision import check_reduce_dtype
from torchard.sharding.scheduling.schedule import Schedule
from torchard.sharding.shard_rewrite import Shard
from torchard.sharding.values.axis_rules import AxisRules, Rules, resolved
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P

__all__ = ["Shard", "shard"]


@checked
def shard(
    fn: Callable[..., Any],
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    constrain_at: Mapping[str, P] | None = None,
    rules: AxisRules | None = None,
    reduce_dtype: torch.dtype | None = None,
    schedule: Schedule | None = None,
    machine: Machine | None = None,
    check_replicated: bool = True,
) -> Transformed:
    """Run a function that is written for global arrays on a mesh.

    The layouts of values inside are propagated from the specs of arguments, results and constraints.
    ``.lower(*args).collectives`` lists all transfers over the network, before anything runs.

    Args:
        fn: a pure function of pytrees.
        mesh: where it runs.
        in_specs: a pytree prefix of the positional arguments (or a mapping by argument name) with a `P`
            at each leaf; None takes the specs of placed arguments.
        out_specs: a pytree prefix of the result; None leaves a spec to propagation.
        constrain_at: specs for named values, by a pattern over ``scope/name``; see `scope` and `name`.
            A pattern that may select some layers of a `repeat`, such as ``"block/3/*"``, unrolls the
            loop, with an `UnrolledLoopWarning`.
        rules: a mapping from names of dims, in these specs and in `constrain` inside, to axes.
        reduce_dtype: the dtype in which narrower floats are summed over ranks; None sums in their own
            dtype.
        schedule: how far ahead parameters are gathered, and how gradients are merged; see `Schedule`.
        machine: the machine, the same on all ranks, on which the plan between the specs takes least time,
            and by whose rates gradients are merged. None: weights are multiplied where they are split,
            and gradients are merged for a core of a host and gloo on CPUs, else for an H100 of one host.
        check_replicated: compare plain tensors across ranks by checksum when they are first used.

    Returns:
        A function of plain tensors (one value, the same on every rank) and MeshTensors. 0-d results,
        and those with ``P()`` in ``out_specs``, are plain tensors; others are MeshTensors. The new
        value of an argument that was placed as ``P()`` (a parameter, an optimizer's state) stays a
        MeshTensor.

    Raises (when called):
        SpecError: a spec does not fit its value; the message names the argument's path.
        MeshError: a MeshTensor is on a different mesh.
        ReplicaMismatch, PlanMismatch: ranks pass different plain tensors, or plan different programs.

    Source: GSPMD, Xu et al., arXiv:2105.04663; factor propagation as in Shardy.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> def mlp(params, x):
    ...     return torch.relu(x @ params["up"]) @ params["down"]
    >>> specs = {"up": ta.P(None, "tp"), "down": ta.P("tp", None)}
    >>> params = ta.place({"up": torch.ones(4, 8), "down": torch.ones(8, 4)}, mesh, specs)
    >>> run = ta.shard(mlp, mesh, out_specs=ta.P())
    >>> run(params, torch.ones(2, 4))
    tensor([[32., 32., 32., 32.],
            [32., 32., 32., 32.]])
    >>> [(c.kind, c.axes) for c in run.lower(params, torch.ones(2, 4)).collectives]
    [('all_reduce', ('tp',))]
    """
    check_reduce_dtype(reduce_dtype)
    in_specs = resolved(in_specs, rules, mesh, "in_specs")
    out_specs = resolved(out_specs, rules, mesh, "out_specs")
    rewrite = Shard(
        mesh,
        in_specs,
        out_specs,
        constraints=tuple((constrain_at or {}).items()),
        check_replicated=check_replicated,
        fn=fn,
        rules=None if rules is None else Rules.of(rules, mesh),
        reduce_dtype=reduce_dtype,
        schedule=schedule,
        machine=machine,
    )
    return Transformed(fn, (rewrite,))
