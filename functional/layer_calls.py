"""The calls that a module makes of stacked layers in its own loop.

The loop runs on stand-ins, which hand placeholders on instead of results; the last one applies all
layers, by `repeat`, to what the first one was given. So the loop shows what each layer hands to the next.
Any other use of a layer's result, and any other argument that differs, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.errors import LoopError
from torchard.functional.core.scope_frames import Frame
from torchard.functional.dropout import Keyed
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.repeat import apply_layers, trace_shapes
from torchard.functional.tracing.pytree_interop import register_torch_nodes

__all__ = ["Applied", "Between", "LayerCalls", "alike", "check_returned"]


class Applied(Protocol):
    """The layers of a list, which can be applied one at a time."""

    path: str
    count: int
    name: str
    frame: Frame

    def apply(self, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """One layer's result."""


class _Handed(Tensor):
    """What a layer hands to the next one, which is computed later: it has a shape and a dtype only."""

    layer: int
    result: int
    path: str

    @staticmethod
    def __new__(cls, like: Tensor, layer: int, result: int, path: str) -> _Handed:
        made: _Handed = internals.valueless(cls, like)
        made.layer, made.result, made.path = layer, result, path
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<result of {self.path}.{self.layer}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            with internals.no_function_modes():
                return func(*args, **(kwargs or {}))
        handed = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, _Handed))
        raise _used_between(handed, f"is used by {getattr(func, '__name__', func)} before the next layer")

    # Required of such a class; operations are refused above.
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


class Between(TorchFunctionMode):
    """Refuses operations on what a layer hands on, also where a trace would see to them first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, _Handed) for kind in types):
            return _Handed.__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# What may be read of a value that is not there yet.
_READS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    *(Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "layout", "is_sparse", "is_meta")),
}


def _used_between(handed: _Handed, how: str) -> LoopError:
    return LoopError(
        f"functionalize(stacked={handed.path!r}): the result of {handed.path}.{handed.layer} {how}; the "
        "results of stacked layers go to the next layer only. Leave the list out of stacked."
    )


class LayerCalls:
    """The calls of the layers in one call of the module."""

    def __init__(
        self,
        layers: Applied,
        rows: Mapping[str, Tensor],
        keyed: Keyed,
        within: Callable[[], Any],
    ) -> None:
        self.layers, self.rows, self.keyed, self.within = layers, rows, keyed, within
        self.upcoming = 0
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.kind: Any = None  # the program of one layer
        self.draws = 0
        # For each tensor among the arguments that the layer before computes, which of its results it is.
        self.carried: dict[int, int] = {}

    def call(self, number: int, args: Any, kwargs: Any) -> Any:
        """The result of a layer: that of the last is one, and those before it are placeholders."""
        if number != self.upcoming:
            raise self._error(f"layer {number} is called where layer {self.upcoming} is expected")
        leaves, structure = tree.flatten((args, kwargs))
        if number == 0:
            self.leaves, self.structure, self.carried = leaves, structure, {}
            self.kind, self.draws = self._traced_once()
        else:
            self._check_call(number, leaves, structure)
        self.upcoming = (number + 1) % self.layers.count
        if not self.upcoming:
            return self._applied()
        results = self._kinds()
        return self.kind.out_tree.build(
            [_Handed(x, number, i, self.layers.path) for i, x in enumerate(results)]
        )

    def check_complete(self) -> None:
        """Check that the loop did not stop before the last layer."""
        if self.upcoming:
            raise self._error(f"the forward calls {self.upcoming} of {self.layers.count} layers")

    def _error(self, what: str) -> LoopError:
        return LoopError(
            f"functionalize(stacked={self.layers.path!r}): {what}; stacked layers are all called, in "
            "order, each with the result of the one before. Leave the list out of stacked."
        )

    def _check_call(self, number: int, leaves: list[Any], structure: Any) -> None:
        """Check that arguments are those of the first layer, but for what the layer before hands on."""
        if structure != self.structure:
            raise self._error(f"layer {number} is called with arguments of another structure")
        paths = tree.paths(tree.unflatten(structure, leaves), "")
        carried: dict[int, int] = {}
        for i, (first, leaf) in enumerate(zip(self.leaves, leaves, strict=True)):
            if isinstance(leaf, _Handed) and leaf.layer == number - 1:
                carried[i] = leaf.result
            elif not alike(first, leaf) if not isinstance(first, Tensor) else first is not leaf:
                raise self._error(
                    f"the argument {paths[i]} of layer {number} is neither that of layer 0 nor a result "
                    f"of layer {number - 1}"
                )
        if number == 1:
            self.carried = carried
        if carried != self.carried or not carried:
            raise self._error(f"layer {number} does not take what layer {number - 1} returns")

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
        return out, keyed.drawn

    def _traced_once(self) -> tuple[Program, int]:
        drawn = 0

        def one(rows: Any, operands: Any, key: Any) -> Any:
            nonlocal drawn
            out, drawn = self._layer(rows, operands, key, 0)
            return out

        first = {name: value[0] for name, value in self.rows.items()}
        operands = {i: self.leaves[i] for i in self._operands()}
        return trace_shapes(one, first, operands, self.keyed.key), drawn

    def _kinds(self) -> list[Tensor]:
        """A tensor of the shape and dtype of each result of a layer."""
        return [VAL.of(node) for node in self.kind.results]

    def _applied(self) -> Any:
        """The result of the last layer, after all others."""
        start = self.keyed.first + self.keyed.drawn
        names = sorted(self.carried)
        shared = [i for i in self._operands() if i not in self.carried]
        also = [k for k in range(len(self._kinds())) if k not in self.carried.values()]

        def block(rows: Any, x: Any, rest: Any, key: Any, *, index: Tensor) -> Any:
            operands = dict(zip((*names, *shared), (*x, *rest), strict=True))
            out, _ = self._layer(rows, operands, key, start + index * self.draws)
            results = [leaf for leaf in tree.leaves(out) if isinstance(leaf, Tensor)]
            return [results[self.carried[i]] for i in names], [results[k] for k in also]

        block.__name__ = self.layers.name
        rest = ([self.leaves[i] for i in shared], self.keyed.key)
        x = [self.leaves[i] for i in names]
        last, others = apply_layers(
            block, self.rows, x, rest, self.layers.frame, collect=True, index=True
        )
        self.keyed.drawn += self.draws * self.layers.count
        results = {k: stacked[-1] for k, stacked in zip(also, others, strict=True)}
        results |= {self.carried[i]: value for i, value in zip(names, last, strict=True)}
        return self.kind.out_tree.build([results[k] for k in range(len(results))])


def alike(one: Any, other: Any) -> bool:
    """Whether two attributes are the same; what cannot be compared is not."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        return bool(torch.equal(one, other) if isinstance(one, Tensor) else one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def check_returned(out: Any) -> None:
    """Refuse a module that returns what a layer hands to the next."""
    for leaf in tree.leaves(out):
        if isinstance(leaf, _Handed):
            raise _used_between(leaf, "is returned by the module")
