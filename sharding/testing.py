"""What property-based tests of sharded code need: meshes and specs to draw, and one check.

Needs hypothesis (``pip install torchard[test]``). ``check_sharded`` compares a function run by
``shard`` with the function itself; ``meshes`` and ``specs`` are the strategies that feed it::

    @given(st.data())
    def test_mine(data):
        mesh = data.draw(meshes())
        spec = data.draw(specs(x.shape, mesh))
        check_sharded(mine, (x,), mesh, (spec,))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from torchard.functional.core import tree
from torchard.sharding.layouts.layout import Coords, Dim, Layout, Sub, chunk
from torchard.sharding.redistribute import place
from torchard.sharding.shard import shard
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P

__all__ = [
    "check_sharded",
    "combined",
    "contributions",
    "layouts",
    "meshes",
    "random_spec",
    "shard_at",
    "specs",
    "whole_of",
]

_NAMES = ("dp", "tp", "pp", "ep")
_FOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def meshes(max_ranks: int = 8, max_axes: int = 3) -> st.SearchStrategy[Mesh]:
    """A hypothesis strategy of virtual meshes, including axes of size one.

    Args:
        max_ranks: the most ranks of a mesh.
        max_axes: the most axes, up to 4: dp, tp, pp, ep.

    Returns:
        A strategy of `Mesh`.

    >>> from hypothesis import find
    >>> from torchard.sharding.testing import meshes
    >>> find(meshes(), lambda mesh: mesh.size == 6 and len(mesh.axes) == 2)
    Mesh(dp=1, tp=6, virtual)
    """
    shapes = [
        shape
        for n in range(1, max_axes + 1)
        for shape in itertools.product(range(1, max_ranks + 1), repeat=n)
        if math.prod(shape) <= max_ranks
    ]
    shapes.sort(key=lambda shape: (math.prod(shape) == 1, len(shape), math.prod(shape)))
    return st.sampled_from(shapes).map(_mesh)


def _mesh(shape: tuple[int, ...]) -> Mesh:
    return Mesh(dict(zip(_NAMES, shape, strict=False)), virtual=True)


def specs(shape: Sequence[int], mesh: Mesh, *, fused: bool = False) -> st.SearchStrategy[P]:
    """A hypothesis strategy of valid specs for a shape.

    Every axis splits some dim or none, several may split one dim in any order, and dims need not
    divide.

    Args:
        shape: of the value.
        mesh: whose axes are used.
        fused: also draw specs with factors inside a dim (`P.factors`).

    Returns:
        A strategy of `P`.

    >>> from hypothesis import find
    >>> import torchard as ta
    >>> from torchard.sharding.testing import specs
    >>> mesh = ta.Mesh({"dp": 2, "tp": 3}, virtual=True)
    >>> find(specs((5, 4), mesh), lambda spec: ("tp", "dp") in spec.entries[:1])
    P(('tp', 'dp'))
    """
    return st.randoms(use_true_random=False).map(
        lambda rng: random_spec(rng, shape, mesh, fused=fused)
    )


def random_spec(rng: Random, shape: Sequence[int], mesh: Mesh, *, fused: bool = False) -> P:
    """Draw one of `specs` without hypothesis.

    Args:
        rng: a ``random.Random``.
        shape: of the value.
        mesh: whose axes are used.
        fused: also draw factors inside a dim.

    Returns:
        A P.

    >>> import random
    >>> import torchard as ta
    >>> from torchard.sharding.testing import random_spec
    >>> random_spec(random.Random(0), (4, 4), ta.Mesh({"dp": 2, "tp": 2}, virtual=True))
    P('dp')
    """
    at = _assigned(rng, len(shape), mesh)
    if fused and at and rng.randint(0, 4) == 0:
        return _named(rng, shape, at)
    entries = [tuple(axes) if len(axes) != 1 else axes[0] for axes in at]
    while entries and not entries[-1]:
        entries.pop()
    return P(*(e or None for e in entries))


def _assigned(rng: Random, rank: int, mesh: Mesh) -> list[list[str]]:
    """For each dim, the axes that split it."""
    at: list[list[str]] = [[] for _ in range(rank)]
    axes = list(mesh.axes)
    rng.shuffle(axes)
    for axis in axes:
        dim = rng.randint(-1, rank - 1)
        if dim >= 0:
            at[dim].append(axis)
    return at


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0] or [1]


def _named(rng: Random, shape: Sequence[int], at: list[list[str]]) -> P:
    """Every dim cut in two factors, the axes on either of them."""
    groups: list[str] = []
    names: dict[str, Any] = {}
    for d, (n, axes) in enumerate(zip(shape, at, strict=True)):
        outer = rng.choice(_divisors(n))
        cut = rng.randint(0, len(axes))
        groups.append(f"(o{d} i{d})")
        names[f"o{d}"] = (outer, *axes[:cut])
        names[f"i{d}"] = (n // outer, *axes[cut:])
    return P.factors(" ".join(groups), **names)


@st.composite
def layouts(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh, *, pending: bool = False) -> Layout:
    """A hypothesis strategy of layouts, whose dims may be products of sub-dims.

    Args:
        shape: of the value.
        mesh: whose axes are used.
        pending: axes that split nothing may hold pending sums.

    Returns:
        A strategy of ``torchard.sharding.layouts.layout.Layout``.

    >>> from hypothesis import find
    >>> import torchard as ta
    >>> from torchard.sharding.testing import layouts
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> layout = find(layouts((4,), mesh, pending=True), lambda layout: bool(layout.pending))
    >>> layout.shape, layout.pending
    ((4,), (('tp', 'sum'),))
    """
    at = _assigned(draw(st.randoms(use_true_random=False)), len(shape), mesh)
    dims: list[Dim] = []
    for n, axes in zip(shape, at, strict=True):
        outer = draw(st.sampled_from(_divisors(n)))
        cut = draw(st.integers(0, len(axes)))
        whole = n == 0 or draw(st.booleans())
        parts = (Sub(n, tuple(axes)),)
        split = (Sub(outer, tuple(axes[:cut])), Sub(n // outer, tuple(axes[cut:])))
        dims.append(parts if whole else split)
    free = [a for a in mesh.axes if not any(a in axes for axes in at)]
    sums = [a for a in free if pending and draw(st.booleans())]
    return Layout(tuple(dims), tuple((a, "sum") for a in sorted(sums))).normal(mesh.sizes)


# -- shards, by definition --------------------------------------------------------------------------


def shard_at(x: torch.Tensor, layout: Layout, coords: Coords, mesh: Mesh) -> torch.Tensor:
    """The shard of a whole value at one coordinate, where possible a view.

    Args:
        x: the whole value.
        layout: how it is split.
        coords: a position for each axis.
        mesh: the mesh.

    Returns:
        The shard.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import shard_at
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> x = torch.arange(3)
    >>> layout = ta.place(x, mesh, ta.P("tp")).layout
    >>> shard_at(x, layout, {"tp": 0}, mesh), shard_at(x, layout, {"tp": 1}, mesh)
    (tensor([0, 1]), tensor([2]))
    """
    subs = [s for dim in layout.dims for s in dim]
    y = x.reshape([s.size for s in subs])
    for i, sub in enumerate(subs):
        own = chunk(sub.size, sub.axes, coords, mesh.shape)
        y = y.narrow(i, own.start, len(own))
    return y.reshape(layout.local_shape(coords, mesh.shape))


def contributions(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """The distinct shards of a value, in order of their coordinates; over pending axes, parts that sum to
    it.

    Args:
        x: the whole value.
        layout: how it is split.
        mesh: the mesh.

    Returns:
        A list of tensors.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import contributions
    >>> mesh = ta.Mesh({"dp": 2, "tp": 2}, virtual=True)
    >>> x = torch.arange(4)
    >>> contributions(x, ta.place(x, mesh, ta.P("tp")).layout, mesh)          # dp holds copies
    [tensor([0, 1]), tensor([2, 3])]
    """
    axes = sorted(a for a, _ in layout.pending)
    count = math.prod(mesh.shape[a] for a in axes)
    generator = torch.Generator().manual_seed(count)
    terms = _terms(x, count, generator)
    found = []
    for at in _distinct(layout, mesh):
        index = 0
        for a in axes:
            index = index * mesh.shape[a] + at[a]
        found.append(shard_at(terms[index], layout, at, mesh))
    return found


def _terms(x: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Tensors whose sum is x; bools are summed by "or"."""
    noise = [torch.randint(-3, 4, x.shape, generator=generator) for _ in range(count - 1)]
    if x.dtype == torch.bool:
        return [*((n > 0) & x for n in noise), x]
    return [*(n.to(x) for n in noise), x - sum(noise, torch.zeros_like(x))]


