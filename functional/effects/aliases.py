"""Aliases: memory that a recorded graph writes to, and the views of it.

Such memory has one current value, its root's: the operation that allocated it. A view of it is a step
from another view or the root; it is recomputed when it is read after a write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.core.errors import PurityError
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.effects.mutation import argument_names, storage_key, written_nodes
from torchard.functional.effects.scatters import (
    ELEMENTWISE,
    RETYPES,
    NodeInserter,
    ViewStep,
    covers_memory,
    strided_steps,
)
from torchard.functional.programs.tags import CUT, SOURCE, VAL
from torchard.functional.programs.views import is_dense, is_view
from torchard.functional.torch_internals.operators import aten

__all__ = ["Alias", "AliasTable"]


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
class Alias:
    """The root of a memory, or a view of another alias; ``value`` is current at ``version``."""

    memory: _Memory
    val: torch.Tensor
    value: fx.Node
    version: int
    parent: Alias | None = None
    step: ViewStep | None = None
    multi_view: bool = False  # one of several views of one call: autograd refuses writes to those

    def is_same(self, other: Alias | None) -> bool:
        """Whether two aliases are the same view, for autograd too, whose call was made twice."""
        if self is other or other is None or self.parent is None:
            return self is other
        return self.step == other.step and self.parent.is_same(other.parent)

    @property
    def stopped(self) -> bool:
        """Whether autograd sees no write through this alias."""
        if self.parent is None or self.step is None:
            return False
        return self.step.cut or self.step.target is aten.view.dtype or self.parent.stopped

    @property
    def holds_floats(self) -> bool:
        """Whether it, or what it is a view of, may have a gradient: bits are written of floats, too."""
        own = is_inexact(self.val)
        return own or (self.parent is not None and self.parent.holds_floats)

    @property
    def refused(self) -> bool:
        """Whether autograd refuses writes through this alias."""
        return self.multi_view or (self.parent is not None and self.parent.refused)


class AliasTable:
    """The nodes of a graph that are written memory or views of it.

    Attributes:
        by_node: the alias that each such node represents.
        evades: whether a value was read of which autograd did not see a write.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.evades = False
        self.by_node: dict[fx.Node, Alias] = {}
        self._roots: dict[int, Alias] = {}
        inputs = {storage_key(node) for node in graph.find_nodes(op="placeholder")}
        strided = graph.find_nodes(op="call_function", target=aten.as_strided.default)
        self._tracked = {storage_key(n) for node in graph.nodes for n in written_nodes(node)}
        # Memory that is read by strides is tracked too: its layout may differ when the program runs.
        self._tracked |= {storage_key(node) for node in strided} - inputs

    def tracks(self, node: fx.Node) -> bool:
        """Whether a node's value lies in written memory."""
        return storage_key(node) in self._tracked

    def returns_views(self, node: fx.Node) -> bool:
        """Whether a node returns several views of written memory; they become one node each."""
        source = node.args[0] if node.args else None
        views = getattr(node.target, "is_view", False) and source in self.by_node
        return views and isinstance(VAL.get(node), (tuple, list))

    # -- reading ------------------------------------------------------------------------------

    def read(self, node: fx.Node) -> None:
        """Make a node read the latest values."""
        emit = NodeInserter(node)
        node.args, node.kwargs = self.latest_of(emit, (node.args, node.kwargs))

    def latest_of(self, emit: NodeInserter, arguments: Any) -> Any:
        """The arguments of a node, with the latest value of each alias among them."""

        def latest(node: fx.Node) -> fx.Node:
            return self.latest(emit, self.by_node[node]) if node in self.by_node else node

        return fx.map_arg(arguments, latest)

    def latest(self, emit: NodeInserter, alias: Alias) -> fx.Node:
        """The latest value of an alias; a view that has an older one is recomputed."""
        if alias.memory.evaded and not alias.stopped:
            self.evades = True
        if alias.version != alias.memory.version:
            assert alias.parent is not None and alias.step is not None
            value, step = self.latest(emit, alias.parent), alias.step
            alias.value = emit.view(emit.viewable(value, step.target, alias.memory.gaps), step)
            alias.version = alias.memory.version
        return alias.value

    # -- registering --------------------------------------------------------------------------

    def register(self, node: fx.Node) -> None:
        """Register a node in written memory: as its root, if it is the first, or as a view."""
        key = storage_key(node)
        assert key is not None
        val = VAL.of(node)
        if key not in self._roots:
            self.read(node)
            root = Alias(_Memory(not is_dense(val)), val, node, 0)
            self._roots[key] = self.by_node[node] = root
            return
        memory = self._roots[key].memory
        known = [n for n in node.all_input_nodes if n in self.by_node]
        source = next((n for n in known if self.by_node[n].memory is memory), None)
        parent = self._roots[key] if source is None else self.by_node[source]
        if source is None or source is not node.args[0] or not _is_step(node):
            self.by_node[node] = self.strided(node, parent, val)
            return
        self.read(node)
        value: Any = NodeInserter(node).viewable(node.args[0], node.target, memory.gaps)
        node.args = (value, *node.args[1:])
        step = ViewStep(node.target, node.args[1:], tuple(node.kwargs.items()), CUT.on(node))
        self.by_node[node] = Alias(memory, val, node, memory.version, parent, step)

    def view(self, reader: fx.Node, parent: Alias, step: ViewStep) -> Alias:
        """A new view of an alias, inserted ahead of a reader."""
        emit = NodeInserter(reader)
        value = emit.view(self.latest(emit, parent), step)
        memory = parent.memory
        return Alias(memory, VAL.of(value), value, memory.version, parent, step)

    def item(self, reader: fx.Node, views: fx.Node, index: Any) -> Alias:
        """One of the views that split or unbind return."""
        parent = self.by_node[views.all_input_nodes[0]]
        arguments = dict(zip(argument_names(views.target), views.args, strict=False)) | views.kwargs
        dim = arguments.get("dim", 0)
        if views.target is aten.unbind.int:
            step = ViewStep(aten.select.int, (dim, index))
        else:
            sizes = [v.shape[dim] for v in VAL.of(views)]
            start = sum(sizes[:index])
            step = ViewStep(aten.slice.Tensor, (dim, start, start + sizes[index]))
        alias = self.view(reader, parent, step)
        alias.multi_view = True
        return alias

    def strided(self, reader: fx.Node, parent: Alias, val: torch.Tensor) -> Alias:
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
                f"{SOURCE.get(reader)} accesses memory that is changed in place through a strided view "
                f"({error}), which has no pure form: index the tensor instead."
            ) from error
        for step in (*steps, *outer):
            parent = self.view(reader, parent, step)
        return parent


def _is_step(node: fx.Node) -> bool:
    """Whether a view depends on its operand's value only, not on the memory around it."""
    target: Any = node.target
    return bool(is_view(node)) and target is not aten.as_strided.default
