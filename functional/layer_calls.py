"""The calls that a module makes of stacked layers in its own loop.

Each layer is replaced by a stub that returns placeholders instead of results; the last stub runs all
layers, by `repeat`, on what the first one was given. So the loop shows what each layer passes to the
next. Any other use of a layer's result, and any other argument that differs, is refused.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.control.iteration import trace_shapes
from torchard.functional.core import tree
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import LoopError
from torchard.functional.core.scope_frames import Frame
from torchard.functional.dropout import Keyed
from torchard.functional.layer_equality import (
    ABSENT,
    Differing,
    alike,
    attributes_of,
    contents,
    thread_state,
    unchanged,
)
from torchard.functional.modules.rows import LayerTables
from torchard.functional.programs.tags import VAL
from torchard.functional.repeat import apply_layers
from torchard.functional.tracing.object_results import register_torch_nodes, with_objects
from torchard.functional.tracing.trace_call import OutTree
from torchard.functional.tracing.trace_state import active

__all__ = ["Applied", "Between", "LayerCalls"]


class Applied(Protocol):
    """The layers of a list, which can be applied one at a time."""

    path: str
    count: int
    name: str
    frame: Frame
    layers: list[nn.Module]

    def is_equal(self, number: int, name: tuple[str, str], first: Any, other: Any) -> bool:
        """Whether an attribute of a layer and that of the first, which are read now, are equal."""

    def check_layer(self, number: int) -> None:
        """Check that a layer has the modules that it had, and no hooks."""

    def apply(self, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """One layer's result."""


class _Handed(Tensor):
    """The carry from a layer to the next, which is computed later: it has only shape and dtype."""

    layer: int
    result: int
    path: str
    turn: object
    line: str  # where the layer was called

    @staticmethod
    def __new__(
        cls, like: Tensor, layer: int, result: int, path: str, turn: object, line: str
    ) -> _Handed:
        made: _Handed = internals.valueless(cls, like)
        made.layer, made.result, made.path, made.turn, made.line = layer, result, path, turn, line
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes keywords
        return f"<result of {self.path}.{self.layer}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            with internals.no_function_modes():
                return func(*args, **(kwargs or {}))
        handed = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, _Handed))
        how = f"is used by {getattr(func, '__name__', func)} before the next layer"
        raise _used_between(handed, how, source.begins_here())

    # Required of such a class; operations are refused above. (torch declares other arguments.)
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


