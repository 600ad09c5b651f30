"""Operators of users whose results nobody uses: they are called for an effect, which no program keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.programs.tags import SOURCE
from torchard.functional.programs.views import needed_by
from torchard.functional.torch_internals.operators import COLLECTIVES

__all__ = ["check_used", "declare_pure", "effects_in", "may_have_effects", "runs_body"]

_LIBRARIES = frozenset(("aten", "prims", "torchard", COLLECTIVES, "c10d_functional"))
_pure: set[Any] = set()
# Kinds of targets that run a body, and the operations of it that what is read of a node depends on.
_LOOPS: dict[type, Callable[[fx.Node], set[fx.Node]]] = {}

# An operator and the line that calls it. A batch may be several calls of one line, of which some are for
# a result that is not wanted; a derivative may call it again.
CalledAt = tuple[Any, str | None]


def declare_pure(op: Any) -> None:
    """Note that an operator has no effects: a rule, for one, says all that it does."""
    _pure.add(op)


def runs_body(kind: type, needed: Callable[[fx.Node], set[fx.Node]]) -> None:
    """Note that targets of a kind run a body, and how to find what a node needs of it."""
    _LOOPS[kind] = needed


def effects_in(graph: fx.Graph) -> list[CalledAt]:
    """The calls of users' operators in a graph and in its loops' bodies."""
    return list(dict.fromkeys(_effects(graph.nodes)))


def check_used(effects: list[CalledAt], graph: fx.Graph) -> None:
    """Refuse users' operators that a graph was recorded with and, purified, does not need any more.

    Raises:
        PurityError: names the operator and the line.
    """
    needed = set(_effects(needed_by([graph.output_node()]))) if effects else set()
    for target, source in effects:
        if (target, source) not in needed:
            raise PurityError(
                f"{source} calls {target}, and no result depends on its return value, so its side "
                "effects (printing, counting) would be lost, since a program only computes results. "
                "Return its result or compute a result with it, or call it outside of the transform. "
                "If it has no side effects, do not call it, or give it a rule (register_rule)."
            )


def _effects(nodes: Iterable[fx.Node]) -> Iterator[CalledAt]:
    for node in nodes:
        if type(node.target) in _LOOPS:
            yield from _effects(_LOOPS[type(node.target)](node))
        elif node.op == "call_function" and may_have_effects(node.target):
            yield node.target, SOURCE.get(node)


def may_have_effects(target: Any) -> bool:
    """Whether a target is a custom operator that is not known to have no side effects."""
    if getattr(target, "namespace", "aten") in _LIBRARIES or target in _pure:
        return False
    schema = internals.schema_or_none(target)
    return schema is not None and not schema.is_mutable
