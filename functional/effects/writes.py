"""Functionalisation: in-place writes become values, and every read of memory reads its latest value.

Memory that is written to has one current value, that of its root: the operation that allocated it. A view
of it is a step from another view or the root; it is recomputed when it is read after a write. A write
through a view replaces the root's value by that of `written_back`. Nothing is retraced, so every node
keeps its tags, and a stop of gradients (``cut``) stays where the user put it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.effects.grad_dependent_ops import may_follow
from torchard.functional.effects.mutation import (
    argument,
    argument_names,
    functional_twin,
    overlap,
    storage_key,
    written_arguments,
    written_nodes,
)
from torchard.functional.effects.scatters import (
    ELEMENTWISE,
    RETYPES,
    NodeInserter,
    ViewStep,
    covers_memory,
    is_dense,
    laid_out_as,
    strided_steps,
    written_back,
)
from torchard.functional.programs.tagging import stand_for
from torchard.functional.programs.tags import CUT, NAME, SOURCE, VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten

__all__ = ["functionalize_writes"]

# Writes that overwrite the whole tensor.
_OVERWRITES = (
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
)


# -- memory ---------------------------------------------------------------------------------------


class _Memory:
    """A storage that is written to.

    Attributes:
        version: the number of writes so far.
        evaded: whether autograd did not see one of them.
        gaps: whether the root was recorded with memory between its elements; no later value has any.
    """

    def __init__(self, gaps: bool) -> None:
        self.version = 0
        self.evaded = False
        self.gaps = gaps


@dataclass(eq=False)
class _Alias:
    """The root of a memory, or a view of another alias; ``value`` is current at ``version``."""

    memory: _Memory
    val: torch.Tensor
    value: fx.Node
    version: int
    parent: _Alias | None = None
    step: ViewStep | None = None
    multi_view: bool = False  # one of several views of one call: autograd refuses writes to those

    @property
    def stopped(self) -> bool:
        """Whether autograd sees no write through this alias."""
        if self.parent is None or self.step is None:
            return False
        return self.step.cut or self.step.target is aten.view.dtype or self.parent.stopped

    @property
    def refused(self) -> bool:
        """Whether autograd refuses writes through this alias."""
        return self.multi_view or (self.parent is not None and self.parent.refused)


def functionalize_writes(graph: fx.Graph) -> bool:
    """Rewrite a recorded graph in place so that no operation of it mutates anything.

    Returns:
        Whether autograd would differ from the graph: because it does not see a write (through
        ``y.detach()`` or ``y.data``), so that its gradient ignores it, or because it refuses one (to one
        of the views of ``y.split(2)``).

    Raises:
        PurityError: an operation writes and has no pure form.
    """
    writes = _Functionalization(graph)
    writes.run()
    return writes.evades


class _Functionalization:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.evades = False
        self.aliases: dict[fx.Node, _Alias] = {}
        self.roots: dict[int, _Alias] = {}
        self.replaced_items: set[fx.Node] = set()  # items of what a write returned
        given = {storage_key(node) for node in graph.find_nodes(op="placeholder")}
        strided = graph.find_nodes(op="call_function", target=aten.as_strided.default)
        self.tracked = {storage_key(n) for node in graph.nodes for n in written_nodes(node)}
        # Memory that is read by strides is tracked too: its layout may differ when the program runs.
        self.tracked |= {storage_key(node) for node in strided} - given

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._read(node)
            elif written_arguments(node.target):
                self._write(node)
            elif node.target is operator.getitem:
                self._item(node)
            elif storage_key(node) in self.tracked:
                self._alias(node)
            elif not self._gives_views(node):
                self._read(node)
            self._hand_over_label(node)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)

    def _hand_over_label(self, node: fx.Node) -> None:
        """What a node is now read as has its label, if it is another node."""
        alias = self.aliases.get(node)
        if NAME.on(node) and alias is not None and alias.value is not node:
            stand_for(self._latest(NodeInserter(node), alias), node)

    # -- reading ------------------------------------------------------------------------------

    def _read(self, node: fx.Node) -> None:
        """Make a node read the latest values."""
        emit = NodeInserter(node)
        node.args, node.kwargs = self._latest_of(emit, (node.args, node.kwargs))

    def _latest_of(self, emit: NodeInserter, arguments: Any) -> Any:
        def latest(node: fx.Node) -> fx.Node:
            return self._latest(emit, self.aliases[node]) if node in self.aliases else node

        return fx.map_arg(arguments, latest)

    def _latest(self, emit: NodeInserter, alias: _Alias) -> fx.Node:
        if alias.memory.evaded and not alias.stopped:
            self.evades = True
        if alias.version != alias.memory.version:
            assert alias.parent is not None and alias.step is not None
            value, step = self._latest(emit, alias.parent), alias.step
            alias.value = emit.view(emit.viewable(value, step.target, alias.memory.gaps), step)
            alias.version = alias.memory.version
        return alias.value

    # -- views --------------------------------------------------------------------------------

    def _alias(self, node: fx.Node) -> None:
        """Register a node in written memory: as its root, if it is the first, or as a view."""
        key = storage_key(node)
        assert key is not None
        val = VAL.of(node)
        if key not in self.roots:
            self._read(node)
            root = _Alias(_Memory(not is_dense(val)), val, node, 0)
            self.roots[key] = self.aliases[node] = root
            return
        memory = self.roots[key].memory
        known = [n for n in node.all_input_nodes if n in self.aliases]
        source = next((n for n in known if self.aliases[n].memory is memory), None)
        parent = self.roots[key] if source is None else self.aliases[source]
        if source is None or source is not node.args[0] or not _is_step(node):
            self.aliases[node] = self._strided(node, parent, val)
            return
        self._read(node)
        value: Any = NodeInserter(node).viewable(node.args[0], node.target, memory.gaps)
        node.args = (value, *node.args[1:])
        step = ViewStep(node.target, node.args[1:], tuple(node.kwargs.items()), CUT.on(node))
        self.aliases[node] = _Alias(memory, val, node, memory.version, parent, step)

    def _view(self, reader: fx.Node, parent: _Alias, step: ViewStep) -> _Alias:
        """A new view of an alias, inserted ahead of a reader."""
        emit = NodeInserter(reader)
        value = emit.view(self._latest(emit, parent), step)
        memory = parent.memory
        return _Alias(memory, VAL.of(value), value, memory.version, parent, step)

    def _gives_views(self, node: fx.Node) -> bool:
        """Whether a node returns several views of written memory; they become one node each."""
        source = node.args[0] if node.args else None
        views = getattr(node.target, "is_view", False) and source in self.aliases
        return views and isinstance(VAL.get(node), (tuple, list))

    def _item(self, node: fx.Node) -> None:
        whole, index = node.args
        assert isinstance(whole, fx.Node)
        if node in self.replaced_items:
            return
        if self._gives_views(whole):
            self.aliases[node] = self._part(node, whole, index)
        elif storage_key(node) in self.tracked:
            self._alias(node)

    def _part(self, node: fx.Node, whole: fx.Node, index: Any) -> _Alias:
        """One of the views that split or unbind return."""
        parent = self.aliases[whole.all_input_nodes[0]]
        given = dict(zip(argument_names(whole.target), whole.args, strict=False)) | whole.kwargs
        dim = given.get("dim", 0)
        if whole.target is aten.unbind.int:
            step = ViewStep(aten.select.int, (dim, index))
        else:
            sizes = [v.shape[dim] for v in VAL.of(whole)]
            start = sum(sizes[:index])
            step = ViewStep(aten.slice.Tensor, (dim, start, start + sizes[index]))
        part = self._view(node, parent, step)
        part.multi_view = True
        return part

    def _strided(self, reader: fx.Node, parent: _Alias, val: torch.Tensor) -> _Alias:
        """A view given by its strides over the memory of an alias."""
        outer: list[ViewStep] = []
        while parent.parent is not None and parent.step is not None:
            if parent.step.target in RETYPES:
                break
            if parent.step.target in ELEMENTWISE:
                outer.insert(0, parent.step)
            parent = parent.parent
        try:
            if parent.parent is not None and not covers_memory(parent.val):
                raise NotImplementedError("a view of another dtype")
            steps = list(strided_steps(NodeInserter(reader), parent.val, val))
        except NotImplementedError as error:
            raise PurityError(
                f"{SOURCE.get(reader)} reads or writes memory by strides ({error}) that is "
                "changed in place: index the tensor instead."
            ) from error
        for step in (*steps, *outer):
            parent = self._view(reader, parent, step)
        return parent

    # -- writing ------------------------------------------------------------------------------

    def _write(self, node: fx.Node) -> None:
        target: Any = node.target
        twin = functional_twin(target)
        turns = torch.Tag.inplace_view in target.tags
        if twin is None or (turns and not twin.is_view):
            raise PurityError(
                f"{SOURCE.get(node)} writes in place by {node.target}, which has no form that "
                "returns new values; use an operation without the underscore."
            )
        if turns:  # no element is written: the tensor has other dims, or no gradient, from now on
            step = ViewStep(twin, node.args[1:], tuple(node.kwargs.items()), CUT.on(node))
            self.aliases[node] = self._view(node, self.aliases[node.all_input_nodes[0]], step)
            return
        _check_overlap(node)
        emit = NodeInserter(node)
        if node.target in _OVERWRITES:
            call, values = None, [self._overwritten(emit, node)]
        else:
            call = self._computed(emit, node, twin)
            values = _written_values(emit, node, call)
        targets = written_nodes(node)
        for target, value in zip(targets, values, strict=True):
            self._store(emit, node, self.aliases[target], value)
        self._replace_results(emit, node, call, targets)

    def _overwritten(self, emit: NodeInserter, node: fx.Node) -> fx.Node:
        """The value after ``copy_`` or ``fill_``: the source, in the shape and dtype of the target."""
        into, *given = node.args
        assert isinstance(into, fx.Node)
        want = VAL.of(into)
        if not (given and isinstance(given[0], fx.Node)):
            like = self._latest(emit, self.aliases[into])
            return emit(aten.new_full.default, like, list(want.shape), given[0] if given else 0)
        value: fx.Node = self._latest_of(emit, given[0])
        if VAL.of(value).shape != want.shape:
            value = emit(aten.expand.default, value, list(want.shape))
        have = VAL.of(value)
        if (have.dtype, have.device) != (want.dtype, want.device):
            value = emit(aten._to_copy.default, value, dtype=want.dtype, device=want.device)
        if NAME.on(node):  # the copy's label does not belong to the source
            value = emit(aten.clone.default, value)
            stand_for(value, node)
        return value

    def _computed(self, emit: NodeInserter, node: fx.Node, twin: Any) -> fx.Node:
        """A call of the functional twin, which returns what this node writes."""
        taken = argument_names(twin)
        args, kwargs = self._latest_of(emit, (node.args, node.kwargs))
        call = emit(twin, *args, **{key: value for key, value in kwargs.items() if key in taken})
        stand_for(call, node)
        return call

    def _store(self, emit: NodeInserter, node: fx.Node, alias: _Alias, value: fx.Node) -> None:
        """Set the value of an alias: compute the new value of its root, which every view then reads."""
        have, want = VAL.of(value), alias.val
        if have.shape != want.shape:
            raise PurityError(
                f"{SOURCE.get(node)} writes {list(have.shape)} into a tensor of "
                f"{list(want.shape)} ({node.target}), which would resize it: return the new value."
            )
        if have.dtype != want.dtype:
            value = emit(aten._to_copy.default, value, dtype=want.dtype)
        memory, floats = alias.memory, want.is_floating_point() or want.is_complex()
        memory.evaded |= alias.stopped and floats
        self.evades |= alias.refused and floats
        while alias.parent is not None:
            step, parent = alias.step, alias.parent
            assert step is not None
            try:
                value = written_back(emit, step, self._latest(emit, parent), value)
                alias = parent
            except NotImplementedError:
                alias = self._strided(node, parent, alias.val)
        if node.target in _OVERWRITES and not may_follow(value):
            # The value no longer depends on an input; for autograd it does, with a gradient of zero.
            self.evades |= may_follow(alias.value)
        memory.version += 1
        alias.value, alias.version = laid_out_as(emit, value, alias.val), memory.version

    def _replace_results(
        self, emit: NodeInserter, node: fx.Node, call: fx.Node | None, targets: list[fx.Node]
    ) -> None:
        """Replace the results of a write: by the alias that was written to, or by those of its twin."""
        vals = VAL.get(node)
        by_storage = {storage_key(target): self.aliases[target] for target in targets}

        def result(val: Any, index: int | None) -> _Alias | fx.Node | None:
            if isinstance(val, torch.Tensor) and internals.storage_id(val) in by_storage:
                return by_storage[internals.storage_id(val)]
            if call is None or index is None:
                return call
            return emit(operator.getitem, call, index)

        if not isinstance(vals, (tuple, list)):
            self._stands_for(node, result(vals, None))
            return
        for item in list(node.users):
            if item.target is operator.getitem:
                index: Any = item.args[1]
                self._stands_for(item, result(vals[index], index))
                self.replaced_items.add(item)

    def _stands_for(self, node: fx.Node, result: _Alias | fx.Node | None) -> None:
        if isinstance(result, _Alias):
            self.aliases[node] = result
        elif result is not None:
            node.replace_all_uses_with(result)


def _check_overlap(node: fx.Node) -> None:
    """Refuse an operation whose operand partly overlaps its output: the result depends on torch's loops.

    torch refuses it as well where it notices it ("refer to a single memory location").
    """
    written = written_nodes(node)
    for target in written:
        beside = (n for n in node.all_input_nodes if n not in written)
        for operand in (n for n in beside if storage_key(n) == storage_key(target)):
            if overlap(VAL.of(operand), VAL.of(target)):
                raise PurityError(
                    f"{SOURCE.get(node)} reads memory that it writes to, from other places "
                    f"({node.target}): what torch computes there depends on the order of its loops. Read "
                    "a copy: y[1:] = y[:-1].clone()."
                )


def _is_step(node: fx.Node) -> bool:
    """Whether a view depends on its operand's value only, not on the memory around it."""
    target: Any = node.target
    return bool(is_view(node)) and target is not aten.as_strided.default


def _written_values(emit: NodeInserter, node: fx.Node, call: fx.Node) -> list[fx.Node]:
    """The results of a functional twin that replace what is written, one per written node."""
    names = written_arguments(node.target)
    target: Any = call.target
    returns = len(internals.schema(target).returns)
    values: list[fx.Node] = []
    for i, name in enumerate(names):
        given = argument(node, name)
        value = call
        if returns > 1:
            value = emit(operator.getitem, call, returns - len(names) + i)
        if isinstance(given, (list, tuple)):
            values += [emit(operator.getitem, value, k) for k in range(len(given))]
        elif given is not None:
            values.append(value)
    return values
