"""Checks of arguments against a function's annotations.

``@checked`` checks the arguments of a public function before it runs. The error names the function, the
argument and the value, and shows how a valid value is written.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from torchard.functional.core.placed import is_placed

__all__ = ["AtLeast", "CheckedInside", "Like", "check_fields", "checked", "nearest", "written"]

Params = ParamSpec("Params")
Result = TypeVar("Result")


class AtLeast(float):
    """A lower bound of a number: ``Annotated[int, AtLeast(1)]``."""


class Like(str):
    """An example of a valid argument, for messages: ``Annotated[Tensor, Like("random.key(0)")]``."""


class CheckedInside:
    """Marks a parameter that the function checks itself: ``Annotated[Where, CheckedInside]``."""


def checked(fn: Callable[Params, Result]) -> Callable[Params, Result]:
    """fn with its arguments checked against its annotations.

    Raises (when called):
        TypeError: an argument is of another type.
        ValueError: a number is NaN or out of range, or a string is none of the choices.
    """
    who = fn.__qualname__.removesuffix(".__init__")

    @functools.wraps(fn)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():  # it cannot trace what follows
            return fn(*args, **kwargs)
        signature = _signature(fn)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{who}: {error}. {_right_call(who, fn, signature)}") from None
        _check(who, _hints(fn), _one_by_one(signature, bound.arguments))
        __tracebackhide__ = _is_assertion
        return fn(*args, **kwargs)

    return run


def _is_assertion(caught: Any) -> bool:
    """Whether pytest hides a frame: a failing law is shown at the user's line."""
    return issubclass(caught.type, AssertionError)


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass against their annotations, for its ``__post_init__``."""
    kind: Any = type(record)
    values = ((name, name, getattr(record, name)) for name in record.__dataclass_fields__)
    _check(kind.__name__, _hints(kind), values)


def _right_call(who: str, fn: Callable[..., Any], signature: inspect.Signature) -> str:
    """How a function is called; transforms are called differently in other libraries."""
    returned = _hints(fn).get("return")
    kind = typing.get_origin(returned) or returned
    makes = isinstance(kind, type) and issubclass(kind, collections.abc.Callable)  # type: ignore[arg-type]
    if makes and next(iter(signature.parameters), "") == "fn":
        return (
            f"{who} takes a function and returns one: call {who}(fn, ...)(*args), or decorate with "
            f"@functools.partial({who}, ...)."
        )
    likes = [f"{name} as in {like}" for name, hint in _hints(fn).items() for like in _examples(hint)]
    return f"Call {who}{_parameters(signature)}{', with ' if likes else ''}{', '.join(likes)}."


# Characters of a default that is shown.
_LONGEST_DEFAULT = 60


def _parameters(signature: inspect.Signature) -> inspect.Signature:
    """A signature to show: without annotations and self, long defaults left out."""
    empty = inspect.Parameter.empty
    shown = [
        p.replace(annotation=empty, default=p.default if _is_short(p.default) else ...)
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    return signature.replace(parameters=shown, return_annotation=empty)


def _is_short(default: Any) -> bool:
    return default is inspect.Parameter.empty or len(repr(default)) <= _LONGEST_DEFAULT


@functools.cache
def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fn)


@functools.cache
def _hints(fn: Any) -> dict[str, Any]:
    return typing.get_type_hints(fn, include_extras=True)


def _one_by_one(
    signature: inspect.Signature, given: dict[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """For each value: the parameter's name, the argument path, and the value."""
    for name, value in given.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            yield from ((name, f"{name}[{i}]", item) for i, item in enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            yield from ((name, key, item) for key, item in value.items())
        else:
            yield name, name, value


def _check(who: str, hints: dict[str, Any], values: Iterable[tuple[str, str, Any]]) -> None:
    for name, path, value in values:
        hint = hints.get(name, Any)
        wrong = _misfit(value, hint, path)
        if wrong is not None:
            error = ValueError if _is_a(value, _without_bounds(hint)) else TypeError
            raise error(f"{who}: {wrong}, but {_must(name, path, wrong, hint)}.")


# -- does a value fit ---------------------------------------------------------------------------------


def _misfit(value: Any, hint: Any, path: str) -> str | None:
    """The innermost value that does not match its hint, in words; None if all do."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    if hint is Any:
        return None
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _MISFITS:
        return _MISFITS[origin](value, inner, path)
    if not _is_a(value, hint) or (isinstance(value, float) and math.isnan(value)):
        return _is(value, path)
    return _misfit_inside(value, origin, inner, path)


def _misfit_annotated(value: Any, inner: tuple[Any, ...], path: str) -> str | None:
    if CheckedInside in inner:
        return None
    wrong = _misfit(value, inner[0], path)
    below = wrong is None and any(isinstance(b, AtLeast) and value < b for b in inner[1:])
    return _is(value, path) if below else wrong


def _misfit_option(value: Any, inner: tuple[Any, ...], path: str) -> str | None:
    if torch.device in inner and isinstance(value, str):
        return None if _is_device(value) else _is(value, path)
    problems = [_misfit(value, option, path) for option in inner]
    misfits = [problem for problem in problems if problem is not None]
    nested = [problem for problem in misfits if not problem.startswith(f"{path} is ")]
    return None if None in problems else (nested or misfits)[0]


def _misfit_choice(value: Any, inner: tuple[Any, ...], path: str) -> str | None:
    return None if value in inner else _is(value, path)


_MISFITS: dict[Any, Callable[[Any, tuple[Any, ...], str], str | None]] = {
    typing.Annotated: _misfit_annotated,
    typing.Union: _misfit_option,
    types.UnionType: _misfit_option,
    typing.Literal: _misfit_choice,
}


def _misfit_inside(value: Any, origin: Any, inner: tuple[Any, ...], path: str) -> str | None:
    if origin is tuple and inner[-1:] != (Ellipsis,):
        if len(value) != len(inner):
            return f"{_is(value, path)} of length {len(value)}"
        pairs = [(f"{path}[{i}]", v, hint) for i, (v, hint) in enumerate(zip(value, inner))]  # noqa: B905
    elif isinstance(value, collections.abc.Mapping) and len(inner) == 2:
        pairs = [(f"a key of {path}", k, inner[0]) for k in value]
        pairs += [(f"{path}[{k!r}]", v, inner[1]) for k, v in value.items()]
    elif inner and origin is not None and _is_container(origin):
        pairs = [(f"{path}[{i}]", v, inner[0]) for i, v in enumerate(value)]
    else:
        return None
    problems = (_misfit(v, hint, where) for where, v, hint in pairs)
    return next((problem for problem in problems if problem is not None), None)


def _is_container(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, collections.abc.Collection)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, ignoring its contents."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, option) for option in inner)
    if origin is typing.Literal:
        return isinstance(value, tuple({type(choice) for choice in inner}))
    kind = origin or hint
    if kind in _KINDS:
        return _KINDS[kind](value)
    if isinstance(value, str) and _is_container(kind) and kind is not str:
        return False  # a string is not meant as a sequence of letters
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, (kind, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


# Types whose instances are not what is accepted.
_KINDS: dict[Any, Callable[[Any], bool]] = {
    # A module class was probably meant to be an instance.
    collections.abc.Callable: lambda value: callable(value) and not _is_module_class(value),
    int: lambda value: _is_number(value, numbers.Integral),
    float: lambda value: _is_number(value, numbers.Real),
    torch.Tensor: lambda value: isinstance(value, torch.Tensor) or is_placed(value),
}


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, torch.nn.Module)


def _without_bounds(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


# -- in words -----------------------------------------------------------------------------------------


def _is(value: Any, path: str) -> str:
    text = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return f"{path} is {shown} ({_a(type(value).__name__)})"


def _a(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "None",
    torch.dtype: "a dtype, as in torch.float32",
    torch.device: "a device, as in torch.device('cuda', 0) or 'cpu'",
    torch.Tensor: "a tensor",
    torch.nn.Module: "an nn.Module (an instance, not its class)",
    os.PathLike: "a path",
    collections.abc.Callable: "a function",
}


_EXAMPLES: dict[type, str] = {}


def written(example: str) -> Callable[[type[Result]], type[Result]]:
    """Register an example of a value of a class, for error messages."""

    def register(cls: type[Result]) -> type[Result]:
        _EXAMPLES[cls] = example
        return cls

    return register


def _examples(hint: Any) -> list[str]:
    annotated = typing.get_origin(hint) is typing.Annotated
    return [x for x in typing.get_args(hint) if annotated and isinstance(x, Like)]


def _wanted(hint: Any) -> str:
    """An annotation in words; see `written`."""
    hint = getattr(hint, "__bound__", None) or hint
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounds = [f" >= {bound:g}" for bound in inner[1:] if isinstance(bound, AtLeast)]
        examples = [f", as in {example}" for example in _examples(hint)]
        return _wanted(inner[0]) + "".join(bounds + examples)
    if origin in (typing.Union, types.UnionType):
        named = [h for h in inner if not (h is str and torch.device in inner)]
        return " or ".join(dict.fromkeys(map(_wanted, named)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if (words := _WORDS.get(origin or hint)) is not None:
        return words
    if origin is not None and _is_container(origin):
        return _wanted_inside(origin, inner)
    name = _a(getattr(hint, "__name__", str(hint)))
    example = _EXAMPLES.get(hint)
    return f"{name}, as in {example}" if example else name


def _must(name: str, path: str, wrong: str, hint: Any) -> str:
    """What an argument must be; of a dict with a wrong value, what its values must be."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    is_dict = isinstance(origin, type) and issubclass(origin, collections.abc.Mapping)
    if is_dict and wrong.startswith(f"{path}["):
        return f"each value of {name} must be {_wanted(inner[1])}"
    return f"{name} must be {_wanted(hint)}"


def _wanted_inside(origin: Any, inner: tuple[Any, ...]) -> str:
    if issubclass(origin, collections.abc.Mapping):
        return f"a dict (each value {_wanted(inner[1])})"
    if origin is tuple and inner[-1:] != (Ellipsis,):
        return f"a pair ({', '.join(map(_wanted, inner))})"
    kind = "a tuple" if origin is tuple else "a list or tuple"
    return f"{kind} (each item {_wanted(inner[0])})"


def nearest(name: str, names: Sequence[str], count: int = 8) -> list[str]:
    """The names that are most like a given one, nearest first.

    >>> from torchard.functional.core.arguments import nearest
    >>> nearest("h.0.mpl", ["h.0.attn", "h.0.mlp", "head"], 2)
    ['h.0.mlp', 'h.0.attn']
    """
    return difflib.get_close_matches(name, names, n=count, cutoff=0.0)
