"""The arguments of a call: traced operands, static leaves, and the cache key of both."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import optree
import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.arguments import check_fields
from torchard.functional.core.errors import StaticArgumentError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import TensorSpec, contiguous
from torchard.functional.tracing.settings import Settings
from torchard.functional.tracing.stand_ins import stand_ins
from torchard.functional.tracing.tensor_lifting import is_weak

__all__ = [
    "Arguments",
    "Known",
    "ShapeDtype",
    "global_signature",
    "paths_of",
    "read",
    "specs_of_arguments",
]


@dataclass(frozen=True)
class ShapeDtype:
    """Represents a tensor without data, to get a program or plan (``lower``, ``trace``, ``initialize``).

    Args:
        shape: the tensor's shape.
        dtype: the tensor's dtype.
        device: the tensor's device.
        placement: how it is placed, as `typeof` and `eval_shape` say; not read of an argument.

    Source: ``jax.ShapeDtypeStruct``.

    >>> import torch, torchard as ta
    >>> program = ta.jit(lambda a, b: a @ b).lower(
    ...     ta.ShapeDtype((10**6, 10**6)), ta.ShapeDtype((10**6,)))    # 4 TB, none of it allocated
    >>> program.peak                                                    # bytes
    4000008000000
    """

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    placement: Any = field(default=None, repr=False, compare=False)

    @property
    def spec(self) -> Any:
        """The spec of its placement on a mesh; None if it is not placed.

        Raises:
            PurityError: it is the type of a value in a traced function, whose layout is not chosen yet.
        """
        return None if self.placement is None else self.placement.spec

    def __post_init__(self) -> None:
        check_fields(self)
        if any(n < 0 for n in self.shape):
            raise ValueError(f"ShapeDtype(shape={self.shape}): sizes must not be negative.")
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclass
class Arguments:
    """The leaves of a call: some are traced as operands, the others are part of ``key``.

    Attributes:
        key: the cache key, equal for calls that may share a trace.
        structure: the tree structure of ``(args, kwargs)``.
        leaves: all leaves, in order.
        traced: indices of the operands among the leaves.
        placed: whether any operand is a placed object.
        plain: whether all leaves are plain tensors.
        resolved: whether no leaf is conjugated or negated lazily, as far as is known.
    """

    key: Hashable
    structure: optree.PyTreeSpec
    leaves: list[Any]
    traced: Sequence[int]
    placed: bool
    plain: bool = False
    resolved: bool = False

    @property
    def values(self) -> list[Any]:
        """The operands."""
        return self.leaves if self.plain else [self.leaves[i] for i in self.traced]


_PLAIN = {torch.Tensor, torch.nn.Parameter}
# The properties of tensors that a trace depends on, read without running Python code for each tensor.
_facts = attrgetter("shape", "dtype", "device")
_layout = attrgetter("layout")
_strides: Callable[[torch.Tensor], Any] = torch.Tensor.stride


@dataclass(frozen=True)
class Known:
    """The arguments of an earlier call, all tensors or placed. Later arguments are compared with them.

    Attributes:
        structure: the tree structure of ``(args, kwargs)``.
        key: the cache key of the call, whose last item is torch's settings.
        dicts: the places of dicts in the tree; optree accepts other mappings with the same keys there.
        check: returns whether leaves have the same properties as those of the call.
        plain: whether all leaves are plain tensors.
        resolved: whether they are, and none is conjugated or negated lazily.
    """

    structure: optree.PyTreeSpec
    key: tuple[Any, ...]
    dicts: _Dicts
    check: Callable[..., bool]
    plain: bool
    resolved: bool

    @classmethod
    def of(cls, arguments: Arguments) -> Known | None:
        """The known arguments of a call; None if they are compared by its key alone."""
        leaves, plain = arguments.leaves, arguments.plain
        dicts = _dicts_in(arguments.structure)
        check = None if dicts is None else _check_like(leaves)
        if dicts is None or check is None:
            return None
        key: Any = arguments.key
        resolved = plain and not any(x.is_neg() or x.is_conj() for x in leaves)
        return cls(arguments.structure, key, dicts, check, plain, resolved)

    def leaves_of(self, call: Any) -> list[Any] | None:
        """The leaves of a call ``(args, kwargs)`` with the same key; None if the call's key differs."""
        try:
            leaves = stand_ins(self.structure.flatten_up_to(call))
        except (ValueError, TypeError):
            return None
        same = self.check(*leaves) and (not self.dicts or _are_dicts(self.dicts, call))
        return leaves if same and self.key[-1].are_current() else None


