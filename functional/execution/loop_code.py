"""The lines of a loop in generated code, and when its values are dropped.

Values that an iteration alone reads are dropped as in straight-line code. What another loop reads is kept
in a list, one entry for each iteration, which the last loop that reads it empties. What is stacked or
summed after the loop is collected as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from torchard.functional.execution.phases import phases_of
from torchard.functional.programs.labels import Label, label_of
from torchard.functional.programs.loops import carried, handed_on, is_apart, reads_alone
from torchard.functional.programs.markers import Loop, again, enter, row, rows, total
from torchard.functional.programs.tags import LOOP

__all__ = ["Lives", "assigned", "loop_lines"]

Line = tuple[str, Label | None]
_COLLECTS: dict[Any, str] = {rows: "r", total: "t"}


class Lives:
    """When each value is last read; a loop counts as one place."""

    def __init__(self, order: Sequence[fx.Node], variables: dict[fx.Node, str]) -> None:
        self.variables = variables
        place: dict[Any, int] = {}
        for node in order:
            place.setdefault(LOOP.get(node) or node, len(place))
        self.place = {node: place[LOOP.get(node) or node] for node in order}
        # By place: the names that are dead after it, each once.
        self.dead: dict[int, dict[str, None]] = {}
        for node in order:
            if node.op != "output" and not LOOP.on(node):
                last = max((self.place[user] for user in node.users), default=self.place[node])
                if node.users or node.op == "call_function":
                    self._drop(variables[node], last)
            elif LOOP.on(node):
                self._collections(node)

    def _drop(self, name: str, place: int) -> None:
        self.dead.setdefault(place, {})[name] = None

    def _collections(self, node: fx.Node) -> None:
        """What is kept of the iterations of a loop, and the last carry."""
        for user in node.users:
            if user.target in _COLLECTS:
                self._drop(self.collection(user), self.place[user])
        if self.kept_for(node):
            self._drop(self.kept(node), max(self.place[user] for user in self.kept_for(node)))
        if node.target is enter:
            left = [self.place[user] for other in handed_on(node) for user in other.users]
            self._drop(self.variables[node], max(left, default=self.place[node]))

    def dead_after(self, node: fx.Node) -> list[str]:
        """The names to delete after a node that is in no loop."""
        return list(self.dead.get(self.place[node], ()))

    def dead_entering(self, nodes: Sequence[fx.Node]) -> list[str]:
        """The names of values that enter the first iteration of a loop, and are not read after that."""
        dead, place = self.dead.get(self.place[nodes[0]], {}), self.place[nodes[0]]
        entering = (operand for n in nodes if n.target is enter for operand in n.all_input_nodes)
        only = [
            self.variables[n]
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
        return "k" + self.variables[node]

    def takes_row(self, node: fx.Node) -> bool:
        """Whether nothing reads the row of an iteration after a node, which takes it out of its list."""
        (values,) = node.all_input_nodes
        span = LOOP.of(node).span
        readers = [u for u in values.users if not LOOP.on(u) or _overlap(LOOP.of(u).span, span)]
        return reads_alone(node) and max(map(self.place.__getitem__, readers)) == self.place[node]

    def collection(self, user: fx.Node) -> str:
        """What collects the values for a node after the loop."""
        return _COLLECTS[user.target] + self.variables[user]

    def begins(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether the loop of a node is the first whose values a node after it collects."""
        return self.place[node] == min(self.place[value] for value in user.all_input_nodes)

    def collected(self, node: fx.Node) -> str | None:
        """The text of a node that reads what a loop left; None for others."""
        if not any(map(LOOP.on, node.all_input_nodes)):
            return None
        if node.target in _COLLECTS:
            return self.collection(node) + ("" if is_apart(node) else ".get()")
        (handing,) = node.all_input_nodes  # of a carry that leaves
        return self.variables[carried(handing)[1]]


def assigned(
    node: fx.Node,
    value: str,
    variable: str,
    operands: str,
    dead: Sequence[str],
    between: Iterable[Line] = (),
) -> Iterator[Line]:
    """The lines of one operation, after which some variables are dead.

    A compiled region takes its list of operands over: it frees each after its own last use of it.
    """
    mine = [name for name in dead if name == variable]
    if getattr(node.target, "takes_over", False):
        yield f"given = {operands}", None
        yield from deleted([name for name in dead if name != variable])
        dead, value = mine, value.replace(f"({operands})", "(given)")
    yield f"{variable} = {value}", label_of(node)
    yield from between
    yield from deleted(dead)


def deleted(names: Sequence[str]) -> Iterator[Line]:
    """The line that deletes some variables, if there are any."""
    if names:
        yield f"del {', '.join(names)}", None


