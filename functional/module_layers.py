"""Module lists whose modules are equal layers: parameters are stacked, and one `repeat` applies them.

Layers are equal if they differ in the values of parameters and buffers only. An attribute that differs is
replaced by one that whatever reads it is refused (`layer_idx`, which nothing reads without a cache). The
module's own loop over its layers runs as it is, on stand-ins for the layers (layer_calls.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import LoopError
from torchard.functional.core.scope_frames import Frame
from torchard.functional.dropout import Keyed
from torchard.functional.layer_calls import Between, LayerCalls, alike

__all__ = ["StackedLayers", "check_untied", "stacked_layers"]

def stacked_layers(module: nn.Module, paths: str | Sequence[str]) -> list[StackedLayers]:
    """The module lists at some paths.

    Raises:
        LoopError: there is no list at a path, or its modules differ in more than their values.
    """
    return [StackedLayers(module, path) for path in ([paths] if isinstance(paths, str) else paths)]


def check_untied(ties: Mapping[str, str], stacks: Sequence[StackedLayers]) -> None:
    """Refuse parameters of stacked layers that are used under two names."""
    for one, other in ties.items():
        for layers in stacks:
            if layers.place(one) or layers.place(other):
                raise LoopError(
                    f"functionalize(stacked={layers.path!r}): {one!r} and {other!r} are one tensor, "
                    "which cannot be a row of a stack too. Leave the list out of stacked."
                )


class StackedLayers:
    """The equal layers of one module list.

    Attributes:
        path: the path of the list.
        count: the number of layers.
        name: the name of their class.
        tensors: the names of a layer's parameters and buffers, within the layer.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        layers = _listed(module, path)
        first = layers[0]
        self.path, self.count, self.name = path, len(layers), type(first).__name__
        self.tensors = [name for name, _ in (*first.named_parameters(), *first.named_buffers())]
        self.frame = Frame(self.row("").rstrip("."), module=True, iterated=True)
        self.differing: dict[tuple[str, str], list[Any]] = {}
        for i, other in enumerate(layers):
            self._compare(first, other, i)
        self._calls: LayerCalls | None = None
        self._layer: nn.Module = first
        self._forward: Callable[..., Any] = first.forward

    # -- names ------------------------------------------------------------------------------------

    def row(self, name: str) -> str:
        """The name of a stack, ``layers.*.weight``, from that of a tensor within its layer."""
        return f"{self.path}.*.{name}"

    def place(self, name: str) -> tuple[int, str] | None:
        """The layer of a tensor, and its name within the layer; None for one that is in no layer."""
        prefix = f"{self.path}."
        number, _, rest = name.removeprefix(prefix).partition(".")
        return (int(number), rest) if name.startswith(prefix) and number.isdigit() else None

    def stack(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by their names, those of the layers stacked."""
        stacked: dict[str, Any] = {}
        for name, value in named.items():
            where = self.place(name)
            if where is None:
                stacked[name] = value
            else:
                stacked.setdefault(self.row(where[1]), []).append(value)
        return {k: torch.stack(v) if isinstance(v, list) else v for k, v in stacked.items()}

    def take(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take the stacks out of tensors by their names; they remain by their names within a layer."""
        return {name: values.pop(self.row(name)) for name in self.tensors}

    # -- layers are equal -------------------------------------------------------------------------

    def _compare(self, first: nn.Module, other: nn.Module, number: int) -> None:
        """Check that a layer has the structure of the first, and note attributes that differ.

        Raises:
            LoopError: it has not.
        """
        have, want = _structure(other), _structure(first)
        for key in dict.fromkeys((*want, *have)):
            if have.get(key) != want.get(key):
                raise LoopError(
                    f"functionalize(stacked={self.path!r}): {self.path}.{number} has "
                    f"{_said(have, key)}, and {self.path}.0 has {_said(want, key)}; layers are stacked "
                    "if they differ in values only. Leave the list out of stacked."
                )
        for (name, part), (_, mine) in zip(other.named_modules(), first.named_modules(), strict=True):
            for key, value in vars(mine).items():
                if key in internals.MODULE_TABLES or alike(value, vars(part).get(key)):
                    continue
                self.differing.setdefault((name, key), [value]).append(vars(part).get(key))

    # -- standing in ------------------------------------------------------------------------------

    def install(self, module: nn.Module, forward: Callable[[str, nn.Module], Any]) -> None:
        """Put stand-ins in the place of the layers of a copy of the module.

        Args:
            forward: makes the forward of a part of the first layer, given its path.
        """
        layers = module.get_submodule(self.path)
        self._layer = layers.get_submodule("0")
        for name, part in self._layer.named_modules():
            part.forward = forward(self.row(name).rstrip("."), part)
            for (owner, key), values in self.differing.items():
                if owner == name:
                    vars(part)[key] = _Differing(self.row(name).rstrip("."), key, values)
        self._forward = self._layer.forward
        for i, layer in enumerate(layers.children()):
            layer.forward = functools.partial(self._call, i)

    def _call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        if self._calls is None:  # the block itself
            return self._forward(*args, **kwargs)
        return self._calls.call(number, args, kwargs)

    @contextmanager
    def running(
        self, rows: Mapping[str, Tensor], keyed: Keyed, within: Callable[[], Any]
    ) -> Iterator[None]:
        """A context in which the module's loop over the layers applies them.

        Args:
            rows: the stacked parameters and buffers, by their names within a layer.
            keyed: the mode of the module's dropouts.
            within: makes a context in which a layer runs, for whoever runs it later.
        """
        self._calls = LayerCalls(self, rows, keyed, within)
        try:
            with Between():
                yield
            self._calls.check_complete()
        finally:
            self._calls = None

    def apply(self, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """One layer's result.

        Raises:
            LoopError: it updates a buffer.
        """
        calls, self._calls = self._calls, None
        buffers = [name for name, _ in self._layer.named_buffers()]
        given = {**tensors, **{name: tensors[name].clone() for name in buffers}}
        versions = {name: internals.version(given[name]) for name in buffers}
        values = dict(given)
        try:
            out = torch.func.functional_call(self._layer, values, args, kwargs, tie_weights=False)
        finally:
            self._calls = calls
        for name, version in versions.items():
            if values[name] is not given[name] or internals.version(values[name]) != version:
                raise LoopError(
                    f"functionalize(stacked={self.path!r}): a layer updates its buffer {name!r}; stacked "
                    "layers have buffers that are only read. Leave the list out of stacked."
                )
        return out


def _listed(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules of a list.

    Raises:
        LoopError: there is none at the path.
    """
    lists = {k: m for k, m in module.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    layers = list(lists[path].children()) if path in lists else []
    if not layers:
        known = ", ".join(repr(k) for k, m in lists.items() if len(m)) or "none"
        raise LoopError(
            f"functionalize(stacked={path!r}): {type(module).__name__} has no list of modules at "
            f"this path; there are {known}."
        )
    return layers


def _structure(layer: nn.Module) -> dict[str, Any]:
    """What equal layers have in common: the classes of their modules; shapes and dtypes of tensors."""
    named = (*layer.named_parameters(), *layer.named_buffers())
    return {
        **{name: f"a {type(part).__qualname__}" for name, part in layer.named_modules()},
        **{f"{name} ": f"{t.dtype}{list(t.shape)}".removeprefix("torch.") for name, t in named},
    }


def _said(structure: Mapping[str, Any], key: str) -> str:
    return f"{structure.get(key, 'nothing')} at {key.strip()!r}" if key else str(structure[key])


class _Differing:
    """An attribute that differs between layers. It can be handed on, but whatever reads it is refused."""

    def __init__(self, path: str, name: str, values: Sequence[Any]) -> None:
        self.__dict__.update(path=path, name=name, values=values)

    def __refuse(self, *_: Any, **__: Any) -> Any:
        values = self.__dict__["values"]
        shown = ", ".join(map(repr, values[:4])) + ", ..." * (len(values) > 4)
        raise LoopError(
            f"functionalize(stacked=...): the forward of {self.__dict__['path']} reads its attribute "
            f"{self.__dict__['name']!r}, which differs between layers ({shown}); stacked layers differ "
            "in parameters and buffers only. Leave the list out of stacked."
        )

    @property  # type: ignore[misc]  # isinstance sees the type that all values have
    def __class__(self) -> type:
        return type(self.__dict__["values"][0])

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    __getattr__ = __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __refuse
    __int__ = __float__ = __index__ = __str__ = __format__ = __refuse

    def __repr__(self) -> str:
        return f"<{self.__dict__['name']} of each layer>"
