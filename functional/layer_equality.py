"""Whether layers are equal but for the values of their tensors, and whether anything changes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError
from torchard.functional.guards.present_cells import is_filled
from torchard.functional.tracing.settings import Settings

__all__ = [
    "ABSENT",
    "Differing",
    "alike",
    "attributes_of",
    "check_hooks",
    "contents",
    "structure_of",
    "thread_state",
    "unchanged",
]

# Types whose objects cannot change, so that equal objects are interchangeable.
_PLAIN = (
    *(bool, int, str, bytes, type(None), type, range, slice, enum.Enum, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_OWN = {*internals.READ_BY_MODULES, *internals.NOT_READ_BY_MODULES} - {"training"}
_OWN |= {"forward", "__getstate__", "_apply"}


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same to whatever reads them.

    Unknown objects are if they are one. So are tensors: equal ones may be written to later.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)  # tells zeros apart, and NaNs not
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, functools.partial):
        return all(map(alike, _of_partial(one), _of_partial(other)))
    if isinstance(one, FunctionType):
        return one.__code__ is other.__code__ and all(map(alike, _of_function(one), _of_function(other)))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(v, other[k]) for k, v in one.items())
    return isinstance(one, _PLAIN) and bool(one == other)


def _of_partial(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return partial.func, partial.args, partial.keywords, vars(partial)


def _of_function(function: FunctionType) -> tuple[Any, ...]:
    """The parts in which functions with the same code may differ. (They have the module's globals.)"""
    closed = [x.cell_contents if is_filled(x) else ABSENT for x in function.__closure__ or ()]
    return closed, function.__defaults__, function.__kwdefaults__, vars(function)


def structure_of(layer: nn.Module) -> dict[str, Any]:
    """Properties that equal layers share: classes of modules, in order, and kinds of tensors."""
    named = (*layer.named_parameters(), *layer.named_buffers())
    return {
        **{name: type_before_parametrizations(part) for name, part in layer.named_modules()},
        **{f"{name} ": (t.dtype, list(t.shape), t.requires_grad) for name, t in named},
    }


def check_hooks(layer: nn.Module, path: str, number: int) -> None:
    """Refuse hooks, which would see one layer of all.

    Args:
        path: the path of the list.
        number: the layer's number in the list.

    Raises:
        LoopError: a module of the layer has one.
    """
    for name, part in layer.named_modules():
        hook = _hook_of(part)
        place = ".".join(filter(None, (f"{path}.{number}", name)))
        if hook is not None:
            raise LoopError(
                f"{source.begins_here()}functionalize(stacked={path!r}): {place} has the {hook}, which "
                "would run for only one of the layers. Remove it (its handle has .remove()), return "
                "what it collects from the forward, or leave the list out of stacked. transformers "
                "installs hooks at the first call with output_hidden_states or output_attentions: "
                "build a new model, and call it without these."
            )


def _hook_of(part: nn.Module) -> str | None:
    """The kind, line and name of a module's first hook; None if it has none."""
    for table in internals.HOOK_TABLES:
        for hook in (vars(part).get(table) or {}).values():
            kind = table.strip("_").removesuffix("s").replace("_", " ")
            return f"{kind} {_text_of(hook)}"
    return None


def _text_of(function: Any) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    return type(inner).__name__ if code is None else f"at {source.of_code(code)}"


def attributes_of(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """The user's attributes of a layer's modules, by the module's name and the attribute's."""
    return {
        (name, key): value
        for name, part in layer.named_modules()
        for key, value in vars(part).items()
        if key not in _OWN
    }


def contents(value: Any, depth: int = 2) -> list[Any] | None:
    """What tells whether a value has changed, to be compared by identity; None if nothing does.

    Args:
        depth: how deep to look into containers, closures and attributes of objects.
    """
    if isinstance(value, Tensor):
        return [value, _Version(internals.version(internals.base_tensor(value)))]
    if isinstance(value, (*_PLAIN, float, complex, Differing, nn.Module)):
        return [value]
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, FunctionType):
        inside = [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
    elif hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    else:
        return None
    further = (contents(each, depth - 1) for each in inside) if depth > 1 else iter(())
    return [value, *inside, *(x for found in further for x in found or ())]


class _Version(int):
    """The version of a tensor, compared by value."""


def unchanged(before: Sequence[Any] | None, now: Sequence[Any] | None) -> bool:
    """Whether a value has the contents that it had."""
    if before is None or now is None or len(before) != len(now):
        return False
    return all(
        a is b or (type(a) in (_Version, float) and alike(a, b))
        for a, b in zip(before, now, strict=True)
    )


def thread_state() -> tuple[Any, ...]:
    """The parts of torch's thread state on which an operation depends."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *Settings.current()


class Differing:
    """An attribute that differs between layers. It can be passed on, but reading it is refused."""

    def __init__(self, path: str, name: str, values: Sequence[Any]) -> None:
        self.__dict__.update(path=path, name=name, values=values)

    def __refuse(self, *_: Any, **__: Any) -> Any:
        values = self.__dict__["values"]
        shown = ", ".join(map(repr, values[:4])) + ", ..." * (len(values) > 4)
        why = f"differs between layers ({shown})" if len(values) > 1 else "refers to layers of the list"
        raise LoopError(
            f"{source.begins_here()}functionalize(stacked=...): the forward of {self.__dict__['path']} "
            f"reads its attribute {self.__dict__['name']!r}, which {why}; stacked layers differ "
            "in parameters and buffers only. Leave the list out of stacked."
        )

    @property  # type: ignore[misc]  # isinstance sees the type that all values have, if it is a simple one
    def __class__(self) -> type:
        kind = type(self.__dict__["values"][0])
        return kind if kind in (bool, int, float, str) else Differing

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        known = self.__dict__
        return Differing, (known["path"], known["name"], known["values"])

    __getattr__ = __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __refuse
    __int__ = __float__ = __index__ = __str__ = __format__ = __refuse

    def __repr__(self) -> str:
        return f"<{self.__dict__['name']} of each layer>"


class _Absent:
    """Represents an attribute that is not there."""

    def __repr__(self) -> str:
        return "none"


ABSENT = _Absent()
