"""Styles: how layers are split over one axis, and where activations go between them."""

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

Split = int | P | None
Layers = Mapping[str, Layer]


@dataclass(frozen=True)
class Placing:
    """What a style says of one layer: specs by the names in params, and its boundary's layouts."""

    path: str
    specs: Mapping[str, P]
    input_layouts: Split = None
    output_layouts: Split = None


@written("Colwise()")
@dataclass(frozen=True, kw_only=True)
class Style:
    """How a layer is split.

    Args:
        input_layouts, output_layouts: of the first tensor that the layer takes and returns: the
            dim that the axis splits, counted from the front (0 is the batch); ``P()`` for none; a
            P with anything in it as it is; None leaves it to propagation, which follows the
            weights.
    """

    input_layouts: Split = None
    output_layouts: Split = None

    def __post_init__(self) -> None:
        for which in ("input_layouts", "output_layouts"):
            _check_split(type(self).__name__, which, getattr(self, which))
        check_fields(self)

    def placings(self, layer: Layer, layers: Layers, axis: str) -> list[Placing]:
        """What this style says of a layer, and of the layers inside it.

        Raises:
            SpecError: it does not suit the layer.
        """
        specs = self.specs(layer, axis)
        return [Placing(layer.path, specs, self.input_layouts, self.output_layouts)]

    def specs(self, layer: Layer, axis: str) -> dict[str, P]:
        """Specs of the layer's own parameters; those not in it are replicated."""
        return {}


def _check_split(style: str, which: str, split: Any) -> None:
    if split is None or isinstance(split, P):
        return
    if not isinstance(split, int) or isinstance(split, bool):
        raise SpecError(
            f"{style}({which}={split!r}): a layout is a dim, a P, or None for what propagation finds."
        )
    if split < 0:
        raise SpecError(
            f"{style}({which}={split}): dims count from the front, for a style does not know the "
            f"rank; the last dim of [batch, sequence, features] is 2."
        )


