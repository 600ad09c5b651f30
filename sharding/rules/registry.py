"""The registry of factor rules: one entry per operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from torchard.functional.core.arguments import checked
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import Absent
from torchard.sharding.layouts.factors import Rule, gathering_rule, instantiate
from torchard.sharding.layouts.tags import CALL, RULE

__all__ = ["REGISTRY", "Call", "Local", "OpRule", "find", "lookup", "register_rule", "rule_of"]


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
        operands = tuple(a for a in _tensor_args(node) if isinstance(_val(a), torch.Tensor))
        ins = tuple(tuple(_val(a).shape) for a in operands)
        call = Call(node, operands, ins, tuple(tuple(v.shape) for v in results(node)))
        CALL.set(node, call)
        return call

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


def _tensor_args(node: fx.Node) -> Iterator[fx.Node]:
    def walk(value: Any) -> Iterator[fx.Node]:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, (tuple, list)):
            for v in value:
                yield from walk(v)

    for value in (*node.args, *node.kwargs.values()):
        yield from walk(value)


class Local(Protocol):
    """What an emitter works with: the local operands of one mesh coordinate, and operations on them."""

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


Text = str | Callable[[Call], str | Rule | None]
Emit = Callable[[Call, Local], Any]


@dataclass(frozen=True)
class OpRule:
    """A registered rule.

    Attributes:
        text: the factor rule, or a function of the call that returns it (None to gather the operands).
        emit: how one coordinate computes its shard; None applies the operation to its local operands.
        alias: True for bijective views: their base is resharded, and viewed again.
        check: a test of the rule of a call against its operation, which raises if they disagree.
    """

    text: Text
    emit: Emit | None = None
    alias: bool = False
    check: Callable[[Call, Rule], None] | None = None


REGISTRY: dict[Any, OpRule] = {}


@checked
def register_rule(
    *targets: Any,
    text: Text,
    emit: Emit | None = None,
    alias: bool = False,
    check: Callable[[Call, Rule], None] | None = None,
) -> None:
    """Register a factor rule of operations. Users' rules are also checked, by ``rule_check.py``."""
    for target in targets:
        if not isinstance(target, Absent):
            REGISTRY[target] = OpRule(text, emit, alias, check)


_FINDERS: list[Callable[[Any], OpRule | None]] = []


def find(finder: Callable[[Any], OpRule | None]) -> Callable[[Any], OpRule | None]:
    """Register a function from operations to rules (or None), for families without a table.

    All operations that torch tags pointwise are such a family.
    """
    _FINDERS.append(finder)
    return finder


@functools.cache
def _family_rule(target: Any) -> OpRule | None:
    return next((r for finder in _FINDERS if (r := finder(target)) is not None), None)


def lookup(target: Any) -> OpRule | None:
    """The entry of an operation; None if it has none, so that its operands are gathered."""
    return REGISTRY.get(target) or _family_rule(target)


def rule_of(call: Call) -> Rule:
    """The factor rule of a call; the gathering rule if no other one applies."""
    cached = RULE.get(call.node)
    if isinstance(cached, Rule):
        return cached
    entry = lookup(call.target)
    rule = _instantiate(entry, call) if entry is not None else None
    if rule is None:
        rule = gathering_rule(call.ins, call.outs)
    RULE.set(call.node, rule)
    if entry is not None and entry.check is not None and not rule.gathered:
        entry.check(call, rule)
    return rule


def _instantiate(entry: OpRule, call: Call) -> Rule | None:
    text = entry.text if isinstance(entry.text, str) else entry.text(call)
    if text is None:
        return None
    rule = instantiate(text, call.ins, call.outs) if isinstance(text, str) else text
    return replace(rule, linear=tuple(g for g in rule.linear if not _counts_bools(call, g)))


def _counts_bools(call: Call, group: frozenset[int]) -> bool:
    """Whether an operation turns partial bools, which combine by "or", into numbers, which add up."""
    bools = any(_val(call.operands[k]).dtype == torch.bool for k in group)
    return bools and any(r.dtype != torch.bool for r in results(call.node))


def letters(n: int) -> list[str]:
    """Names for n dims."""
    return [f"d{i}" for i in range(n)]


def spell(dims: Sequence[str]) -> str:
    """The text of an operand with these dims."""
    return " ".join(dims)
