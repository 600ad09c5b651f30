"""The registry of factor rules: what a rule and its emitter see of a call, and which rule a call has."""

from torchard.sharding.rules.registry.call import Call, Local, letters, result_index, results, spell
from torchard.sharding.rules.registry.entries import (
    REGISTRY,
    Emit,
    OpRule,
    Text,
    find,
    lookup,
    register_rule,
    rule_of,
)

__all__ = [
    "REGISTRY",
    "Call",
    "Emit",
    "Local",
    "OpRule",
    "Text",
    "find",
    "letters",
    "lookup",
    "register_rule",
    "result_index",
    "results",
    "rule_of",
    "spell",
]
