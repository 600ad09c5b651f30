"""The registry of factor rules: one entry per operation, the tables live beside this file."""

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
    """One operation of a program, seen from outside: its arguments and the shapes around it."""

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
        """A positional argument, by name where it was given so, else the schema's default."""
        args, kwargs = self.node.args, self.node.kwargs
        if position < len(args):
            return args[position]
        return kwargs.get(name, default) if name is not None else default


def _val(node: fx.Node) -> Any:
    return VAL.get(node)


def results(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The tensors a node returns (those it does not return, None, are left out)."""
    val = _val(node)
    if isinstance(val, torch.Tensor):
        return (val,)
    if isinstance(val, (tuple, list)):
        return tuple(v for v in val if isinstance(v, torch.Tensor))
    return ()


def result_index(node: fx.Node) -> int:
    """Which of its source's tensors a getitem takes (results that are None do not count)."""
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
    """What an emitter sees: the local values of one coordinate, and how to make more."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply an operation to local values."""

    def shape(self, result: int = 0) -> list[int]:
        """The local shape of a result."""

    def operand_shape(self, operand: int) -> list[int]:
        """The local shape of an operand."""

    def result_range(self, dim: int) -> range:
        """The global indices of a dim of the first result that this coordinate owns."""

    def operand_range(self, operand: int, dim: int) -> range:
        """The global indices of a dim of an operand that this coordinate owns."""


Text = str | Callable[[Call], str | Rule | None]
Emit = Callable[[Call, Local], Any]


@dataclass(frozen=True)
class OpRule:
    """A registered rule.

    Attributes:
        text: the factor rule, or a function of the call that gives it (None: gather).
        emit: how one coordinate computes its part; None applies the same operation.
        alias: True for bijective views: a reshard is made on the base and viewed again.
        check: what holds the rule of a call against its operation; raises where it is wrong.
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
    """Give operations a factor rule. Users' are checked: theirs is that of ``rule_check.py``."""
    for target in targets:
        if not isinstance(target, Absent):
            REGISTRY[target] = OpRule(text, emit, alias, check)


_POINTWISE: list[Callable[[Any], OpRule | None]] = []


def find(finder: Callable[[Any], OpRule | None]) -> Callable[[Any], OpRule | None]:
    """Register a finder for whole families of operations (say, all that torch tags pointwise)."""
    _POINTWISE.append(finder)
    return finder


@functools.cache
def _found(target: Any) -> OpRule | None:
    return next((r for finder in _POINTWISE if (r := finder(target)) is not None), None)


def lookup(target: Any) -> OpRule | None:
    """The rule of an operation, or None: it will be gathered."""
    return REGISTRY.get(target) or _found(target)


def rule_of(call: Call) -> Rule:
    """The rule for this call, the gathering rule where there is none."""
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
    """Parts of a bool are joined by "or", which nothing that makes a number of it respects."""
    bools = any(_val(call.operands[k]).dtype == torch.bool for k in group)
    return bools and any(r.dtype != torch.bool for r in results(call.node))


def letters(n: int) -> list[str]:
    """Names for n dims."""
    return [f"d{i}" for i in range(n)]


def spell(dims: Sequence[str]) -> str:
    """Dims as the text of an operand."""
    return " ".join(dims)
