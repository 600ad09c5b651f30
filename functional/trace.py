"""trace: the program of a function, found from the shapes of its arguments; scopes and labels for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.core import user_lines as source
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import FREE, Program
from torchard.functional.programs.tags import VAL
from torchard.functional.reports.lowered import Lowered
from torchard.functional.tracing.signature import ShapeDtype, paths_of, read
from torchard.functional.tracing.trace_call import trace_call
from torchard.functional.tracing.trace_state import active, scope

__all__ = ["eval_shape", "name", "scope", "trace", "typeof"]


@checked
def trace(fn: Callable[..., Any]) -> Callable[..., Lowered]:
    """Get the program of a function for arguments of given shapes, without computing anything.

    Tensors (on ``meta`` too), placed values, floats and `ShapeDtype` are traced; other arguments are
    static. Tensors that the function closes over become inputs of role ``closure``.

    Args:
        fn: a pure function of pytrees.

    Returns:
        A function of ``fn``'s arguments that returns the program. It prints as one line for each
        operation; ``.residuals``, ``.peak`` (bytes) and ``.work`` (FLOPs) are reports on it.

    Raises (when called):
        PurityError: ``fn`` branches on a tensor's value, changes an argument in place, or draws from
            torch's global random state.
        StaticArgumentError: an argument is neither traced nor hashable.

    >>> import torch, torchard as ta
    >>> program = ta.trace(lambda w, x: torch.relu(x @ w))(torch.ones(4, 2), torch.ones(3, 4))
    >>> [node.name for node in program.calls]
    ['mm', 'relu']
    >>> program.peak                       # bytes: 8 + 12 + 6 + 6 floats
    128
    """

    def traced(*args: Any, **kwargs: Any) -> Lowered:
        return Lowered.of(trace_call(fn, read(args, kwargs), paths_of(args, kwargs)))

    return traced


@checked
def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns, without its values: nothing is computed.

    Args:
        fn: a pure function of pytrees.
        args, kwargs: its arguments, as those of `trace`: tensors, `ShapeDtype`, and anything else.

    Returns:
        The result, with a `ShapeDtype` for each tensor; of a sharded function each has its ``spec``.

    Raises:
        PurityError: as `trace`.

    Source: ``jax.eval_shape``.

    >>> import torch, torchard as ta
    >>> ta.eval_shape(lambda a, b: {"y": a @ b}, ta.ShapeDtype((2, 10**9)), ta.ShapeDtype((10**9, 3)))
    {'y': ShapeDtype(shape=(2, 3), dtype=torch.float32, device='cpu')}
    """
    if isinstance(fn, Transformed):
        program: Program = fn.lower(*args, **kwargs)
    else:
        program = trace_call(fn, read(args, kwargs), paths_of(args, kwargs), called=False)
    assert program.out_tree is not None
    pairs = zip(program.outputs, program.results, strict=True)
    return program.out_tree.build([_type_of(VAL.of(node), leaf.tag) for leaf, node in pairs])


def _type_of(val: torch.Tensor, tag: Any) -> ShapeDtype:
    placement = None if tag is FREE else tag
    return ShapeDtype(tuple(val.shape), val.dtype, str(val.device), placement)


def typeof(x: Any) -> ShapeDtype:
    """The shape, dtype and device of a tensor; of a placed one its ``spec``, too.

    Args:
        x: a tensor, or a placed value.

    Returns:
        A `ShapeDtype`. In a traced function its ``spec`` is an error that says where it will be known.

    Raises:
        TypeError: x is neither.

    Source: ``jax.typeof``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.typeof(ta.place(torch.ones(4, 3), mesh, ta.P("dp"))).spec
    P('dp', None)
    """
    if is_placed(x):
        shape, dtype, device, placement, _ = x.__torchard_placed__()
        return ShapeDtype(tuple(shape), dtype, str(device), placement)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"typeof: x is {type(x).__name__}, and must be a tensor or a placed value.")
    placement = _Planned() if active() is not None else None
    return ShapeDtype(tuple(x.shape), x.dtype, str(x.device), placement)


class _Planned:
    """The placement of a value in a traced function."""

    @property
    def spec(self) -> Any:
        raise PurityError(
            f"{source.begins_here()}the layout of a value is chosen when its program is planned, after "
            "the function is traced: see shard(f, mesh).lower(*args).plan.specs, or choose it, by "
            "constrain(x, P(...))."
        )


@checked
def name(value: torch.Tensor, label: str) -> torch.Tensor:
    """Label a value. Policies and ``constrain_at`` select values by label.

    Args:
        value: a tensor.
        label: any string; with `scope`, ``constrain_at`` sees ``"block/3/out"``.

    Returns:
        ``value`` unchanged. Outside a trace nothing happens.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     hidden = ta.name(x.sin(), "hidden")
    ...     return hidden.exp().sum()
    >>> g = ta.checkpoint(f, policy=ta.policies.save_names("hidden"))
    >>> [(r.what, r.name) for r in ta.saved_residuals(g, torch.ones(3))]
    [('args[0]', None), ('aten.sin', 'hidden')]
    """
    state = active()
    if state is not None:
        state.label(value, label)
    return value
