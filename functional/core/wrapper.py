"""The base classes of transformed functions, and of functions made from modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["ModuleCopy", "Wrapper"]

# Remedies in place of a module's methods, which a function of its parameters does not have.
_MODES = (
    "it computes in the mode that the module had when it was functionalized: "
    "functionalize(module.{0}()); or call {1}.module.{0}(), which applies to later calls"
)
_PARAMETERS = (
    "its parameters are an argument, the dict that functionalize returned with it (fn, params = "
    "functionalize(module)). Let an optimizer update this dict, and save and load it"
)
_CONVERSIONS = (
    "its parameters are an argument: convert them, as in "
    "torchard.tree.map(lambda p: p.{0}(...), params), and pass the buffers converted, too "
    "(buffers=); or convert the module before functionalize"
)
_GRADIENTS = (
    "torch.func.grad returns new gradients in each call. If backward() adds to the .grad of tensors in "
    "params, reset these: optimizer.zero_grad()"
)
_INSTEAD: dict[str, str] = {
    **dict.fromkeys(("train", "eval"), _MODES),
    **dict.fromkeys(("parameters", "named_parameters", "state_dict", "load_state_dict"), _PARAMETERS),
    **dict.fromkeys(("get_parameter", "named_buffers", "get_buffer"), _PARAMETERS),
    **dict.fromkeys(("to", "type", "cpu", "cuda", "xpu", "half", "float", "double"), _CONVERSIONS),
    **dict.fromkeys(("bfloat16", "to_empty", "share_memory"), _CONVERSIONS),
    "requires_grad_": "pass params of which some require grad, or see fn.split(params)",
    "zero_grad": _GRADIENTS,
    "compile": "torchard.jit(fn) compiles it",
    "forward": "it is called with the parameters first: fn(params, ...)",
}


class Wrapper:
    """A callable around ``fn``; a trace of it depends on the values that ``fn`` closes over and reads.

    Attributes:
        fn: the function.
        rewrites: the rewrites of its program, which a trace depends on too.
    """

    fn: Callable[..., Any]
    rewrites: tuple[Any, ...] = ()

    @property
    def reads(self) -> tuple[Any, ...]:
        """The functions that a call depends on."""
        return (self.fn,)

    def __getattr__(self, name: str) -> Any:
        """Suggest a replacement for a method of modules, if ``fn`` was made from a module."""
        fn = vars(self).get("fn")
        if isinstance(fn, ModuleCopy):
            raise _missing(name, fn.module, "fn.fn")
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=self)


class ModuleCopy:
    """A callable with a private copy of a module, whose code a trace depends on.

    Attributes:
        module: the copy.
        held_at: the path of the attribute that holds it, in another module of which a function is made.
    """

    __slots__ = ()
    module: nn.Module
    held_at: str = ""

    def hold_at(self, path: str) -> None:
        """Set ``held_at``."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Suggest a replacement for a method of modules, which this function does not have."""
        raise _missing(name, object.__getattribute__(self, "module"), "fn")

    def tensors_in(self, tables: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of what is in tables of the copy, between calls or before this one."""
        raise NotImplementedError


def _missing(name: str, module: nn.Module, owner: str) -> AttributeError:
    """The error of an attribute that a function made of a module lacks.

    Args:
        name: the name of the attribute.
        module: the function's copy of the module.
        owner: an expression for the function that has this copy.
    """
    what = f"a functionalized module is a function and has no attribute {name!r}"
    if name in _INSTEAD:
        return AttributeError(f"{what}: {_INSTEAD[name].format(name, owner)}.")
    if not name.startswith("__") and _has(module, name):
        return AttributeError(f"{what}; its copy of the module has it: {owner}.module.{name}.")
    return AttributeError(f"{what}.")


def _has(module: Any, name: str) -> bool:
    tables = (vars(module), *(vars(module).get(f"_{kind}", {}) for kind in ("modules", "parameters")))
    return hasattr(type(module), name) or any(name in table for table in tables)
