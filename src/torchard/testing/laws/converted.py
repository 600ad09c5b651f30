"""A user's function in a different dtype from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.failed_calls import note_call
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.loops.rolled import straight_line
from torchard.functional.programs.tags import SOURCE, VAL
from torchard.functional.torch_internals.accessors import pytree
from torchard.functional.trace import trace
from torchard.testing.rounding.roundings import unit_roundoff

__all__ = ["check_converted", "check_double"]


def check_converted(
    who: str, fn: Callable[..., Any], given: Sequence[Any], converted: Sequence[Any], dtype: torch.dtype
) -> None:
    """Check that a function that takes these arguments takes them in another dtype too.

    Raises:
        TypeError: it does not; names the line, the call of torch, and an argument that was converted.
    """
    try:
        fn(*converted)
    except Exception as error:
        if not _runs(fn, given):  # then it is not the dtype
            raise
        what = _noted(fn, converted) or error
        notes = "; ".join([_first_line(what), *getattr(what, "__notes__", ())])
        raise TypeError(
            f"{who} calls fn with {_first_converted(given, converted)} in {_name(dtype)}, and fn "
            f"fails: {notes}. A value that fn makes or closes over does not change its dtype: create "
            "it in the dtype of an argument, as in x.new_zeros(3) or torch.zeros(3, dtype=x.dtype), or "
            "pass it as an argument."
        ) from error


def check_double(who: str, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Check that a function of float64 arguments computes nothing of them in less.

    Small steps of its arguments would then be lost, and its derivatives be none to compare.

    Raises:
        TypeError: it does; names the dtype and the line.
    """
    try:
        program = straight_line(trace(fn)(*args))
    except Exception:  # whatever a trace refuses
        return
    computed: set[fx.Node] = set()  # of the arguments, by operations on floating numbers
    for node in program.graph.nodes:
        dtypes = [x.dtype for x in pytree.tree_leaves(VAL.get(node)) if is_inexact(x)]
        if not dtypes:
            continue
        narrowest = max(dtypes, key=unit_roundoff)
        narrow = unit_roundoff(narrowest) > unit_roundoff(torch.float64)
        if node.op == "placeholder" and not narrow:
            computed.add(node)
        if not computed.intersection(node.all_input_nodes):
            continue
        computed.add(node)
        if narrow:
            raise TypeError(
                f"{who} calls fn in float64, and fn computes in {_name(narrowest)} at "
                f"{SOURCE.get(node)}. Let it keep wider dtypes, as "
                f"x.to(torch.promote_types(x.dtype, {narrowest})) does."
            )


class _Noting(TorchFunctionMode):
    """Notes which call of torch raised an error, and its operands."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = internals.unpatched(func)
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            note_call(error, source.of_here(), func, args, kwargs or {})
            raise


def _noted(fn: Callable[..., Any], args: Sequence[Any]) -> Exception | None:
    """The error of a call, with such a note."""
    try:
        with _Noting():
            fn(*args)
    except Exception as error:
        return error
    return None


def _runs(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    try:
        fn(*args)
    except Exception:
        return False
    return True


def _first_converted(given: Sequence[Any], converted: Sequence[Any]) -> str:
    leaves = zip(
        tree.paths(given, "args"), tree.leaves(given), tree.leaves(converted), strict=True
    )
    changed = [
        f"{path}, given in {_name(old.dtype)},"
        for path, old, new in leaves
        if isinstance(new, torch.Tensor) and new.dtype != old.dtype
    ]
    return changed[0] if changed else "its arguments"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
