"""Which values differ between microbatches: a plan over the axis in time, in which nothing is chosen.

The graph becomes an SPMD graph over one axis, as ``scheduling/partition.py`` makes it over a mesh: every
node is tagged with its layout, and steps between nodes are the identity on global values. A batch that
enters is sliced. From there on each operation splits the factors that its operands split, by its factor
rule. A sum over the batch pends until something needs its value: then the microbatches are added up.
Whole values that an operation wants split are computed split, wherever that takes no more than slices of
inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from torchard.functional.core.errors import AccumulateError
from torchard.functional.programs.constants import release_constants
from torchard.functional.programs.graphs import add_call, output_node, output_values, with_operands
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import LAYOUT, PHASE, SOURCE, VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals import ProgramGraph
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.decompose import decompose
from torchard.sharding.decompositions.sorted_rows import in_blocks, sorts
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.options import Option, options
from torchard.sharding.layouts.reshard import plan
from torchard.sharding.layouts.tags import CHUNK, GATHERED
from torchard.sharding.microbatches.mark import AXIS, Mark, marked
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index
from torchard.sharding.scheduling.collectives import emit_step

__all__ = ["spread"]

# The weight of the labels, which torch's kernel returns with the loss, depends only on the labels.
_APART = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_SMALL = 1024  # elements below which an operation on a pending sum may run once per microbatch


def spread(graph: fx.Graph, steps: int) -> fx.Graph:
    """The SPMD graph over the axis, of a canonical graph, whose operations may be decomposed in place.

    Raises:
        AccumulateError: an operation needs the whole batch at once.
    """
    for sort in sorts(graph):
        if mark := _mark_behind(sort, steps):
            in_blocks(graph, sort, steps * mark.blocks)
    return _Spread(graph, steps).run()


def _mark_behind(node: fx.Node, steps: int) -> Mark | None:
    """The mark of a sliced batch on which a value depends."""
    seen, stack = {node}, [node]
    while stack:
        mark = marked(here := stack.pop())
        if mark is not None and mark.steps == steps:
            return mark
        stack += [n for n in here.all_input_nodes if n not in seen]
        seen.update(here.all_input_nodes)
    return None


class _Spread:
    def __init__(self, graph: fx.Graph, steps: int) -> None:
        self.old, self.sizes = graph, ((AXIS, steps),)
        self.new = ProgramGraph()
        self.home: dict[fx.Node, Layout] = {}
        self.versions: dict[fx.Node, dict[Layout, fx.Node]] = {}
        self.tuples: dict[fx.Node, tuple[fx.Node, tuple[Layout, ...]]] = {}

    def run(self) -> fx.Graph:
        for node in self.old.nodes:  # a decomposed node's users are erased, and not visited
            if node.op == "placeholder":
                copied = self.new.node_copy(node)
                inherit(copied, node, "call")
                LAYOUT.set(copied, _whole(node))
                self._publish(node, _whole(node), copied)
            elif node.op == "call_function":
                self._call(node)
        out = output_node(self.old)
        results = [
            self._fetch(value, _whole(value), out) for value in output_values(self.old)
        ]
        inherit(self.new.output(tuple(results)), out, "call")
        return self.new

    def _call(self, node: fx.Node) -> None:
        mark = marked(node)
        if mark is not None and mark.steps == self.sizes[0][1]:
            (source,) = node.all_input_nodes
            layout = mark.layout(VAL.of(node).shape).normal(self.sizes)
            self._publish(node, layout, self._fetch(source, layout, node))
        elif node.target is operator.getitem:
            self._item(node)
        else:
            self._operation(node)

    def _item(self, node: fx.Node) -> None:
        if not hasattr(VAL.get(node), "shape"):
            return
        whole, layouts = self.tuples[node.all_input_nodes[0]]
        layout = layouts[result_index(node)]
        self._publish(node, layout, self._copy(node, layout, (whole, node.args[1]), {}))

    # -- operations -----------------------------------------------------------------------------

    def _operation(self, node: fx.Node) -> None:
        call = Call.of(node)
        have = [self.home[o] for o in call.operands]
        whole = all(layout.is_replicated for layout in have)
        option = None if node.target in _APART and not whole else self._option(call, have)
        if option is None:
            pieces = decompose(self.old, node)
            if not pieces:
                raise AccumulateError(self._refusal(node, have))
            for piece in release_constants(pieces):
                self._call(piece)
            return
        self._compute(node, call, option)

    def _compute(self, node: fx.Node, call: Call, option: Option) -> fx.Node:
        operands = [
            self._fetch(o, want, node) for o, want in zip(call.operands, option.ins, strict=True)
        ]
        args, kwargs = with_operands(node, operands)
        several = isinstance(VAL.of(node), (tuple, list))
        computed = self._copy(node, option.outs if several else option.outs[0], args, kwargs)
        GATHERED.set(computed, option.rule.gathered and bool(call.ins))
        if several:
            self.tuples[node] = computed, option.outs
        else:
            self.versions.setdefault(node, {})[option.outs[0]] = computed
            self.home.setdefault(node, option.outs[0])
        return computed

    def _option(self, call: Call, have: Sequence[Layout]) -> Option | None:
        """The option that needs the fewest sums; None if every option gathers."""
        found = options(rule_of(call), tuple(have), (), self.sizes)
        if all(layout.is_replicated for layout in have):
            return next(o for o in found if not any(out.axes for out in (*o.ins, *o.outs)))
        usable = [o for o in found if all(map(_reachable, have, o.ins)) and self._is_even(o)]
        if _is_after_sums(call):
            usable = [o for o in usable if not any(x.awaited for x in o.ins)] or usable
        split = any(layout.split_axes for layout in have)
        if split:
            usable = [o for o in usable if any(o.axes)]
        return min(usable, key=lambda o: _price(call, have, o), default=None)

    def _is_even(self, option: Option) -> bool:
        """Whether all microbatches have the same shapes."""
        steps = self.sizes[0][1]
        dims = (dim for layout in (*option.ins, *option.outs) for dim in layout.dims)
        return all(sub.size % steps == 0 for dim in dims for sub in dim if sub.axes)

    def _refusal(self, node: fx.Node, have: Sequence[Layout]) -> str:
        shapes = ", ".join(str(list(VAL.of(o).shape)) for o in Call.of(node).operands)
        dims = sorted({dim for layout in have if (dim := layout.dim_of(AXIS)) is not None})
        return (
            f"{SOURCE.get(node) or 'an unknown line'}: {node.target} of {shapes} cannot be computed one "
            f"microbatch at a time: it needs the whole batch, which is dim {' or '.join(map(str, dims))} "
            f"here. Compute it outside of accumulate{_instead(node)}."
        )

    # -- values in the layouts that their users want ----------------------------------------------

    def _fetch(self, node: fx.Node, want: Layout, user: fx.Node) -> fx.Node:
        have = self.versions[node]
        if want in have:
            return have[want]
        home = self.home[node]
        if want.split_axes and home.is_replicated:
            split = self._computed_split(node, want)
            if split is not None:
                return split
        if home.awaited and want.split_axes:  # added up, then sliced: never scattered
            self._fetch(node, _whole(node), user)
            home = _whole(node)
        value = have[home]
        for step in plan(home, want, self.sizes):
            value = emit_step(self.new, value, step, user, self.sizes)
        have[want] = value
        return value

    def _computed_split(self, node: fx.Node, want: Layout) -> fx.Node | None:
        """A whole value computed in slices, by its operation on slices of its operands, if it can be."""
        if node.op != "call_function" or marked(node) or isinstance(VAL.of(node), (tuple, list)):
            return None
        if node.target is operator.getitem:
            return None
        call = Call.of(node)
        have = [self.home[o] for o in call.operands]
        if not all(layout.is_replicated for layout in have):
            return None
        found = options(rule_of(call), tuple(have), (want,), self.sizes)
        for option in found:
            clear = not any(layout.pending for layout in option.ins)
            if option.outs == (want,) and clear and self._is_even(option):
                return self._compute(node, call, option)
        return None

    def _publish(self, node: fx.Node, layout: Layout, computed: fx.Node) -> None:
        self.home[node] = layout
        self.versions[node] = {layout: computed}

    def _copy(
        self, node: fx.Node, layout: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        computed = add_call(node, node.target, *args, graph=self.new, same="call", **kwargs)
        LAYOUT.set(computed, layout)
        return computed


def _instead(node: fx.Node) -> str:
    """The remedy for an operation that is not computed one microbatch at a time."""
    space = getattr(node.target, "namespace", "aten")
    if space not in ("aten", "prims", "torchard"):
        return (
            f", or state which of its dims are independent: register_rule(torch.ops.{node.target}, text="
            "'n ... -> n ...') for one that computes each row by itself"
        )
    return (
        ", split a dim of the arguments that it treats one by one (batch=...), or use checkpoint, which "
        "saves memory without slices"
    )


def _whole(node: fx.Node) -> Layout:
    return Layout.replicated(tuple(VAL.of(node).shape))


def _reachable(have: Layout, want: Layout) -> bool:
    """Whether a value can be had in a layout without gathering it."""
    if have == want:
        return True
    if have.split_axes:
        return False
    return not want.pending


def _is_after_sums(call: Call) -> bool:
    """Whether the sums that an operation reads are completed first, even if it is linear in them.

    It reads gradients and belongs to no backward, as an optimizer does: it is computed once. Or it adds
    up sums at several stages of a pipeline, each of which is sent once.
    """
    chunks = {CHUNK.of(o) for o in call.operands if CHUNK.on(o)}
    of_gradients = any(PHASE.get(o) == "backward" for o in call.operands)
    return len(chunks) > 1 or (of_gradients and PHASE.get(call.node) != "backward")


def _price(call: Call, have: Sequence[Layout], option: Option) -> tuple[int, ...]:
    """The cost of an option: sums that later microbatches wait for, repeated work, and sums."""
    sums = [h for h, want in zip(have, option.ins, strict=True) if h.awaited and not want.awaited]
    varies = any(out.axes for out in option.outs)
    passed = [h for h, want in zip(have, option.ins, strict=True) if h.awaited and want.awaited]
    again = 0
    if len(passed) == 1 and not is_view(call.node):
        before = max(_elements(h) for h in passed)
        after = sum(map(_elements, option.outs))
        again = int(after > _SMALL and after >= before)
    return len(sums) if varies else 0, again, len(sums)


def _elements(layout: Layout) -> int:
    return layout.largest_local({AXIS: 1})
