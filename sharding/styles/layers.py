"""The layers of a model, as styles see them: paths, kinds, and the parameters they own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from torchard.functional.module import Functional
from torchard.functional.module_layers import StackedLayers
from torchard.functional.programs.program import Program
from torchard.sharding.styles.heads import Units, units_of
from torchard.sharding.values.spec import SpecError

__all__ = ["LINEAR", "Layer", "layers_of", "with_units"]

LINEAR, EMBEDDING, OTHER, UNKNOWN = "linear", "embedding", "other", "unknown"


@dataclass(frozen=True)
class Layer:
    """One module of a model.

    Attributes:
        path: the dotted path of the module; "" for the model itself.
        kind: ``linear``, ``embedding``, ``other``; ``unknown`` where only parameters were given.
        what: the name of its class, for messages.
        names: from the module's names of its own parameters to their names in the model's params (for
            a tied parameter, the first one).
        shapes: the shapes of these parameters, by the same keys.
        transposed: whether the weight is [in, out] instead of [out, in].
        units: the units of each dim of these parameters, by the same keys; empty without a trace.
        stacked: whether params has one more leading dim, with the parameters of several layers.
    """

    path: str
    kind: str
    what: str
    names: Mapping[str, str]
    shapes: Mapping[str, Sequence[int]]
    transposed: bool = False
    units: Mapping[str, tuple[Units, ...]] = field(default_factory=dict)
    stacked: bool = False

    @property
    def is_linear(self) -> bool:
        """Whether the layer multiplies by a matrix; if its class is unknown, whether it has one."""
        if self.kind == UNKNOWN:
            return len(self.shapes.get("weight", ())) == 2
        return self.kind == LINEAR


def layers_of(model: Any) -> tuple[dict[str, Layer], Any]:
    """The layers of a model by module path, in model order, and a tree like its params that holds names.

    Args:
        model: an nn.Module, what `functionalize` returned for one, or params: a dict by dotted name, or
            nested dicts.

    Raises:
        SpecError: the model is none of these.
    """
    if isinstance(model, Functional):
        layers = _of_module(model.module)
        for stack in model.stacks:
            layers = _stacked(layers, stack)
        own = (name for name, _ in model.module.named_parameters())
        return layers, {name: name for name in model.names_of(own)}
    if isinstance(model, nn.Module):
        return _of_module(model), {name: name for name, _ in model.named_parameters()}
    if isinstance(model, Mapping):
        names = _names(model, "")
        return _of_params(dict(_flat(model, names))), names
    raise SpecError(
        f"parallelize: model is a {type(model).__name__}; pass an nn.Module, a functionalized one, "
        "or a dict of parameters."
    )


def with_units(layers: Mapping[str, Layer], program: Program) -> dict[str, Layer]:
    """The layers with the units that are found in a trace of the model.

    Raises:
        SpecError: the first argument of the program is not the model's params.
    """
    known = units_of(program)
    missing = sorted({n for layer in layers.values() for n in layer.names.values()} - set(known))
    if missing:
        raise SpecError(
            f"program is not a trace of this model: its first argument has no {missing[0]!r}. Use "
            "trace(fn)(params, ...) with the params of the model that is parallelized."
        )
    return {
        path: replace(
            layer, units={k: known[name][layer.stacked :] for k, name in layer.names.items()}
        )
        for path, layer in layers.items()
    }


def _of_module(model: nn.Module) -> dict[str, Layer]:
    first_names: dict[int, str] = {id(p): name for name, p in model.named_parameters()}
    layers = {}
    for path, part in model.named_modules(remove_duplicate=False):
        own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
        layers[path] = Layer(
            path=path,
            kind=_kind(part),
            what=type(part).__name__,
            names={k: first_names[id(p)] for k, p in own.items()},
            shapes={k: tuple(p.shape) for k, p in own.items()},
            transposed=_is_transposed(part),
        )
    return layers


def _stacked(layers: Mapping[str, Layer], stack: StackedLayers) -> dict[str, Layer]:
    """The layers with one of a stack in place of all of them."""
    found: dict[str, Layer] = {}
    for path, layer in layers.items():
        place = stack.place(path)
        if place is None:
            found[path] = layer
        elif place[0] == 0:
            path = stack.row(place[1]).rstrip(".")
            names = {k: f"{path}.{k}" for k in layer.names}
            found[path] = replace(layer, path=path, names=names, stacked=True)
    return found


def _kind(part: nn.Module) -> str:
    if isinstance(part, nn.Linear) or _is_transposed(part):
        return LINEAR
    return EMBEDDING if isinstance(part, nn.Embedding) else OTHER


def _is_transposed(part: nn.Module) -> bool:
    """Whether it is HuggingFace's Conv1D, the linear of GPT-2 (by name: transformers is optional)."""
    return any(
        cls.__name__ == "Conv1D" and cls.__module__.startswith("transformers.")
        for cls in type(part).__mro__
    )


def _names(params: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        k: _names(v, f"{prefix}{k}.") if isinstance(v, Mapping) else f"{prefix}{k}"
        for k, v in params.items()
    }


def _flat(params: Mapping[str, Any], names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for k, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, names[k])
        elif not hasattr(value, "shape"):
            raise SpecError(
                f"parallelize: model at {names[k]!r} is {value!r}; a dict of parameters must hold "
                "tensors."
            )
        else:
            yield names[k], value


def _of_params(flat: Mapping[str, Any]) -> dict[str, Layer]:
    """The layers that dotted names of parameters imply, containers included."""
    paths: dict[str, dict[str, str]] = {"": {}}
    for name in flat:
        steps = name.split(".")
        for depth in range(1, len(steps)):
            paths.setdefault(".".join(steps[:depth]), {})
        paths[".".join(steps[:-1])][steps[-1]] = name
    return {
        path: Layer(
            path=path,
            kind=UNKNOWN if own else OTHER,
            what="group of parameters",
            names=own,
            shapes={k: tuple(flat[name].shape) for k, name in own.items()},
        )
        for path, own in paths.items()
    }
