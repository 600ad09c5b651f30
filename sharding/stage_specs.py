"""stage_specs: where in a pipeline each parameter is to live."""

from __future__ import annotations

from typing import Any

import optree
from torch import fx

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed, lowered_until
from torchard.functional.programs.program import Stage
from torchard.functional.tracing.signature import paths_of
from torchard.sharding.layouts.tags import CHUNK
from torchard.sharding.pipelining.homes import Home
from torchard.sharding.planning.canonicalize import prepare
from torchard.sharding.values.spec import P
from torchard.sharding.values.spectree import broadcast

__all__ = ["stage_specs"]


@checked
def stage_specs(fn: Transformed, *args: Any, specs: Any = None, **kwargs: Any) -> Any:
    """The specs of a pipeline's first argument, each at the one stage that uses the value.

    A value that several stages use, such as a tied embedding, or that no stage uses, is at all stages.

    Args:
        fn: a result of `pipeline`, or a transform of it.
        args, kwargs: its arguments, as for ``fn.lower``: `ShapeDtype` suffices.
        specs: how the first argument is split over other axes: a pytree prefix of it with a `P` at each
            leaf; by default the specs of placed values, and no split for other values.

    Returns:
        A tree like the first argument, with a `P` for each leaf, for `place` and `initialize`.

    Raises:
        SpecError: ``specs`` is not a prefix of the first argument.
        PipelineError, AccumulateError: as for a call of ``fn``; but only a call notices that an operation
            needs the entire batch.

    >>> import torch, torchard as ta
    >>> def mlp(params, x):
    ...     for i, w in enumerate(params["layers"]):
    ...         with ta.scope(f"layer/{i}"):
    ...             x = torch.tanh(x * params["gain"]) @ w
    ...     return x.sum()
    >>> mesh = ta.Mesh({"pp": 2, "tp": 2}, virtual=True)
    >>> step = ta.pipeline(torch.func.grad(mlp), mesh, "pp", microbatches=2, batch=(None, 0))
    >>> params = {"gain": ta.ShapeDtype([]), "layers": [ta.ShapeDtype((8, 8))] * 2}
    >>> ta.stage_specs(step, params, ta.ShapeDtype((4, 8)), specs={"gain": ta.P(), "layers": ta.P("tp")})
    {'gain': P().at(pp=0), 'layers': [P('tp').at(pp=0), P('tp').at(pp=1)]}
    """
    program = lowered_until(fn, Stage.CUT, args, kwargs).copy()
    prepare(program.graph)  # what only the shape is read of is not used there
    homes = {
        leaf.path: _used_at(node)
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
    }
    leaves, structure = optree.tree_flatten(
        args[0], is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    given = [None] * len(leaves) if specs is None else broadcast(specs, args[0], "specs", "args[0]")
    found = [
        (spec or (leaf.spec if is_placed(leaf) else P())).at(**dict(homes.get(path, ())))
        for leaf, spec, path in zip(leaves, given, paths_of(args, kwargs), strict=False)
    ]
    return optree.tree_unflatten(structure, found)


def _used_at(placeholder: fx.Node) -> Home:
    """The home of all stages that use an input; () if there are several, or none."""
    homes: set[Home] = set()
    seen, stack = {placeholder}, [placeholder]
    while stack:
        for user in stack.pop().users:
            if CHUNK.on(user):
                homes.add(CHUNK.of(user)[1])
            elif user not in seen:
                seen.add(user)
                stack.append(user)
    return homes.pop() if len(homes) == 1 else ()
