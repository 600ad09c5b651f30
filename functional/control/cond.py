"""cond and switch: one of several functions, chosen by a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.callbacks.effect import threaded
from torchard.functional.control.iteration import (
    as_tensor,
    captured,
    operands_of,
    trace_shapes,
)
from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import BranchError
from torchard.functional.core.scope_frames import Frame
from torchard.functional.guards.present_cells import with_present_cells
from torchard.functional.loops.branch_call import BranchCall, has_effects, same_inputs
from torchard.functional.loops.branches import run, selected
from torchard.functional.loops.call import as_body
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.trace_state import TraceState, active, current_frames, in_frames

__all__ = ["cond", "switch"]


@checked
def cond(
    pred: bool | torch.Tensor,
    true: Callable[..., Any],
    false: Callable[..., Any],
    *operands: Any,
    name: str = "cond",
) -> Any:
    """Call one of two functions, chosen by a value.

    Computes the same as ``true(*operands) if pred else false(*operands)``, and only what that does, also
    in a transformed function and in its derivatives. Where ``pred`` differs between the examples of a
    vmap, both are computed and selected from. On a mesh all ranks take the same branch.

    Args:
        pred: a bool, or a tensor of bools without dims.
        true, false: pure functions, whose results have one structure, and the same shapes and dtypes.
        operands: their arguments; what else they read needs not be passed.
        name: the scope of their operations: ``cond/true`` and ``cond/false``.

    Returns:
        The result of the function that is called; numbers are tensors.

    Raises:
        BranchError: ``pred`` has dims or is not bool, or the results differ in structure, shapes or
            dtypes; names the leaf.

    Source: ``jax.lax.cond``.

    >>> import torch, torchard as ta
    >>> @ta.jit
    ... def clipped(x):
    ...     return ta.cond(x.norm() < 1, lambda x: x, lambda x: x / x.norm(), x)
    >>> clipped(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    if isinstance(pred, torch.Tensor) and (pred.ndim or pred.dtype != torch.bool):
        raise BranchError(
            f"cond: pred is {str(pred.dtype).removeprefix('torch.')}{list(pred.shape)}; it must be a "
            "bool without dims, as in (x > 0).all(). torch.where selects element by element."
        )
    return _chosen("cond", name, ("false", "true"), pred, (false, true), operands)


@checked
def switch(
    index: int | torch.Tensor,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    name: str = "switch",
) -> Any:
    """Call one of several functions, chosen by its number.

    As `cond`, of ``branches[index]``; an index beyond the first or last branch takes that one.

    Args:
        index: an int, or a tensor of integers without dims.
        branches: pure functions, whose results have one structure, and the same shapes and dtypes.
        operands: their arguments.
        name: the scope of their operations: ``switch/0``, ``switch/1``, ...

    Returns:
        The result of the function that is called; numbers are tensors.

    Raises:
        BranchError: ``index`` has dims or is no integer, there are no branches, or their results differ
            in structure, shapes or dtypes; names the leaf.

    Source: ``jax.lax.switch``.

    >>> import torch, torchard as ta
    >>> ways = [torch.sin, torch.cos, torch.square]
    >>> ta.switch(torch.tensor(2), ways, torch.tensor(3.0))
    tensor(9.)
    """
    if not branches:
        raise BranchError("switch: there are no branches.")
    if isinstance(index, torch.Tensor):
        if index.ndim or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
            raise BranchError(
                f"switch: index is {str(index.dtype).removeprefix('torch.')}{list(index.shape)}; it "
                "must be an integer without dims."
            )
        index = index.clamp(0, len(branches) - 1)
    else:
        index = min(max(index, 0), len(branches) - 1)
    return _chosen("switch", name, tuple(map(str, range(len(branches)))), index, branches, operands)


def _chosen(
    who: str,
    name: str,
    names: Sequence[str],
    index: Any,
    branches: Sequence[Callable[..., Any]],
    operands: tuple[Any, ...],
) -> Any:
    """The result of the branch of an index."""
    made = [
        _Branch(fn, Frame(f"{name}/{of}")) for fn, of in zip(branches, names, strict=True)
    ]
    if not isinstance(index, torch.Tensor):
        return made[int(index)](*operands)
    state = active()
    if state is not None and state.align_operands is list:
        return _traced(state, who, names, index.to(torch.int64), made, operands)
    if state is None and not internals.batch_dims(index):
        return made[int(index)](*operands)
    # Examples, or in a shard_map ranks, differ: all are computed.
    results = [branch(*operands) for branch in made]
    _check_alike(who, names, [(tree.structure(each), tree.leaves(each)) for each in results])
    return tree.map(lambda *leaves: _selected(index, leaves), *results)


def _selected(index: torch.Tensor, leaves: Sequence[Any]) -> Any:
    return selected(index, leaves) if isinstance(leaves[0], torch.Tensor) else leaves[0]


class _Branch:
    """A branch, whose operations are in its scope, and whose numbers are tensors."""

    def __init__(self, fn: Callable[..., Any], frame: Frame) -> None:
        self.fn, self.frame = fn, frame
        self.__name__ = getattr(fn, "__name__", frame.name)

    def __call__(self, *operands: Any) -> Any:
        with in_frames((*current_frames(), self.frame)):
            return tree.map(lambda leaf: as_tensor(leaf, None), self.fn(*operands))


def _traced(
    state: TraceState,
    who: str,
    names: Sequence[str],
    index: torch.Tensor,
    branches: Sequence[_Branch],
    operands: tuple[Any, ...],
    ordered: bool = False,
) -> Any:
    """The conditional as one operation of the trace in progress.

    Args:
        ordered: whether branches take and return the token of effects.
    """
    programs = [_program(branch, operands) for branch in branches]
    _check_alike(who, names, [_results(program) for program in programs])
    if not ordered and any(has_effects(program.graph) for program in programs):
        for branch in branches:
            branch.fn = threaded(branch.fn)
        operands = (state.token(), *operands)
        result, token = _traced(state, who, names, index, branches, operands, ordered=True)
        state.put_token(token)
        return result
    own = [len(program.closures) + len(program.constants) for program in programs]
    values = list(operands_of(operands))
    for program in programs:
        values += captured(state, program)
    call = BranchCall(same_inputs([as_body(program) for program in programs], own), run)
    made = call(state.operand(index), *(state.operand(value) for value in values))
    return programs[0].out_tree.build(made)


def _program(branch: _Branch, operands: tuple[Any, ...]) -> Program:
    present = with_present_cells(branch.fn)
    program = trace_shapes(branch, *operands)
    branch.fn = present  # what derivatives may run again
    return program


Results = tuple[Any, list[Any]]


def _results(program: Program) -> Results:
    """The structure and the leaves of what a program returns."""
    leaves = tree.leaves(program.out_tree.build([VAL.of(node) for node in program.results]))
    return program.out_tree.structure, leaves


def _check_alike(who: str, names: Sequence[str], results: Sequence[Results]) -> None:
    """Check that the results of branches have one structure, and the same shapes and dtypes."""
    structure, leaves = results[0]
    paths = tree.paths(tree.unflatten(structure, leaves), "its result")
    for name, (other, values) in zip(names[1:], results[1:], strict=True):
        if other != structure:
            raise BranchError(
                f"{who}: branch {name} returns {other}, and branch {names[0]} {structure}; they must "
                "return one structure."
            )
        for path, mine, theirs in zip(paths, leaves, values, strict=True):
            if _kind(mine) != _kind(theirs):
                raise BranchError(
                    f"{who}: of branch {name} {path} is {_kind(theirs)}, and of branch {names[0]} "
                    f"{_kind(mine)}; branches must return the same shapes and dtypes."
                )


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
