"""The instructions of a loop, and when its values are dropped.

Values that an iteration alone reads are dropped as in straight-line code. What another loop reads is kept
in a list, one entry for each iteration, which the last loop that reads it empties. What is stacked or
summed after the loop is collected as it is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    Drop,
    For,
    Get,
    Instruction,
    New,
    Pack,
    Put,
    Read,
    Shifted,
    SlotNames,
    When,
    While,
)
from torchard.functional.execution.phases import phases_of
from torchard.functional.programs.loops import carried, handed_on, is_apart, reads_alone
from torchard.functional.programs.markers import Loop, again, enter, goes_on, item, row, rows, total
from torchard.functional.programs.tags import LOOP

__all__ = ["Lives", "dropped", "loop_instructions", "operation"]

# Node that reads the collected values of iterations -> the first letter of the collector's slot.
_COLLECTS: dict[Any, str] = {rows: "r", total: "t"}


class Lives:
    """When each value is last read; a loop counts as one place."""

    def __init__(self, order: Sequence[fx.Node], slots: SlotNames) -> None:
        self.slots = slots
        place: dict[Any, int] = {}
        for node in order:
            place.setdefault(LOOP.get(node) or node, len(place))
        self.place = {node: place[LOOP.get(node) or node] for node in order}
        # By place: the slots whose values are dead after it, each once.
        self.dead: dict[int, dict[str, None]] = {}
        for node in order:
            if node.op != "output" and not LOOP.on(node):
                readers = [user for user in node.users if user in self.place]  # others are dead
                last = max(map(self.place.__getitem__, readers), default=self.place[node])
                if node.users or node.op == "call_function":
                    self._drop(slots[node], last)
            elif LOOP.on(node):
                self._collections(node)

    def _drop(self, slot: str, place: int) -> None:
        self.dead.setdefault(place, {})[slot] = None

    def _collections(self, node: fx.Node) -> None:
        """What is kept of the iterations of a loop, and the last carry."""
        for user in node.users:
            if user.target in _COLLECTS:
                self._drop(self.collection(user), self.place[user])
        if self.kept_for(node):
            self._drop(self.kept(node), max(self.place[user] for user in self.kept_for(node)))
        if node.target is enter:
            left = [self.place[user] for other in handed_on(node) for user in other.users]
            self._drop(self.slots[node], max(left, default=self.place[node]))

    def dead_after(self, node: fx.Node) -> list[str]:
        """The slots to empty after a node that is in no loop."""
        return list(self.dead.get(self.place[node], ()))

    def dead_entering(self, nodes: Sequence[fx.Node]) -> list[str]:
        """The slots of values that enter the first iteration of a loop, and are not read after that."""
        dead, place = self.dead.get(self.place[nodes[0]], {}), self.place[nodes[0]]
        entering = (operand for n in nodes if n.target is enter for operand in n.all_input_nodes)
        only = [
            self.slots[n]
            for n in dict.fromkeys(entering)
            if all(user.target is enter for user in n.users if self.place[user] == place)
        ]
        gone = [name for name in only if name in dead]
        for name in gone:
            del dead[name]
        return gone

    def kept_for(self, node: fx.Node) -> list[fx.Node]:
        """The readers of a value in other loops."""
        loop = LOOP.get(node)
        return [user for user in node.users if LOOP.on(user) and LOOP.of(user) is not loop]

    def kept(self, node: fx.Node) -> str:
        """The list of a value of all iterations."""
        return "k" + self.slots[node]

    def takes_row(self, node: fx.Node) -> bool:
        """Whether nothing reads the row of an iteration after a node, which takes it out of its list."""
        (values,) = node.all_input_nodes
        span = LOOP.of(node).span
        readers = [u for u in values.users if not LOOP.on(u) or _overlap(LOOP.of(u).span, span)]
        return reads_alone(node) and max(map(self.place.__getitem__, readers)) == self.place[node]

    def collection(self, user: fx.Node) -> str:
        """What collects the values for a node after the loop."""
        return _COLLECTS[user.target] + self.slots[user]

    def begins(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether the loop of a node is the first whose values a node after it collects."""
        return self.place[node] == min(self.place[value] for value in user.all_input_nodes)

    def collected(self, node: fx.Node) -> Instruction | None:
        """How a node reads what a loop left; None for others."""
        if not any(map(LOOP.on, node.all_input_nodes)):
            return None
        slot = self.slots[node]
        if node.target in _COLLECTS:
            source = self.collection(node)
            return Assign(node, [slot], [source]) if is_apart(node) else Get(node, slot, source)
        (handing,) = node.all_input_nodes  # of a carry that leaves
        return Assign(node, [slot], [self.slots[carried(handing)[1]]])


