"""Module lists whose modules are equal layers: parameters are stacked, and one `repeat` applies them.

Layers are equal if they differ in the values of parameters and buffers only. An attribute that differs is
replaced by a sentinel that raises when read (`layer_idx`, which nothing reads without a cache). The
module's own loop over its layers runs on stubs in place of the layers (layer_calls.py).

Unlike layers that are recognised in a program (loops/recognised.py), one layer is traced for all, and the
number of arguments does not depend on the depth (tests/functional/loops/test_depth.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError
from torchard.functional.core.scope_frames import Frame
from torchard.functional.dropout import Keyed
from torchard.functional.layer_calls import Between, LayerCalls
from torchard.functional.layer_equality import (
    ABSENT,
    Differing,
    alike,
    attributes_of,
    check_hooks,
    contents,
    structure_of,
    unchanged,
)
from torchard.functional.modules.containers import pairs
from torchard.functional.modules.rows import LayerTables, Table, holding, tables_of
from torchard.functional.modules.state import Contents, undone

__all__ = ["StackedLayers", "check_untied", "stacked_layers"]

_THAW = (
    "Let all of them require grad, and differentiate with respect to the rows of the trained layers "
    "(the guide, Functions: frozen layers). Or: "
)


def stacked_layers(module: nn.Module, paths: str | Sequence[str]) -> list[StackedLayers]:
    """The module lists at some paths.

    Raises:
        LoopError: there is no list at a path, or its modules differ in more than their values.
    """
    given = [paths] if isinstance(paths, str) else list(paths)
    for i, path in enumerate(given):
        around = next((o for j, o in enumerate(given) if i != j and f"{path}.".startswith(f"{o}.")), None)
        if around is not None:
            raise LoopError(
                f"functionalize(stacked={given!r}): the list {path!r} is {around!r} or inside of it; "
                "leave one of them out."
            )
    return [StackedLayers(module, path) for path in given]


def check_untied(ties: Mapping[str, str], stacks: Sequence[StackedLayers]) -> None:
    """Refuse parameters of stacked layers that are used under two names."""
    for one, other in ties.items():
        for layers in stacks:
            if layers.place(one) or layers.place(other):
                raise LoopError(
                    f"functionalize(stacked={layers.path!r}): {one!r} and {other!r} are the same "
                    "tensor, which cannot also be a row of a stack. Leave the list out of stacked."
                )


class StackedLayers:
    """The equal layers of one module list.

    Attributes:
        path: the path of the list.
        count: the number of layers.
        name: the name of their class.
        tensors: the names of a layer's parameters and buffers, within the layer.
        layers: the modules.
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        layers = _listed(module, path)
        first = layers[0]
        for i, layer in enumerate(layers):
            check_hooks(layer, path, i)
        self.path, self.count, self.name = path, len(layers), type(first).__name__
        self.tensors = [name for name, _ in (*first.named_parameters(), *first.named_buffers())]
        self.frame = Frame(self.row("").rstrip("."), module=True, iterated=True)
        self.differing: dict[tuple[str, str], list[Any]] = {}
        for i, other in enumerate(layers):
            self._compare(first, other, i)
        self._refuse_references(module, layers)
        self._calls: LayerCalls | None = None
        self.layers = layers
        self._installed: list[dict[tuple[str, str], Any]] = []
        self._forwards: list[list[Any]] = []
        self._layer: nn.Module = first
        self._buffer_names = [name for name, _ in first.named_buffers()]
        self._parameter_names = [name for name, _ in first.named_parameters()]
        self._tables: list[Table] = []
        self._modules: list[list[nn.Module]] = []
        self._forward: Callable[..., Any] = first.forward

    def __getstate__(self) -> dict[str, Any]:
        """What does not depend on a copy of the module, as `install` sets the rest."""
        kept = ["path", "count", "name", "tensors", "frame", "differing"]
        kept += ["_buffer_names", "_parameter_names"]
        return {"_calls": None, **{name: vars(self)[name] for name in kept}}

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
        have, want = structure_of(other), structure_of(first)
        differ = next((k for k in (*want, *have) if have.get(k) != want.get(k)), None)
        if differ is None and list(have) != list(want):
            differ = next(a for a, b in zip(have, want, strict=True) if a != b)
        if differ is not None:
            said = _said(have, differ), _said(want, differ)
            frozen = any("without gradients" in text for text in said)
            raise LoopError(
                f"functionalize(stacked={self.path!r}): {self.path}.{number} has {said[0]}, and "
                f"{self.path}.0 has {said[1]}; layers can be stacked only if nothing but their values "
                f"differs. {_THAW if frozen else ''}Leave the list out of stacked."
            )
        ours, theirs = attributes_of(first), attributes_of(other)
        for name in dict.fromkeys((*ours, *theirs)):
            values = ours.get(name, ABSENT), theirs.get(name, ABSENT)
            if not alike(*values):
                self.differing.setdefault(name, [values[0]]).append(values[1])

    def _refuse_references(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        """Refuse to read attributes by which a layer would reach the layers, itself among them."""
        steps = self.path.split(".")
        around = (module.get_submodule(".".join(steps[:i])) for i in range(len(steps) + 1))
        reached = {id(m) for m in (*around, *(part for layer in layers for part in layer.modules()))}
        for name, value in attributes_of(layers[0]).items():
            if any(id(x) in reached for x in contents(value) or ()):
                self.differing.setdefault(name, [value])

    # -- standing in ------------------------------------------------------------------------------

    def install(self, module: nn.Module, iterate: Callable[[str, nn.Module], None]) -> None:
        """Put stand-ins in the place of the layers of a copy of the module.

        Args:
            iterate: gives a part of the first layer, given its path, the forward of all layers.
        """
        layers = module.get_submodule(self.path)
        self.layers = list(layers.children())
        self._layer = self.layers[0]
        for name, part in self._layer.named_modules():
            iterate(self.row(name).rstrip("."), part)
            for (owner, key), values in self.differing.items():
                if owner == name:
                    vars(part)[key] = Differing(self.row(name).rstrip("."), key, values)
        self._forward = self._layer.forward
        self._tables = tables_of(self._layer)
        self._modules = [[*layer.modules()] for layer in self.layers]
        self._installed = [_with_contents(attributes_of(layer)) for layer in self.layers]
        for i, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._call, i)
        self._forwards = [_forwards(layer) for layer in self.layers]

    def is_equal(self, number: int, name: tuple[str, str], first: Any, other: Any) -> bool:
        """Whether an attribute of a layer and that of the first, which are read now, are equal."""
        known = [self._installed[i].get(name) for i in (0, number)]
        if all(unchanged(*pair) for pair in zip(known, map(contents, (first, other)), strict=True)):
            return True  # compared before
        return alike(first, other)

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
        tables = LayerTables(self.layers, rows)
        self._calls = LayerCalls(self, rows, keyed, within, tables)
        try:
            with Between(), tables.readable():
                yield
            self._calls.check_complete()
            # The frames of the forward are gone: what still refers to a placeholder is in the result.
            self._calls.check_forgotten()
        finally:
            self._calls = None

    def apply(self, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """One layer's result.

        Raises:
            LoopError: it updates a buffer or writes an attribute.
        """
        calls, self._calls = self._calls, None
        buffers = [name for name in self._buffer_names if name in tensors]
        given = {**tensors, **{name: tensors[name].clone() for name in buffers}}
        versions = {name: internals.version(given[name]) for name in buffers}
        values = dict(given)
        try:
            parameters = internals.as_parameters(given[name] for name in self._parameter_names)
            with holding(self._tables), parameters, undone(Contents(self._layer)) as contents:
                out = torch.func.functional_call(self._layer, values, args, kwargs, tie_weights=False)
                written = _written(contents)
        finally:
            self._calls = calls
        for name, version in versions.items():
            if values[name] is not given[name] or internals.version(values[name]) != version:
                raise LoopError(
                    f"{_line(self._layer)}functionalize(stacked={self.path!r}): a layer updates its "
                    f"buffer {name!r}; buffers of stacked layers may only be read. Leave the list out "
                    "of stacked."
                )
        if written is not None:
            raise LoopError(
                f"{_line(self._layer)}functionalize(stacked={self.path!r}): the forward of a layer "
                f"writes {written}, which only one of the layers would store. Return the value, or "
                "leave the list out of stacked."
            )
        return out

    def check_layer(self, number: int) -> None:
        """Check that a layer has the modules and forwards that it had, and no hooks.

        Raises:
            LoopError: it has not.
        """
        layer = self.layers[number]
        check_hooks(layer, self.path, number)
        exchanged = [*layer.modules()] != self._modules[number]
        forwards = zip(_forwards(layer), self._forwards[number], strict=False)
        if exchanged or not all(now is before for now, before in forwards):
            what = "a module" if exchanged else "the forward of a module"
            raise LoopError(
                f"{source.begins_here()}functionalize(stacked={self.path!r}): {what} of "
                f"{self.path}.{number} has changed since the layers were stacked; only parameters and "
                "buffers may differ. Leave the list out of stacked."
            )


def _line(layer: nn.Module) -> str:
    """Where the forward of a layer is written, as the beginning of a message."""
    code = getattr(type(layer).forward, "__code__", None)
    return "" if code is None else f"{source.of_code(code)}: "


def _forwards(layer: nn.Module) -> list[Any]:
    """The forwards of a layer's modules."""
    return [vars(part).get("forward") for part in layer.modules()]


def _with_contents(attributes: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], Any]:
    return {name: contents(value) for name, value in attributes.items()}


