"""The module's own parameters and buffers in a call: they have the values that the function is given.

Wherever the copy has them, in its tables or in a list or function that it holds, a call puts its values
(places.py). A global, a shared object or a weak reference may lead to the original module's; operations
on those are operations on the call's.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError, PurityError
from torchard.functional.modules.copying import deep_copy
from torchard.functional.modules.places import Places
from torchard.functional.modules.rebinding import memory_of
from torchard.functional.modules.state import Contents
from torchard.functional.tracing.stand_ins import standing_in

__all__ = ["OwnTensors", "Registered"]


class OwnTensors:
    """The parameters and buffers of a module and of its copy, and the other contents of the copy.

    Args:
        originals: the module's tensors by name, as weak references.
        copied: the module's copy without weights.
        private: objects to which only functions of the copy refer.
        ties: the first name of each tied tensor, by its other names.

    Attributes:
        originals: the module's tensors that are still alive, by name.
        views: tensors in the copy that share memory with the module's tensors, each with a name.
        running: the values of the calls that run.
    """

    def __init__(
        self,
        originals: Mapping[str, Tensor],
        copied: nn.Module,
        private: Sequence[Any],
        ties: Mapping[str, str],
    ) -> None:
        self.module, self.private = copied, private
        self.originals = weakref.WeakValueDictionary(originals)
        self.running: list[Mapping[str, Tensor]] = []
        self._copied = {k: t for k, t in named_tensors(copied).items()}
        self._ties = ties
        self._contents = Contents(copied, private)
        memory = {memory_of(tensor): name for name, tensor in originals.items()}
        held = (x for _, values in self._contents.kept for x in values if isinstance(x, Tensor))
        self.views = [(x, memory[memory_of(x)]) for x in held if memory_of(x) in {*memory} - {0}]
        self._places: Places | None = None

    def names(self, originals: Mapping[str, Tensor]) -> dict[int, str]:
        """The names of these, and of the copy's, by their ids."""
        named = (*originals.items(), *self._copied.items())
        return {id(tensor): self._ties.get(name, name) for name, tensor in named}

    def tensors_in(self, tables: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of what tables contain, or contained before the calls that run."""
        if not self.running:
            return [*map(id, chain.from_iterable(map(dict.values, tables)))]
        before = {id(table): held for table, held in self._contents.kept}
        return [id(x) for table in tables for x in before.get(id(table), ())[1::2]]

    def contents(self) -> Contents:
        """The present contents of the copy."""
        if not self._contents.unchanged():
            self._contents = Contents(self.module, self.private)
        return self._contents

    def places(self, values: Mapping[str, Tensor]) -> Places:
        """Where the copy has its own tensors, or those of a call that runs."""
        contents = self.contents()
        if self._places is None or self._places.contents is not contents:
            names = {id(tensor): self._ties.get(name, name) for name, tensor in self._copied.items()}
            for running in self.running:
                names |= {id(value): name for name, value in running.items()}
            self._places = Places(contents, names, values.keys(), self._ties)
        return self._places


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class Registered(TorchFunctionMode):
    """A mode in which a module's own tensors are replaced by the call's.

    Args:
        tensors: the module's own tensors.
        values: the call's tensors, by name.

    Values that the library itself reads (arguments and closures of transforms) are replaced as well.

    Raises (inside):
        LoopError: the tensor is of a stacked layer.
        PurityError: an own tensor of the original module was given to an autograd Function, or a view
            of one is used.
    """

    def __init__(self, tensors: OwnTensors, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors, self.values = tensors, values
        # Kept alive: if the module were freed in the call, its ids and memory would be another value's.
        self._originals = dict(tensors.originals)
        self.names = tensors.names(self._originals)
        given = [internals.base_tensor(value) for value in values.values()]
        self._given = set(map(id, given))
        # The memory of the module's tensors, but for that which the call's have as well.
        others = {*map(memory_of, given), 0}
        named = (*self._originals.items(), *((name, view) for view, name in tensors.views))
        memory = {memory_of(tensor): name for name, tensor in named}
        self._memory = {at: name for at, name in memory.items() if at not in others}
        self._read: list[contextlib.ExitStack] = []

    def is_entered(self) -> bool:
        """Whether this is a context now."""
        return bool(self._read)

    @contextlib.contextmanager
    def running(self) -> Iterator[Places]:
        """A context in which the copy's tensors are those of the call, in its places as well."""
        places = self._tensors.places(self.values)
        self._tensors.running.append(self.values)
        try:
            places.fill(self.values)
            with self:
                yield places
        finally:
            places.clear()
            self._tensors.running.pop()

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
        if func is Tensor.__deepcopy__ and self._cannot_copy(args[0]):
            return deep_copy(self._of_call(args[0]), args[1])
        if kwargs:
            kwargs = {key: self._of_call(value) for key, value in kwargs.items()}
        return func(*map(self._of_call, args), **(kwargs or {}))

    def _cannot_copy(self, value: Tensor) -> bool:
        """Whether torch makes no deep copy of a tensor: of the call, or of a level of torch.func."""
        row = isinstance(value, nn.Parameter) and type(value) is not nn.Parameter
        own = id(value) in self.names or id(value) in self._given
        return row or own or internals.base_tensor(value) is not value

    def _of_call(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            name = self.names.get(id(value))
            if name is not None:
                return self._value(name, value)
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
                f"{source.of_here()} computes with a view of {name!r}, a parameter or buffer of the "
                "original module, or with its wrapper in torch.func.grad or vmap, which do not have "
                "the value of the call. Read it from the module, where it is used: "
                "grad(f)(self.weight)."
            )

    def _value(self, name: str, own: Tensor) -> Tensor:
        if name not in self.values:
            raise LoopError(
                f"{source.of_here()} refers directly to the parameter or buffer {name!r} of a stacked "
                "layer. Read it from the module's list of layers, or leave the list out of stacked."
            )
        if _is_operand_of_function(own):
            raise PurityError(
                f"{source.of_here()}: an autograd Function receives {name!r} of the original module, "
                "from a global or an object outside of the module, so its gradient would be lost. Read "
                "it from the module, self.weight, or pass Function.apply(w + 0)."
            )
        return self.values[name]


_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _is_operand_of_function(own: Tensor) -> bool:
    """Whether an autograd Function that is running was given a tensor: no mode sees that."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY and any(x is own for x in frame.f_locals["args"]):
            return True
        frame = frame.f_back
    return False
