"""State that is read through objects and functions of the library's: settings, contexts, references."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import importlib
import inspect
import logging
import operator
import os
import sys
import types
import weakref
from collections.abc import Callable
from importlib.util import resolve_name
from typing import Any, TypeAlias

import torch

from torchard.functional import torch_internals as internals

__all__ = ["INDIRECT", "imported", "is_proxy", "library_names", "setting_names", "special"]

# The walk of `reachable.py`, which imports this file.
Walk: TypeAlias = Any

_NOTHING = object()

# Functions that return one of torch's settings: guarded where code names them.
_SETTINGS = {
    id(read): read
    for read in (
        torch.get_num_threads,
        torch.get_num_interop_threads,
        torch.get_float32_matmul_precision,
        torch.get_deterministic_debug_mode,
        torch.are_deterministic_algorithms_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        torch.is_anomaly_enabled,
        torch.is_anomaly_check_nan_enabled,
        torch.is_warn_always_enabled,
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
        sys.getrecursionlimit,
        os.getcwd,
    )
}
# During a trace, torch has another function of this name.
for _read in (torch.is_inference_mode_enabled, internals.inference_mode_told):
    _SETTINGS[id(_read)] = internals.in_inference_mode
# Functions whose results depend on an object.
_READERS = {id(os.getenv): os.environ, id(os.path.expandvars): os.environ}
# Names in code that reads a logger's level.
_LEVELS = frozenset(("isEnabledFor", "getEffectiveLevel", "level"))


def special(walk: Walk, value: Any) -> Any:
    """The entry in the structure for what is known by its identity; None for everything else."""
    number = id(value)
    if number in _SETTINGS:
        return _fact(walk, _SETTINGS[number], "()")
    if number in _READERS:
        return "reader", walk.token(_READERS[number])
    if value is sys.modules or value is importlib.import_module or value is __import__:
        return _modules(walk)
    if value is os.environ:
        return _environment(walk)
    if value is logging.getLogger:
        return "loggers", _loggers(walk)
    return None


def _fact(walk: Walk, read: Callable[[], Any], label: str) -> Any:
    result = read()
    walk.slots.facts.append((read, result))
    return "fact", walk.token(result, label)


def _modules(walk: Walk) -> Any:
    """The modules whose names are in the code."""
    known = sorted(key for key in walk.code.names if key in sys.modules)
    walk.slots.name(sys.modules, known)
    return "modules", tuple((key, walk.token(sys.modules[key], f"[{key!r}]")) for key in known)


def _environment(walk: Walk) -> Any:
    """All environment variables: few, and code computes their names."""
    held = vars(os.environ)["_data"]
    walk.slots.sets.append((held, dict(held)))
    items = sorted(os.environ.items())
    return "environment", tuple((k, walk.token(v, f"[{k!r}]")) for k, v in items)


def imported(walk: Walk, names: dict[str, Any], imports: frozenset[tuple[str, int]]) -> Any:
    """The modules that a function imports, and the packages that they are in."""
    paths = []
    for name, level in sorted(imports):
        with contextlib.suppress(ImportError):  # beyond the top: the import fails, too
            package = names.get("__package__") or ""
            full = resolve_name("." * level + name, package) if level else name
            parts = full.split(".")
            paths += [".".join(parts[: i + 1]) for i in range(len(parts))]
    present = [path for path in dict.fromkeys(paths) if path in sys.modules]
    walk.slots.name(sys.modules, present, [path for path in paths if path not in sys.modules])
    return tuple((path, walk.token(sys.modules[path], path)) for path in present)


def library_names(walk: Walk, module: types.ModuleType) -> Any:
    """What the code names in a module of the library's, and settings that are its properties."""
    held = vars(module)
    known = sorted(key for key in walk.code.names if key in held)
    walk.slots.name(held, known)
    tokens = tuple((key, walk.token(held[key], f".{key}")) for key in known)
    if type(module) is types.ModuleType:
        return tokens
    return tokens, setting_names(walk, module, lambda key: _is_property(type(module), key))


def _is_property(cls: type, key: str) -> bool:
    found = inspect.getattr_static(cls, key, None)
    return hasattr(found, "__get__") and hasattr(found, "__set__")


def setting_names(walk: Walk, value: Any, chosen: Callable[[str], bool]) -> Any:
    """The named attributes of one of torch's backends."""
    tokens = []
    for key in sorted(filter(chosen, walk.code.names)):
        with contextlib.suppress(Exception):
            found = getattr(value, key)
            if isinstance(found, (bool, int, float, str)):
                read = functools.partial(getattr, value, key, None)
                tokens.append((key, _fact(walk, read, f".{key}")))
    return tuple(tokens)


def _context_variable(walk: Walk, variable: contextvars.ContextVar[Any]) -> Any:
    get = functools.partial(variable.get, _NOTHING)
    walk.slots.gets.append(get)
    return "context variable", walk.token(get(), ".get()")


def _reference(walk: Walk, reference: weakref.ref[Any]) -> Any:
    walk.slots.gets.append(reference)
    return "reference", walk.token(reference(), "()")


def is_proxy(value: Any) -> bool:
    """Whether a value is a weak proxy, which says that it has the class of what it refers to."""
    return type(value) in weakref.ProxyTypes


def referents(walk: Walk, value: Any) -> Any:
    """The objects to which a view or a getter of C refers; names in a getter are like names in code."""
    held = gc.get_referents(value)
    if isinstance(value, _GETTERS):
        walk.meet(_strings(held))
    return "view", type(value), tuple(walk.token(item, "") for item in held if item is not type(value))


def _strings(held: Any) -> frozenset[str]:
    names: set[str] = set()
    for item in held:
        if isinstance(item, str):
            names.update(item.split("."))
        elif isinstance(item, tuple):
            names |= _strings(item)
    return frozenset(names)


def _bound(walk: Walk, method: Any) -> Any:
    """A method of C, of a list or a dict, with the object that it is bound to."""
    owner = method.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return "opaque", id(method)
    return "bound", method.__name__, walk.token(owner, "")


def _logger(walk: Walk, logger: logging.Logger) -> Any:
    if _LEVELS.isdisjoint(walk.code.names):
        return "opaque", id(logger)
    return "logger", id(logger), _fact(walk, logger.getEffectiveLevel, ".getEffectiveLevel()")


def _loggers(walk: Walk) -> Any:
    known = logging.root.manager.loggerDict
    return tuple(walk.token(logging.getLogger(key)) for key in sorted(walk.code.names & known.keys()))


def _cached(walk: Walk, cached: Any) -> Any:
    """A function with a cache: the results that it holds are those of the plain call, too."""
    return "cached", walk.token(cached.__wrapped__, "")


_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_NO_ITEMS: dict[Any, Any] = {}
_VIEWS = (
    types.MappingProxyType,
    *(type(_NO_ITEMS.keys()), type(_NO_ITEMS.values()), type(_NO_ITEMS.items())),
)

INDIRECT: tuple[tuple[Any, Callable[[Walk, Any], Any]], ...] = (
    (contextvars.ContextVar, _context_variable),
    (weakref.ref, _reference),
    ((*_GETTERS, *_VIEWS), referents),
    ((types.BuiltinMethodType, types.MethodWrapperType), _bound),
    (logging.Logger, _logger),
    (type(functools.lru_cache(len)), _cached),
)
