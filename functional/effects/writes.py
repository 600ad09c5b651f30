"""Functionalisation: in-place writes become values, and every read of memory reads its latest value.

A write through a view replaces the value of the memory's root (`aliases.py`) by that of `written_back`.
Nothing is retraced, so every node keeps its tags, and a stop of gradients (``cut``) stays where the user
put it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.effects.aliases import Alias, AliasTable
from torchard.functional.effects.grad_dependent_ops import may_follow
from torchard.functional.effects.mutation import (
    argument,
    argument_names,
    functional_twin,
    overlap,
    storage_key,
    writes_only,
    written_arguments,
    written_nodes,
)
from torchard.functional.effects.scatters import NodeInserter, ViewStep, laid_out_as, written_back
from torchard.functional.programs.tagging import stand_for
from torchard.functional.programs.tags import CUT, NAME, SOURCE, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["functionalize_writes"]

# Writes that overwrite the entire tensor.
_OVERWRITES = (
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
)


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
    return writes.evades or writes.table.evades


class _Functionalization:
    """A walk over a recorded graph.

    Attributes:
        table: the written memory and its views.
        evades: whether autograd does not see a write, or refuses one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.table = AliasTable(graph)
        self.evades = False
        self.replaced_items: set[fx.Node] = set()  # items of what a write returned

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self.table.read(node)
            elif written_arguments(node.target):
                self._write(node)
            elif node.target is operator.getitem:
                self._item(node)
            elif self.table.tracks(node):
                self.table.register(node)
            elif not self.table.returns_views(node):
                self.table.read(node)
            self._hand_over_label(node)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)

    def _hand_over_label(self, node: fx.Node) -> None:
        """Give a node's label to the node that is now read instead, if it is a different one."""
        alias = self.table.by_node.get(node)
        if NAME.on(node) and alias is not None and alias.value is not node:
            stand_for(self.table.latest(NodeInserter(node), alias), node)

    def _item(self, node: fx.Node) -> None:
        """An item of the result of a second node."""
        source, index = node.args
        assert isinstance(source, fx.Node)
        if node in self.replaced_items:
            return
        if self.table.returns_views(source):
            self.table.by_node[node] = self.table.item(node, source, index)
        elif self.table.tracks(node):
            self.table.register(node)

    def _write(self, node: fx.Node) -> None:
        target: Any = node.target
        twin = functional_twin(target)
        turns = torch.Tag.inplace_view in target.tags
        if twin is None or (turns and not twin.is_view):
            raise writes_only(SOURCE.get(node), target)
        if turns:  # no element is written: the tensor has other dims, or no gradient, from now on
            step = ViewStep(twin, node.args[1:], tuple(node.kwargs.items()), CUT.on(node))
            parent = self.table.by_node[node.all_input_nodes[0]]
            self.table.by_node[node] = self.table.view(node, parent, step)
            return
        _check_overlap(node)
        into, *sources = (self.table.by_node.get(n) for n in node.all_input_nodes)
        if node.target is aten.copy_.default and into and all(map(into.is_same, sources)):
            self.table.by_node[node] = into  # the second half of ``y[i] += x``
            return
        emit = NodeInserter(node)
        if node.target in _OVERWRITES:
            call = self._overwritten(emit, node)
            values = [call]
        else:
            call = self._computed(emit, node, twin)
            values = _written_values(emit, node, call)
        targets = written_nodes(node)
        for target, value in zip(targets, values, strict=True):
            self._store(emit, node, self.table.by_node[target], value)
        self._replace_results(emit, node, call, targets)

    def _overwritten(self, emit: NodeInserter, node: fx.Node) -> fx.Node:
        """The value after ``copy_`` or ``fill_``: the source, in the shape and dtype of the target."""
        into, *sources = node.args
        assert isinstance(into, fx.Node)
        want = VAL.of(into)
        if not (sources and isinstance(sources[0], fx.Node)):
            like = self.table.latest(emit, self.table.by_node[into])
            return emit(aten.new_full.default, like, list(want.shape), sources[0] if sources else 0)
        value: fx.Node = self.table.latest_of(emit, sources[0])
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
        """A call of the functional counterpart, which returns the values that this node writes."""
        parameters = argument_names(twin)
        args, kwargs = self.table.latest_of(emit, (node.args, node.kwargs))
        call = emit(twin, *args, **{k: value for k, value in kwargs.items() if k in parameters})
        stand_for(call, node)
        return call

    def _store(self, emit: NodeInserter, node: fx.Node, alias: Alias, value: fx.Node) -> None:
        """Set the value of an alias: compute the new value of its root, which every view then reads."""
        have, want = VAL.of(value), alias.val
        if have.shape != want.shape:
            raise PurityError(
                f"{SOURCE.get(node)} writes a value of shape {list(have.shape)} into a tensor of shape "
                f"{list(want.shape)} ({node.target}), which would resize it: return the new value."
            )
        if have.dtype != want.dtype:
            value = emit(aten._to_copy.default, value, dtype=want.dtype)
        memory = alias.memory
        memory.evaded |= alias.stopped and alias.holds_floats
        self.evades |= alias.refused and alias.holds_floats
        while alias.parent is not None:
            step, parent = alias.step, alias.parent
            assert step is not None
            try:
                value = written_back(emit, step, self.table.latest(emit, parent), value)
                alias = parent
            except NotImplementedError:
                alias = self.table.strided(node, parent, alias.val)
        if node.target in _OVERWRITES and not may_follow(value):
            # The value no longer depends on an input; for autograd it does, with a gradient of zero.
            self.evades |= may_follow(alias.value)
        memory.version += 1
        alias.value, alias.version = laid_out_as(emit, value, alias.val), memory.version

    def _replace_results(
        self, emit: NodeInserter, node: fx.Node, call: fx.Node, targets: list[fx.Node]
    ) -> None:
        """Replace the results of a write: by the alias that was written to, or by those of its twin."""
        vals: Any = VAL.get(node)
        by_storage = {storage_key(target): self.table.by_node[target] for target in targets}

        if isinstance(vals, torch.Tensor):  # what it returns is what it writes
            self.table.by_node[node] = by_storage[internals.storage_id(vals)]
            return
        for item in list(node.users):
            index: Any = item.args[1]
            alias = by_storage.get(internals.storage_id(vals[index]))
            if alias is not None:
                self.table.by_node[item] = alias
            else:
                item.replace_all_uses_with(emit(operator.getitem, call, index))
            self.replaced_items.add(item)