@dataclass(frozen=True, kw_only=True)
class _Product(Style):
    """A layer with one matrix.

    Args:
        unit: this many consecutive features stay together (the size of an attention head).
        heads: the features are those of this many heads, each of which stays whole: the same said
            by their number. Where k and v have fewer heads than q, it is theirs for q, k, v and the
            output alike, so that a group of queries stays with its k and v.
        transposed: the weight is [in, out]. None asks the layer's class; True or False also makes
            a linear of a layer whose class is not known.
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
                    f"{type(self).__name__}(unit={self.unit}, heads={self.heads}): the size of a "
                    "head and their number say the same of a layer; give one of them."
                )

    def _of_linear(self, layer: Layer) -> bool:
        """Whether the weight is [in, out]; SpecError if the layer has none."""
        forced = self.transposed is not None and len(layer.shapes.get("weight", ())) == 2
        if not (layer.is_linear or forced):
            style = type(self).__name__
            shapes = ", ".join(f"{k} {list(v)}" for k, v in layer.shapes.items()) or "no parameters"
            raise SpecError(
                f"{style} splits linears and embeddings; {layer.path!r} is a {layer.what} with "
                f"{shapes}. Narrow the pattern, use Activations() or SequenceParallel() to place "
                f"what goes in and out, or {style}(transposed=False) if its weight is a [out, in]."
            )
        return layer.transposed if self.transposed is None else self.transposed

    def _units(self, layer: Layer, dim: int, parts: int = 1) -> tuple[int, int | None]:
        """The parts of a dim of the weight and the heads in each: as told, else as found."""
        found = layer.units.get("weight")
        if self.unit > 1 or self.heads is not None or not found or parts not in (1, found[dim][0]):
            return parts, self.heads
        parts, units = found[dim]
        size = layer.shapes["weight"][dim]
        if units == 1 < size // parts:
            raise SpecError(
                f"the {size} features of {layer.path!r} stay together in what follows, so that there "
                f"is nothing to split; give {type(self).__name__}(heads=) or (unit=), or leave it out."
            )
        return parts, None if parts == 1 and units == size else units

    def _split(self, axis: str, other: str, parts: int, heads: int | None) -> P:
        """A dim of ``parts`` times units, with another dim before it, after it, or none."""
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
        raise SpecError(f"{type(style).__name__}({which}={count!r}): it must be an int from 1 on.")


@dataclass(frozen=True, kw_only=True)
class Colwise(_Product):
    """A linear split by its outputs, an embedding by its features.

    The output is split in its last dim; nothing crosses the network in the forward.

    Args:
        parts: how many projections of equal size the layer holds one after the other (3 for q, k
            and v in one): each of them is split, so that they come apart unsplit.

    Source: Shoeybi et al. (Megatron-LM), arXiv:1909.08053; PyTorch's ColwiseParallel.
    """

    parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_count(self, "parts", self.parts)

    def specs(self, layer: Layer, axis: str) -> dict[str, P]:
        transposed = layer.kind == EMBEDDING or self._of_linear(layer)
        parts, heads = self._units(layer, 1 if transposed else 0, self.parts)
        weight = self._split(axis, "before" if transposed else "after", parts, heads)
        found = {"weight": weight, "bias": self._split(axis, "", parts, heads)}
        return {layer.names[k]: spec for k, spec in found.items() if k in layer.names}


@dataclass(frozen=True, kw_only=True)
class Rowwise(_Product):
    """A linear split by its inputs, an embedding by its rows (the vocabulary).

    Every rank has a part of the sum; it is completed by one all_reduce, or by one reduce_scatter
    where ``output_layouts`` names a dim. The bias is replicated and added once.

    Source: Shoeybi et al. (Megatron-LM), arXiv:1909.08053; PyTorch's RowwiseParallel.
    """

    def specs(self, layer: Layer, axis: str) -> dict[str, P]:
        transposed = layer.kind == EMBEDDING or self._of_linear(layer)
        units = self._units(layer, 0 if transposed else 1)
        weight = self._split(axis, "after" if transposed else "before", *units)
        return {layer.names["weight"]: weight}


@dataclass(frozen=True, kw_only=True)
class Activations(Style):
    """The layer's parameters are replicated, or said by other patterns; only what it takes and
    returns is placed. PyTorch's PrepareModuleInput and PrepareModuleOutput.
    """


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Style):
    """A layer that works on each position for itself (a norm), on activations split by position.

    Its parameters are replicated. By default dim 1 is split, of [batch, sequence, features].

    Source: Korthikanti et al., arXiv:2205.05198; PyTorch's SequenceParallel.
    """

    input_layouts: Split = 1
    output_layouts: Split = 1


@dataclass(frozen=True, kw_only=True)
class Pairwise(Style):
    """The linears inside a module in pairs, Colwise then Rowwise; an odd last one is left alone.

    They pair up in the order in which the module registered them, embeddings and norms aside.
    The layouts are those of the module, not of the linears.

    Source: PyTorch's PairwiseParallel.
    """

    def placings(self, layer: Layer, layers: Layers, axis: str) -> list[Placing]:
        prefix = f"{layer.path}." if layer.path else ""
        inside = [other for path, other in layers.items() if path.startswith(prefix)]
        linears = [other for other in inside if other.path != layer.path and other.is_linear]
        if len(linears) < 2:
            raise SpecError(
                f"Pairwise splits the linears inside a module in pairs; {layer.path!r} is a "
                f"{layer.what} with {len(linears)} inside. Give it a module that holds two, or use "
                "Colwise() or Rowwise() for a single one."
            )
        found = super().placings(layer, layers, axis)
        for first, second in zip(linears[::2], linears[1::2], strict=False):
            found += Colwise().placings(first, layers, axis)
            found += Rowwise().placings(second, layers, axis)
        return found
