"""Styles: how the parameters of a layer are split over one axis, and how its activations are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchard.functional.core.arguments import check_fields, written
from torchard.sharding.styles.layers import EMBEDDING, Layer
from torchard.sharding.values.spec import P, SpecError

__all__ = [
    "Activations",
    "Colwise",
    "Pairwise",
    "Placing",
    "Rowwise",
    "SequenceParallel",
    "Style",
]

SplitDim = int | P | None
Layers = Mapping[str, Layer]


@dataclass(frozen=True)
class Placing:
    """The specs of a layer's parameters, by name in params, and the layouts of its input and output."""

    path: str
    specs: Mapping[str, P]
    input_layouts: SplitDim = None
    output_layouts: SplitDim = None


@written("Colwise()")
@dataclass(frozen=True, kw_only=True)
class Style:
    """How a layer is split. For a custom style, subclass it and override ``specs``.

    Args:
        input_layouts: the layout of the first tensor that the layer takes: the dim that the axis splits,
            counted from the front (0 is the batch); ``P()`` for none; any other P is used unchanged; None
            leaves it to propagation.
        output_layouts: the same for the first tensor that the layer returns.

    >>> import torch, torchard as ta
    >>> class Stacked(ta.Style):
    ...     def specs(self, layer, axis):                        # split dim 0 of every parameter
    ...         return {name: ta.P(axis) for name in layer.names.values()}
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> specs, _ = ta.parallelize(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": Stacked()})
    >>> specs
    {'0.weight': P('tp'), '0.bias': P('tp')}
    """

    input_layouts: SplitDim = None
    output_layouts: SplitDim = None

    def __post_init__(self) -> None:
        for which in ("input_layouts", "output_layouts"):
            _check_split(type(self).__name__, which, getattr(self, which))
        check_fields(self)

    def placings(self, layer: Layer, layers: Layers, axis: str) -> list[Placing]:
        """The placings of a layer, and of layers inside it.

        Raises:
            SpecError: the style does not suit the layer.
        """
        specs = self.specs(layer, axis)
        return [Placing(layer.path, specs, self.input_layouts, self.output_layouts)]

    def specs(self, layer: Layer, axis: str) -> dict[str, P]:
        """Specs of the layer's own parameters, by their names in params; others are replicated."""
        return {}


def _check_split(style: str, which: str, split: Any) -> None:
    if split is None or isinstance(split, P):
        return
    if not isinstance(split, int) or isinstance(split, bool):
        raise SpecError(
            f"{style}({which}={split!r}): a layout is a dim, a P, or None to leave it to propagation."
        )
    if split < 0:
        raise SpecError(
            f"{style}({which}={split}): dims are counted from the front, as a style does not know the "
            f"rank; the last dim of [batch, sequence, features] is 2."
        )


