"""Names that code only writes: counters that it increments, containers that it only adds to.

The values of these names cannot reach the result, so a change needs no new trace. The bytecode is run on
symbols, from one jump to the next. A use of a name counts as a write if the loaded value, or a value
computed from it, is stored in the same place (``n += 1``, ``self.n += 1``, ``stats["n"] += 1``), or if a
method that only adds to a container is called on it and the result is dropped (``log.append(x)``). Every
other use is a read, as is a use by an unknown instruction.
"""

from __future__ import annotations

import dis
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["WRITTEN_TYPES", "written_names"]

# Container methods that return nothing and cannot fail because of the container's contents.
_ADDING = frozenset(
    ("append", "appendleft", "extend", "extendleft", "add", "update", "insert", "clear", "discard")
)
# The types of counters and containers: methods and operators of other types may do anything.
WRITTEN_TYPES = (int, float, bool, list, set, dict, deque, Counter, OrderedDict, defaultdict)

_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")
_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_LOCALS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_CONST", "LOAD_SMALL_INT")
_NO_EFFECT = ("CACHE", "PRECALL", "RESUME", "NOP", "KW_NAMES", "EXTENDED_ARG", "COPY_FREE_VARS")
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")


@dataclass(eq=False)
class _Symbol:
    """A value on the stack, which was loaded or computed.

    Attributes:
        place: the name, attribute of a symbol, or item of a symbol from which the value was loaded.
        of: the symbols from which the value was computed.
        method: the name of the method that is called on these symbols.
        result: whether the value is the result of a method that only adds to a container.
    """

    place: tuple[Any, ...] = ()
    of: tuple[_Symbol, ...] = ()
    method: str = ""
    result: bool = False


@dataclass
class _Uses:
    """The uses of names in one code object, each a symbol with its name."""

    names: list[tuple[str, _Symbol]] = field(default_factory=list)
    stored: set[str] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)

    def write(self, symbol: _Symbol) -> None:
        self.written.add(id(symbol))

    def reads(self, symbols: Iterable[_Symbol]) -> None:
        for symbol in symbols:
            self.read.add(id(symbol))
            self.reads(symbol.of)

    def only_written(self) -> frozenset[str]:
        wrong = {n for n, s in self.names if id(s) in self.read or id(s) not in self.written}
        return frozenset(self.stored.union(name for name, _ in self.names) - wrong)


def written_names(codes: Iterable[types.CodeType]) -> frozenset[str]:
    """The globals, closure variables and attributes that are written and never read in these codes."""
    written: set[str] = set()
    read: set[str] = set()
    for code in codes:
        uses = _Run(code).run()
        here = uses.only_written()
        written |= here
        read |= {name for name, _ in uses.names} - here
    return frozenset(written - read)