def _check_overlap(node: fx.Node) -> None:
    """Refuse an operation whose operand partly overlaps its output: its result is not defined.

    torch refuses it as well where it detects it ("refer to a single memory location").
    """
    written = written_nodes(node)
    for target in written:
        others = (n for n in node.all_input_nodes if n not in written)
        for operand in (n for n in others if storage_key(n) == storage_key(target)):
            if overlap(VAL.of(operand), VAL.of(target)):
                raise PurityError(
                    f"{SOURCE.get(node)} reads elements that it also writes, at different indices "
                    f"({node.target}), so the result depends on the order of torch's loops. Read a "
                    "copy: y[1:] = y[:-1].clone()."
                )


def _written_values(emit: NodeInserter, node: fx.Node, call: fx.Node) -> list[fx.Node]:
    """The results of a functional counterpart that replace the written values, one per written node."""
    names = written_arguments(node.target)
    target: Any = call.target
    returns = len(internals.schema(target).returns)
    values: list[fx.Node] = []
    for i, name in enumerate(names):
        written = argument(node, name)
        value = call
        if returns > 1:
            value = emit(operator.getitem, call, returns - len(names) + i)
        if isinstance(written, (list, tuple)):
            values += [emit(operator.getitem, value, k) for k in range(len(written))]
        else:
            values.append(value)
    return values
