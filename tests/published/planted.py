"""Planted bugs: a right function, and changes of its text that make it wrong.

The module of a wrong function is the module of the right one with one piece of text replaced, which
stands in that function (or class) once: errors name its lines as they do those of any function.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fn = Callable[..., Any]


@dataclass(frozen=True)
class Planted:
    """One bug: what was done, the right and the wrong text, and the arguments' spec."""

    function: str
    kind: str
    old: str
    new: str
    spec: str
    right: Fn
    module: str
    symmetries: tuple[tuple[Any, ...], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.function}: {self.kind}"

    def wrong(self) -> Fn:
        """The wrong function, of a module of its own."""
        source = inspect.getsource(sys.modules[self.module])
        start = _start(source, self.function)
        end = _end(source, start)
        body = source[start:end]
        if body.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is there {body.count(self.old)} times")
        text = source[:start] + body.replace(self.old, self.new) + source[end:]
        name = f"planted_{self.function}_{abs(hash((self.kind, self.old, self.new)))}"
        path = f"<{name}>"
        linecache.cache[path] = (len(text), None, text.splitlines(True), path)
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile(text, path, "exec"), module.__dict__)
        return callable_of(getattr(module, self.function))


def callable_of(value: Any) -> Fn:
    """The function, or what an autograd.Function is called by."""
    found: Fn = value.apply if isinstance(value, type) else value
    return found


def _start(source: str, name: str) -> int:
    for keyword in ("def", "class"):
        at = source.find(f"\n{keyword} {name}(")
        if at >= 0:
            return at + 1
    raise ValueError(f"no function or class {name}")


def _end(source: str, start: int) -> int:
    """Where the next statement of the module begins."""
    at = start
    while (at := source.find("\n", at) + 1) > 0:
        if at < len(source) and source[at] not in " \n)#":
            return at
    return len(source)


def planted(
    bugs: list[Planted], spec: str, *changes: tuple[str, str, str], symmetries: Any = ()
) -> Callable[[Any], Any]:
    """Enter wrong versions of a function: kinds of bugs, with the right and the wrong text of each."""

    def enter(value: Any) -> Any:
        for kind, old, new in changes:
            known = callable_of(value), value.__module__, tuple(symmetries)
            bugs.append(Planted(value.__name__, kind, old, new, spec, *known))
        return value

    return enter