def loop_lines(
    loop: Loop,
    nodes: Sequence[fx.Node],
    lives: Lives,
    text: Callable[[Any, Mapping[fx.Node, str]], str],
    call: Callable[[fx.Node, Mapping[fx.Node, str]], str],
) -> Iterator[Line]:
    """The lines of a loop.

    Args:
        nodes: its operations, in order.
        text: the text of an argument, given the names of values.
        call: the text of a call.
    """
    return _LoopLines(loop, nodes, lives, text, call).lines()


class _LoopLines:
    def __init__(
        self,
        loop: Loop,
        nodes: Sequence[fx.Node],
        lives: Lives,
        text: Callable[[Any, Mapping[fx.Node, str]], str],
        call: Callable[[fx.Node, Mapping[fx.Node, str]], str],
    ) -> None:
        self.loop, self.nodes, self.lives, self.text, self.call = loop, nodes, lives, text, call
        self.phases = phases_of(nodes)
        # The last carry of another loop may still be held, under the name of what entered there.
        others = {n: f"of_{lives.variables[n]}" for n in _of_other_loops(loop, nodes)}
        self.variables = {**lives.variables, **others}
        # Values that one iteration computes for another, or in another's place, have names of their own.
        self.ahead = {node: f"next_{lives.variables[node]}" for node in self.phases.ahead}
        late = (*self.phases.late, *self.phases.pending)
        self.late = {node: f"last_{lives.variables[node]}" for node in late}

    def lines(self) -> Iterator[Line]:
        """All lines."""
        yield from self._beginning()
        order, phases = self.loop.order(), self.phases
        if phases.ahead:
            yield _for(order[: phases.distance]), None
            yield from _indented(self._issue())
        yield _for(order), None
        yield from _indented(self._iteration())
        if phases.late:
            yield _for(order[-1:]), None
            yield from _indented(self._await())
        gone = self.lives.dead_after(self.nodes[0])
        lists = [self._early(node) for node in phases.early] + list(map(self._pending, phases.pending))
        yield from deleted([*gone, *lists])

    def _beginning(self) -> Iterator[Line]:
        """What is there before the first iteration: carries, and lists."""
        lives, stop = self.lives, self.loop.span.stop
        for node in self.nodes:
            if node.target is enter:
                yield f"{lives.variables[node]} = {self.text(node.args[0], lives.variables)}", None
            if lives.kept_for(node):
                yield f"{lives.kept(node)} = [None] * {stop}", None
            for user in node.users:
                if user.target in _COLLECTS and lives.begins(user, node):
                    yield f"{lives.collection(user)} = {_collecting(user)}", None
        yield from deleted(lives.dead_entering(self.nodes))
        for name in (*map(self._early, self.phases.early), *map(self._pending, self.phases.pending)):
            yield f"{name} = [None] * {stop}", None

    def _row(self, node: fx.Node) -> str:
        """The text of the row of an iteration."""
        (source,) = node.all_input_nodes
        values = self.lives.variables[source]
        if not is_apart(source):
            return f"row_of({values}, i)"
        again_read = node in self.ahead and node in self.phases.main
        return f"taken({values}, i)" if self.lives.takes_row(node) and not again_read else f"{values}[i]"

    def _early(self, node: fx.Node) -> str:
        """The list of values that are computed ahead."""
        return "e" + self.lives.variables[node]

    def _pending(self, node: fx.Node) -> str:
        """The list of values that are read after the next iteration."""
        return "p" + self.lives.variables[node]

    def _issue(self) -> Iterator[Line]:
        """What is issued ahead, for the iteration of row i."""
        names = {**self.variables, **self.ahead}
        early = {node: f"{self._early(node)}[i] = {names[node]}" for node in self.phases.early}
        yield from self._block(self.phases.ahead, names, early, kept=False)

    def _issue_later(self) -> Iterator[Line]:
        """What is issued ahead, for the iteration so far after that of row i, if there is one."""
        distance = self.phases.distance
        if distance:
            yield f"if {_within(self.loop, distance)}:", None
            ahead = -distance if self.loop.reverse else distance
            yield from _indented(_for_row(ahead, self._issue()))

    def _await(self) -> Iterator[Line]:
        """What is awaited late, for the iteration of row i."""
        names = {**self.variables, **self.late}
        for node in self.phases.pending:
            yield f"{names[node]} = taken({self._pending(node)}, i)", None
        yield from self._block(self.phases.late, names, {})

    def _iteration(self) -> Iterator[Line]:
        loop, phases, variables = self.loop, self.phases, self.variables
        step = -1 if loop.reverse else 1
        pending = {node: f"{self._pending(node)}[i] = {variables[node]}" for node in phases.pending}
        for node in phases.early:
            yield f"{variables[node]} = taken({self._early(node)}, i)", None
            yield from _keep(node, self.lives, variables)
            if node in pending:
                yield pending[node], None
        main = [*phases.arriving, *phases.main]
        yield from self._block(main, variables, pending, after=len(phases.arriving))
        if phases.late:
            yield f"if {_within(loop, -1)}:", None
            yield from _indented(_for_row(-step, self._await()))

    def _block(
        self,
        nodes: Sequence[fx.Node],
        names: Mapping[fx.Node, str],
        saved: Mapping[fx.Node, str],
        kept: bool = True,
        after: int | None = None,
    ) -> Iterator[Line]:
        """The lines of some operations of one iteration, each followed by what saves its value.

        Args:
            kept: whether values are kept for other loops, and collected.
            after: after how many operations collectives of a later iteration are issued.
        """
        last, lives = _last_reads(nodes), self.lives
        # Values of other loops are taken from their lists before their first use.
        taken: set[fx.Node] = set()
        for i, node in enumerate(nodes):
            if i == after:
                yield from self._issue_later()
            for operand in node.all_input_nodes:
                if LOOP.get(operand) not in (None, self.loop) and operand not in taken:
                    taken.add(operand)
                    yield f"{names[operand]} = {lives.kept(operand)}[i]", None
                    if all(lives.place[user] <= lives.place[node] for user in lives.kept_for(operand)):
                        yield f"{lives.kept(operand)}[i] = None", None
            gone = [names[n] for n in last.get(node, ())]
            saves: list[Line] = [(saved[node], None)] if node in saved else []
            saves += list(_keep(node, lives, names)) if kept and node.target is not again else []
            if node.target in (enter, again):
                yield from [*saves, *deleted(gone)]
                continue
            value = self._row(node) if node.target is row else self.call(node, names)
            operands = self.text(node.args[0], names) if node.args else ""
            yield from assigned(node, value, names[node], operands, gone, saves)
        if after == len(nodes):
            yield from self._issue_later()
        handed = [node for node in nodes if node.target is again]
        if handed:
            entered = ", ".join(names[carried(node)[1]] for node in handed)
            values = ", ".join(names[carried(node)[0]] for node in handed)
            yield f"{entered}, = {values},", None
        yield from deleted(list(dict.fromkeys(names[n] for n in last.get(None, ()))))


