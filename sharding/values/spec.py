"""Partition specs: the mesh axes that split each dim of a value, as the user writes them."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from torchard.functional.core.arguments import checked, written
from torchard.functional.core.axis_expressions import Axis, AxisExpressionError
from torchard.sharding.layouts.layout import Dim, Layout, Sub
from torchard.sharding.layouts.spec_patterns import factors_of_dims
from torchard.sharding.values.mesh import Mesh

__all__ = ["P", "SpecError", "check_closed", "layout_of", "spec_of"]


class Unconstrained(enum.Enum):
    """The entry of a dim that a constraint leaves open; an enum, so that copies are the same object."""

    UNCONSTRAINED = enum.auto()

    def __repr__(self) -> str:
        return "P.UNCONSTRAINED"


Entry = str | tuple[str, ...] | None | Literal[Unconstrained.UNCONSTRAINED]
Factor = int | str | tuple[int | str, ...] | None


class SpecError(ValueError):
    """A spec does not fit its value or its mesh.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2}, virtual=True)
    >>> ta.place(torch.ones(4), mesh, ta.P(None, "dp"))
    Traceback (most recent call last):
        ...
    torchard.SpecError: values has spec P(None, 'dp') of length 2, but its shape is [4] (rank
        1); drop 1 of its entries, or use P(None).
    """


@written('P("tp", None)')
class P:
    """A partition spec: for each dim, the mesh axes that split it.

    ``P("tp", None)`` splits dim 0 over tp. Missing trailing entries are None, so ``P()`` is replicated.
    An uneven dim is split as by `torch.chunk`. `P.factors` splits factors inside a dim.

    In `constrain` and ``constrain_at=``, ``P("dp", P.UNCONSTRAINED)`` leaves dim 1 open: the plan of the
    enclosing `shard` may split it over any axes but dp. Other specs say where values are, and have an
    entry for each dim that is split.

    Args:
        entries: for each dim an axis, a tuple of axes (outermost first), None, or ``P.UNCONSTRAINED``.
            Entries may also be names of dims, which ``rules=`` maps to axes.
        weak: whether propagation may overrule the spec more readily than other specs.

    Raises:
        SpecError: an entry has the wrong type, or an axis appears twice.

    Source: ``jax.sharding.PartitionSpec``.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"dp": 2, "tp": 2}, virtual=True)
    >>> x = torch.arange(8).view(2, 4)
    >>> ta.place(x, mesh, ta.P("dp", "tp")).parts
    (tensor([[0, 1]]), tensor([[2, 3]]), tensor([[4, 5]]), tensor([[6, 7]]))
    >>> ta.place(x, mesh, ta.P(None, ("dp", "tp"))).parts[3]
    tensor([[3],
            [7]])
    >>> ta.place(x, mesh, ta.P("batch", "embed"), rules={"batch": "dp", "embed": None}).spec
    P('dp', None)
    >>> def f(x, w):
    ...     return ta.constrain(x @ w, ta.P("dp", ta.P.UNCONSTRAINED))
    >>> x, w = ta.place((torch.ones(2, 4), torch.ones(4, 4)), mesh, (ta.P("dp"), ta.P(None, "tp")))
    >>> ta.shard(f, mesh)(x, w).spec                        # dim 1 is split as the product is
    P('dp', 'tp')
    """

    UNCONSTRAINED: ClassVar[Literal[Unconstrained.UNCONSTRAINED]] = Unconstrained.UNCONSTRAINED

    __slots__ = ("entries", "home", "named", "weak")

    def __init__(self, *entries: Entry | list[str], weak: bool = False) -> None:
        checked: list[Entry] = []
        for entry in entries:
            if isinstance(entry, list):
                entry = tuple(entry)
            if not (
                entry is None
                or isinstance(entry, str | Unconstrained)
                or (isinstance(entry, tuple) and all(isinstance(a, str) for a in entry))
            ):
                raise SpecError(
                    f"P{entries!r}: entry {entry!r} is neither an axis name, a tuple of axis names, "
                    "None, nor P.UNCONSTRAINED."
                )
            checked.append(entry)
        self.entries: tuple[Entry, ...] = tuple(checked)
        self.weak = weak
        self.home: tuple[tuple[str, int], ...] = ()
        self.named: tuple[str, tuple[tuple[str, Any], ...]] | None = None
        _check_unique(self, [a for e in self.entries for a in _axes(e)])

    @classmethod
    @checked
    def factors(cls, pattern: str, *, weak: bool = False, **names: Factor) -> P:
        """A spec in terms of factors, for dims that fuse several.

        Args:
            pattern: the factors of each dim, fused ones in parentheses: ``"(three heads d) embed"``.
            weak: as for `P`.
            names: for a factor its size (an int), its axes (a name or a tuple), or both, ``heads=(16,
                "tp")``. The pattern may give the size instead, ``(three=3 heads d)``. At most one
                factor of a dim may lack a size.

        Returns:
            A P.

        Raises:
            SpecError: the pattern cannot be parsed, or contradicts ``names``.

        >>> import torch, torchard as ta
        >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
        >>> qkv = torch.arange(12)                               # q, k and v, each of 2 heads of size 2
        >>> spec = ta.P.factors("(three heads d)", three=3, d=2, heads="tp")
        >>> [part.tolist() for part in ta.place(qkv, mesh, spec).parts]
        [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
        """
        spec = cls(weak=weak)
        for axis in (axis for group in _groups(pattern) for axis in group):
            given = _sized(names.get(axis.name))[0]
            if axis.size is not None and given not in (None, axis.size):
                raise SpecError(
                    f"P.factors({pattern!r}): factor {axis.name} has size {axis.size} in the pattern "
                    f"and {given} in its keyword argument; give it once."
                )
        spec.named = (pattern, tuple(sorted(names.items())))
        _check_unique(spec, [a for v in names.values() for a in _sized(v)[1]])
        return spec

    def at(self, **home: int) -> P:
        """The spec of a value that only ranks at one coordinate of an axis hold, such as a stage.

        Args:
            home: the coordinate along each of these axes; ranks at other coordinates hold nothing of the
                value.

        Returns:
            A P.

        Raises:
            SpecError: the spec splits a dim over the axis.

        >>> import torch, torchard as ta
        >>> mesh = ta.Mesh({"pp": 2, "tp": 2}, virtual=True)
        >>> w = ta.place(torch.arange(4), mesh, ta.P("tp").at(pp=1))
        >>> w.spec, w.parts
        (P('tp').at(pp=1), (tensor([0, 1]), tensor([2, 3])))
        """
        return self._like(P(*self.entries), tuple(sorted({**dict(self.home), **home}.items())))

    def _like(self, spec: P, home: tuple[tuple[str, int], ...] | None = None) -> P:
        """A new spec, as weak as this one, and at its home or at a given one."""
        spec.weak, spec.home = self.weak, self.home if home is None else home
        spec.named = spec.named or self.named
        both = [axis for axis, _ in spec.home if axis in spec.axes]
        if both:
            raise SpecError(
                f"{spec!r} both splits a dim over {both[0]!r} and pins the value to one coordinate of "
                f"{both[0]!r} (.at); remove one of the two."
            )
        return spec

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that the spec splits dims over."""
        if self.named is not None:
            return tuple(a for _, v in self.named[1] for a in _sized(v)[1])
        return tuple(a for e in self.entries for a in _axes(e))

    @property
    def axes_by_entry(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each entry, none of which leaves its dim open."""
        check_closed(self, "the value")
        return tuple(_axes(e) for e in self.entries)

    @property
    def is_replicated(self) -> bool:
        return not self.axes and not self.home and not self.open_dims

    @property
    def open_dims(self) -> tuple[int, ...]:
        """The dims that a constraint leaves open."""
        return tuple(d for d, e in enumerate(self.entries) if e is P.UNCONSTRAINED)

    def led(self, dims: int) -> P:
        """The spec of a value with this many unsplit leading dims added."""
        if not dims:
            return self
        if self.named is None:
            return self._like(P(*[None] * dims, *self.entries))
        used = {axis.name for group in _groups(self.named[0]) for axis in group}
        free = (name for i in itertools.count() if (name := f"lead{i}") not in used)
        lead = " ".join(itertools.islice(free, dims))
        return self._like(P.factors(f"{lead} {self.named[0]}", **dict(self.named[1])))

    def split_further(self, axes: tuple[str, ...], rank: int) -> P:
        """The spec with the first unsplit dim split over these axes, if there is one."""
        if self.named is None:
            entries = [*self.entries, *[None] * (rank - len(self.entries))]
            if None in entries:
                entries[entries.index(None)] = _entry(axes)
            return self._like(P(*entries))
        pattern, named = self.named[0], dict(self.named[1])
        for group in _groups(pattern):
            if not any(_factor(axis, named)[1] for axis in group):
                size, _ = _sized(named.get(group[0].name))
                named[group[0].name] = _entry(axes) if size is None else (size, *axes)
                break
        return self._like(P.factors(pattern, **named))

    def renamed(self, axes_of: Callable[[str], tuple[str, ...]]) -> P:
        """The spec with each name replaced by ``axes_of(name)``, which is called from left to right."""

        def mapped(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for name in names for axis in axes_of(name))

        if self.named is None:
            split = [e if e is P.UNCONSTRAINED else _entry(mapped(_axes(e))) for e in self.entries]
            return self._like(P(*split))
        pattern, named = self.named[0], dict(self.named[1])
        for factor in [a.name for group in _groups(pattern) for a in group if a.name in named]:
            size, axes = _sized(named.pop(factor))
            new = mapped(axes)
            if size is not None or new:
                named[factor] = _entry(new) if size is None else (size, *new) if new else size
        return self._like(P.factors(pattern, **named))

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over the entries: ``P(None, *spec)`` is the spec of a stack of such values.

        Raises:
            SpecError: the spec names factors, and has no entries (use ``led``).
        """
        if self.named is not None:
            raise SpecError(
                f"{self} names factors and has no entries to unpack; use .led(1) for the spec of a stack "
                "of such values."
            )
        return iter(self.entries)

    def _key(self) -> tuple[Any, ...]:
        return self.entries, self.named, self.weak, self.home

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        weak = ["weak=True"] if self.weak else []
        if self.named is not None:
            named = [f"{k}={v!r}" for k, v in self.named[1]]
            text = f"P.factors({', '.join([repr(self.named[0]), *named, *weak])})"
        else:
            text = f"P({', '.join([repr(e) for e in self.entries] + weak)})"
        return text + (f".at({', '.join(f'{a}={i}' for a, i in self.home)})" if self.home else "")


def _axes(entry: Any) -> tuple[str, ...]:
    """The axes of an entry, as a tuple."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _entry(axes: tuple[str, ...]) -> Entry:
    """The entry for these axes, as a user would write it."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _sized(value: Any) -> tuple[int | None, tuple[str, ...]]:
    """The size and the axes of a factor's argument."""
    if isinstance(value, int):
        return value, ()
    if isinstance(value, tuple) and value and isinstance(value[0], int):
        return value[0], tuple(value[1:])
    return None, _axes(value)


def _factor(axis: Axis, named: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """The size and the axes of a factor; the pattern may give the size."""
    size, axes = _sized(named.get(axis.name))
    return (axis.size if size is None else size), axes


def _check_unique(spec: P, axes: Sequence[str]) -> None:
    twice = sorted({a for a in axes if axes.count(a) > 1})
    if twice:
        raise SpecError(f"{spec!r} uses axis {twice[0]!r} twice; an axis can split one dim only.")


def check_closed(spec: P, path: str) -> None:
    """Raise SpecError if a spec leaves a dim open, where it has to say how each dim is split."""
    if spec.open_dims:
        raise SpecError(
            f"{path} has spec {spec}, which leaves dim {spec.open_dims[0]} open, but has to say where "
            "the value is: give the dim its axes, or None if it is not split. Only constrain, inside of "
            "a function that is sharded, and constrain_at= leave dims to the plan; so does None in place "
            "of a whole spec in shard's in_specs and out_specs."
        )


def layout_of(
    spec: P,
    shape: Sequence[int],
    mesh: Mesh,
    path: str = "the value",
    *,
    may_be_open: bool = False,
) -> Layout:
    """The layout that a spec gives a value of this shape.

    Args:
        may_be_open: whether the spec may leave dims open, which the layout then does not split.

    Raises:
        SpecError: the spec is longer than the rank, names an axis that the mesh does not have, leaves a
            dim open, or its factors do not multiply to the dim. The message begins with ``path``.
    """
    if not may_be_open:
        check_closed(spec, path)
    shape = tuple(shape)
    unknown = [a for a in (*spec.axes, *dict(spec.home)) if a not in mesh.shape]
    if unknown:
        raise SpecError(
            f"{path} has spec {spec}, but {mesh} has no axis {unknown[0]!r}; its axes are "
            f"{', '.join(mesh.axes)}. To name dims instead of axes, pass rules=."
        )
    if spec.named is not None:
        dims = _named_dims(spec, shape, path)
    else:
        if len(spec.entries) > len(shape):
            raise SpecError(
                f"{path} has spec {spec} of length {len(spec.entries)}, but its shape is "
                f"{list(shape)} (rank {len(shape)}); {_shorter(spec, len(shape))}."
            )
        entries = spec.entries + (None,) * (len(shape) - len(spec.entries))
        dims = [(Sub(n, _axes(e)),) for n, e in zip(shape, entries, strict=True)]
    for axis, place in spec.home:
        if not 0 <= place < mesh.shape[axis]:
            raise SpecError(
                f"{path} has spec {spec}, but axis {axis!r} of {mesh} has coordinates 0 to "
                f"{mesh.shape[axis] - 1} only."
            )
    stripped = tuple(tuple(_strip(s, mesh.shape) for s in dim) for dim in dims)
    home = tuple((axis, place) for axis, place in spec.home if mesh.shape[axis] > 1)
    return Layout(stripped, home=home).normal(mesh.sizes)


def _shorter(spec: P, rank: int) -> str:
    kept = spec.entries[:rank]
    return f"drop {len(spec.entries) - rank} of its entries, or use {P(*kept)}"


def _strip(sub: Sub, sizes: Mapping[str, int]) -> Sub:
    """The sub-dim without axes of size one, which split nothing."""
    return Sub(sub.size, tuple(a for a in sub.axes if sizes[a] > 1))


@functools.cache
def _groups(pattern: str) -> tuple[tuple[Axis, ...], ...]:
    """The factors of each dim."""
    try:
        return factors_of_dims(pattern)
    except AxisExpressionError as error:
        raise SpecError(f"P.factors({pattern!r}): {error}") from None


def _named_dims(spec: P, shape: tuple[int, ...], path: str) -> list[Dim]:
    assert spec.named is not None
    pattern, named = spec.named[0], dict(spec.named[1])
    groups = _groups(pattern)
    if len(groups) != len(shape):
        raise SpecError(
            f"{path} has spec {spec} for {len(groups)} dims, but its shape is {list(shape)} "
            f"(rank {len(shape)}); give the pattern one group for each dim."
        )
    unknown = sorted(set(named) - {axis.name for group in groups for axis in group})
    if unknown:
        raise SpecError(f"{path} has spec {spec}, whose pattern has no factor {unknown[0]!r}.")
    return [_named_dim(spec, g, n, named, path) for g, n in zip(groups, shape, strict=True)]


def _named_dim(spec: P, group: tuple[Axis, ...], size: int, named: dict[str, Any], path: str) -> Dim:
    sizes = {a.name: n for a in group if (n := _factor(a, named)[0]) is not None}
    missing = [a.name for a in group if a.name not in sizes]
    known = math.prod(sizes.values())
    if len(missing) > 1 or (known and size % known) or (not missing and known != size):
        raise SpecError(
            f"{path} has spec {spec}: factors ({' '.join(a.name for a in group)}) with sizes {sizes} do "
            f"not multiply to the dim's {size}; give every factor but one a size that divides it."
        )
    if missing:
        sizes[missing[0]] = size // known if known else 0
    return tuple(Sub(sizes[a.name], _factor(a, named)[1]) for a in group)


def spec_of(layout: Layout) -> P:
    """The spec of a layout; pending axes are left out."""
    if all(len(dim) == 1 for dim in layout.dims):
        return P(*[_entry(sub.axes) for (sub,) in layout.dims]).at(**dict(layout.home))
    names: dict[str, Any] = {}
    groups = []
    for d, dim in enumerate(layout.dims):
        group = []
        for s, sub in enumerate(dim):
            name = f"d{d}_{s}" if len(dim) > 1 else f"d{d}"
            group.append(name)
            if len(dim) > 1:
                names[name] = (sub.size, *sub.axes) if sub.axes else sub.size
            elif sub.axes:
                names[name] = sub.axes
        groups.append(f"({' '.join(group)})" if len(group) > 1 else group[0])
    return P.factors(" ".join(groups), **names).at(**dict(layout.home))
