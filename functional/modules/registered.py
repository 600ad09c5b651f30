"""The module's own parameters and buffers, where its code reaches them by another way than the copy.

A hook may close over a parameter, and a global or a weak reference lead to the original module. In a call
of the module they have the values of that call, so here they have those that the function is given.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError

__all__ = ["OwnTensors", "Registered"]


class OwnTensors:
    """The parameters and buffers of a module and of its copy, with the names that they have first.

    Args:
        module: the module, to which only weak references are kept.
        copied: its copy without weights.
        ties: the first name of each tied tensor, by its other names.
    """

    def __init__(self, module: nn.Module, copied: nn.Module, ties: Mapping[str, str]) -> None:
        self._original = [(weakref.ref(t), ties.get(k, k)) for k, t in _named(module)]
        self._copied = [(t, ties.get(k, k)) for k, t in _named(copied)]

    def names(self) -> dict[int, str]:
        """The names of those that are alive, by their ids."""
        alive = ((ref(), name) for ref, name in self._original)
        found = {id(tensor): name for tensor, name in alive if tensor is not None}
        return found | {id(tensor): name for tensor, name in self._copied}


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class Registered(TorchFunctionMode):
    """A mode in which operations on a module's own tensors are operations on those of the call.

    Args:
        tensors: the module's own tensors.
        values: those of the call, by name.

    Raises (inside):
        LoopError: the tensor is of a stacked layer.
    """

    def __init__(self, tensors: OwnTensors, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names, self.values = tensors.names(), values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = internals.unpatched(func)
        if kwargs:
            kwargs = {key: self._of_call(value) for key, value in kwargs.items()}
        return func(*map(self._of_call, args), **(kwargs or {}))

    def _of_call(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self.names.get(id(value))
            return value if name is None else self._value(name)
        if type(value) in (list, tuple):
            return type(value)(map(self._of_call, value))
        return value

    def _value(self, name: str) -> Tensor:
        if name not in self.values:
            raise LoopError(
                f"{source.of_here()} uses the parameter or buffer {name!r} of a stacked layer, which it "
                "refers to itself. Read it from the module's list of layers, or leave the list out of "
                "stacked."
            )
        return self.values[name]
