"""Functions whose derivative is a rule: how their arguments become a call's tensors, and its results."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import is_inexact_dtype
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.custom.rules import RuleCall, Tensors, applied
from torchard.functional.loops.differentiated import kind_of
from torchard.functional.tracing.trace_state import active

__all__ = ["FunctionCall", "Ruled", "TensorTree", "calls_seen", "line_of", "said"]


class TensorTree:
    """A tree without its tensors.

    Attributes:
        kinds: the shape, dtype and device of each tensor.
    """

    def __init__(self, value: Any) -> None:
        leaves, self.structure = tree.flatten(value)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.kinds = [kind_of(leaves[i]) for i in self._places]
        self._rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """The tensors of the tree."""
        leaves = tree.leaves(value)
        return [leaves[i] for i in self._places]

    def build(self, tensors: Sequence[Any], others: bool = True) -> Any:
        """The tree of these tensors; its other leaves, or None for them."""
        leaves = list(self._rest) if others else [None] * len(self._rest)
        for i, tensor in zip(self._places, tensors, strict=True):
            leaves[i] = tensor
        return tree.unflatten(self.structure, leaves)

    def floating(self) -> list[int]:
        """The positions of the tensors that have a derivative."""
        return [i for i, (_, dtype, _) in enumerate(self.kinds) if is_inexact_dtype(dtype)]

    def zeros(self) -> list[torch.Tensor]:
        """Zeros like each tensor that has a derivative."""
        kinds = (self.kinds[i] for i in self.floating())
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]


class Ruled(Wrapper):
    """A function whose derivative is a rule.

    Attributes:
        who: the decorator, in messages.
        static: the numbers of the arguments that are not differentiated; the rule receives them first.
    """

    who: str

    def __init__(self, fn: Callable[..., Any], nondiff_argnums: int | Sequence[int]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn = fn
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)
        try:
            self.signature: inspect.Signature | None = inspect.signature(fn)
        except ValueError:  # a builtin without one
            self.signature = None
        self.static = (nondiff_argnums,) if isinstance(nondiff_argnums, int) else tuple(nondiff_argnums)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        args = self._positional(args, kwargs)
        self._check_static(args)
        for calls in _seen:
            calls.append((self, args))
        parts = TensorTree(args)
        tensors = parts.tensors(args)
        differentiated = _may_be_differentiated(tensors)
        state = active()
        if state is None and not differentiated:
            return self.fn(*args)
        if state is not None:
            tensors = list(map(state.kept, tensors))
        call = self._call(parts, differentiated)
        made = applied(call, tensors)
        return call.results.build(made)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the rule receives the instance first, and gives None for it."""
        return self if instance is None else functools.partial(self, instance)

    @abstractmethod
    def rule_text(self) -> str:
        """The rule, in messages: ``the bwd of f (model.py:3 in bwd)``."""

    @abstractmethod
    def _call(self, args: TensorTree, differentiated: bool) -> FunctionCall:
        """One call; ``differentiated`` is whether a derivative of it is wanted."""

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments as the rule receives them: by position, defaults included."""
        if self.signature is None:
            return args
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise DerivativeError(
                f"{self.who}: {self.__name__} takes {', '.join(bound.kwargs)} by name only, and its rule "
                "receives all arguments by position: make them positional."
            )
        return bound.args

    def _check_static(self, args: tuple[Any, ...]) -> None:
        for i in self.static:
            if any(isinstance(leaf, torch.Tensor) for leaf in tree.leaves(args[i])):
                raise DerivativeError(
                    f"{source.begins_here()}{self.who}: argument {i} of {self.__name__} has tensors, and "
                    "nondiff_argnums is for what has none. Leave it out; the rule may give None for it."
                )


class FunctionCall(RuleCall):
    """A call of a function with a rule.

    Attributes:
        function: the function.
        args: its arguments, whose tensors are the inputs.
        results: once it has run, its result.
    """

    results: TensorTree

    def __init__(self, function: Ruled, args: TensorTree) -> None:
        self.function, self.args, self.kinds = function, args, internals.level_kinds()

    def called(self, fn: Callable[..., Any], inputs: Tensors) -> Any:
        """What a function returns for the arguments with these inputs.

        Raises:
            DerivativeError: the rule applies, and the function reads a value that is differentiated and
                is not among the inputs.
        """
        if not self.applies:
            return fn(*self.args.build(inputs))
        with _Closed(self.function, inputs, self.kinds):
            return fn(*self.args.build(inputs))

    def finished(self, result: Any, inputs: Tensors) -> list[torch.Tensor]:
        """The tensors of the result; instead of an input a view, as torch wants results of its own."""
        self.results = TensorTree(result)
        known = set(map(id, inputs))
        tensors = [
            x.view_as(x) if id(x) in known else x for x in self.results.tensors(result)
        ]
        self.count = len(tensors)
        return tensors

    def apart(self) -> tuple[list[Any], list[int]]:
        """The arguments that are not differentiated, and the numbers of the others."""
        args = self.args.build([None] * len(self.args.kinds))
        static = [i % len(args) for i in self.function.static]
        return [args[i] for i in static], [i for i in range(len(args)) if i not in static]


class _Closed(TorchFunctionMode):
    """Refuses tensors that are differentiated and are not computed from the inputs."""

    def __init__(self, function: Ruled, inputs: Tensors, kinds: Sequence[Any]) -> None:
        super().__init__()
        self.kinds = kinds
        self.function = function
        self.known = {id(x): x for x in inputs}
        self.state, self.levels = active(), len(internals.level_kinds())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if active() is not self.state or len(internals.level_kinds()) != self.levels:
            return self._deeper(func, args, kwargs)
        for leaf in tree.leaves((args, kwargs)):
            self._check(leaf)
        made = func(*args, **kwargs)
        # Views of inputs are marked as the inputs are.
        self.known.update((id(x), x) for x in tree.leaves(made) if self._is_followed(x))
        return made

    def _deeper(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call inside of a further transform, by which tensors are followed; known are its results."""
        made = func(*args, **kwargs)
        if active() is self.state:
            given = [self._base(x) for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if all(id(x) in self.known or not self._is_followed(x) for x in given):
                tensors = [x for x in tree.leaves(made) if isinstance(x, torch.Tensor)]
                self.known.update((id(x), x) for x in map(self._base, tensors))
        return made

    def _base(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor inside of the levels that a further transform has added."""
        while internals.is_wrapped(tensor) and id(tensor) not in self.known:
            tensor = internals.wrapped_in(tensor)[0]
        return tensor

    def _check(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            tensor = internals.without_ended_levels(tensor)  # as a pullback keeps them
        if id(tensor) not in self.known and self._is_followed(tensor):
            raise DerivativeError(
                f"{source.begins_here()}{self.function.who}: {self.function.__name__} reads a tensor of "
                f"shape {list(tensor.shape)} that is differentiated, or mapped by vmap, and is none of "
                "its arguments, so its rule gives no gradient for it: pass it as an argument "
                "(closure_convert does so), or detach it before."
            )

    def _is_followed(self, tensor: Any) -> bool:
        """Whether it is a tensor that autograd, or a level of torch.func, follows."""
        if not isinstance(tensor, torch.Tensor):
            return False
        if self.state is not None and not self.state.native(tensor):
            tensor = self.state.lift(tensor)
        dual = self.state is None and internals.JVP not in self.kinds and internals.has_tangent(tensor)
        return dual or internals.is_followed(tensor, self.kinds)


_seen: list[list[tuple[Ruled, tuple[Any, ...]]]] = []


@contextmanager
def calls_seen() -> Iterator[list[tuple[Ruled, tuple[Any, ...]]]]:
    """A context that collects the calls of functions with a rule, and their arguments."""
    calls: list[tuple[Ruled, tuple[Any, ...]]] = []
    _seen.append(calls)
    try:
        yield calls
    finally:
        _seen.remove(calls)


def _may_be_differentiated(tensors: Tensors) -> bool:
    """Whether a derivative of what is computed of tensors may be wanted."""
    kinds = internals.level_kinds()
    if internals.GRAD in kinds or internals.JVP in kinds or internals.forward_ad_active():
        return True
    followed = (each for x in tensors for each in (x, *internals.wrapped_in(x)))
    return torch.is_grad_enabled() and any(each.requires_grad for each in followed)


def line_of(fn: Any) -> str:
    """Where a function is written, as the beginning of a message."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return "" if code is None else f"{source.of_code(code)}: "


def said(value: Any) -> str:
    """A value, in messages."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)