def _check_like(leaves: Sequence[Any]) -> Callable[..., bool] | None:
    """A check of as many leaves; None if one is neither a plain tensor nor placed."""
    placed = [i for i, leaf in enumerate(leaves) if is_placed(leaf)]
    rest = [i for i, leaf in enumerate(leaves) if not is_placed(leaf)]
    tensors = [leaves[i] for i in rest]
    if not _PLAIN.issuperset(map(type, tensors)) or any(x.ndim == 0 and is_weak(x) for x in tensors):
        return None
    check_tensors = internals.check_like(tensors) if tensors or not placed else None
    if not placed or (tensors and check_tensors is None):
        return check_tensors
    wanted = [leaves[i].__torchard_placed__()[:4] for i in placed]

    def check(*leaves: Any) -> bool:
        for i, (shape, dtype, device, placement) in zip(placed, wanted, strict=True):
            leaf = leaves[i]
            if not is_placed(leaf):
                return False
            facts = leaf.__torchard_placed__()
            if facts[3] is not placement and facts[3] != placement:
                return False
            if facts[1] is not dtype or facts[2] != device or facts[0] != shape:
                return False
        return check_tensors is None or check_tensors(*[leaves[i] for i in rest])

    return check


# For each child of a node that is a dict or contains one: the child's index or key, whether the child is
# a dict, and a nested table for the child's children.
_Dicts = Sequence[tuple[Any, bool, "_Dicts"]]
_Kind = optree.PyTreeKind
_INDEXED = frozenset((_Kind.TUPLE, _Kind.LIST, _Kind.DICT, _Kind.NAMEDTUPLE))


def _dicts_in(structure: optree.PyTreeSpec) -> _Dicts | None:
    """The places of dicts in a tree; None if it has nodes that cannot be compared by their items."""
    found: list[tuple[Any, bool, _Dicts]] = []
    for key, child in zip(structure.entries(), structure.children(), strict=True):
        if child.is_leaf():
            continue
        inner = _dicts_in(child)
        if inner is None or child.type in (OrderedDict, defaultdict, deque):
            return None
        if inner or child.type is dict:
            if structure.kind not in _INDEXED:
                return None  # whose children may not be its items
            found.append((key, child.type is dict, inner))
    return found


def _are_dicts(dicts: _Dicts, node: Any) -> bool:
    for key, is_dict, inner in dicts:
        child = node[key]
        if is_dict and type(child) is not dict:
            return False
        if inner and not _are_dicts(inner, child):
            return False
    return True


