"""The lines of a loop in generated code, and when its values are dropped.

Values that an iteration alone reads are dropped as in straight-line code. What another loop reads is kept
in a list, one entry for each iteration, which the last loop that reads it empties. What is stacked or
summed after the loop is collected as it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from torchard.functional.programs.labels import Label, label_of
from torchard.functional.programs.loops import carried, handed_on, is_apart
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
        # By place: the names that are dead after it.
        self.dead: dict[int, list[str]] = {}
        for node in order:
            if node.op != "output" and not LOOP.on(node):
                last = max((self.place[user] for user in node.users), default=self.place[node])
                if node.users or node.op == "call_function":
                    self.dead.setdefault(last, []).append(variables[node])
            elif LOOP.on(node):
                self._collections(node)

    def _collections(self, node: fx.Node) -> None:
        """What is kept of the iterations of a loop, and the last carry."""
        for user in node.users:
            if user.target in _COLLECTS:
                self.dead.setdefault(self.place[user], []).append(self.collection(user))
        if self.kept_for(node):
            last = max(self.place[user] for user in self.kept_for(node))
            self.dead.setdefault(last, []).append(self.kept(node))
        if node.target is enter:
            left = [self.place[user] for other in handed_on(node) for user in other.users]
            last = max(left, default=self.place[node])
            self.dead.setdefault(last, []).append(self.variables[node])

    def dead_after(self, node: fx.Node) -> list[str]:
        """The names to delete after a node that is in no loop."""
        return self.dead.get(self.place[node], [])

    def kept_for(self, node: fx.Node) -> list[fx.Node]:
        """The readers of a value in other loops."""
        loop = LOOP.get(node)
        return [user for user in node.users if LOOP.on(user) and LOOP.of(user) is not loop]

    def kept(self, node: fx.Node) -> str:
        """The list of a value of all iterations."""
        return "k" + self.variables[node]

    def of_row(self, node: fx.Node) -> str:
        """The text of the row of an iteration, which is taken out of a list at its last use."""
        (stacked,) = node.all_input_nodes
        text = f"{self.variables[stacked]}[i]"
        readers = [user for user in stacked.users if self.place[user] == self.place[node]]
        last = max(self.place[user] for user in stacked.users) == self.place[node]
        alone = is_apart(stacked) and last and len(readers) == 1
        return f"taken({self.variables[stacked]}, i)" if alone else text

    def collection(self, user: fx.Node) -> str:
        """What collects the values for a node after the loop."""
        return _COLLECTS[user.target] + self.variables[user]

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
    text: Callable[[Any], str],
    dead: Sequence[str],
    between: Iterable[Line] = (),
) -> Iterator[Line]:
    """The lines of one operation, after which some variables are dead.

    A compiled region takes its operands over: it frees each after its own last use of it.
    """
    mine = [name for name in dead if name == variable]
    if getattr(node.target, "takes_over", False):
        yield f"given = {text(node.args[0])}", None
        yield from deleted([name for name in dead if name != variable])
        dead, value = mine, value.replace(f"({text(node.args[0])})", "(given)")
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
    text: Callable[[Any], str],
    call: Callable[[fx.Node], str],
) -> Iterator[Line]:
    """The lines of a loop.

    Args:
        nodes: its operations, in order.
        text: the text of an argument.
        call: the text of a call.
    """
    variables = lives.variables
    for node in nodes:
        if node.target is enter:
            yield f"{variables[node]} = {text(node.args[0])}", None
        if lives.kept_for(node):
            yield f"{lives.kept(node)} = [None] * {loop.count}", None
        for user in node.users:
            if user.target in _COLLECTS:
                making = f"Rows({loop.count})" if user.target is rows else "Total()"
                making = f"[None] * {loop.count}" if is_apart(user) else making
                yield f"{lives.collection(user)} = {making}", None
    order = loop.order()
    yield f"for i in range({order.start}, {order.stop}, {order.step}):", None
    for line, label in _iteration(loop, nodes, lives, text, call):
        yield f"    {line}", label
    gone = lives.dead_after(nodes[0])
    if gone:
        yield f"del {', '.join(gone)}", None


def _iteration(
    loop: Loop,
    nodes: Sequence[fx.Node],
    lives: Lives,
    text: Callable[[Any], str],
    call: Callable[[fx.Node], str],
) -> Iterator[Line]:
    variables, last = lives.variables, _last_reads(nodes)
    # Values of other loops are taken from their lists before their first use.
    taken: set[fx.Node] = set()
    for node in nodes:
        for operand in node.all_input_nodes:
            if LOOP.get(operand) not in (None, loop) and operand not in taken:
                taken.add(operand)
                yield f"{variables[operand]} = {lives.kept(operand)}[i]", None
                if all(lives.place[user] <= lives.place[node] for user in lives.kept_for(operand)):
                    yield f"{lives.kept(operand)}[i] = None", None
        gone = [variables[n] for n in last.get(node, ())]
        kept = list(_keep(node, lives)) if node.target is not again else []
        if node.target in (enter, again):
            yield from [*kept, *deleted(gone)]
            continue
        value = lives.of_row(node) if node.target is row else call(node)
        yield from assigned(node, value, variables[node], text, gone, kept)
    handed = [node for node in nodes if node.target is again]
    if handed:
        entered = ", ".join(variables[node.args[1]] for node in handed)  # type: ignore[index]
        values = ", ".join(variables[node.args[0]] for node in handed)  # type: ignore[index]
        yield f"{entered}, = {values},", None
    gone = list(dict.fromkeys(variables[n] for n in last.get(None, ())))
    if gone:
        yield f"del {', '.join(gone)}", None


def _keep(node: fx.Node, lives: Lives) -> Iterator[Line]:
    value = lives.variables[node]
    if lives.kept_for(node):
        yield f"{lives.kept(node)}[i] = {value}", None
    for user in node.users:
        if user.target in _COLLECTS:
            name = lives.collection(user)
            put = f"{name}[i] = {value}" if is_apart(user) else f"{name}.put(i, {value})"
            yield put, label_of(user)


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