def _distinct(layout: Layout, mesh: Mesh) -> list[dict[str, int]]:
    first: dict[tuple[int, ...], dict[str, int]] = {}
    for at in mesh.all_coords():
        first.setdefault(layout.key(at), at)
    return list(first.values())


def whole_of(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The value that distinct shards make up; pending ones are reduced. The inverse of `contributions`.

    Args:
        parts: the shards, in order of their coordinates.
        layout: how the value is split.
        mesh: the mesh.

    Returns:
        The whole value.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import whole_of
    >>> x = ta.place(torch.arange(3), ta.Mesh({"tp": 2}, virtual=True), ta.P("tp"))
    >>> whole_of(x.parts, x.layout, x.mesh)
    tensor([0, 1, 2])
    """
    ops = dict(layout.pending)
    filled: dict[tuple[int, ...], torch.Tensor] = {}
    for part, at in zip(parts, _distinct(layout, mesh), strict=True):
        group = tuple(at[a] for a in sorted(layout.axes) if a in ops)
        whole = filled.setdefault(group, part.new_zeros(layout.shape))
        _write(whole, part, layout, at, mesh)
    return combined(list(filled.values()), next(iter(ops.values()), "sum"))


def _write(whole: torch.Tensor, part: torch.Tensor, layout: Layout, at: Coords, mesh: Mesh) -> None:
    subs = [s for dim in layout.dims for s in dim]
    view = whole.view([s.size for s in subs])
    own = [chunk(s.size, s.axes, at, mesh.shape) for s in subs]
    for i, run in enumerate(own):
        view = view.narrow(i, run.start, len(run))
    view.copy_(part.reshape([len(run) for run in own]))


def combined(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce tensors of one shape elementwise.

    Args:
        parts: at least one tensor.
        op: ``"sum"``, ``"max"`` or ``"min"``.

    Returns:
        A tensor of this shape.

    >>> import torch
    >>> from torchard.sharding.testing import combined
    >>> combined([torch.tensor([1, 5]), torch.tensor([3, 2])], "max")
    tensor([3, 5])
    """
    total = parts[0]
    for part in parts[1:]:
        total = _FOLD[op](total, part)
    return total


# -- the check ----------------------------------------------------------------------------------------


def check_sharded(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any = None,
    *,
    grads: bool = True,
    placed: bool = True,
    tolerance: float = 1e-12,
) -> None:
    """Assert that ``shard(fn)`` computes what ``fn`` does: outputs, and gradients of <outputs,
    cotangents>.

    Args:
        fn: a pure function.
        args: its arguments: whole tensors (float64, unless ``tolerance`` says otherwise) and static
            values.
        mesh: where it runs.
        in_specs: a pytree prefix of ``args``, as for `shard`.
        out_specs: a pytree prefix of the result, as for `shard`.
        grads: compare the gradients of all floating arguments too. Cotangents are small integers, so
            functions of integers stay exact.
        placed: pass the arguments as MeshTensors; False passes plain tensors and ``in_specs``.
        tolerance: the largest difference, relative to the largest entry (or to 1, if that is larger).
            If ``fn`` itself changes more when its inputs change in their last digits, that much is
            allowed. 0 asks for equal values.

    Raises:
        AssertionError: a value differs; says which, by how much, and where it was run.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import check_sharded
    >>> mesh = ta.Mesh({"dp": 2, "tp": 2}, virtual=True)
    >>> x = torch.arange(20.0, dtype=torch.float64).view(5, 4)
    >>> check_sharded(lambda x: x.softmax(-1), (x,), mesh, (ta.P("dp", "tp"),))
    """
    want = _evaluated(fn, args, grads)
    if placed:
        run, given = shard(fn, mesh, out_specs=out_specs), place(args, mesh, in_specs)
    else:
        run, given = shard(fn, mesh, in_specs, out_specs), args
    have = _evaluated(run, given, grads)
    where = f"on {mesh} with in_specs {in_specs} and out_specs {out_specs}"
    assert have.keys() == want.keys(), f"{sorted(have)} instead of {sorted(want)} {where}"
    moved: dict[str, torch.Tensor] | None = None
    for name, value in want.items():
        error = _error(name, have[name], value, where)
        allowed = tolerance
        if error > tolerance > 0:
            moved = moved or _evaluated(fn, tree.map(_nudged, args), grads)
            allowed = max(tolerance, 20 * _error(name, moved[name], value, where))
        assert error <= allowed, (
            f"{name} differs by {error:.1e} of its largest entry {where}\n"
            f"have {have[name]}\nwant {value}"
        )


def _nudged(x: Any) -> Any:
    """Moved by about the last digit."""
    if not _floats(x):
        return x
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    return x * (1 + torch.finfo(x.dtype).eps * noise)


def _evaluated(fn: Callable[..., Any], args: Any, grads: bool) -> dict[str, torch.Tensor]:
    leaves, structure = tree.flatten(args)
    if grads:
        leaves = [x.detach().clone().requires_grad_() if _floats(x) else x for x in leaves]
    given = tree.unflatten(structure, leaves)
    with torch.set_grad_enabled(grads):
        out = tree.whole(fn(*given))
        results = {f"result {i}": x for i, x in enumerate(tree.leaves(out)) if _tensor(x)}
        found = {name: value.detach() for name, value in results.items()}
        if grads:
            filled = _gradients(list(results.values()), leaves)
            whole = tree.whole(tree.unflatten(structure, filled))
            found |= {f"gradient {i}": g for i, g in enumerate(tree.leaves(whole)) if _tensor(g)}
    return found


def _gradients(results: list[torch.Tensor], leaves: list[Any]) -> list[Any]:
    """One for each tensor: zeros where nothing arrives, and for what is no floating tensor."""
    followed = [out for out in results if _floats(out) and out.requires_grad]
    wanted = [x for x in leaves if _floats(x)]
    values: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if followed and wanted:
        values = torch.autograd.grad(
            followed, wanted, [_cotangent(out) for out in followed], allow_unused=True
        )
    arrived = {id(x): v for x, v in zip(wanted, values, strict=True) if v is not None}
    return [arrived.get(id(x), torch.zeros_like(x)) if _tensor(x) else x for x in leaves]


def _cotangent(out: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out.numel())
    parts = [torch.randint(-3, 4, out.shape, generator=generator) for _ in range(2)]
    return (torch.complex(*(p.double() for p in parts)) if out.is_complex() else parts[0]).to(out)


def _tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _floats(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _error(name: str, have: torch.Tensor, want: torch.Tensor, where: str) -> float:
    assert have.shape == want.shape, f"{name} has shape {have.shape}, not {want.shape} {where}"
    assert have.dtype == want.dtype, f"{name} has dtype {have.dtype}, not {want.dtype} {where}"
    a, b = _real(have.detach()), _real(want.detach())
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    scale = torch.where(b.isfinite(), b.abs(), 0.0).max().clamp(min=1.0)
    difference = torch.where(same, 0.0, (a - b).abs())
    return float((difference / scale).nan_to_num(nan=math.inf).max())


def _real(x: torch.Tensor) -> torch.Tensor:
    """As float64; a complex number as its two parts."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.double()
