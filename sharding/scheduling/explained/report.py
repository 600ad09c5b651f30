"""The report of a plan: what it costs, what every other one costs at least, and why it is as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from torch import fx

from torchard.functional.core.arguments import checked
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Records
from torchard.functional.programs.tags import LAYOUT, VAL
from torchard.functional.reports.text import value_text
from torchard.functional.reports.time import duration
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.tags import SOFT
from torchard.sharding.planning.decision import Plan
from torchard.sharding.planning.minimum.bounds import Bounded
from torchard.sharding.planning.minimum.elimination import TooWide
from torchard.sharding.planning.updates import updated_inputs
from torchard.sharding.scheduling.collectives import Collective
from torchard.sharding.scheduling.explained.changes import PlanChange, change_between
from torchard.sharding.scheduling.explained.model import PlanCosts, PlanSpace
from torchard.sharding.scheduling.explained.moves import given_layouts, transfers_table
from torchard.sharding.scheduling.explained.named import PlanNames
from torchard.sharding.scheduling.explained.others import (
    Other,
    family,
    other_specs,
    planned_with,
    saved_by,
    with_other_layout,
    without_collective,
)
from torchard.sharding.scheduling.explained.reasons import PlanReason, SpecGain
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import spec_of

__all__ = ["PlanReport", "reporter"]

_EQUAL = 1e-5  # of the seconds: plans whose difference is smaller are equal
_TOLD_APART = 1e-11  # seconds: slices and collectives of equal plans are told apart by less
_MOST = 120_000  # variables of all problems, of one spec each, that are solved to find better ones
_PLANNED = 4  # specs that are planned
_ALL = "all plans of these operations"
_ALONG_ONE = "all plans that differ from this one along one axis"


def reporter(plan: Plan, mesh: Mesh) -> Callable[[Program], PlanReport]:
    """A function from a program to the report of its plan."""
    return lambda program: PlanReport(program, plan, mesh)


class PlanReport:
    """What a plan costs, what every plan of its operations costs at least, and why it is as it is.

    Costs are those of the model by which plans are minimized: the seconds that the busiest rank
    computes, and those of all collectives, one after the other. ``.time(machine)`` predicts what a call
    takes. Printed, it is a table of what is sent, whose seconds add up to those of sending, and one of
    inputs that would be cheaper with another spec.

    Bounds and better specs are found when they are asked for, within some ten seconds each.

    Args:
        program: the program of a mesh.
        plan: its plan.
        mesh: the mesh.

    Attributes:
        machine: the machine whose rates are used: that given to `shard`, or a slow network.
        minimized: whether the plan is to take least time on it, because it was given; otherwise plans
            follow specs by rules.
        seconds: what the plan costs.
        computing: the seconds of it in which the busiest rank computes.
        idle: axes that split nothing.

    >>> import torchard as ta
    >>> def mlp(x, up, down):
    ...     return (x @ up).relu() @ down
    >>> mesh = ta.Mesh({"tp": 4}, virtual=True)
    >>> specs = ta.P(), ta.P(None, "tp"), ta.P("tp")
    >>> shapes = ta.ShapeDtype((64, 32)), ta.ShapeDtype((32, 128)), ta.ShapeDtype((128, 32))
    >>> program = ta.shard(mlp, mesh, specs, ta.P()).lower(*shapes)
    >>> isinstance(program.plan, ta.PlanReport), program.plan.gap
    (True, 0.0)
    >>> print(program.plan.why(program.collectives[0]))
    all_reduce(tp) [64, 32] float32, 12,288 bytes, moves mm at ... in mlp
    without it: +20.3 µs (+99.3%), +12,288 bytes per rank
      + all_to_all(tp) [64, 32] float32, 6,144 bytes at ... in mlp
      + all_gather(tp) [32, 32] float32, 12,288 bytes at ... in mlp
      + all_gather(tp) [16, 32] float32, 6,144 bytes at ... in mlp
      - all_reduce(tp) [64, 32] float32, 12,288 bytes at ... in mlp
    """

    def __init__(self, program: Program, plan: Plan, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        self._plan, self._costs = plan, PlanCosts(plan, mesh.sizes)
        self.machine: Machine = self._costs.energy.machine
        self.minimized = plan.given.on is not None
        decision = self._costs.decision
        self.seconds = self._costs.seconds(decision)
        within = [*self._costs.within(decision)]
        self.computing = self._costs.working(decision) - sum(each.seconds for each in within)
        moves = self._costs.moves(decision)
        self._sent = [*within, *(sent for move in moves for sent in self._costs.collectives(move))]
        self._little = max(_EQUAL * self.seconds, _TOLD_APART)
        self._axes = tuple(plan.given.planned_axes(mesh.sizes))
        self._stages = _stages(program)
        options = decision.option.values()
        by_shard_map = {a for o in options for x in (*o.ins, *o.outs) for a in x.axes}
        split = by_shard_map.union(self._axes)
        unused = (a for a in mesh.axes if a not in split and mesh.shape[a] > 1)
        self.idle = tuple(a for a in unused if a not in self._stages)

    # -- bounds -----------------------------------------------------------------------------------

    @cached_property
    def _proved(self) -> tuple[PlanSpace, Bounded] | None:
        """All plans, and the cheapest of them; None if there are too many."""
        try:
            space = PlanSpace(self._costs, self._axes)
            return space, space.proved()
        except TooWide:
            return None

    @property
    def bound(self) -> float | None:
        """What each plan of these operations costs at least; None if there are too many.

        Of all plans in which every axis that splits something that is given may split any operation, and
        outputs have the layouts that they have in this one; up to the picoseconds by which plans of equal
        cost are told apart. There are too many where an operation has more than 400 options, a value that
        several read more than 26 layouts, or all more than 40,000 reshards.
        """
        return None if self._proved is None else min(self._proved[1].bound, self.seconds)

    @property
    def gap(self) -> float | None:
        """The part of the plan's seconds, from 0 to 1, by which the bound is less; None without one."""
        bound = self.bound
        if bound is None:
            return None
        return (self.seconds - bound) / self.seconds if self.seconds - bound > self._little else 0.0

    @cached_property
    def better(self) -> PlanChange | None:
        """How a cheaper plan differs, if one is found; None if none is."""
        if self._proved is None or not self.gap:
            return None
        space, found = self._proved
        if found.cost >= self.seconds - self._little:
            return None
        exact = found.bound >= found.cost - self._little
        return self._change(Other(found.cost, None, space.model.decision(found.states), exact))

    def _change(self, other: Other) -> PlanChange:
        """How another plan differs from this one."""
        plan = replace(self._plan, decision=other.decision)
        return self._change_to(plan, other.seconds, other.exact)

    def _change_to(self, plan: Plan, seconds: float, exact: bool = True) -> PlanChange:
        longer = seconds - self.seconds
        longer = longer if abs(longer) > self._little else 0.0
        return change_between(self._plan, plan, longer, self.mesh, exact)

    # -- better specs -----------------------------------------------------------------------------

    @cached_property
    def _spaces(self) -> list[PlanSpace]:
        """The plans that differ along one axis, for each of them."""
        return [PlanSpace(self._costs, (axis,)) for axis in self._axes]

    @cached_property
    def specs(self) -> Records:
        """The inputs of which another spec would save time, those that save most first.

        One input is changed at a time, along one axis, with its gradient and its new value, if they have
        its spec; it takes no more memory. The few for which the model promises most are planned, and
        listed if the promise is kept. If there are very many inputs, only the largest are considered.
        Each record has the input's ``path``, its ``spec``, the ``other`` one, and the ``change`` of the
        plan, with its ``seconds`` and ``bytes``.
        """
        promised = []
        for node in self._considered():
            found = self._other_spec(node)
            if found is not None and found[0] > self._little:
                promised.append((found[0], node, found[1]))
        promised.sort(key=lambda each: -each[0])
        gains = [
            SpecGain(self._names.path(node), spec_of(self._layout(node)), spec_of(layout), change)
            for _, node, layout in promised[:_PLANNED]
            if (change := self._respecified(node, layout)).seconds < 0
        ]
        return Records(sorted(gains, key=lambda gain: gain.change.seconds))

    def _considered(self) -> list[fx.Node]:
        """The inputs with specs that may be changed, the largest first."""
        each = sum(len(space.states) for space in self._spaces)
        nodes = sorted(self._specified, key=lambda node: -VAL.of(node).nbytes)
        return nodes[: _MOST // max(each, 1)]

    def _other_spec(self, node: fx.Node) -> tuple[float, Layout] | None:
        """The seconds that the best other spec along any one axis saves, and that spec."""
        tied = self._tied(node)
        each = (
            (saved_by(space, node, tied, spec), spec)
            for space in self._spaces
            for spec in other_specs(space, node)
        )
        return max(each, key=lambda found: found[0], default=None)

    def _respecified(self, node: fx.Node, layout: Layout) -> PlanChange:
        """How the plan with another spec differs from this one."""
        plan = planned_with(self._plan, self.mesh, node, self._tied(node), layout)
        costs = PlanCosts(plan, self.mesh.sizes)
        return self._change_to(plan, costs.seconds(costs.decision))

    @cached_property
    def _specified(self) -> dict[fx.Node, int]:
        """The inputs, or the constraints that are their specs, by the number of the input."""
        found: dict[fx.Node, int] = {}
        for i, (node, known) in enumerate(self._plan.given.inputs.items()):
            soft = [user for user in node.users if SOFT.get(user)]
            if VAL.of(node).ndim and not isinstance(known, int):
                found[(soft or [node])[0]] = i
        return found

    def _tied(self, node: fx.Node) -> list[int]:
        """The outputs that are an input's gradient or new value, and have its spec."""
        return [
            i
            for i, layout in enumerate(self._plan.decision.outputs)
            if self._updates.get(i, -1) == self._specified.get(node) and layout == self._layout(node)
        ]

    @cached_property
    def _updates(self) -> dict[int, int]:
        """The inputs whose gradients or new values are outputs, by numbers."""
        numbers = {node: i for i, node in enumerate(self._plan.given.inputs)}
        found = updated_inputs(self._plan.graph, self.program.outputs)
        return {i: numbers[node] for i, node in found.items()}

    def _layout(self, node: fx.Node) -> Layout:
        """The layout that a plan keeps a value in; that which is given, if there is one."""
        fixed = given_layouts(self._plan.given, self._plan.decision)
        return fixed.get(node) or self._plan.decision.home[node]

    @cached_property
    def _names(self) -> PlanNames:
        return PlanNames(self.program, self._plan, self._specified)

    # -- why --------------------------------------------------------------------------------------

    @checked
    def why(self, what: str | Collective) -> Records:
        """Why a value has its layout, what the next best one would cost, and what would change.

        Args:
            what: the path of an input or output, as in ``"args[0]['up']"``; a label that `name` gave; a
                source line, as in ``"model.py:12"``, for all values that it computes; or an entry of
                ``.collectives``.

        Returns:
            A `PlanReason` for each value. Of an input whose spec fixes its layout, what the next best
            spec would change. Other plans differ from this one along one axis; if none of those has
            what is asked for, along any.

        Raises:
            ValueError: there is no such value or collective, it is sent between stages, or there are
                too many plans.
        """
        try:
            if isinstance(what, Collective):
                return Records([self._collective(what)])
            return Records([self._value(node) for node in self._names.named(what)])
        except TooWide:
            raise ValueError(
                f"why: {self.program.name} has so many operations, or so many layouts of their values, "
                "that the other plans take too long to compare. Ask for the plan of a part of it."
            ) from None

    def _value(self, node: fx.Node) -> PlanReason:
        change, layout, fixed, compared = None, None, "", ""
        if node in self._specified or node in self._plan.given.constraints:
            fixed = self._names.fixed_by(node, self._layout(node), self.mesh)
            if (found := self._other_spec(node)) is not None:
                layout, change = found[1], self._respecified(node, found[1])
        else:
            other, compared = self._otherwise(lambda space: with_other_layout(space, node))
            if other is not None:
                layout, change = other.layout, self._change(other)
        now, what = self._layout(node), f"{self._names.called(node)} {value_text(VAL.of(node))}"
        what += self._names.returned(node, now)
        text = str(spec_of(now)) + "".join(f"+{op}({axis})" for axis, op in now.pending)
        other_spec = None if layout is None else spec_of(layout)
        return PlanReason(what, text, spec_of(now), fixed, self.seconds, other_spec, change, compared)

    def _collective(self, record: Collective) -> PlanReason:
        values, moved = self._names.moved_by(record)
        related = list(dict.fromkeys(n for value in values for n in family(value))) if moved else values
        kind, axes = record.kind, record.axes
        other, compared = self._otherwise(
            lambda space: without_collective(space, related, kind, axes, moved)
        )
        what = f"{record}, {record.bytes:,} bytes,"
        names = ", ".join(dict.fromkeys(map(self._names.called, values)))
        how = f"{'moves' if moved else 'is sent within'} {names}"
        change = None if other is None else self._change(other)
        return PlanReason(what, how, None, "", self.seconds, None, change, compared)

    def _otherwise(self, find: Callable[[PlanSpace], Other | None]) -> tuple[Other | None, str]:
        """The cheapest plan of those that differ along one axis, else of all; and which were compared."""
        found = _best(map(find, self._spaces))
        if len(self._spaces) < 2:
            return found, _ALL
        with suppress(TooWide):
            if found is None and self._proved is not None:
                return find(self._proved[0]), _ALL
        return found, _ALONG_ONE

    # -- text -------------------------------------------------------------------------------------

    def __str__(self) -> str:
        computing, sending = self.computing, sum(each.seconds for each in self._sent)
        computing = computing if computing > self._little else 0.0  # or rounding alone
        head = [
            f"{duration(self.seconds)} on {self.machine.name}: computes {duration(computing)}, "
            f"sends {duration(sending)}",
            self._verdict(),
        ]
        if not self.minimized:
            head.append("the plan follows specs by rules: no machine= was given to shard")
        if self._stages:
            head.append("stages compute one after another, and what they send is not counted")
        if self.idle:
            head.append(f"nothing that is given is split over {', '.join(self.idle)}")
        return "\n".join([*head, *transfers_table(self._sent), *self._cheaper()])

    def _verdict(self) -> str:
        """What is known of all plans."""
        bound, gap = self.bound, self.gap
        if bound is None or gap is None:
            return self._verdict_along_axes()
        if not gap:
            return "no plan of these operations takes less"
        text = f"no plan of these operations takes less than {duration(bound)} (gap {gap:.1%})"
        if self.better is None:
            return text
        seconds = duration(self.seconds + self.better.seconds)
        if self.better.exact:
            return f"the cheapest plan of these operations takes {seconds} (gap {gap:.1%}): {self.better}"
        return f"{text}; one that takes {seconds} was found: {self.better}"

    def _verdict_along_axes(self) -> str:
        """What is known where all plans are too many."""
        text = f"no bound: along {' and '.join(self._axes)} there are too many plans to compare"
        if len(self._axes) < 2:
            return text
        try:
            least = min(space.best.bound for space in self._spaces)
        except TooWide:
            return text
        known = "" if least >= self.seconds - self._little else f" than {duration(least)}"
        return f"{text}; none that differs from this one along one axis takes less{known}"

    def _cheaper(self) -> list[str]:
        """The table of better specs."""
        try:
            return ["", str(self.specs)] if self.specs else []
        except TooWide:
            return ["", "other specs are too many to compare"]


def _stages(program: Program) -> set[str]:
    """The axes of a pipeline's stages."""
    layouts = [LAYOUT.of(node) for node in program.calls if LAYOUT.on(node)]
    each = (x for known in layouts for x in (known if isinstance(known, tuple) else (known,)))
    return {axis for layout in each for axis, _ in layout.home}


def _best(others: Iterable[Other | None]) -> Other | None:
    """The cheapest of some plans."""
    return min(filter(None, others), key=lambda other: other.seconds, default=None)