def read(args: tuple[Any, ...], kwargs: dict[str, Any], known: Known | None = None) -> Arguments:
    """Flatten the arguments of a call, and tell operands from static leaves.

    Args:
        args, kwargs: the arguments of the call.
        known: the arguments of an earlier call, outside of a trace.

    Raises:
        StaticArgumentError: a leaf is a sparse tensor, or neither tensor nor float nor hashable;
            names its path.
    """
    call: Any = (args, kwargs)
    if known is not None and (same := known.leaves_of(call)) is not None:
        every = range(len(same))
        placed, all_plain = not known.plain, known.plain
        return Arguments(known.key, known.structure, same, every, placed, all_plain, known.resolved)
    leaves, structure = optree.tree_flatten(
        call, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    leaves = stand_ins(leaves)
    if _PLAIN.issuperset(map(type, leaves)) and (facts := _of_plain(leaves)) is not None:
        plain = structure, *facts, Settings.current()
        return Arguments(plain, structure, leaves, range(len(leaves)), False, plain=True)
    key: list[Any] = [structure]
    traced: list[int] = []
    placed = False
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise _sparse(leaf, paths_of(args, kwargs)[i])
            if leaf.ndim == 0 and is_weak(leaf):
                key.append(float)
            else:
                key.append((_facts(leaf), leaf.stride()))
            traced.append(i)
        elif isinstance(leaf, float):
            key.append(float)
            traced.append(i)
        elif is_placed(leaf):
            key.append(leaf.__torchard_placed__()[:4])
            traced.append(i)
            placed = True
        elif isinstance(leaf, ShapeDtype):
            key.append(leaf)
            traced.append(i)
        elif isinstance(leaf, slice):  # hashable from Python 3.12 on
            key.append((slice, leaf.start, leaf.stop, leaf.step))
        else:
            if hasattr(type(leaf), "__dataclass_fields__"):
                _check_holds_no_tensor(leaf, args, kwargs, i)
            key.append((type(leaf), leaf))
    key.append(Settings.current())
    whole = tuple(key)
    try:
        hash(whole)
    except TypeError as error:
        raise _unhashable(args, kwargs, leaves) from error
    return Arguments(whole, structure, leaves, traced, placed)


def _of_plain(tensors: list[torch.Tensor]) -> Iterable[Any] | None:
    """The part of the key for each tensor; None if a tensor is sparse or represents a number."""
    if not {torch.strided}.issuperset(map(_layout, tensors)):
        return None
    strides = [*map(_strides, tensors)]
    if () in strides and any(x.ndim == 0 and is_weak(x) for x in tensors):
        return None
    return zip(map(_facts, tensors), strides, strict=True)


def paths_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The path of each leaf: ``args[0]['w1']``, or ``scale`` for a keyword."""
    call: Any = (args, kwargs)
    accessors = optree.tree_accessors(call, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE)
    paths = []
    for accessor in accessors:
        first, rest = accessor[0].entry, accessor[1:]
        paths.append(rest.codify("args" if first == 0 else "kwargs"))
    return paths


def _unhashable(args: Any, kwargs: Any, leaves: Sequence[Any]) -> StaticArgumentError:
    for path, leaf in zip(paths_of(args, kwargs), leaves, strict=True):
        if isinstance(leaf, (torch.Tensor, float, ShapeDtype)) or is_placed(leaf):
            continue
        if dataclasses.is_dataclass(leaf):
            return _unregistered(leaf, path)
        try:
            hash(leaf)
        except TypeError:
            return StaticArgumentError(
                f"{path} is a {type(leaf).__name__}, which is neither a tensor, a float nor "
                "hashable: it can be neither traced nor part of the cache key. Pass a tensor, a "
                "hashable value (a tuple instead of an array), or register the type with "
                "torchard.tree.register."
            )
    return StaticArgumentError(
        "an argument is not hashable, so it cannot be part of the cache key: pass a tensor or a hashable "
        "value (a tuple instead of a list)."
    )


def _check_holds_no_tensor(leaf: Any, args: Any, kwargs: Any, i: int) -> None:
    """Refuse a frozen dataclass with tensors: it is hashable, but each new object would need a trace."""
    values = (getattr(leaf, field.name, None) for field in dataclasses.fields(leaf))
    if any(isinstance(value, torch.Tensor) or is_placed(value) for value in values):
        raise _unregistered(leaf, paths_of(args, kwargs)[i])


def _unregistered(leaf: Any, path: str) -> StaticArgumentError:
    return StaticArgumentError(
        f"{path} is a {type(leaf).__name__}, a dataclass that is not registered as a pytree node: put "
        "@torchard.tree.register_dataclass above its @dataclass, so that its fields are traced."
    )


def _sparse(leaf: torch.Tensor, path: str) -> StaticArgumentError:
    return StaticArgumentError(
        f"{path} has the layout {leaf.layout}, and a traced function takes strided tensors only. Pass "
        "its indices and values and build it inside the function, or pass x.to_dense()."
    )


def specs_of_arguments(arguments: Arguments) -> list[TensorSpec]:
    """The spec of each traced leaf."""
    batched = internals.VMAP in internals.level_kinds()
    return [_spec(arguments.leaves[i], batched) for i in arguments.traced]


def global_signature(arguments: Arguments) -> Hashable:
    """A key that is equal for calls with the same trace, wherever their arguments are placed."""
    key: Any = arguments.key
    parts = list(key)
    for i, spec in zip(arguments.traced, specs_of_arguments(arguments), strict=True):
        parts[i + 1] = spec
    return tuple(parts), internals.level_kinds()


def _spec(leaf: Any, batched: bool) -> TensorSpec:
    if isinstance(leaf, torch.Tensor):
        spec = TensorSpec.of(leaf, weak=is_weak(leaf))
        return contiguous(spec.shape, spec.dtype, spec.device) if batched else spec
    if isinstance(leaf, float):
        return TensorSpec((), (), torch.float64, torch.device("cpu"), weak=True)
    if isinstance(leaf, ShapeDtype):
        return contiguous(leaf.shape, leaf.dtype, torch.device(leaf.device))
    shape, dtype, device = leaf.__torchard_placed__()[:3]
    return contiguous(shape, dtype, device)
