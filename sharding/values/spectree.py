"""Spec trees: pytree prefixes of the arguments or the result, expanded to one spec per leaf."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optree

from torchard.functional.core import tree
from torchard.functional.programs.program import Program
from torchard.functional.tracing.signature import paths_of
from torchard.sharding.values.spec import P, SpecError

__all__ = ["as_arguments", "broadcast", "specs_of_arguments", "specs_of_results"]


class _Slot:
    """A placeholder for a leaf while trees are compared."""


def specs_of_arguments(
    program: Program, in_specs: Any, fn: Callable[..., Any] | None
) -> dict[str, P]:
    """The specs of those argument leaves for which one was given, by path.

    Raises:
        SpecError: the tree is not a prefix of the arguments, or splits a leaf that is not a tensor.
    """
    if in_specs is None:
        return {}
    slots = [_Slot() for _ in range(program.in_tree.num_leaves)]
    args, kwargs = tree.unflatten(program.in_tree, slots)
    paths = paths_of(args, kwargs)
    names = _positional_names(fn, len(args))
    if isinstance(in_specs, Mapping) and not _is_the_argument(in_specs, args, names, kwargs):
        specs = _by_name(in_specs, args, kwargs, names)
    else:
        specs = broadcast(as_arguments(in_specs, args), args, "in_specs", "args")
        specs += [None] * len(tree.leaves(kwargs))
    traced = {leaf.path for leaf in program.inputs}
    given = {p: s for p, s in zip(paths, specs, strict=True) if s is not None}
    for path, spec in given.items():
        if path not in traced and not spec.is_replicated:
            raise SpecError(
                f"in_specs gives {path} the spec {spec}, but it is not a tensor: it is static and "
                "cannot be split. Use None there."
            )
    return {p: s for p, s in given.items() if p in traced}


def as_arguments(in_specs: Any, args: tuple[Any, ...]) -> Any:
    """The in_specs as a tuple with one entry per argument, also from a list or from a lone entry."""
    if isinstance(in_specs, list):
        return tuple(in_specs)
    if len(args) == 1 and not isinstance(in_specs, (tuple, P)):
        return (in_specs,)
    return in_specs


def _is_the_argument(
    in_specs: Mapping[str, Any], args: tuple[Any, ...], names: list[str], kwargs: dict[str, Any]
) -> bool:
    """Whether a mapping is the spec tree of a lone dict argument, rather than specs by argument name."""
    lone = len(args) == 1 and not kwargs and isinstance(args[0], Mapping)
    return lone and not set(in_specs) <= set(names)


def _by_name(
    in_specs: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> list[P | None]:
    unknown = sorted(set(in_specs) - set(names) - set(kwargs))
    if unknown:
        given = ", ".join([*(n for n in names if n), *kwargs])
        raise SpecError(f"in_specs names {unknown[0]!r}, but the arguments are {given}.")
    specs: list[P | None] = []
    for name, value in [*zip(names, args, strict=True), *sorted(kwargs.items())]:
        specs += broadcast(in_specs.get(name), value, f"in_specs[{name!r}]", name)
    return specs


def _positional_names(fn: Any, count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        parameters = []
    return (parameters + [""] * count)[:count]


def specs_of_results(program: Program, out_specs: Any) -> dict[str, P]:
    """The specs of those result leaves for which one was given, by path.

    Raises:
        SpecError: the tree is not a prefix of the result.
    """
    if out_specs is None:
        return {}
    structure = program.out_tree.structure
    slots = [_Slot() for _ in range(structure.num_leaves)]
    result = tree.unflatten(structure, slots)
    specs = broadcast(out_specs, result, "out_specs", "out")
    paths = tree.paths(result, "out")
    known = {leaf.path for leaf in program.outputs}
    return {p: s for p, s in zip(paths, specs, strict=True) if s is not None and p in known}


def broadcast(prefix: Any, full: Any, name: str, what: str) -> list[P | None]:
    """The spec (or None) of each leaf of ``full``, from a pytree prefix.

    Args:
        prefix: the specs.
        full: the tree of leaves.
        name, what: the names of ``prefix`` and ``full`` in messages.

    Raises:
        SpecError: the tree is not a prefix of ``full``, or has a leaf that is not a spec.
    """
    for leaf in optree.tree_leaves(prefix, none_is_leaf=True, namespace=tree.NAMESPACE):
        if leaf is not None and not isinstance(leaf, P):
            raise SpecError(
                f"{name} has a leaf {leaf!r} of type {type(leaf).__name__}; use a P or None, as in "
                f"{P(leaf) if isinstance(leaf, str) else P('tp', None)}."
            )
    try:
        return tree.broadcast(prefix, full, name, what, "spec")
    except ValueError as error:
        raise SpecError(str(error)) from error