def operation(
    node: fx.Node, slots: SlotNames, dead: Sequence[str], saved: Sequence[Put] = ()
) -> Iterator[Instruction]:
    """The instructions of one operation.

    A compiled region takes over its list of operands: it frees each operand after its last use.

    Args:
        slots: the slots of the operation and of its operands.
        dead: the slots that are empty after the operation.
        saved: the further places to which its value is written.
    """
    slot = slots[node]
    others = [each for each in dead if each != slot]
    if getattr(node.target, "takes_over", False):
        operands: Any = node.args[0]
        yield Pack(None, "given", operands, slots)
        yield from dropped(others)
        yield Compute(node, slot, slots, given="given")
    else:
        yield _value(node, slots)
        yield from dropped(others)  # before the value is saved, which may take memory
    yield from saved
    yield from dropped([each for each in dead if each == slot])


def _value(node: fx.Node, slots: SlotNames) -> Instruction:
    """What sets the slot of a node that is in a graph, or in an iteration and no row."""
    slot = slots[node]
    source: Any = node.args[0] if node.args else None
    if is_apart(node):
        return Pack(node, slot, source, slots)
    if node.target is operator.getitem:
        return Read(node, slot, slots[source], node.args[1], "item")
    if node.target is item and is_apart(source):
        alone = sum(user.args == node.args for user in source.users) == 1
        return Read(node, slot, slots[source], node.args[1], "out" if alone else "item")
    if node.target is item:
        return Read(node, slot, slots[source], node.args[1], "row")
    return Compute(node, slot, slots)


def dropped(slots: Sequence[str]) -> Iterator[Drop]:
    """The instruction that empties some slots, if there are any."""
    if slots:
        yield Drop(slots)


def loop_instructions(
    loop: Loop, nodes: Sequence[fx.Node], lives: Lives
) -> Iterator[Instruction]:
    """The instructions of a loop.

    Args:
        nodes: the loop's operations, in order.
    """
    return _LoopInstructions(loop, nodes, lives).all()


class _LoopInstructions:
    def __init__(self, loop: Loop, nodes: Sequence[fx.Node], lives: Lives) -> None:
        self.loop, self.nodes, self.lives = loop, nodes, lives
        self.phases = phases_of(nodes)
        # The last carry of another loop may still be held, in the slot of what entered there.
        others = {n: f"of_{lives.slots[n]}" for n in _of_other_loops(loop, nodes)}
        self.slots = {**lives.slots, **others}
        # Values that one iteration computes for another, or in another's place, have slots of their own.
        self.ahead = {node: f"next_{lives.slots[node]}" for node in self.phases.ahead}
        late = (*self.phases.late, *self.phases.pending)
        self.late = {node: f"last_{lives.slots[node]}" for node in late}

    def all(self) -> Iterator[Instruction]:
        """The iterations, and what is before and after them."""
        yield from self._beginning()
        order, phases = self.loop.order(), self.phases
        if phases.ahead:
            yield For(order[: phases.distance], list(self._issue()))
        body = list(self._iteration())
        going = next((n for n in self.nodes if n.target is goes_on), None)
        if going is None:
            yield For(order, body)
        else:
            yield While(self.lives.slots[going.all_input_nodes[0]], body)
        if phases.late:
            yield For(order[-1:], list(self._await()))
        gone = self.lives.dead_after(self.nodes[0])
        lists = [self._early(node) for node in phases.early] + list(map(self._pending, phases.pending))
        yield from dropped([*gone, *lists])

    def _beginning(self) -> Iterator[Instruction]:
        """What is there before the first iteration: carries, and lists."""
        lives, stop = self.lives, self.loop.span.stop
        for node in self.nodes:
            if node.target is enter:
                initial = node.args[0]
                assert isinstance(initial, fx.Node)
                yield Assign(None, [lives.slots[node]], [lives.slots[initial]])
            if lives.kept_for(node):
                yield New(lives.kept(node), "list", stop)
            for user in node.users:
                if user.target in _COLLECTS and lives.begins(user, node):
                    yield _collecting(lives.collection(user), user)
        yield from dropped(lives.dead_entering(self.nodes))
        for slot in (*map(self._early, self.phases.early), *map(self._pending, self.phases.pending)):
            yield New(slot, "list", stop)

    def _row(self, node: fx.Node, slot: str) -> Read:
        """How the row of an iteration is read."""
        (source,) = node.all_input_nodes
        again_read = node in self.ahead and node in self.phases.main
        alone = self.lives.takes_row(node) and not again_read
        how: Any = "row" if not is_apart(source) else "out" if alone else "item"
        return Read(node, slot, self.lives.slots[source], None, how)

    def _early(self, node: fx.Node) -> str:
        """The list of values that are computed ahead."""
        return "e" + self.lives.slots[node]

    def _pending(self, node: fx.Node) -> str:
        """The list of values that are read after the next iteration."""
        return "p" + self.lives.slots[node]

    def _issue(self) -> Iterator[Instruction]:
        """What is issued ahead, for the iteration of the row."""
        slots = {**self.slots, **self.ahead}
        early = {node: Put(None, self._early(node), slots[node]) for node in self.phases.early}
        yield from self._block(self.phases.ahead, slots, early, kept=False)

    def _issue_later(self) -> Iterator[Instruction]:
        """What is issued ahead, for the iteration so far after that of the row, if there is one."""
        distance = self.phases.distance
        if distance:
            ahead = -distance if self.loop.reverse else distance
            yield When(_within(self.loop, distance), [Shifted(ahead, list(self._issue()))])

    def _await(self) -> Iterator[Instruction]:
        """What is awaited late, for the iteration of the row."""
        slots = {**self.slots, **self.late}
        for node in self.phases.pending:
            yield Read(None, slots[node], self._pending(node), None, "out")
        yield from self._block(self.phases.late, slots, {})

    def _iteration(self) -> Iterator[Instruction]:
        loop, phases, slots = self.loop, self.phases, self.slots
        step = -1 if loop.reverse else 1
        pending = {node: Put(None, self._pending(node), slots[node]) for node in phases.pending}
        for node in phases.early:
            yield Read(None, slots[node], self._early(node), None, "out")
            yield from _keep(node, self.lives, slots)
            if node in pending:
                yield pending[node]
        main = [*phases.arriving, *phases.main]
        yield from self._block(main, slots, pending, after=len(phases.arriving))
        if phases.late:
            yield When(_within(loop, -1), [Shifted(-step, list(self._await()))])

    def _block(
        self,
        nodes: Sequence[fx.Node],
        slots: SlotNames,
        saved: Mapping[fx.Node, Put],
        kept: bool = True,
        after: int | None = None,
    ) -> Iterator[Instruction]:
        """Some operations of one iteration, each followed by what saves its value.

        Args:
            kept: whether values are kept for other loops, and collected.
            after: after how many operations collectives of a later iteration are issued.
        """
        last, lives = _last_reads(nodes), self.lives
        taken: set[fx.Node] = set()  # of other loops' values
        for i, node in enumerate(nodes):
            if i == after:
                yield from self._issue_later()
            yield from self._values_of_others(node, slots, taken)
            gone = [slots[n] for n in last.get(node, ())]
            saves = [saved[node]] if node in saved else []
            if kept and node.target is not again:
                saves += _keep(node, lives, slots)
            if node.target in (enter, again, goes_on, row):
                if node.target is row:
                    yield self._row(node, slots[node])
                yield from saves
                yield from dropped(gone)
            else:
                yield from operation(node, slots, gone, saves)
        if after == len(nodes):
            yield from self._issue_later()
        handed = [carried(node) for node in nodes if node.target is again]
        if handed:
            values, entered = zip(*handed, strict=True)
            yield Assign(None, [slots[n] for n in entered], [slots[n] for n in values])
        yield from dropped(list(dict.fromkeys(slots[n] for n in last.get(None, ()))))

    def _values_of_others(
        self, node: fx.Node, slots: SlotNames, taken: set[fx.Node]
    ) -> Iterator[Instruction]:
        """Values of other loops are taken from their lists before their first use."""
        lives = self.lives
        for operand in node.all_input_nodes:
            if LOOP.get(operand) not in (None, self.loop) and operand not in taken:
                taken.add(operand)
                last = all(lives.place[user] <= lives.place[node] for user in lives.kept_for(operand))
                yield Read(None, slots[operand], lives.kept(operand), None, "item")
                if last:
                    yield Put(None, lives.kept(operand), None)


