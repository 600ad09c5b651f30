"""Factor rules, one file per family of operations; importing this package registers them all."""

from torchard.sharding.rules import (
    attention,
    contract,
    create,
    cut,
    index,
    layout,
    loss,
    normal,
    pointwise,
    reduce,
)
from torchard.sharding.rules.registry import (
    REGISTRY,
    Call,
    Local,
    OpRule,
    find,
    lookup,
    register_rule,
    rule_of,
)

__all__ = [
    "REGISTRY",
    "Call",
    "Local",
    "OpRule",
    "attention",
    "contract",
    "create",
    "cut",
    "find",
    "index",
    "layout",
    "lookup",
    "loss",
    "normal",
    "pointwise",
    "reduce",
    "register_rule",
    "rule_of",
]