@dataclass(frozen=True, kw_only=True)
class _Product(Style):
    """A style of layers with one matrix.

    Args:
        unit: the number of consecutive features that stay together, such as the size of a head.
        heads: the number of heads that the features form, none of which is split (instead of ``unit``).
            If k and v have fewer heads than q, the number of their heads for all of q, k, v and the
            output projection, so that a group of queries stays with its k and v.
        transposed: whether the weight is [in, out]; None goes by the layer's class. With True or False,
            any layer whose weight is a matrix is treated as a linear.
    """

    unit: int = 1
    heads: int | None = None
    transposed: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count(self, "unit", self.unit)
        if self.heads is not None:
            _check_count(self, "heads", self.heads)
            if self.unit > 1:
                raise SpecError(
                    f"{type(self).__name__}(unit={self.unit}, heads={self.heads}): the size of heads "
                    "and the number of heads determine each other; give one of them."
                )

    def _of_linear(self, layer: Layer) -> bool:
        """Whether the weight is [in, out].

        Raises:
            SpecError: the layer has no 2-D weight that this style can split.
        """
        forced = self.transposed is not None and len(layer.shapes.get("weight", ())) == 2
        if not (layer.is_linear or forced):
            style = type(self).__name__
            shapes = ", ".join(f"{k} {list(v)}" for k, v in layer.shapes.items()) or "no parameters"
            raise SpecError(
                f"{style} splits linears and embeddings; {layer.path!r} is a {layer.what} with "
                f"{shapes}. Narrow the pattern, use Activations() or SequenceParallel() to place its "
                f"inputs and outputs, or {style}(transposed=False) if its weight is [out, in]."
            )
        return layer.transposed if self.transposed is None else self.transposed

    def _units(self, layer: Layer, dim: int, parts: int = 1) -> tuple[int, int | None]:
        """The parts of a dim of the weight, and the heads in each: as given, else as found in a trace."""
        traced = layer.units.get("weight")
        if self.unit > 1 or self.heads is not None or not traced or parts not in (1, traced[dim][0]):
            return parts, self.heads
        parts, units = traced[dim]
        size = layer.shapes["weight"][dim]
        if units == 1 < size // parts:
            raise SpecError(
                f"the {size} features of {layer.path!r} are needed together by the operations that "
                f"follow, so they cannot be split; give {type(self).__name__}(heads=) or (unit=), or "
                "leave the layer out of the plan."
            )
        return parts, None if parts == 1 and units == size else units

    def _split(self, axis: str, other: str, parts: int, heads: int | None) -> P:
        """The spec of a dim of ``parts`` times units, with another dim before it, after it, or none."""
        if parts == self.unit == 1 and heads is None:
            return P(None, axis) if other == "before" else P(axis, *[None] * (other == "after"))
        fused = "(parts units unit)"
        pattern = {"": fused, "before": f"other {fused}", "after": f"{fused} other"}[other]
        sizes: dict[str, Any] = {"unit": self.unit, "units": axis}
        if heads is not None:
            sizes = {"units": (heads, axis)}
        return P.factors(pattern, parts=parts, **sizes)


def _check_count(style: Style, which: str, count: Any) -> None:
    if not isinstance(count, int) or count < 1:
        raise SpecError(f"{type(style).__name__}({which}={count!r}): it must be a positive int.")


@dataclass(frozen=True, kw_only=True)
class Colwise(_Product):
    """Split a linear by its outputs, an embedding by its features.

    The forward needs no communication.

    Args:
        unit: as for `Rowwise`.
        heads: as for `Rowwise`.
        transposed: as for `Rowwise`.
        parts: the number of projections of equal size that the layer concatenates (3 for q, k and v).
            Each of them is split.

    Source: Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3; PyTorch's ``ColwiseParallel``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(4, 8), "qkv": torch.nn.Linear(4, 12)})
    >>> specs, _ = ta.parallelize(model, mesh, {"up": ta.Colwise(), "qkv": ta.Colwise(parts=3)})
    >>> for name, spec in specs.items():
    ...     print(name, spec)
    up.weight P('tp', None)
    up.bias P('tp')
    qkv.weight P.factors('(parts units unit) other', parts=3, unit=1, units='tp')
    qkv.bias P.factors('(parts units unit)', parts=3, unit=1, units='tp')
    """

    parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count(self, "parts", self.parts)

    def specs(self, layer: Layer, axis: str) -> dict[str, P]:
        transposed = layer.kind == EMBEDDING or self._of_linear(layer)
        parts, heads = self._units(layer, 1 if transposed else 0, self.parts)
        weight = self._split(axis, "before" if transposed else "after", parts, heads)
        specs = {"weight": weight, "bias": self._split(axis, "", parts, heads)}
        return {layer.names[k]: spec for k, spec in specs.items() if k in layer.names}


