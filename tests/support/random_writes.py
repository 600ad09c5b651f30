"""Random programs that write into buffers, as abstract steps, and two readings of them.

A step names an operation and numbers; every choice of numbers is a valid program, so hypothesis shrinks
freely. `InPlace` runs a program as a user writes it, with views and writes in place. `AsValues` is the
reference: a buffer is a flat value, a view the places of its elements in it, and a write a new value; it
has no memory that could be shared, so it may be differentiated in any way.

All numbers are small integers: results are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from torchard import checkpoint, repeat

__all__ = ["CLOSED", "AsValues", "InPlace", "Program", "Step", "programs"]

# Read by programs, and never written.
CLOSED = torch.arange(16.0, dtype=torch.float64).view(4, 4) % 3 - 1
Places = Any  # an array of int64


@dataclass(frozen=True)
class Step:
    """An operation on values y and o, each counted back from the newest; c is any number."""

    op: str
    y: int = 0
    o: int = 0
    c: int = 0
    body: tuple[Step, ...] = ()

    def __str__(self) -> str:
        body = f" [{'; '.join(map(str, self.body))}]" if self.body else ""
        return f"{self.op}  (y={self.y}, o={self.o}, c={self.c}){body}"


@dataclass(frozen=True)
class Program:
    """Steps, and values that are returned, some twice, some views; others are read at the end, too."""

    steps: tuple[Step, ...]
    results: tuple[int, ...]
    read: tuple[int, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*map(str, self.steps), f"return {self.results}, read {self.read}"])

    def by(self, memory: type[Memory]) -> Callable[..., tuple[Tensor, ...]]:
        """A function of tensors, the last of which is an index, [2] int64."""

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            *given, at = tensors
            values = memory(given, at)
            values.run(self.steps)
            results = [values.read(values.pick(number)) for number in self.results]
            last = [values.read(values.pick(number)).sum() % 97 for number in self.read]
            return *results, *last

        return run


# -- the operations, in terms of a value y, one of its shape o, and a number c ------------------------

MAKES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "y.clone()": lambda y, o, c: y.clone(),
    "zeros_like(y)": lambda y, o, c: torch.zeros_like(y),
    "zeros(y.shape)": lambda y, o, c: torch.zeros(y.shape, dtype=y.dtype),
    "y + o": lambda y, o, c: y + o,
    "y - 2 o": lambda y, o, c: y - 2 * o,
    "y * o % 5": lambda y, o, c: y * o % 5,
    "relu(y)": lambda y, o, c: y.relu(),
    "where(mask, y, o)": lambda y, o, c: torch.where(_mask(y, c), y, o),
    "y.flip(0)": lambda y, o, c: y.flip(0) if y.ndim else y + c,
    "y.sum(0) + y": lambda y, o, c: (y.sum(0) + y) % 7 if y.ndim else y * 2,
    "y.reshape(-1) + c": lambda y, o, c: y.reshape(-1) + c,
    "2 * y.t()": lambda y, o, c: 2 * y.swapaxes(0, -1) if y.ndim else y * 2,
    "where(bits, y, o)": lambda y, o, c: torch.where(_bits(y, o, c), y, o),
    "stack([y, o])[c]": lambda y, o, c: torch.stack([y, o])[c % 2],
}

# Of tensors and of arrays of places alike.
VIEWS: dict[str, Callable[[Any, int], Any]] = {
    "y[c]": lambda y, c: y[c % y.shape[0]] if y.ndim else y[None],
    "y[c:]": lambda y, c: y[c % y.shape[0] :] if y.ndim else y[None],
    "y[:c + 1]": lambda y, c: y[: c % y.shape[0] + 1] if y.ndim else y[None],
    "y[..., ::2]": lambda y, c: y[..., ::2] if y.ndim else y[None],
    "y.t()": lambda y, c: y.swapaxes(0, -1) if y.ndim else y[None],
    "y.diagonal()": lambda y, c: y.diagonal() if y.ndim > 1 else y[None],
    "y[None]": lambda y, c: y[None] if y.ndim < 3 else y[0],
    "y[c][1:]": lambda y, c: y[c % y.shape[0]][1:] if y.ndim > 1 and y.shape[1] > 1 else y[None],
}

# Of at least one dim, with o of its shape; `at` are two indices, by number and as a tensor of the call.
WRITES: dict[str, Callable[[Tensor, Tensor, int, Tensor], object]] = {
    "y[c] = o[0]": lambda y, o, c, at: y.__setitem__(c % len(y), o[0]),
    "y[c] = 3": lambda y, o, c, at: y.__setitem__(c % len(y), 3),
    "y[c] += o[-1]": lambda y, o, c, at: y[c % len(y)].add_(o[-1]),
    "y[c:] = o[c:]": lambda y, o, c, at: y.__setitem__(slice(c % len(y), None), o[c % len(y) :]),
    "y[1:] = o[:-1]": lambda y, o, c, at: y.__setitem__(slice(1, None), o[:-1]),
    "y[..., at] = o[..., :2]": lambda y, o, c, at: y.__setitem__(
        (..., at % y.shape[-1]), o[..., : len(at)]
    ),
    "y[at] = o[:2]": lambda y, o, c, at: y.__setitem__((at,), o[: len(at)]),
    "y[at] += o[:2]": lambda y, o, c, at: y.__setitem__((at,), y[at] + o[: len(at)]),
    "y.index_copy_(0, at, o[:2])": lambda y, o, c, at: y.index_copy_(0, at, o[: len(at)]),
    "y.index_add_(0, at, o[:2])": lambda y, o, c, at: y.index_add_(0, at, o[: len(at)]),
    "y.index_fill_(0, at, c)": lambda y, o, c, at: y.index_fill_(0, at, c),
    "y.index_put_((at,), o[:2], accumulate=True)": lambda y, o, c, at: y.index_put_(
        (at,), o[: len(at)], accumulate=True
    ),
    "y.scatter_(0, i, o)": lambda y, o, c, at: y.scatter_(0, _rotated(y, c), o),
    "y.scatter_add_(0, i, o)": lambda y, o, c, at: y.scatter_add_(0, _rotated(y, c), o),
    "y.masked_fill_(mask, c)": lambda y, o, c, at: y.masked_fill_(_mask(y, c), c),
    "y.copy_(o)": lambda y, o, c, at: y.copy_(o),
    "y += o": lambda y, o, c, at: y.add_(o),
    "y -= 2 o": lambda y, o, c, at: y.sub_(o, alpha=2),
    "y *= c": lambda y, o, c, at: y.mul_(c % 3 - 1),
    "y.zero_()": lambda y, o, c, at: y.zero_(),
    "y.relu_()": lambda y, o, c, at: y.relu_(),
    "y.t()[c] = o.t()[0]": lambda y, o, c, at: _turned(y).__setitem__(c % y.shape[-1], _turned(o)[0]),
    "y[0][c:] += o[0][c:]": lambda y, o, c, at: _tail(y, c).add_(_tail(o, c)),
    "y.diagonal().copy_(o.diagonal())": lambda y, o, c, at: _diagonal(y).copy_(_diagonal(o)),
    "y[0], y[-1] = y[-1], y[0]": lambda y, o, c, at: _swap(y),
}

# The same out of place: y may be read afterwards, by views, too.
COPIES: dict[str, Callable[[Tensor, Tensor, int, Tensor], Tensor]] = {
    "y.index_copy(0, at, o[:2])": lambda y, o, c, at: y.index_copy(0, at, o[: len(at)]),
    "y.index_add(0, at, o[:2])": lambda y, o, c, at: y.index_add(0, at, o[: len(at)]),
    "y.index_fill(0, at, c)": lambda y, o, c, at: y.index_fill(0, at, c),
    "y.index_put((at,), o[:2])": lambda y, o, c, at: y.index_put((at,), o[: len(at)]),
    "y.scatter(0, i, o)": lambda y, o, c, at: y.scatter(0, _rotated(y, c), o),
    "y.scatter_add(0, i, o)": lambda y, o, c, at: y.scatter_add(0, _rotated(y, c), o),
    "y.masked_fill(mask, c)": lambda y, o, c, at: y.masked_fill(_mask(y, c), c),
    "y.select_scatter(o[0], 0, c)": lambda y, o, c, at: y.select_scatter(o[0], 0, c % len(y)),
    "y.slice_scatter(o[c:], 0, c)": lambda y, o, c, at: y.slice_scatter(
        o[c % len(y) :], 0, c % len(y)
    ),
    "y.diagonal_scatter(o.diagonal())": lambda y, o, c, at: (
        y.diagonal_scatter(o.diagonal()) if y.ndim > 1 else y * 2
    ),
}


def _mask(y: Tensor, c: int) -> Tensor:
    return (torch.arange(y.numel()) + c).remainder(3).eq(0).view(y.shape)


def _bits(y: Tensor, o: Tensor, c: int) -> Tensor:
    """Booleans, some of which are written."""
    bits = (y > o).reshape(-1).clone()
    bits[c % len(bits)] = bits[0]
    bits[c % len(bits) :] |= (o > 0).reshape(-1)[c % len(bits) :]
    return bits.view(y.shape)


def _rotated(y: Tensor, c: int) -> Tensor:
    """Each row once, in an order that starts at c."""
    rows = (torch.arange(len(y)) + c).remainder(len(y))
    return rows.view(-1, *[1] * (y.ndim - 1)).expand(y.shape)


def _turned(y: Tensor) -> Tensor:
    return y.transpose(0, -1)


def _tail(y: Tensor, c: int) -> Tensor:
    return y[0][c % y.shape[1] :] if y.ndim > 1 else y


def _diagonal(y: Tensor) -> Tensor:
    return y.diagonal() if y.ndim > 1 else y


def _swap(y: Tensor) -> None:
    first = y[0].clone()
    y[0] = y[-1].clone()
    y[-1] = first


# -- two readings -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """The elements of a buffer at these places; `tensor` has them, if there is one."""

    buffer: int
    places: Places
    tensor: Any = None


class Memory:
    """The values of a program, oldest first, and their buffers; the given ones are not written."""

    transforms = True  # whether the library's are used within a program

    def __init__(self, given: Sequence[Tensor], at: Tensor) -> None:
        self.values: list[Value] = []
        self.buffers = 0
        self.at = at
        for tensor in given:
            self.new(tensor)
        self.given = len(self.values)

    def pick(self, number: int) -> Value:
        return self.values[-1 - number % len(self.values)]

    def new(self, tensor: Tensor) -> Value:
        """A new value in a buffer of its own."""
        self.buffers += 1
        places = np.arange(tensor.numel()).reshape(tuple(tensor.shape))
        return self._added(Value(self.buffers - 1, places), tensor)

    def view(self, value: Value, op: str, c: int) -> Value:
        raise NotImplementedError

    def read(self, value: Value) -> Tensor:
        raise NotImplementedError

    def write(self, value: Value, change: Callable[[Tensor], object]) -> None:
        raise NotImplementedError

    def _added(self, value: Value, tensor: Tensor) -> Value:
        raise NotImplementedError

    def run(self, steps: Sequence[Step], number: int = 0) -> None:
        """Run the steps; in iteration `number` of a loop, each has the number c + number."""
        for step in steps:
            self._run(step, number)

    def _run(self, step: Step, number: int) -> None:
        c, y, o = step.c + number, self.pick(step.y), self.pick(step.o)
        if step.op in MAKES:
            made = self.read(y)
            self.new(MAKES[step.op](made, self._like(o, made), c))
        elif step.op in VIEWS:
            self.view(y, step.op, c)
        elif step.op in WRITES or step.op in COPIES:
            self._write(step, y, o, c)
        elif step.op == "for":
            for i in range(2 + step.c % 3):
                count = len(self.values)
                self.run(step.body, number + i)
                del self.values[count:]
        else:
            for result in self._called(step, self.read(y), self.read(o)):
                self.new(result)

    def _write(self, step: Step, y: Value, o: Value, c: int) -> None:
        if y.buffer < self.given and step.op in WRITES:  # of which a user writes a copy
            y = self.new(self.read(y).clone())
        if not y.places.ndim:
            y = self.view(y, "y[None]", 0)
        other = self._like(o, self.read(y))
        at = self.at % len(y.places) if len(y.places) > 1 else self.at[:1] * 0
        at = at[: y.places.shape[-1]]
        if step.op in COPIES:
            self.new(COPIES[step.op](self.read(y), other, c, at))
            return
        # torch refuses to read what it writes, in another place.
        if o.buffer == y.buffer and np.intersect1d(o.places, y.places).size:
            other = other.clone()
        self.write(y, lambda tensor: WRITES[step.op](tensor, other, c, at))

    def _like(self, value: Value, like: Tensor) -> Tensor:
        """A value, or its first row or element, in the shape and dtype of another."""
        tensor, shape = self.read(value).to(like.dtype), like.shape
        while tensor.ndim and tensor.shape != shape[len(shape) - tensor.ndim :]:
            tensor = tensor[0]
        return tensor.expand(shape)

    def _called(self, step: Step, y: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        """What a function of two values returns: of the shape of the first, and of any."""

        def block(y: Tensor, o: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
            inner = type(self)([y, o], at)
            inner.run(step.body, step.c)
            newest = inner.values[-1]
            return inner._like(newest, y) * 1, inner.read(newest) % 11

        if step.op in ("call", "checkpoint"):
            run = block
            if step.op == "checkpoint" and self.transforms:
                run = checkpoint(block, policy=_some) if step.c % 2 else checkpoint(block)
            return run(y, o, self.at)  # type: ignore[no-any-return]
        rows = torch.stack([o, o + 1, o * 2])

        def carried(row: Tensor, carry: tuple[Tensor, Tensor], at: Tensor) -> Any:
            first, second = carry
            new, collected = block(first, row, at)
            return (second % 7, new % 7), collected

        if self.transforms:
            carry, collected = repeat(carried, rows, (y, y * 2), self.at, collect=True)
            return *carry, collected
        carry, parts = (y, y * 2), []
        for row in rows:
            carry, part = carried(row, carry, self.at)
            parts.append(part)
        return *carry, torch.stack(parts)


def _some(op: str, *_: Any) -> str:
    """A policy under which values are saved, recomputed and offloaded."""
    return ("save", "recompute", "offload")[len(op) % 3]


class InPlace(Memory):
    """As a user writes it: views of tensors, and writes in place."""

    def _added(self, value: Value, tensor: Tensor) -> Value:
        value.tensor = tensor
        self.values.append(value)
        return value

    def view(self, value: Value, op: str, c: int) -> Value:
        places = VIEWS[op](value.places, c)
        return self._added(Value(value.buffer, places), VIEWS[op](value.tensor, c))

    def read(self, value: Value) -> Tensor:
        return value.tensor  # type: ignore[no-any-return]

    def write(self, value: Value, change: Callable[[Tensor], object]) -> None:
        change(value.tensor)


class AsValues(Memory):
    """The reference, without any tensor that is written after it was read."""

    transforms = False

    def _added(self, value: Value, tensor: Tensor) -> Value:
        self.flat = getattr(self, "flat", {})
        self.flat[value.buffer] = tensor.reshape(-1)
        self.values.append(value)
        return value

    def view(self, value: Value, op: str, c: int) -> Value:
        self.values.append(Value(value.buffer, VIEWS[op](value.places, c)))
        return self.values[-1]

    def read(self, value: Value) -> Tensor:
        return self.flat[value.buffer][self._index(value)]  # type: ignore[no-any-return]

    def write(self, value: Value, change: Callable[[Tensor], object]) -> None:
        new = self.read(value).clone()
        change(new)
        self.flat[value.buffer] = self.flat[value.buffer].index_put((self._index(value),), new)

    def _index(self, value: Value) -> Tensor:
        return torch.from_numpy(np.array(value.places))


# -- what hypothesis draws ------------------------------------------------------------------------------


def _steps(ops: Sequence[str], body: Any = None) -> st.SearchStrategy[Step]:
    number = st.sampled_from([0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 7])
    bodies = st.just(()) if body is None else st.lists(body, min_size=1, max_size=4).map(tuple)
    return st.builds(Step, st.sampled_from(ops), number, number, st.integers(0, 3), bodies)


def _old_and_new(view: Step, copy: Step, number: int) -> list[Step]:
    """A view of a value, which is then written, or copied with a change; both are read."""
    later = Step("y + o", 0, 1) if number % 2 else Step("y * o % 5", 1, 0)
    return [replace(view, y=number), replace(copy, y=number + 1), later]


def _turned_and_flat(change: Step, number: int) -> list[Step]:
    """A value in another order, which is written, or copied with a change, and read in one dim."""
    return [Step("2 * y.t()", number), replace(change, y=0), Step("y.reshape(-1) + c")]


def programs() -> st.SearchStrategy[Program]:
    """Of CLOSED, three tensors [4], [4, 4], [4, 4], and an index."""
    makes, views, writes, copies = (_steps(list(ops)) for ops in (MAKES, VIEWS, WRITES, COPIES))
    simple = st.one_of(makes, views, writes, copies, writes, copies)
    loops = _steps(["for"], simple)
    calls = _steps(["for", "call", "checkpoint", "repeat"], st.one_of(simple, simple, loops))
    changes, number = st.one_of(writes, copies), st.integers(0, 3)
    old_and_new = st.builds(_old_and_new, views, changes, number)
    turned = st.builds(_turned_and_flat, changes, number)
    one = st.one_of(simple, simple, simple, calls).map(lambda step: [step])
    steps = st.lists(st.one_of(one, one, one, old_and_new, old_and_new, turned), min_size=2, max_size=8)
    some = st.lists(st.integers(0, 11), max_size=4).map(tuple)
    results = st.one_of(some.filter(len), some.map(lambda more: (0, 1, *more)))
    return st.builds(Program, steps.map(lambda parts: tuple(chain(*parts))), results, some)