def _of_other_loops(loop: Loop, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The values of other loops that these operations read."""
    operands = (operand for node in nodes for operand in node.all_input_nodes)
    return {operand for operand in operands if LOOP.get(operand) not in (None, loop)}


def _collecting(slot: str, user: fx.Node) -> New:
    """What collects values for a node, empty at first."""
    if user.target is total:
        return New(slot, "total")
    count = user.args[1]
    assert isinstance(count, int)
    return New(slot, "list" if is_apart(user) else "rows", count)


def _within(loop: Loop, iterations: int) -> range:
    """The rows for which there is an iteration so many after theirs."""
    ahead = -iterations if loop.reverse else iterations
    return loop.span[: -ahead] if ahead > 0 else loop.span[-ahead:]


def _keep(node: fx.Node, lives: Lives, slots: SlotNames) -> Iterator[Put]:
    """A value is kept for other loops, and collected for what reads all of them."""
    if lives.kept_for(node):
        yield Put(None, lives.kept(node), slots[node])
    for user in node.users:
        if user.target in _COLLECTS:
            listed, only = is_apart(user), list[int]()
            if listed:
                read = sorted({int(str(each.args[1])) for each in user.users})
                only = read if len(read) < int(str(user.args[1])) else []
            yield Put(user, lives.collection(user), slots[node], listed, only)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _last_reads(nodes: Sequence[fx.Node]) -> dict[fx.Node | None, list[fx.Node]]:
    """By node, the values that the iteration does not read after it; by None, those that it hands on."""
    last: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:
        if node.target not in (again, goes_on):
            last[node] = node
            last.update(dict.fromkeys(filter(LOOP.on, node.all_input_nodes), node))
    for node in nodes:
        if node.target is again:
            last[carried(node)[0]] = None
    reads: dict[fx.Node | None, list[fx.Node]] = {}
    for value, end in last.items():
        if LOOP.on(value) and not (end is None and value.target is enter):
            reads.setdefault(end, []).append(value)
    return reads
