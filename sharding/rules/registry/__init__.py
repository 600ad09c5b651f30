"""The registry of factor rules: what a rule and its emitter see of a call, and which rule a call has."""

from torchard.sharding.rules.registry.call import Call, Local, result_index, results
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
from torchard.sharding.rules.registry.text import letters, spell

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