class _Run:
    """One code object, run on symbols."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.stack: list[_Symbol] = []
        self.uses = _Uses()
        self.kept: list[_Symbol] = []  # keeps symbols alive, so that their ids are not reused

    def run(self) -> _Uses:
        for instruction in dis.get_instructions(self.code):
            if instruction.is_jump_target:
                self.forget()
            if instruction.opname not in _NO_EFFECT:
                step = _STEPS.get(instruction.opname, _Run.other)
                step(self, instruction)
        return self.uses

    def push(self, symbol: _Symbol) -> None:
        self.kept.append(symbol)
        self.stack.append(symbol)

    def pop(self) -> _Symbol:
        return self.stack.pop() if self.stack else _Symbol()

    def forget(self) -> None:
        """Count all symbols on the stack as read."""
        self.uses.reads(self.stack)
        self.stack.clear()

    def other(self, instruction: dis.Instruction) -> None:
        self.forget()
        if instruction.opname.startswith(("LOAD", "DELETE", "IMPORT")):
            self.named(str(instruction.argval), _Symbol())

    def named(self, name: str, symbol: _Symbol) -> _Symbol:
        self.uses.names.append((name, symbol))
        self.kept.append(symbol)
        return symbol

    def load(self, instruction: dis.Instruction) -> None:
        name = instruction.argval
        symbol = self.named(name, _Symbol((name,)))
        if instruction.opname == "LOAD_GLOBAL" and (instruction.arg or 0) & 1:
            self.uses.reads([symbol])  # called, not written
            self.push(_Symbol())
        self.push(symbol)

    def local(self, instruction: dis.Instruction) -> None:
        place = (instruction.opname[:10], instruction.argval)
        self.push(_Symbol(place))

    def attribute(self, instruction: dis.Instruction) -> None:
        owner, name = self.pop(), instruction.argval
        method = _is_method(instruction)
        if method and name in _ADDING:
            self.push(_Symbol(of=(owner,), method=name))
        else:
            self.uses.reads([owner])
            self.push(self.named(name, _Symbol(("attribute", owner.place, name))))
        if method:
            self.push(_Symbol())

    def item(self, instruction: dis.Instruction) -> None:
        key, owner = self.pop(), self.pop()
        self.uses.reads([key])
        self.push(_Symbol(("item", owner, key.place), (owner,)))

    def operation(self, instruction: dis.Instruction) -> None:
        if instruction.argrepr == "[]":
            return self.item(instruction)
        right, left = self.pop(), self.pop()
        self.uses.reads([right])
        self.push(_Symbol(of=(left,)))

    def call(self, instruction: dis.Instruction) -> None:
        count = instruction.arg or 0
        self.uses.reads([self.pop() for _ in range(count)])
        self.pop()
        method = self.pop()
        if not method.method:
            self.uses.reads([method])
        self.push(_Symbol(of=method.of, result=bool(method.method)))

    def drop(self, instruction: dis.Instruction) -> None:
        value = self.pop()
        if value.result:
            self.write(value.of)
        else:
            self.uses.reads([value])

    def write(self, symbols: Iterable[_Symbol]) -> None:
        for symbol in symbols:
            self.uses.write(symbol)

    def store(self, instruction: dis.Instruction) -> None:
        self.goes_to(self.pop(), (instruction.argval,))

    def goes_to(self, value: _Symbol, place: tuple[Any, ...]) -> None:
        """Store a value in a place; not a read if the value was computed from the place's value."""
        (source, *others) = value.of or (value,)
        if value.of and not others and source.place == place and not value.result:
            self.uses.write(source)
        else:
            self.uses.reads([value])

    def store_attribute(self, instruction: dis.Instruction) -> None:
        owner, value = self.pop(), self.pop()
        self.uses.stored.add(instruction.argval)
        self.goes_to(value, ("attribute", owner.place, instruction.argval))

    def store_item(self, instruction: dis.Instruction) -> None:
        key, owner, value = self.pop(), self.pop(), self.pop()
        (source, *_) = value.of or (value,)
        place: Any = source.place
        if place[:1] == ("item",) and place[1] is owner and place[2] == key.place:
            self.uses.write(owner)
        else:
            self.uses.reads([value, key])
            self.uses.write(owner)

    def copy(self, instruction: dis.Instruction) -> None:
        depth = instruction.arg or 1
        if depth > len(self.stack):
            return self.forget()
        symbol = self.stack[-depth]
        if symbol.of:  # a result that is stored and used
            self.uses.reads([symbol])
        self.stack.append(symbol)

    def swap(self, instruction: dis.Instruction) -> None:
        depth = instruction.arg or 1
        if depth > len(self.stack):
            return self.forget()
        self.stack[-1], self.stack[-depth] = self.stack[-depth], self.stack[-1]

    def null(self, instruction: dis.Instruction) -> None:
        self.push(_Symbol())


def _is_method(instruction: dis.Instruction) -> bool:
    """Whether an instruction pushes two items: a method and its object."""
    if sys.version_info < (3, 12):
        return instruction.opname == "LOAD_METHOD"
    return bool((instruction.arg or 0) & 1)


_STEPS: dict[str, Callable[[_Run, dis.Instruction], None]] = {
    **dict.fromkeys((*_GLOBALS, *_CELLS), _Run.load),
    **dict.fromkeys(_LOCALS, _Run.local),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD"), _Run.attribute),
    **dict.fromkeys(_STORES, _Run.store),
    "STORE_ATTR": _Run.store_attribute,
    "STORE_SUBSCR": _Run.store_item,
    "BINARY_SUBSCR": _Run.item,
    "BINARY_OP": _Run.operation,
    "CALL": _Run.call,
    "POP_TOP": _Run.drop,
    "COPY": _Run.copy,
    "SWAP": _Run.swap,
    "PUSH_NULL": _Run.null,
}
