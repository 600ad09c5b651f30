"""Results that are objects which hold traced tensors and are not pytree nodes, such as a model's cache.

Objects of classes that torch's pytree knows become nodes. The tensors in other objects are results like
all others: a call returns a copy of each object that refers to such tensors, with the call's values in
it, and of the lists and dicts inside. Everything else is returned as in the traced call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.errors import PurityError
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tree_nodes import register
from torchard.functional.guards.references import References
from torchard.functional.torch_internals.accessors import pytree as torch_pytree
from torchard.functional.tracing.trace_state import tracing

__all__ = ["check_unchanged", "has_objects", "register_torch_nodes", "restored", "with_objects"]


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor belongs to a trace in progress or to a level of torch.func."""
    base = internals.base_tensor(tensor)
    if base is not tensor:
        return True
    return isinstance(base, internals.FakeTensor) and any(
        base.fake_mode is state.fakes for state in tracing()
    )


class _Slot:
    """The place of a tensor in an object."""


class _Model:
    """An object with slots in place of its traced tensors; calls return copies of the object.

    Args:
        value: the object, or an object that contains it.
        slots: the slots in the object, in the order of the tensors.
        names: the path of each slot within the object.
        shared: the values that copies share with the object, by id.
    """

    def __init__(
        self, value: Any, slots: Sequence[_Slot], names: Sequence[str], shared: dict[int, Any]
    ) -> None:
        self.value, self.slots, self.names, self.shared = value, slots, names, shared


class _Object:
    """A node in place of an object that holds traced tensors; its children are these tensors."""

    def __init__(self, model: _Model, tensors: Sequence[Any]) -> None:
        self.model, self.tensors = model, tensors

    def restored(self, memo: dict[int, Any]) -> Any:
        """A copy of the object with these tensors. Shared references are copied once for each memo."""
        memo.update(self.model.shared)
        memo.update({id(s): x for s, x in zip(self.model.slots, self.tensors, strict=True)})
        return copy.deepcopy(self.model.value, memo)


class _Entry(optree.PyTreeEntry):
    """A tensor in an object, by its path within the object."""

    def codify(self, node: str = "") -> str:
        return f"{node}{self.entry}"


def _flat(node: Any) -> Any:
    return node.tensors, node.model, tuple(node.model.names)


register(
    _Object,
    _flat,
    lambda model, tensors: _Object(model, tensors),
    entry=_Entry,
)


def with_objects(output: Any, is_wanted: Callable[[torch.Tensor], bool] = _is_traced) -> Any:
    """A result with nodes in place of the objects that hold wanted tensors, by default traced tensors.

    Raises:
        PurityError: such an object cannot be copied with the values of a call; names its path.
    """
    leaves, structure = tree.flatten(output)
    known = References(is_wanted)
    held: dict[int, dict[str, torch.Tensor]] = {}
    paths: list[str] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) or is_placed(leaf):
            continue
        found = References(is_wanted).search(leaf, "")
        if found:
            paths = paths or tree.paths(output, "out")
            known.search(leaf, paths[i])
            held[i] = found
    if not held:
        return output
    models = _models(leaves, held, paths, known)
    replaced = [models.get(i, leaf) for i, leaf in enumerate(leaves)]
    return tree.unflatten(structure, replaced)


def _models(
    leaves: Sequence[Any],
    held: dict[int, dict[str, torch.Tensor]],
    paths: Sequence[str],
    known: References,
) -> dict[int, _Object]:
    holders = known.holders()
    made = holders | known.containers(holders)
    shared = {
        i: x
        for i, x in known.objects.items()
        if i not in made or (i in holders and isinstance(x, _NO_ORDER))
    }
    slots = {id(tensor): _Slot() for tensor in known.tensors.values()}
    memo: dict[int, Any] = {**shared, **slots}
    found = {}
    for i, tensors in held.items():
        try:
            value = copy.deepcopy(leaves[i], memo) if known.complete else leaves[i]
        except Exception as error:  # copying may run any code of its class
            raise _refusal(leaves[i], paths[i], next(iter(tensors))) from error
        if left := References(known.is_wanted).search(value, ""):
            raise _refusal(leaves[i], paths[i], next(iter(left)))
        model = _Model(value, [slots[id(x)] for x in tensors.values()], [*tensors], shared)
        found[i] = _Object(model, [*tensors.values()])
    return found


# Tensors in sets have no order, but a derivative is traced by a second run, which needs their order.
_NO_ORDER = (set, frozenset)


def restored(output: Any) -> Any:
    """A result in which the objects that `with_objects` replaced are restored."""
    memo: dict[int, Any] = {}
    leaves, structure = tree.flatten(output, is_leaf=_is_object)
    return structure.unflatten(x.restored(memo) if _is_object(x) else x for x in leaves)


def has_objects(output: Any) -> bool:
    """Whether `with_objects` replaced an object in a result."""
    return any(map(_is_object, tree.leaves(output, is_leaf=_is_object)))


def _is_object(node: Any) -> bool:
    return isinstance(node, _Object)


def _refusal(value: Any, path: str, name: str) -> PurityError:
    return PurityError(
        f"{path} is a {type(value).__name__}, and {path}{name} is a tensor of the trace: a transformed "
        "function returns tensors in dicts, lists, tuples and registered types, and in objects that "
        "copy.deepcopy copies. Return the tensors themselves, or register the type by "
        "torchard.tree.register or register_dataclass."
    )


def check_unchanged(arguments: Mapping[str, Any], is_own: Callable[[torch.Tensor], bool]) -> None:
    """Refuse a function that kept a tensor of its trace in one of its static arguments."""
    for path, leaf in arguments.items():
        found = References(is_own).search(leaf, path)
        if found:
            raise PurityError(
                f"the traced function changes {path}, a {type(leaf).__name__}: "
                f"{next(iter(found))} is now a tensor of the trace, which has no value. Return the "
                "tensor, or let the function change a copy.deepcopy of the object."
            )


# -- nodes of torch's pytree ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Context:
    """The static part of a node in torch's pytree, made hashable, as optree (not torch) requires."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


def register_torch_nodes(value: Any) -> None:
    """Register the types in a tree that torch's pytree knows and optree does not.

    HuggingFace's model outputs, for example, register with torch only.
    """
    for leaf in tree.leaves(value):
        node = torch_pytree.SUPPORTED_NODES.get(type(leaf))
        if node is None:
            continue
        # The leaves were listed before the first object of its class was registered.
        if any(each is leaf for each in tree.leaves(leaf)):
            _register(type(leaf), node)
        register_torch_nodes(leaf)


def _register(cls: type, node: Any) -> None:
    def flatten(value: Any) -> tuple[list[Any], _Context]:
        children, context = node.flatten_fn(value)
        return children, _Context(context)

    def unflatten(context: _Context, children: Any) -> Any:
        return node.unflatten_fn(list(children), context.value)

    restore: Any = unflatten
    optree.register_pytree_node(cls, flatten, restore, namespace=tree.NAMESPACE)
