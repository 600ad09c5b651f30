"""Factor rules that are broken on purpose: plans made by them are consistent, and wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from torchard.sharding.layouts.factors import Rule, instantiate
from torchard.sharding.rules import REGISTRY, Call, OpRule, lookup
from torchard.testing.prove.operations import Claim

Change = Callable[[Rule, Random], Rule]


def whole_lost(rule: Rule, rng: Random) -> Rule:
    """A factor that must be whole may be split; where it is on no result, parts are summed."""
    given = sorted(f for f in rule.whole if any(f in dim for dims in rule.ins for dim in dims))
    if not given:
        return rule
    lost = rng.choice(given)
    on_all = all(any(lost in dim for dim in dims) for dims in rule.outs)
    combine = rule.combine if on_all else tuple(sorted((*rule.combine, (lost, "sum"))))
    return replace(rule, whole=rule.whole - {lost}, combine=combine)


def linear_gained(rule: Rule, rng: Random) -> Rule:
    """Sums over ranks may come after an operation that is not linear."""
    if not rule.ins:
        return rule
    groups = [frozenset({k}) for k in range(len(rule.ins))] + [frozenset(range(len(rule.ins)))]
    return replace(rule, linear=(*rule.linear, rng.choice(groups)))


def other_reduction(rule: Rule, rng: Random) -> Rule:
    """Parts are joined by another operation."""
    changed = {"sum": "max", "max": "sum", "min": "max"}
    return replace(rule, combine=tuple((f, changed[op]) for f, op in rule.combine))


def reduction_lost(rule: Rule, rng: Random) -> Rule:
    """Partial results are taken for results."""
    return replace(rule, combine=())


def claims_of(rule: Rule) -> list[Claim]:
    """All that a rule claims of its operator."""
    tied = {f for pair in rule.ties for f in pair} | set(rule.halo[:1] if rule.halo else ())
    free = [f for f in range(len(rule.sizes)) if f not in rule.whole | tied]
    return [
        *(Claim("split", (f,)) for f in free),
        *(Claim("tie", pair) for pair in rule.ties),
        *(Claim("linear", tuple(sorted(group))) for group in rule.linear),
    ]


CHANGES: tuple[Change, ...] = (whole_lost, linear_gained, other_reduction, reduction_lost)


@contextlib.contextmanager
def broken(target: Any, change: Change | None, seed: int) -> Iterator[None]:
    """A context in which the rule of an operation is changed; without a change, its emitter is lost."""
    entry = lookup(target)
    assert entry is not None
    known = REGISTRY.get(target)

    def text(call: Call) -> Rule | None:
        made = entry.text if isinstance(entry.text, str) else entry.text(call)
        rule = instantiate(made, call.ins, call.outs) if isinstance(made, str) else made
        return rule if rule is None or change is None else change(rule, Random(seed))

    REGISTRY[target] = OpRule(text, None if change is None else entry.emit, entry.alias)
    try:
        yield
    finally:
        if known is None:
            del REGISTRY[target]
        else:
            REGISTRY[target] = known
