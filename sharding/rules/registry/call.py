"""A call of an operation as its rule sees it, and one rank's part of the call as an emitter sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.tags import CALL

__all__ = ["Call", "Local", "letters", "result_index", "results", "spell"]


@dataclass(frozen=True)
class Call:
    """One operation of a program as its rule sees it: arguments, and shapes of operands and results."""

    node: fx.Node
    operands: tuple[fx.Node, ...]
    ins: tuple[tuple[int, ...], ...]
    outs: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(node: fx.Node) -> Call:
        cached = CALL.get(node)
        if isinstance(cached, Call) and cached.node is node:
            return cached
        vals = [(a, val) for a in _tensor_args(node) if isinstance(val := _val(a), torch.Tensor)]
        ins = tuple([tuple(val.shape) for _, val in vals])
        outs = tuple([tuple(val.shape) for val in results(node)])
        call = Call(node, tuple([a for a, _ in vals]), ins, outs)
        CALL.set(node, call)
        return call

    @staticmethod
    def copy(node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> None:
        """Give the copy of a node its call, on the copies of the operands."""
        call = CALL.get(node)
        if isinstance(call, Call):
            operands = tuple([env[operand] for operand in call.operands])
            CALL.set(env[node], Call(env[node], operands, call.ins, call.outs))

    @property
    def target(self) -> Any:
        return self.node.target

    def arg(self, position: int, name: str | None = None, default: Any = None) -> Any:
        """The argument at a position, or given by name; else ``default``, which is the schema's."""
        args, kwargs = self.node.args, self.node.kwargs
        if position < len(args):
            return args[position]
        return kwargs.get(name, default) if name is not None else default


def _val(node: fx.Node) -> Any:
    return VAL.get(node)


def results(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The tensors that a node returns, without results that are None."""
    val = _val(node)
    if isinstance(val, torch.Tensor):
        return (val,)
    if isinstance(val, (tuple, list)):
        return tuple(v for v in val if isinstance(v, torch.Tensor))
    return ()


def result_index(node: fx.Node) -> int:
    """The index of a getitem among the tensors that its source returns, not counting None."""
    source, position = node.args
    assert isinstance(source, fx.Node) and isinstance(position, int)
    val = _val(source)
    return sum(hasattr(v, "shape") for v in val[:position])


def _tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order; one that is given twice is listed twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


class Local(Protocol):
    """The arguments of an emitter: the local operands of one mesh coordinate, and operations on them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an operation to local values."""

    def shape(self, result: int = 0) -> list[int]:
        """The local shape of a result."""

    def operand_shape(self, operand: int) -> list[int]:
        """The local shape of an operand."""

    def result_range(self, dim: int) -> range:
        """The global indices that this coordinate owns of a dim of the first result."""

    def operand_range(self, operand: int, dim: int) -> range:
        """The global indices that this coordinate owns of a dim of an operand."""

    def result_axes(self, dim: int) -> tuple[str, ...]:
        """The mesh axes that split a dim of the first result."""

    def operand_axes(self, operand: int, dim: int) -> tuple[str, ...]:
        """The mesh axes that split a dim of an operand."""

    def is_distributed(self) -> bool:
        """Whether other processes may compute the same."""

    def is_first(self) -> bool:
        """Whether this coordinate is the first of those that compute the result."""


# -- the spelling of rules --------------------------------------------------------------------------


def letters(n: int) -> list[str]:
    """Names for n dims."""
    return [f"d{i}" for i in range(n)]


def spell(dims: Sequence[str]) -> str:
    """The text of an operand with these dims."""
    return " ".join(dims)
