"""Spec trees: pytree prefixes of the arguments or the result, expanded to one spec per leaf."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optree

from torchard.functional.core import tree
from torchard.functional.programs.program import Program
from torchard.functional.tracing.signature import paths_of
from torchard.sharding.values.spec import P, SpecError, check_closed

__all__ = ["as_arguments", "broadcast", "by_argument", "specs_of_arguments", "specs_of_results"]

_AS_IN = "P or None, as in P('tp', None)"


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
    given: dict[str, P] = by_argument(program, in_specs, fn, "in_specs", P, _AS_IN)
    traced = {leaf.path for leaf in program.inputs}
    for path, spec in given.items():
        if path not in traced and not spec.is_replicated:
            raise SpecError(
                f"in_specs gives {path} the spec {spec}, but it is not a tensor: it is static and "
                "cannot be split. Use None there."
            )
    return {p: s for p, s in given.items() if p in traced}


def by_argument(
    program: Program,
    prefix: Any,
    fn: Callable[..., Any] | None,
    name: str,
    kind: type,
    example: str,
) -> dict[str, Any]:
    """The values that a pytree prefix of the arguments gives leaves, by path, static ones included.

    Args:
        program: the trace of the function.
        prefix: a prefix of the positional arguments, or a mapping by argument name.
        fn: the function, for the names of its arguments.
        name: the name of the prefix in messages.
        kind: the type of its leaves.
        example: the leaf that messages recommend.

    Raises:
        SpecError: it is no prefix of the arguments, or has a leaf of another type.
    """
    slots = [_Slot() for _ in range(program.in_tree.num_leaves)]
    args, kwargs = tree.unflatten(program.in_tree, slots)
    paths = paths_of(args, kwargs)
    names = _positional_names(fn, len(args))
    how = name, kind, example
    if isinstance(prefix, Mapping) and not _is_the_argument(prefix, args, names, kwargs):
        found = _by_name(prefix, args, kwargs, names, how)
    else:
        found = _broadcast(as_arguments(prefix, args), args, name, "args", how)
        found += [None] * len(tree.leaves(kwargs))
    return {p: value for p, value in zip(paths, found, strict=True) if value is not None}


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
    prefix: Mapping[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    how: tuple[str, type, str],
) -> list[Any]:
    unknown = sorted(set(prefix) - set(names) - set(kwargs))
    if unknown:
        given = ", ".join([*(n for n in names if n), *kwargs])
        raise SpecError(f"{how[0]} names {unknown[0]!r}, but the arguments are {given}.")
    found: list[Any] = []
    for name, value in [*zip(names, args, strict=True), *sorted(kwargs.items())]:
        found += _broadcast(prefix.get(name), value, f"{how[0]}[{name!r}]", name, how)
    return found


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
    found: list[P | None] = _broadcast(prefix, full, name, what, (name, P, _AS_IN))
    return found


def _broadcast(
    prefix: Any, full: Any, name: str, what: str, how: tuple[str, type, str]
) -> list[Any]:
    _, kind, example = how
    if kind is P:
        _check_all_closed(prefix, name)
    for leaf in optree.tree_leaves(prefix, none_is_leaf=True, namespace=tree.NAMESPACE):
        if leaf is not None and (isinstance(leaf, bool) or not isinstance(leaf, kind)):
            meant = f"P or None, as in {P(leaf)}" if kind is P and isinstance(leaf, str) else example
            raise SpecError(
                f"{name} has a leaf {leaf!r} of type {type(leaf).__name__}; use a {meant}."
            )
    noun = "spec" if kind is P else "dim"
    try:
        return tree.broadcast(prefix, full, name, what, noun)
    except ValueError as error:
        raise SpecError(str(error)) from error


def _check_all_closed(specs: Any, name: str) -> None:
    """Raise SpecError if a spec of a tree leaves a dim open; the message names each that does."""
    errors = []
    for spec, path in zip(tree.leaves(specs), tree.paths(specs, name), strict=True):
        try:
            if isinstance(spec, P):
                check_closed(spec, path)
        except SpecError as error:
            errors.append(str(error))
    if errors:
        raise SpecError("\n".join(errors))
