"""custom_vjp: a function whose gradient is a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import is_inexact_dtype
from torchard.functional.custom.ruled import FunctionCall, Ruled, TensorTree, line_of, said
from torchard.functional.custom.rules import Tensors
from torchard.functional.loops.differentiated import or_zeros

__all__ = ["custom_vjp"]

Kind = tuple[torch.Size, torch.dtype, torch.device]


class custom_vjp(Ruled):
    """A function whose gradient is a rule that is given, by ``defvjp``.

    The rule is right under derivatives of any order and kind, as its own code is differentiated: ``bwd``,
    what ``fwd`` computes for it, and for forward mode ``bwd`` transposed (it must be linear in the
    cotangents). It is batched by vmap, and planned, recomputed and fused like any other code. Outside of
    transforms a call keeps its arguments if there are residuals of floating dtype that are neither
    arguments nor results, since a second derivative needs them.

    Args:
        fn: a pure function of pytrees. What it reads besides its arguments has no gradient: if that is
            differentiated, it is refused.
        nondiff_argnums: the numbers of arguments that the rule receives first, and has no gradients of.
            Leaves that are no tensors need not be among them.

    Raises (when called):
        DerivativeError: it is differentiated or traced, and has no rule; or the rule returns something
            else than one gradient for each argument, which may be None, in its structure and shapes.

    Source: ``jax.custom_vjp``, which refuses forward mode.

    >>> import torch, torchard as ta
    >>> @ta.custom_vjp
    ... def clipped(x, bound):
    ...     return x.clone()
    >>> clipped.defvjp(
    ...     lambda x, bound: (x.clone(), bound),
    ...     lambda bound, ct: (ct.clamp(-bound, bound), None),
    ... )
    >>> torch.func.grad(lambda x: clipped(x, 1.0).square().sum())(torch.tensor([0.2, 3.0]))
    tensor([0.4000, 1.0000])
    """

    who = "custom_vjp"

    @checked
    def __init__(
        self, fn: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()
    ) -> None:
        super().__init__(fn, nondiff_argnums)
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None

    @checked
    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Give the rule.

        Args:
            fwd: of the function's arguments; returns its result and residuals, a pytree.
            bwd: of the arguments of ``nondiff_argnums``, then residuals and the result's cotangent, with
                None for what is no floating tensor; returns a tuple of gradients, one for each of the
                other arguments. None stands for zeros.

        Returns:
            None.
        """
        self.fwd, self.bwd = fwd, bwd

    @property
    def reads(self) -> tuple[Any, ...]:
        """The functions that a call depends on."""
        return self.fn, self.fwd, self.bwd

    def rule_text(self) -> str:
        """The rule, in messages."""
        return f"the rule of {self.__name__} ({line_of(self.bwd).removesuffix(': ')})"

    def _call(self, args: TensorTree, differentiated: bool) -> FunctionCall:
        if self.fwd is None or self.bwd is None:
            raise DerivativeError(
                f"{line_of(self.fn)}custom_vjp: {self.__name__} has no rule: give it one by "
                f"{self.__name__}.defvjp(fwd, bwd)."
            )
        return _VjpCall(self, args, self.fwd, self.bwd, differentiated)


class _VjpCall(FunctionCall):
    """A call of a function with a gradient of its own."""

    residuals: TensorTree

    def __init__(
        self,
        function: Ruled,
        args: TensorTree,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        differentiated: bool,
    ) -> None:
        super().__init__(function, args)
        self.fwd, self.bwd, self.differentiated = fwd, bwd, differentiated

    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        if not self.differentiated:
            return self.finished(self.called(self.function.fn, inputs), inputs)
        made = self.called(self.fwd, inputs)
        if not isinstance(made, tuple) or len(made) != 2:
            raise DerivativeError(
                f"{line_of(self.fwd)}custom_vjp: the fwd of {self.function.__name__} returned "
                f"{said(made)}; it returns a pair: the result, and the residuals that bwd needs."
            )
        results = self.finished(made[0], inputs)
        self.residuals = TensorTree(made[1])
        return [*results, *self._kept([*inputs, *results], self.residuals.tensors(made[1]))]

    def _kept(self, known: Tensors, residuals: Tensors) -> Tensors:
        """The residuals that are not known; where each one is, is remembered."""
        values, position = list(known), {id(x): i for i, x in enumerate(known)}
        for x in residuals:
            if id(x) not in position:
                position[id(x)] = len(values)
                values.append(x)
        self.saved = [position[id(x)] for x in residuals]
        return values[len(known) :]

    def pull(self, saved: Tensors, cotangents: Tensors) -> list[torch.Tensor | None]:
        given: list[Any] = [None] * self.count
        for i, cotangent in zip(self.results.floating(), cotangents, strict=True):
            given[i] = cotangent
        static, numbers = self.apart()
        gradients = self.bwd(
            *static, self.residuals.build(saved), self.results.build(given, others=False)
        )
        where = f"{line_of(self.bwd)}custom_vjp: the bwd of {self.function.__name__} returned "
        if not isinstance(gradients, (tuple, list)) or len(gradients) != len(numbers):
            raise DerivativeError(
                f"{where}{said(gradients)}; it returns a tuple of {len(numbers)}: a gradient for each "
                "argument, or None."
            )
        return self._of_tensors(where, dict(zip(numbers, gradients, strict=True)))

    def _of_tensors(self, where: str, gradients: dict[int, Any]) -> list[torch.Tensor | None]:
        """The gradient of each tensor among the arguments."""
        found: list[torch.Tensor | None] = []
        tensors = iter(self.args.kinds)
        marked = self.args.build([_TENSOR] * len(self.args.kinds), others=False)
        for number, argument in enumerate(marked):
            path, gradient = f"argument {number}", gradients.get(number)
            leaves, structure = tree.flatten(argument)
            given = [None] * len(leaves) if gradient is None else tree.leaves(gradient)
            if gradient is not None and tree.structure(gradient) != structure:
                raise DerivativeError(
                    f"{where}for {path} a gradient of the structure {tree.structure(gradient)}; the "
                    f"argument has {structure}."
                )
            for at, leaf, one in zip(tree.paths(argument, path), leaves, given, strict=True):
                if leaf is _TENSOR:
                    found.append(_checked(where, at, next(tensors), one))
        return found

    def push(
        self, inputs: Tensors, saved: Tensors, tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The transpose of ``pull``, which is linear in the cotangents."""
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def pulled(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            gradients = self.pull(saved, cotangents)
            return tuple(or_zeros(gradients[i], self.args.kinds[i]) for i in moved)

        given: Any = tuple(tangents[i] for i in moved)
        return list(torch.func.vjp(pulled, *self.results.zeros())[1](given))


_TENSOR = object()


def _checked(where: str, path: str, kind: Kind, gradient: Any) -> torch.Tensor | None:
    shape, dtype, _ = kind
    if gradient is None or not is_inexact_dtype(dtype):
        return None
    if not isinstance(gradient, torch.Tensor) or gradient.shape != shape:
        raise DerivativeError(
            f"{where}{said(gradient)} as the gradient of {path}, whose shape is {list(shape)}."
        )
    return gradient
