"""custom_jvp: a function whose tangent is a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import DerivativeError
from torchard.functional.custom.ruled import FunctionCall, Ruled, TensorTree, line_of, said
from torchard.functional.custom.rules import Tensors

__all__ = ["custom_jvp"]


class custom_jvp(Ruled):
    """A function whose tangent is a rule that is given, by ``defjvp``.

    Reverse mode transposes the rule, so it must be linear in the tangents. Its own code is differentiated
    for derivatives of higher orders, batched by vmap, and planned, recomputed and fused like any other.

    Args:
        fn: a pure function of pytrees. What it reads besides its arguments has no derivative: if that is
            differentiated, it is refused.
        nondiff_argnums: the numbers of arguments that the rule receives first, and has no tangents of.
            Leaves that are no tensors need not be among them.

    Raises (when called):
        DerivativeError: it is differentiated or traced, and has no rule; or the rule returns something
            else than a pair of the result and its tangent, of one structure and the same shapes.

    Source: ``jax.custom_jvp``.

    >>> import torch, torchard as ta
    >>> @ta.custom_jvp
    ... def log1pexp(x):
    ...     return torch.log1p(torch.exp(x))
    >>> @log1pexp.defjvp
    ... def _(primals, tangents):
    ...     (x,), (t,) = primals, tangents
    ...     return log1pexp(x), torch.sigmoid(x) * t
    >>> torch.func.grad(log1pexp)(torch.tensor(100.0))
    tensor(1.)
    """

    who = "custom_jvp"

    @checked
    def __init__(self, fn: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()) -> None:
        super().__init__(fn, nondiff_argnums)
        self.rule: Callable[..., Any] | None = None

    @checked
    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Give the rule.

        Args:
            rule: of the arguments of ``nondiff_argnums``, then two tuples: the other arguments, and their
                tangents, with None for what is no floating tensor; returns the result and its tangent.

        Returns:
            The rule, so that this is a decorator.
        """
        self.rule = rule
        return rule

    @checked
    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Give one rule for each argument; the result's tangent is the sum of theirs.

        Args:
            rules: ``(tangent, result, *arguments) -> tangent of the result``; None for arguments without
                a derivative.

        Returns:
            None.
        """

        def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            result = self(*primals)
            moved = [
                each(tangent, result, *primals)
                for each, tangent in zip(rules, tangents, strict=True)
                if each is not None
            ]
            return result, tree.map(lambda first, *others: sum(others, start=first), *moved)

        self.rule = rule

    @property
    def reads(self) -> tuple[Any, ...]:
        """The functions that a call depends on."""
        return self.fn, self.rule

    def rule_text(self) -> str:
        """The rule, in messages."""
        return f"the rule of {self.__name__} ({line_of(self.rule).removesuffix(': ')})"

    def _call(self, args: TensorTree, differentiated: bool) -> FunctionCall:
        if self.rule is None:
            raise DerivativeError(
                f"{line_of(self.fn)}custom_jvp: {self.__name__} has no rule: give it one by "
                f"{self.__name__}.defjvp(rule)."
            )
        return _JvpCall(self, args, self.rule)


class _JvpCall(FunctionCall):
    """A call of a function with a tangent of its own."""

    def __init__(self, function: Ruled, args: TensorTree, rule: Callable[..., Any]) -> None:
        super().__init__(function, args)
        self.rule = rule
        self.saved = range(len(args.kinds))

    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        return self.finished(self.called(self.function.fn, inputs), inputs)

    def push(
        self, inputs: Tensors, saved: Tensors, tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        given: list[Any] = [None] * len(inputs)
        for i, zeros in zip(self.args.floating(), self.args.zeros(), strict=True):
            given[i] = zeros if tangents[i] is None else tangents[i]
        static, numbers = self.apart()
        primals, moved = self.args.build(inputs), self.args.build(given, others=False)
        made = self.rule(*static, tuple(primals[i] for i in numbers), tuple(moved[i] for i in numbers))
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise DerivativeError(
                f"{self._where}{said(made)}; it returns a pair: the result, and its tangent."
            )
        return self._checked(made[1])

    @property
    def _where(self) -> str:
        return f"{line_of(self.rule)}custom_jvp: the rule of {self.function.__name__} returned "

    def _checked(self, tangent: Any) -> list[torch.Tensor]:
        """The tangents of the result's tensors that have one."""
        if tree.structure(tangent) != self.results.structure:
            raise DerivativeError(
                f"{self._where}a tangent of the structure {tree.structure(tangent)}; the result has "
                f"{self.results.structure}."
            )
        leaves = self.results.tensors(tangent)
        found = []
        for i in self.results.floating():
            shape, dtype, _ = self.results.kinds[i]
            leaf = leaves[i]
            if not isinstance(leaf, torch.Tensor) or leaf.shape != shape:
                raise DerivativeError(
                    f"{self._where}{said(leaf)} as the tangent of a result of shape {list(shape)}."
                )
            found.append(leaf.to(dtype))
        return found

    def pull(self, saved: Tensors, cotangents: Tensors) -> list[torch.Tensor | None]:
        """The transpose of ``push``, which is linear in the tangents."""
        floating = self.args.floating()

        def pushed(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tangents: list[torch.Tensor | None] = [None] * len(saved)
            for i, tangent in zip(floating, given, strict=True):
                tangents[i] = tangent
            return tuple(self.push(saved, saved, tangents))

        pulled = iter(torch.func.vjp(pushed, *self.args.zeros())[1](tuple(cotangents)))
        return [next(pulled) if i in floating else None for i in range(len(saved))]