def _written(contents: Contents) -> str | None:
    """The change that a layer's forward made in the layer, for messages; None if nothing."""
    attributes = {id(vars(part)) for part in contents.module.modules()}
    for now, before in contents.changed():
        if id(now) not in attributes:
            return f"to a {type(now).__name__} that it holds"
        then = pairs(before)
        for key in (*now, *then):
            if not alike(now.get(key, ABSENT), then.get(key, ABSENT)):
                return f"its attribute {key!r}"
    return None


def _listed(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules of a list.

    Raises:
        LoopError: there is none at the path.
    """
    lists = {k: m for k, m in module.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))}
    layers = dict(lists[path].named_children()) if path in lists and path else {}
    if list(layers) != list(map(str, range(len(layers)))):
        raise LoopError(
            f"functionalize(stacked={path!r}): the modules of this list are called "
            f"{', '.join(map(repr, layers))}; stacked layers are numbered from 0."
        )
    if not layers:
        known = ", ".join(repr(k) for k, m in lists.items() if k and len(m))
        there = f"there are {known}" if known else "there is none in it"
        if "" in lists and len(lists[""]):
            there += (
                ". The module itself is a list: put it into a list, as in "
                "functionalize(nn.Sequential(module), stacked='0')"
            )
        raise LoopError(
            f"functionalize(stacked={path!r}): {type(module).__name__} has no list of modules at "
            f"this path; {there}."
        )
    return list(layers.values())


def _said(structure: Mapping[str, Any], key: str) -> str:
    """A module or tensor of a layer, for messages."""
    known = structure.get(key)
    if known is None:
        return f"nothing at {key.strip()!r}"
    if isinstance(known, type):
        text = f"a {known.__qualname__}"
        return f"{text} at {key!r}" if key else text
    dtype, shape, requires = known
    kind = f"{dtype}{shape}".removeprefix("torch.")
    return f"{kind}{' with' if requires else ' without'} gradients at {key.strip()!r}"