def _of_other_loops(loop: Loop, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The values of other loops that these operations read."""
    operands = (operand for node in nodes for operand in node.all_input_nodes)
    return {operand for operand in operands if LOOP.get(operand) not in (None, loop)}


def _collecting(user: fx.Node) -> str:
    """The text of what collects values for a node, which is empty at first."""
    if user.target is total:
        return "Total()"
    return f"[None] * {user.args[1]}" if is_apart(user) else f"Rows({user.args[1]})"


def _for(order: range) -> str:
    return f"for i in range({order.start}, {order.stop}, {order.step}):"


def _indented(lines: Iterable[Line]) -> Iterator[Line]:
    return ((f"    {line}", label) for line, label in lines)


def _within(loop: Loop, iterations: int) -> str:
    """The condition that there is an iteration so many after this one."""
    ahead = -iterations if loop.reverse else iterations
    return f"i < {loop.span.stop - ahead}" if ahead > 0 else f"i >= {loop.first - ahead}"


def _for_row(ahead: int, lines: Iterable[Line]) -> Iterator[Line]:
    """Lines for another row, so many further on."""
    yield f"i += {ahead}", None
    yield from lines
    yield f"i -= {ahead}", None


def _keep(node: fx.Node, lives: Lives, names: Mapping[fx.Node, str]) -> Iterator[Line]:
    value = names[node]
    if lives.kept_for(node):
        yield f"{lives.kept(node)}[i] = {value}", None
    for user in node.users:
        if user.target in _COLLECTS:
            name = lives.collection(user)
            put = f"{name}.put(i, {value})"
            if is_apart(user):
                read = sorted({int(str(each.args[1])) for each in user.users})
                only = "" if len(read) == user.args[1] else f"if i in {read}: "
                put = f"{only}{name}[i] = {value}"
            yield put, label_of(user)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _last_reads(nodes: Sequence[fx.Node]) -> dict[fx.Node | None, list[fx.Node]]:
    """By node, the values that the iteration does not read after it; by None, those that it hands on."""
    last: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:
        if node.target is not again:
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
