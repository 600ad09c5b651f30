"""Refusals of changes that a forward makes in its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.modules.containers import pairs
from torchard.functional.modules.copying import owner_of
from torchard.functional.modules.state import Contents, replaced_value

__all__ = ["check_attributes", "check_contents", "created", "parted", "updated"]


def check_attributes(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse a forward that keeps state in a plain attribute."""
    key = replaced_value(before, after)
    if key is not None:
        raise PurityError(
            f"module {path!r} changes its attribute {key!r} in forward: a pure function cannot keep "
            "it. If only the first call sets it (a flag, a cache), run the module once before "
            "functionalize. If every call does, make it a buffer, "
            f"self.register_buffer({key!r}, ...), and pass buffers=."
        )


def check_contents(name: str, contents: Contents) -> None:
    """Refuse a forward that keeps state in a container, or that installs hooks at every call."""
    # Attributes of modules are checked around each forward, since a hook may compute an attribute first.
    # A buffer that was assigned is a result.
    parts = list(contents.module.modules())
    checked = {id(table) for part in parts for table in (vars(part), internals.buffer_table(part))}
    for now, before in contents.changed():
        held = isinstance(now, dict) and id(now) not in checked
        key = replaced_value(pairs(before), now) if held else None
        if key is not None:
            raise PurityError(
                f"the forward of {name} changes {key!r} in a dict or object that the module holds; a "
                "pure function cannot keep this change. If only the first call changes it, run the "
                "module once before functionalize. If every call changes it, make it a buffer, and pass "
                "buffers=."
            )
    if contents.hooks_alone():
        raise _hooked(name)


def _hooked(name: str) -> PurityError:
    """The error for hooks that a call installed or removed, without other changes in the module."""
    return PurityError(
        f"the forward of {name} installs or removes hooks, and nothing in the module records this: a "
        "pure function cannot keep them, and the next call would differ from the module's. Run the "
        "module once before functionalize, or install hooks there."
    )


def created(names: Sequence[str]) -> PurityError:
    """The error for buffers that a call with ``buffers`` created."""
    return PurityError(
        f"the forward creates {', '.join(map(repr, names))}: a call with buffers= returns those that the "
        "module had when it was functionalized. Run the module once before functionalize."
    )


def parted(path: str, first: str) -> PurityError:
    """The error for tied buffers if a forward replaces one of them."""
    return PurityError(
        f"module {owner_of(path)!r} or {owner_of(first)!r} replaces a buffer that they share "
        f"({first!r}, {path!r}) by a new tensor, which they would not share: write to it in place, as "
        f"in self.{path.rpartition('.')[2]}.copy_(new)."
    )


def updated(path: str) -> PurityError:
    """The error for a buffer update in a call without ``buffers``."""
    return PurityError(
        f"module {owner_of(path)!r} updates its buffer {path!r}: a pure function returns new values. "
        "Pass buffers=fn.buffers and continue with those that are returned, as in "
        "out, buffers = fn(params, ..., buffers=buffers), or functionalize(module.eval())."
    )
