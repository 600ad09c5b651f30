"""Operators of users whose results nobody uses: they are called for an effect, which no program keeps."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.programs.tags import SOURCE
from torchard.functional.torch_internals.operators import COLLECTIVES, aten

__all__ = ["check_used", "declare_pure"]

_LIBRARIES = frozenset(("aten", "prims", "torchard", COLLECTIVES, "c10d_functional"))
# What autograd and vmap put around a result by themselves.
_SAME = (
    *(aten.detach.default, aten.alias.default, operator.getitem, aten.stack.default, aten.cat.default),
    *(aten.unsqueeze.default, aten.view.default, aten.permute.default, aten.expand.default),
)
_pure: set[Any] = set()


def declare_pure(op: Any) -> None:
    """Note that an operator has no effects: a rule, for one, says all that it does."""
    _pure.add(op)


def check_used(graph: fx.Graph) -> None:
    """Refuse a user's operator whose result nobody uses: it would be dropped with its effect.

    Raises:
        PurityError: names the operator and the line.
    """
    calls = [n for n in graph.nodes if n.op == "call_function" and _may_have_effects(n.target)]
    # A batch may be several calls of one line, of which some are for a result that is not wanted.
    used = {(node.target, SOURCE.get(node)) for node in calls if _is_used(node)}
    for node in calls:
        if (node.target, SOURCE.get(node)) not in used:
            raise PurityError(
                f"{SOURCE.get(node)} calls {node.target} and uses no result of it: whatever it does "
                "besides (printing, counting) would be left out, since programs have results only. "
                "Return its result or compute with it, or call it outside of the transform. An operator "
                "without effects need not be called there; one with a rule (register_rule) may be."
            )


def _may_have_effects(target: Any) -> bool:
    schema = internals.schema_or_none(target)
    if schema is None or schema.is_mutable or target in _pure:
        return False
    return getattr(target, "namespace", "aten") not in _LIBRARIES


def _is_used(node: fx.Node) -> bool:
    return any(user.target not in _SAME or _is_used(user) for user in node.users)
