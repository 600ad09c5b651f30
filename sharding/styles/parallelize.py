"""parallelize: from styles by module path to specs of parameters and constraints."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torchard.functional.core.arguments import checked, nearest
from torchard.functional.programs.program import Program
from torchard.sharding.styles.layers import Layer, layers_of, with_units
from torchard.sharding.styles.styles import Placing, Style
from torchard.sharding.values.axis_rules import AxisRules, resolved
from torchard.sharding.values.mesh import Mesh, MeshError
from torchard.sharding.values.spec import P, SpecError, layout_of

__all__ = ["parallelize"]


@checked
def parallelize(
    model: Any,
    mesh: Mesh,
    plan: Mapping[str, Any],
    *,
    axis: str = "tp",
    batch: str | tuple[str, ...] | None = None,
    fsdp: str | tuple[str, ...] | None = None,
    rules: AxisRules | None = None,
    program: Program | None = None,
) -> tuple[Any, dict[str, P]]:
    """Specs of a model's parameters and constraints on its activations, from styles by module path.

    Args:
        model: a result of `functionalize` (the function or the params), an ``nn.Module``, or params in
            nested dicts. If only parameters are known, a layer with a ``weight`` of two dims counts as a
            linear with a weight [out, in].
        mesh: where the model will run.
        plan: from patterns of module paths to styles (``*`` also matches dots; ``""`` is the model).
        axis: the mesh axis that styles split over.
        batch: axes that split dim 0 of activations, also where a style places them.
        fsdp: axes that split every parameter as well, in the first dim that no style splits (ZeRO). If
            the batch is split over the same axes, the parameters of a layer are gathered when they are
            used. A parameter whose dims are all split already is not split further.
        rules: a mapping from names of dims, in ``batch``, ``fsdp`` and styles, to axes.
        program: a trace of the model, ``trace(fn)(params, ...)``. `Colwise` and `Rowwise` without
            ``heads`` find the heads in it, by the views that follow a projection.

    Returns:
        The specs, a tree like params with a `P` for each (replicated if no style places it), and the
        constraints that `shard` takes as ``constrain_at`` (empty unless styles have layouts).

    Raises:
        SpecError: a pattern matches no module, a style does not suit its layer or is not a style, or two
            patterns contradict each other. The message lists all errors of the plan.
        MeshError: the mesh lacks one of the axes.

    Source: ZeRO, Rajbhandari et al., arXiv:1910.02054, for ``fsdp``; PyTorch's ``parallelize_module``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> fn, params = ta.functionalize(mlp)
    >>> plan = {"0": ta.Colwise(), "2": ta.Rowwise(output_layouts=0)}
    >>> specs, constraints = ta.parallelize(fn, mesh, plan)
    >>> run = ta.shard(fn, mesh, constrain_at=constraints)
    >>> run(ta.place(params, mesh, specs), torch.ones(2, 4)).spec
    P('tp', None)
    """
    batch, fsdp = (
        resolved(P(given), rules, mesh, what).entries[0]
        for what, given in (("batch", batch), ("fsdp", fsdp))
    )
    for name in (*([axis] if plan else []), *_axes(batch), *_axes(fsdp)):
        if name not in mesh.axes:
            raise MeshError(
                f"parallelize(..., axis=, batch=, fsdp=): {mesh} has no axis {name!r}; its axes are "
                f"{', '.join(mesh.axes)}."
            )
    layers, names = layers_of(model)
    if program is not None:
        layers = with_units(layers, program)
    claims, errors = _Claims(mesh, axis, batch, rules), list[str]()
    for pattern, style in plan.items():
        try:
            _check_style(style)
            for layer in _matched(pattern, layers):
                for placing in style.placings(layer, layers, axis):
                    claims.add(f"plan[{pattern!r}]", placing, layers)
        except SpecError as error:
            errors.append(f"plan[{pattern!r}]: {error}")
    if errors:
        raise SpecError("\n".join(errors))
    if fsdp:
        claims.split_further(_axes(fsdp), layers)
    stacked = {name for layer in layers.values() if layer.stacked for name in layer.names.values()}
    specs = {name: spec.led(int(name in stacked)) for name, spec in claims.specs.items()}
    return _specs_like(names, specs), dict(claims.constraints)


def _axes(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def _check_style(style: Any) -> None:
    if isinstance(style, type) and issubclass(style, Style):
        raise SpecError(f"{style.__name__} is a class; write {style.__name__}().")
    if not isinstance(style, Style):
        raise SpecError(
            f"{style!r} is not a style; use Colwise(), Rowwise(), Pairwise(), SequenceParallel(), "
            "Activations(), or a subclass of Style."
        )


def _matched(pattern: str, layers: Mapping[str, Layer]) -> list[Layer]:
    paths = [path for path in layers if path] if pattern else [""]
    matched = [layers[path] for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if not matched:
        near = nearest(pattern, paths, 3)
        raise SpecError(
            f"it matches no module; the model has {len(paths)}, such as {', '.join(near) or 'none'}."
        )
    return matched


def _specs_like(names: Any, specs: Mapping[str, P]) -> Any:
    if isinstance(names, dict):
        return {k: _specs_like(v, specs) for k, v in names.items()}
    return specs.get(names, P())


def _check_inside(layer: Layer, split: Any) -> None:
    if not layer.path:
        raise SpecError(
            f"a layout ({split!r}) for the model itself; its inputs and outputs are placed by shard's "
            "in_specs and out_specs."
        )


class _Claims:
    """The specs and constraints that patterns have given so far, and which pattern gave each of them."""

    def __init__(
        self, mesh: Mesh, axis: str, batch: str | tuple[str, ...] | None, rules: AxisRules | None
    ) -> None:
        self.mesh, self.axis, self.batch, self.rules = mesh, axis, batch, rules
        self.specs: dict[str, P] = {}
        self.constraints: dict[str, P] = {}
        self._by: dict[str, str] = {}

    def add(self, by: str, placing: Placing, layers: Mapping[str, Layer]) -> None:
        """Record the placing of one layer by a pattern.

        Raises:
            SpecError: it does not fit the layer, or contradicts another pattern.
        """
        layer = layers[placing.path]
        shapes = {name: layer.shapes[k] for k, name in layer.names.items()}
        for name, spec in self._known(dict(placing.specs), "specs").items():
            layout_of(spec, shapes[name], self.mesh, name)
            self._claim(self.specs, name, spec, by)
        for which, split in (("in", placing.input_layouts), ("out", placing.output_layouts)):
            if split is not None:
                _check_inside(layer, split)
                label = f"{placing.path}/{which}"
                self._claim(self.constraints, label, self._constrain(self._known(split, label)), by)

    def split_further(self, axes: tuple[str, ...], layers: Mapping[str, Layer]) -> None:
        """Split every parameter over these axes too, in its first dim that is not split."""
        for layer in layers.values():
            for key, name in layer.names.items():
                rank = len(layer.shapes[key])
                spec = self.specs.get(name, P())
                if not set(axes) & set(spec.axes):  # a tied parameter is in several layers
                    self.specs[name] = spec.split_further(axes, rank)

    def _claim(self, claimed: dict[str, P], name: str, spec: P, by: str) -> None:
        if claimed.setdefault(name, spec) != spec:
            raise SpecError(
                f"{name} would get spec {spec}, but {self._by[name]} gives it {claimed[name]}; a "
                "parameter has one spec, even if it is tied. Narrow one of the patterns."
            )
        self._by.setdefault(name, by)

    def _known(self, specs: Any, where: str) -> Any:
        return resolved(specs, self.rules, self.mesh, where)

    def _constrain(self, split: int | P) -> P:
        if isinstance(split, P):
            return P(self.batch) if split.is_replicated and self.batch else split
        if split == 0:
            return P((*_axes(self.batch), self.axis))
        return P(self.batch, *[None] * (split - 1), self.axis)