@dataclass(frozen=True, kw_only=True)
class Rowwise(_Product):
    """Split a linear by its inputs, an embedding by its rows (the vocabulary).

    Every rank computes a partial sum. It is completed by one all_reduce, or by one reduce_scatter if
    ``output_layouts`` names a dim. The bias is replicated and added once.

    Args:
        unit: the number of consecutive features that stay together, such as the size of a head.
        heads: the number of heads that the features form, none of which is split (instead of ``unit``).
            If k and v have fewer heads than q, give the number of their heads for all of q, k, v and the
            output projection, so that a group of queries stays with its k and v.
        transposed: whether the weight is [in, out]; None goes by the layer's class. With True or False,
            any layer whose weight is a matrix is treated as a linear.

    Source: Megatron-LM, Shoeybi et al., arXiv:1909.08053, section 3; PyTorch's ``RowwiseParallel``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> fn, params = ta.functionalize(mlp)
    >>> specs, _ = ta.parallelize(fn, mesh, {"0": ta.Colwise(), "2": ta.Rowwise()})
    >>> specs
    {'0.weight': P('tp', None), '0.bias': P('tp'), '2.weight': P(None, 'tp'), '2.bias': P()}
    >>> plan = ta.shard(fn, mesh, out_specs=ta.P()).lower(ta.place(params, mesh, specs), torch.ones(2, 4))
    >>> [c.kind for c in plan.collectives]
    ['all_reduce']
    """

    def specs(self, layer: Layer, axis: str) -> dict[str, P]:
        transposed = layer.kind == EMBEDDING or self._of_linear(layer)
        units = self._units(layer, 0 if transposed else 1)
        weight = self._split(axis, "after" if transposed else "before", *units)
        return {layer.names["weight"]: weight}


@dataclass(frozen=True, kw_only=True)
class Activations(Style):
    """Place only the input and output of a layer.

    Its parameters are replicated, or placed by other patterns.

    Source: PyTorch's ``PrepareModuleInput`` and ``PrepareModuleOutput``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    >>> ta.parallelize(model, mesh, {"0": ta.Activations(output_layouts=0)})
    ({'0.weight': P(), '0.bias': P()}, {'0/out': P(('tp',))})
    """


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Style):
    """Run a layer that treats positions independently, such as a norm, on a split sequence.

    Its parameters are replicated. By default dim 1 of [batch, sequence, features] is split.

    Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2; PyTorch's ``SequenceParallel``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> specs, constraints = ta.parallelize(
    ...     torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4)}), mesh, {"norm": ta.SequenceParallel()})
    >>> specs
    {'norm.weight': P(), 'norm.bias': P()}
    >>> constraints
    {'norm/in': P(None, 'tp'), 'norm/out': P(None, 'tp')}
    """

    input_layouts: SplitDim = 1
    output_layouts: SplitDim = 1


@dataclass(frozen=True, kw_only=True)
class Pairwise(Style):
    """Split the linears inside a module in pairs, `Colwise` then `Rowwise`.

    They are paired in the order in which the module registered them; embeddings and norms do not count,
    and an odd last linear is not split. The layouts apply to the module, not to the linears.

    Source: PyTorch's ``PairwiseParallel``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> specs, _ = ta.parallelize(mlp, mesh, {"": ta.Pairwise()})
    >>> specs
    {'0.weight': P('tp', None), '0.bias': P('tp'), '2.weight': P(None, 'tp'), '2.bias': P()}
    """

    def placings(self, layer: Layer, layers: Layers, axis: str) -> list[Placing]:
        prefix = f"{layer.path}." if layer.path else ""
        inside = [other for path, other in layers.items() if path.startswith(prefix)]
        linears = [other for other in inside if other.path != layer.path and other.is_linear]
        if len(linears) < 2:
            raise SpecError(
                f"Pairwise splits the linears inside a module in pairs; {layer.path!r} is a "
                f"{layer.what} with {len(linears)} inside. Give it a module that holds two, or use "
                "Colwise() or Rowwise() for a single linear."
            )
        placings = super().placings(layer, layers, axis)
        for first, second in zip(linears[::2], linears[1::2], strict=False):
            placings += Colwise().placings(first, layers, axis)
            placings += Rowwise().placings(second, layers, axis)
        return placings
