"""Names of dims, and rules that map them to the mesh axes that split them.

A spec may name dims instead of axes, ``P("embed", "mlp")``, and so may its factors. A model is annotated
once, its parameters by a tree of such specs and its activations by ``constrain``; a mapping from names
to axes then places it on a mesh::

    def loss(params, x):
        x = constrain(x, P("batch", "seq", "embed"))
        ...

    specs = {"up": P("mlp", "embed"), "down": P("embed", "mlp")}
    tensor = {"mlp": "tp", "batch": "dp", "seq": None, "embed": None}
    fully = {"mlp": None, "batch": "dp", "seq": None, "embed": "dp"}

    params = place(params, mesh, specs, rules=tensor)
    run = shard(loss, mesh, rules=tensor)

`shard`, `place`, `initialize` and `parallelize` take ``rules=``. The rules of a shard apply to its specs
and to every ``constrain`` inside it, except inside an inner shard with its own rules. Outside any shard
``constrain`` is the identity, whatever it names.

- A name without a rule is an error, unless it is an axis of the mesh, which needs no rule. A dim that is
  not split has an explicit rule: ``"seq": None``.
- An axis splits one dim of a value. Axes that the spec itself names take precedence; of several names
  that map to one axis, the leftmost in the spec gets it, and the others are not split over it. So
  ``{"batch": "dp", "embed": "dp"}`` is FSDP: P("mlp", "embed") is split by its features, P("batch",
  "seq", "embed") by its batch. The order of the rules has no meaning.
- Where this is not intended, give the dim another name: positions that are split between blocks but
  not inside them can be "seq" in one place and "position" in the other.

The model is Flax's logical axis rules (``flax.linen.logical_to_mesh_axes``). The differences: in Flax,
rules are a list in order of precedence, in which a name may occur twice and the first rule whose axis is
free applies; a name without a rule is silently not split; and rules come from a context manager or are
global. In both, a name may occur once in a spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torchard.functional.core import tree
from torchard.functional.core.arguments import CheckedInside
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P, SpecError

__all__ = ["AxisRules", "Rules", "resolved"]

AxisRules = Annotated[Mapping[str, str | tuple[str, ...] | None], CheckedInside]


@dataclass(frozen=True)
class Rules:
    """Which axes of a mesh split the dims of each name."""

    mesh: Mesh
    axes: tuple[tuple[str, tuple[str, ...]], ...]

    @staticmethod
    def of(given: AxisRules, mesh: Mesh) -> Rules:
        """The rules in a user's mapping, checked.

        Raises:
            SpecError: a rule has the wrong type, maps to something other than axes of the mesh, or
                redefines an axis of the mesh. One message lists all errors.
        """
        if not isinstance(given, Mapping):
            raise SpecError(
                f"rules is a {type(given).__name__}; use a mapping from names of dims to axes, as in "
                'rules={"mlp": "tp", "embed": None}.'
            )
        errors = [problem for rule in given.items() if (problem := _problem(*rule, mesh))]
        if errors:
            raise SpecError("\n".join(errors))
        return Rules(mesh, tuple((name, _axes(to)) for name, to in given.items()))

    def spec(self, spec: P, where: str) -> P:
        """The spec with names replaced by axes.

        Raises:
            SpecError: a name is neither in the rules nor an axis; the message begins with ``where``.
        """
        rules = dict(self.axes)
        unknown = [name for name in spec.axes if name not in rules and name not in self.mesh.axes]
        if unknown:
            raise SpecError(
                f"{where} has spec {spec}, but {unknown[0]!r} is neither in rules "
                f"({', '.join(rules) or 'which are empty'}) nor an axis of {self.mesh}; add it to "
                f"rules, as {unknown[0]!r}: None if the dim is not to be split."
            )
        taken = {name for name in spec.axes if name not in rules}

        def axes_of(name: str) -> tuple[str, ...]:
            if name not in rules:
                return (name,)
            free = tuple(axis for axis in rules[name] if axis not in taken)
            taken.update(free)
            return free

        return spec.renamed(axes_of)


def resolved(specs: Any, rules: AxisRules | None, mesh: Mesh, what: str) -> Any:
    """A tree of specs with names replaced by axes; unchanged without rules.

    Raises:
        SpecError: a name is not known (the message has the path of every such leaf), or the rules are
            wrong.
    """
    if rules is None:
        return specs
    known, errors = Rules.of(rules, mesh), list[str]()
    leaves, structure = tree.flatten(specs)
    replaced = []
    for leaf, path in zip(leaves, tree.paths(specs, what), strict=True):
        try:
            replaced.append(known.spec(leaf, path) if isinstance(leaf, P) else leaf)
        except SpecError as error:
            errors.append(str(error))
    if errors:
        raise SpecError("\n".join(errors))
    return tree.unflatten(structure, replaced)


def _axes(to: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if to is None else (to,) if isinstance(to, str) else tuple(to)


def _problem(name: Any, to: Any, mesh: Mesh) -> str | None:
    """The error in one rule, as a message; None if there is none."""
    several = isinstance(to, (tuple, list)) and all(isinstance(axis, str) for axis in to)
    if not isinstance(name, str) or not (to is None or isinstance(to, str) or several):
        return f"rules[{name!r}] is {to!r}; a name maps to an axis, a tuple of axes, or None."
    unknown = [axis for axis in _axes(to) if axis not in mesh.axes]
    if unknown:
        return (
            f"rules[{name!r}] is {to!r}, but {mesh} has no axis {unknown[0]!r}; its axes are "
            f"{', '.join(mesh.axes)}."
        )
    if len(set(_axes(to))) < len(_axes(to)):
        return f"rules[{name!r}] is {to!r}, which names an axis twice."
    if name in mesh.axes and _axes(to) != (name,):
        return (
            f"rules[{name!r}] is {to!r}, but {name!r} is an axis of {mesh}, which needs no rule; give "
            "the dim a different name."
        )
    return None