class Between(TorchFunctionMode):
    """Refuses operations on a layer's carry, even if a trace would handle them first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = internals.unpatched(func)
        if any(issubclass(kind, _Handed) for kind in types):
            return _Handed.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# Attributes and methods that may be read of a value that is not computed yet.
_READS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "layout", "is_sparse", "is_meta")),
}


def _used_between(handed: _Handed, how: str, line: str) -> LoopError:
    return LoopError(
        f"{line}functionalize(stacked={handed.path!r}): the result of {handed.path}.{handed.layer} "
        f"{how}; the result of a stacked layer may only be passed to the next layer. Leave the list "
        "out of stacked."
    )


class LayerCalls:
    """The calls of the layers in one call of the module."""

    def __init__(
        self,
        layers: Applied,
        rows: Mapping[str, Tensor],
        keyed: Keyed,
        within: Callable[[], Any],
        tables: LayerTables,
    ) -> None:
        self.layers, self.rows, self.keyed, self.within = layers, rows, keyed, within
        self.tables = tables
        self.upcoming = 0
        self.line = ""  # of the last call
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.kind: _Kind
        # For each tensor among the arguments that the layer before computes, which of its results it is.
        self.carried: dict[int, int] = {}
        # One for each time that the layers are applied: their carries belong to it.
        self.turn = object()
        self.handed: list[weakref.ref[_Handed]] = []

    def call(self, number: int, args: Any, kwargs: Any) -> Any:
        """The result of a layer: a value for the last layer, placeholders for the others."""
        self.line = source.begins_here()
        if number != self.upcoming:
            raise self._error(f"layer {number} is called where layer {self.upcoming} is expected")
        leaves, structure = tree.flatten((args, kwargs))
        if number == 0:
            self._begin(leaves, structure)
        else:
            self._check_call(number, leaves, structure)
        self._check_tables(number)
        self.upcoming = (number + 1) % self.layers.count
        if not self.upcoming:
            return self._applied()
        path, kinds = self.layers.path, enumerate(self.kind.results)
        results = [_Handed(like, number, i, path, self.turn, self.line) for i, like in kinds]
        self.handed += map(weakref.ref, results)
        return self.kind.tree.build(results)

    def check_complete(self) -> None:
        """Check that the loop did not stop before the last layer."""
        if self.upcoming:
            raise self._error(f"the forward calls {self.upcoming} of {self.layers.count} layers")
        for number in range(self.layers.count):
            if (replaced := self.tables.replaced(number)) is not None:
                raise self._error(f"the forward replaces {replaced!r} of layer {number}")

    def check_forgotten(self) -> None:
        """Check that nothing stores a layer's carry."""
        if any(ref() is not None for ref in self.handed):
            gc.collect()  # it may be in a cycle that nobody reaches
        kept = next((handed for ref in self.handed if (handed := ref()) is not None), None)
        if kept is not None:
            raise _used_between(kept, "is returned by the module, or stored in it", kept.line)

    def _check_tables(self, number: int) -> None:
        """Check that a layer is as it was when the module was functionalized, but for its attributes."""
        self.layers.check_layer(number)
        replaced = self.tables.replaced(number)
        if replaced is not None:
            raise self._error(f"the parameter or buffer {replaced!r} of layer {number} is replaced")
        if self.tables.versions() != self.versions:
            raise self._error(f"a parameter or buffer of a layer is written to before layer {number}")

    def _error(self, what: str) -> LoopError:
        return LoopError(
            f"{self.line}functionalize(stacked={self.layers.path!r}): {what}; all stacked layers must "
            "be called, in order, each with the result of the previous one. Leave the list out of "
            "stacked."
        )

    def _begin(self, leaves: list[Any], structure: Any) -> None:
        """The call of the first layer."""
        for leaf in leaves:
            if isinstance(leaf, _Handed):
                raise _used_between(leaf, f"is an argument of {self.layers.path}.0", self.line)
        self.leaves, self.structure, self.carried, self.turn = leaves, structure, {}, object()
        self.start, self.state = self.keyed.first + self.keyed.drawn, thread_state()
        self.before = [contents(leaf) for leaf in leaves]
        self.versions = self.tables.versions()
        self.attributes = [self._attributes(layer) for layer in self.layers.layers]
        for number, attributes in enumerate(self.attributes):
            for name in dict.fromkeys((*self.attributes[0], *attributes)):
                first, _ = self.attributes[0].get(name, _ABSENT)
                other, _ = attributes.get(name, _ABSENT)
                if not (_is_differing(first) or self.layers.is_equal(number, name, first, other)):
                    what = f"the attribute {name[1]!r} of layer {number}"
                    raise self._error(f"{what} is {other!r}, and that of layer 0 {first!r}")
        self.kind = self._kind()

    def _attributes(self, layer: nn.Module) -> dict[tuple[str, str], Any]:
        """The attributes of a layer, each with its contents."""
        return {name: (value, contents(value)) for name, value in attributes_of(layer).items()}

    def _check_call(self, number: int, leaves: list[Any], structure: Any) -> None:
        """Check that arguments are those of the first layer, except for the carry."""
        if structure != self.structure:
            raise self._error(f"layer {number} is called with arguments of a different structure")
        if thread_state() != self.state:
            raise self._error(f"layer {number} is called under a different grad mode or autocast")
        if self.kind.draws and self.keyed.first + self.keyed.drawn != self.start:
            raise self._error(f"a dropout outside of the layers draws a mask before layer {number}")
        paths = tree.paths(tree.unflatten(structure, leaves), "")
        carried: dict[int, int] = {}
        for i, (first, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if isinstance(leaf, _Handed):
                if leaf.turn is not self.turn or leaf.layer != number - 1:
                    what = f"is an argument of {self.layers.path}.{number}"
                    raise _used_between(leaf, what, self.line)
                carried[i] = leaf.result
            elif first is not leaf if isinstance(first, Tensor) else not alike(first, leaf):
                raise self._error(
                    f"the argument {paths[i]} of layer {number} is neither that of layer 0 nor a result "
                    f"of layer {number - 1}"
                )
        if number == 1:
            self.carried = carried
        if carried != self.carried or not carried:
            raise self._error(f"layer {number} does not take the result of layer {number - 1}")
        self._check_unchanged(number, paths)

    def _check_unchanged(self, number: int, paths: list[str]) -> None:
        """Check that nothing changed since the first layer's call which a layer could read."""
        for i, (before, leaf) in enumerate(zip(self.before, self.leaves, strict=True)):
            if i not in self.carried and not unchanged(before, contents(leaf)):
                raise self._error(f"the argument {paths[i]} may have changed before layer {number}")
        then, now = self.attributes[number], self._attributes(self.layers.layers[number])
        for name in (*then, *now):
            (_, before), (_, after) = then.get(name, _ABSENT), now.get(name, _ABSENT)
            if not unchanged(before, after):
                what = f"the attribute {name[1]!r} of layer {number}"
                raise self._error(f"{what} may have changed since layer 0")

    # -- one layer --------------------------------------------------------------------------------

    def _operands(self) -> list[int]:
        """The positions of the tensors among the arguments."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    def _layer(
        self, rows: Any, operands: Mapping[int, Tensor], key: Tensor | None, first: Any
    ) -> tuple[Any, int]:
        """The result of one layer, and how many dropouts drew a mask in it."""
        leaves = [operands.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        args, kwargs = tree.unflatten(self.structure, leaves)
        with self.within(), Keyed(key, first) as keyed:
            out = self.layers.apply(rows, args, kwargs)
        register_torch_nodes(out)
        return with_objects(out, lambda tensor: True), keyed.drawn

    def _kind(self) -> _Kind:
        """The result of one layer: traced in a trace, else computed."""
        first = {name: value[0] for name, value in self.rows.items()}
        operands = {i: self.leaves[i] for i in self._operands()}
        drawn = 0

        def one(rows: Any, operands: Any, key: Any) -> Any:
            nonlocal drawn
            out, drawn = self._layer(rows, operands, key, 0)
            return out

        one.__name__ = self.layers.name
        if active() is None:  # a trace would wait for another thread's, which may wait for the module
            leaves, structure = tree.flatten(one(first, operands, self.keyed.key))
            results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            return _Kind(OutTree.of(leaves, structure), results, drawn)
        program = trace_shapes(one, first, operands, self.keyed.key)
        return _Kind(program.out_tree, [VAL.of(node) for node in program.results], drawn)

    def _applied(self) -> Any:
        """The result of the last layer, after all others."""
        names, count = sorted(self.carried), len(self.kind.results)
        shared = [i for i in self._operands() if i not in self.carried]
        also = [k for k in range(count) if k not in self.carried.values()]

        def block(rows: Any, x: Any, rest: Any, key: Any, *, index: Tensor) -> Any:
            operands = dict(zip((*names, *shared), (*x, *rest), strict=True))
            out, _ = self._layer(rows, operands, key, self.start + index * self.kind.draws)
            results = [leaf for leaf in tree.leaves(out) if isinstance(leaf, Tensor)]
            return [results[self.carried[i]] for i in names], [results[k] for k in also]

        block.__name__ = self.layers.name
        rest = ([self.leaves[i] for i in shared], self.keyed.key)
        x = [self.leaves[i] for i in names]
        last, others = apply_layers(
            block, self.rows, x, rest, self.layers.frame, collect=True, index=True
        )
        self.keyed.drawn += self.kind.draws * self.layers.count
        results = {k: stacked[-1] for k, stacked in zip(also, others, strict=True)}
        results |= {self.carried[i]: value for i, value in zip(names, last, strict=True)}
        return self.kind.tree.build([results[k] for k in range(count)])


@dataclass
class _Kind:
    """The kind of a layer's result.

    Attributes:
        tree: the structure of its result.
        results: tensors of the shapes and dtypes of those in it.
        draws: how many dropouts draw a mask.
    """

    tree: OutTree
    results: list[Tensor]
    draws: int


_ABSENT = (ABSENT, None)


def _is_differing(value: Any) -> bool:
    return type(value) is Differing
