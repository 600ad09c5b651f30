"""The loop in C++ that calls what an iteration calls, and its program: calls, and pointers to operands.

One library serves all loops: a program is data. Pointers to rows move from one iteration to the next.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchard.functional.torch_internals.accessors.native_code import library

__all__ = ["ADDS", "MOST_OPERANDS", "Driver", "Pointer"]

MOST_OPERANDS = 48
# How the driver adds values of a dtype to a sum.
ADDS = {torch.float32: 4, torch.float64: 5, torch.int64: 6}
_KERNEL, _PRODUCT, _COPY, _MOVE = range(4)
_AT_ONCE = 0.05  # seconds that a call of the driver may take, in which Python handles no signal
_FIRST = 4096

_SOURCE = """
#include <cstdint>
#include <cstring>
#include <utility>

using std::int64_t;

struct Call { int64_t kind, function, first, count, extra; };

template <std::size_t... I>
void call(int64_t function, char** p, std::index_sequence<I...>) {
    using Pointer = char*;
    reinterpret_cast<void (*)(decltype((void)I, Pointer())...)>(function)(p[I]...);
}

template <std::size_t N>
void call_with(int64_t function, char** p, int64_t count) {
    if constexpr (N > 0) {
        if (count == N) call(function, p, std::make_index_sequence<N>());
        else call_with<N - 1>(function, p, count);
    }
}

static bool product(int64_t function, char** p, int64_t count) {
    if (count == 3)
        return reinterpret_cast<int (*)(char*, char*, char*)>(function)(p[0], p[1], p[2]) == 0;
    using Sum = int (*)(char*, char*, char*, char*, double, double);
    return reinterpret_cast<Sum>(function)(p[0], p[1], p[2], p[3], 1.0, 1.0) == 0;
}

// A copy between strides: the number of dims, then the bytes of an element, then sizes, then strides.
static void move(char* to, const char* from, const int64_t* e, int64_t dim = 0) {
    const int64_t dims = e[0];
    if (dim == dims) { std::memcpy(to, from, e[1]); return; }
    for (int64_t i = 0; i < e[2 + dim]; ++i)
        move(to + i * e[2 + dims + dim], from + i * e[2 + 2 * dims + dim], e, dim + 1);
}

template <class T>
void add(char* sum, const char* value, int64_t count) {
    T* to = reinterpret_cast<T*>(sum);
    const T* from = reinterpret_cast<const T*>(value);
    for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

static bool run_one(const Call& c, char** p, const int64_t* extras) {
    switch (c.kind) {
        case 0: call_with<MOST>(c.function, p, c.count); return true;
        case 1: return product(c.function, p, c.count);
        case 2: std::memcpy(p[0], p[1], c.extra); return true;
        case 3: move(p[0], p[1], extras + c.extra); return true;
        case 4: add<float>(p[0], p[1], c.extra); return true;
        case 5: add<double>(p[0], p[1], c.extra); return true;
        default: add<int64_t>(p[0], p[1], c.extra); return true;
    }
}

// Returns the number of iterations, or that of the iteration that failed as -1, -2, ...
extern "C" int64_t run(
    const Call* calls, int64_t count, char** p, const int64_t* moving, const int64_t* steps,
    int64_t n_moving, const int64_t* extras, int64_t iterations, const bool* going) {
    int64_t i = 0;
    try {
        for (; i < iterations && (going == nullptr || *going); ++i) {
            for (int64_t k = 0; k < count; ++k)
                if (!run_one(calls[k], p + calls[k].first, extras)) return -i - 1;
            for (int64_t m = 0; m < n_moving; ++m) p[moving[m]] += steps[m];
        }
    } catch (...) { return -i - 1; }
    return i;
}
""".replace("MOST", str(MOST_OPERANDS))


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "function", "first", "count", "extra")]


@functools.cache
def _library() -> ctypes.CDLL:
    found = library(_SOURCE)
    found.run.restype = ctypes.c_int64
    return found


class Pointer(NamedTuple):
    """A place in memory.

    Attributes:
        base: the number of memory that each run is told the address of; None if `at` is an address.
        at: bytes from there.
        step: how many bytes further it is in the next iteration.
    """

    base: int | None
    at: int
    step: int = 0


class Driver:
    """What an iteration calls, in order; for one run at a time."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._pointers: list[Pointer] = []
        self._extras: list[int] = []

    def kernel(self, address: int, operands: Sequence[Pointer]) -> None:
        """Call a kernel."""
        self._call(_KERNEL, operands, address)

    def product(self, address: int, handles: Sequence[Pointer]) -> None:
        """Call a product of torch's, with handles of tensors."""
        self._call(_PRODUCT, handles, address)

    def copy(self, to: Pointer, source: Pointer, size: int) -> None:
        """Copy bytes."""
        self._call(_COPY, [to, source], extra=size)

    def move(
        self,
        to: Pointer,
        source: Pointer,
        size: Sequence[int],
        strides: tuple[Sequence[int], Sequence[int]],
        itemsize: int,
    ) -> None:
        """Copy elements between strides (to, from)."""
        in_bytes = [stride * itemsize for each in strides for stride in each]
        self._call(_MOVE, [to, source], extra=len(self._extras))
        self._extras += [len(size), itemsize, *size, *in_bytes]

    def add(self, total: Pointer, value: Pointer, dtype: torch.dtype, count: int) -> None:
        """Add elements to a sum."""
        self._call(ADDS[dtype], [total, value], extra=count)

    def _call(
        self, kind: int, operands: Sequence[Pointer], function: int = 0, extra: int = 0
    ) -> None:
        self._calls.append(_Call(kind, function, len(self._pointers), len(operands), extra))
        self._pointers += operands

    @functools.cached_property
    def _arrays(self) -> Any:
        """What the library is given: the calls, pointers, which of them move, their steps, and extras."""
        moving = [i for i, pointer in enumerate(self._pointers) if pointer.step]
        return (
            (_Call * len(self._calls))(*self._calls),
            _numbers([pointer.at for pointer in self._pointers]),
            _numbers(moving),
            _numbers([self._pointers[i].step for i in moving]),
            _numbers(self._extras),
        )

    @functools.cached_property
    def _relative(self) -> list[tuple[int, int, int]]:
        """The pointers that each run sets: their numbers, their bases, and bytes from these."""
        return [(i, p.base, p.at) for i, p in enumerate(self._pointers) if p.base is not None]

    def run(self, bases: Sequence[int], iterations: int | None, going: int = 0) -> bool:
        """Run it so many times, or while the bool at an address is true; whether no call failed.

        Python's lock is released, and taken again now and then for signals.
        """
        calls, pointers, moving, steps, extras = self._arrays
        for i, base, at in self._relative:
            pointers[i] = bases[base] + at
        at_once, count, most = _FIRST, ctypes.c_int64(len(calls)), ctypes.c_int64(len(moving))
        while iterations is None or iterations > 0:
            asked = at_once if iterations is None else min(iterations, at_once)
            start = time.monotonic()
            done = _library().run(
                calls, count, pointers, moving, steps, most, extras,
                ctypes.c_int64(asked), ctypes.c_void_p(going),
            )  # fmt: skip
            if done < 0:
                return False
            if done < asked:
                return True
            iterations = None if iterations is None else iterations - done
            if time.monotonic() - start < _AT_ONCE:
                at_once *= 2
        return True


def _numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
