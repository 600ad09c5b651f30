"""The registry of normal forms: a rule for each operation that has a normal form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tags import VAL
from torchard.kernels.terms.store import Store
from torchard.kernels.terms.terms import TermValue

__all__ = ["Evaluated", "EvaluatedCall", "EvaluationRule", "register", "rule_of"]

Evaluated = Any  # a TermValue, a tuple of them, or None


class EvaluatedCall:
    """A call of one node, with values in place of its operands.

    Attributes:
        args, kwargs: the arguments, with values in place of nodes.
        val: the result, as a fake tensor or several fake tensors.
    """

    def __init__(self, node: fx.Node, env: dict[fx.Node, Evaluated]) -> None:
        self.node = node
        arguments: Any = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        self.args: tuple[Any, ...] = arguments[0]
        self.kwargs: dict[str, Any] = arguments[1]
        self.val = VAL.of(node)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.val.shape)

    @property
    def dtype(self) -> torch.dtype:
        result: torch.dtype = self.val.dtype
        return result

    def arg(self, position: int, name: str = "", default: Any = None) -> Any:
        """An argument, given by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def tensors(self) -> list[TermValue]:
        """All tensor operands, in order."""
        return [v for v in _leaves((self.args, self.kwargs)) if isinstance(v, TermValue)]

    def literals(self) -> Hashable:
        """All arguments that are not tensors."""
        return _frozen((self.args, self.kwargs))


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _frozen(value: Any) -> Hashable:
    if isinstance(value, TermValue):
        return "value"
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in sorted(value.items()))
    return value if isinstance(value, Hashable) else repr(value)


EvaluationRule = Callable[[Store, EvaluatedCall], Evaluated]
_RULES: dict[Any, EvaluationRule] = {}


def register(*targets: Any) -> Callable[[EvaluationRule], EvaluationRule]:
    """Register a rule for operations; it returns NotImplemented for calls without a normal form."""

    def entered(rule: EvaluationRule) -> EvaluationRule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return entered


def rule_of(target: Any) -> EvaluationRule | None:
    """The rule of an operation; None if no rule is registered."""
    return _RULES.get(target)
