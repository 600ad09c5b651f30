"""The registered rules: one entry per operation or family of operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchard.functional.core.arguments import checked
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import Absent
from torchard.sharding.layouts.factors import Rule, gathering_rule, instantiate
from torchard.sharding.layouts.tags import RULE
from torchard.sharding.rules.registry.call import Call, Local, results

__all__ = ["REGISTRY", "Emit", "OpRule", "Text", "find", "lookup", "register_rule", "rule_of"]

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
    if any(r.dtype in _NOT_ADDED for r in results(call.node)):
        rule = _without_sums(rule)
    linear = tuple(g for g in rule.linear if not _counts_bools(call, g))
    return rule if linear == rule.linear else replace(rule, linear=linear)


# Dtypes that torch moves and casts, but does not add.
_NOT_ADDED = frozenset(
    {
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
        torch.float8_e8m0fnu,
    }
)


def _without_sums(rule: Rule) -> Rule:
    """The rule without partial sums: a table of float8 is gathered where its rows are looked up."""
    summed = {f for f, op in rule.combine if op == "sum"}
    combine = tuple((f, op) for f, op in rule.combine if f not in summed)
    return replace(rule, whole=rule.whole | summed, combine=combine, linear=())


def _counts_bools(call: Call, group: frozenset[int]) -> bool:
    """Whether an operation turns partial bools, which combine by "or", into numbers, which add up."""
    bools = any(VAL.of(call.operands[k]).dtype == torch.bool for k in group)
    return bools and any(r.dtype != torch.bool for r in results(call.node))
