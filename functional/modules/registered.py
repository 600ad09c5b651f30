"""The module's own parameters and buffers, where its code reaches them by another way than the copy.

A hook may close over a parameter, and a global or a weak reference lead to the original module. In a call
of the module they have the values of that call, so here they have those that the function is given.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError, PurityError
from torchard.functional.modules.rebinding import memory_of
from torchard.functional.tracing.stand_ins import standing_in

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

    def memory(self) -> dict[int, str]:
        """The names by the memory that the module's tensors have."""
        alive = ((ref(), name) for ref, name in self._original)
        return {memory_of(tensor): name for tensor, name in alive if tensor is not None}


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class Registered(TorchFunctionMode):
    """A mode in which operations on a module's own tensors are operations on those of the call.

    Args:
        tensors: the module's own tensors.
        values: those of the call, by name.

    What the library itself reads, arguments and closures of transforms, is replaced as well. torch's
    transforms wrap a tensor before anybody sees it.

    Raises (inside):
        LoopError: the tensor is of a stacked layer.
        PurityError: a transform of torch's maps or differentiates the module's own tensor.
    """

    def __init__(self, tensors: OwnTensors, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names, self.values = tensors.names(), values
        given = [internals.base_tensor(value) for value in values.values()]
        self._given = set(map(id, given))
        # The memory of the module's tensors, but for that which the call's have as well.
        others = {*map(memory_of, given), 0}
        self._memory = {at: name for at, name in tensors.memory().items() if at not in others}
        self._read: list[contextlib.ExitStack] = []

    def __enter__(self) -> Registered:
        self._read.append(contextlib.ExitStack())
        self._read[-1].enter_context(standing_in(self._of_call))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._read.pop().close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = internals.unpatched(func)
        if kwargs:
            kwargs = {key: self._of_call(value) for key, value in kwargs.items()}
        return func(*map(self._of_call, args), **(kwargs or {}))

    def _of_call(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self.names.get(id(value))
            if name is not None:
                return self._value(name)
            self._check(value)
            return value
        if type(value) in (list, tuple):
            return type(value)(map(self._of_call, value))
        return value

    def _check(self, value: Tensor) -> None:
        """Refuse a view of one of the module's tensors, and what a level of torch.func wraps in one."""
        base = internals.base_tensor(value)
        name = self._memory.get(memory_of(base)) if self._memory else None
        if base is not value and id(base) not in self._given:
            name = self.names.get(id(base), name)
        if name is not None:
            raise PurityError(
                f"{source.of_here()} computes with a view of {name!r}, the module's own parameter or "
                "buffer, or with what torch.func.grad or vmap makes of it, which has not the value that "
                "the call is given. Read it from the module, where it is used: grad(f)(self.weight)."
            )

    def _value(self, name: str) -> Tensor:
        if name not in self.values:
            raise LoopError(
                f"{source.of_here()} uses the parameter or buffer {name!r} of a stacked layer, which it "
                "refers to itself. Read it from the module's list of layers, or leave the list out of "
                "stacked."
            )
        return self.values[name]
