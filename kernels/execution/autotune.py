"""Autotuning: the choice of an implementation for given tensors."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections import UserString
from collections.abc import Callable, Hashable, Mapping, Sequence
from time import perf_counter, thread_time
from typing import Any

import torch

from torchard.functional.core.bounded import Recent
from torchard.functional.core.errors import KernelError
from torchard.functional.core.outputs import outputs_of
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.kernels.execution import rank_consensus as settle
from torchard.kernels.execution.blocked import RowLayout, blocked
from torchard.kernels.execution.compiled import compiled, writing
from torchard.kernels.execution.optional_backends import Backend, Imported, implementation
from torchard.kernels.terms.dims import Dims

__all__ = ["COMPILERS", "Choice"]

COMPILERS = ("inductor", "eager")
# Elements below which a compiled region is not worth its compilation on a CPU.
_SMALL = 1 << 20
_ROUNDS = 5

Run = Callable[..., Any]
Tensors = Sequence[torch.Tensor]

_TIMED = "inductor, blocked or eager, by time"
# Equal computations, such as those of equal layers, are compiled and timed once.
_CHOSEN: Recent[tuple[Run, str]] = Recent(512)


class Choice(ABC):
    """A computation and its possible implementations, of which one is chosen.

    Attributes:
        name: the name in errors.
        compiler: the compiler for devices without an implementation.
        way: a label of the implementation that runs, as far as it is known; updated at the first call.
    """

    name: str
    compiler: str
    implementations: Mapping[str, Run | Imported]
    literals: dict[str, Any]
    dims: Dims | None
    # Whether the compiled reference is also timed on a CPU.
    by_time: bool = False

    def __init__(self) -> None:
        self.programs: dict[Hashable, Run] = {}
        self.way, self.labels = UserString(""), dict[str, None]()

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """A key that is equal for equal computations."""

    @abstractmethod
    def program(self, tensors: Tensors) -> Program:
        """The operations as a program, for tensors like these."""

    def reference(self, *tensors: torch.Tensor) -> Any:
        """Run the operations one by one."""
        return self._bound(tensors)(*tensors)

    def _bound(self, tensors: Tensors) -> Run:
        key = tuple((tuple(t.shape), t.dtype) for t in tensors), tensors[0].device
        run = self.programs.get(key)
        if run is None:
            run = self.programs[key] = self._eager(tensors)
        return run

    def _eager(self, tensors: Tensors) -> Run:
        program = self.program(tensors)
        bound, single = bind(program), len(program.results) == 1

        def run(*args: torch.Tensor) -> Any:
            results = bound(args)
            return results[0] if single else tuple(results)

        return run

    # -- choosing -----------------------------------------------------------------------------

    def label(self, device: str, numels: Sequence[int]) -> str:
        """The label of the implementation for a device, as far as it is known before the first call."""
        backend = implementation(self.implementations, device)
        return (backend.name if backend.run else self._compiling(device, numels)) + backend.note

    def _compiling(self, device: str, numels: Sequence[int]) -> str:
        """The label where there is no implementation."""
        if self.compiler == "eager":
            return "eager (requested)"
        if device == "cpu" and max(numels, default=0) < _SMALL:
            return "eager (small)"
        return "inductor" if device != "cpu" else _TIMED

    def choose(self, tensors: Tensors) -> Run:
        """Choose the implementation for these tensors, and update `way`."""
        key = (
            self.key,
            torch.get_num_threads(),
            tuple((t.shape, t.dtype, t.device, t.stride()) for t in tensors),
        )
        run, label = _CHOSEN.get(key, lambda: self._chosen(tensors))
        self.labels[label] = None
        self.way.data = "; ".join(self.labels)
        return run

    def _chosen(self, tensors: Tensors) -> tuple[Run, str]:
        device = tensors[0].device.type
        backend = implementation(self.implementations, device)
        given, failure = self._given(backend, tensors)
        if given is None:
            run, label = self._variant(tensors)
            return run, label + backend.note + failure
        if self.by_time and self._compiling(device, [t.numel() for t in tensors]) == _TIMED:
            run, label = self._variant(tensors, {backend.name: given})
            return run, label + backend.note
        return given, backend.name + backend.note

    def _given(self, backend: Backend, tensors: Tensors) -> tuple[Run | None, str]:
        """The implementation, or None and the note if an optional one fails on these tensors."""
        if backend.run is None:
            return None, ""
        run = functools.partial(backend.run, **self.literals) if self.literals else backend.run
        try:
            results = run(*tensors)
            self._check(results, tensors)
        except Exception as error:  # compilers raise anything on devices they do not support
            if not backend.imported:
                error.add_note(f"in an implementation of the kernel {self.name!r}")
                raise
            return None, f" ({backend.name} failed: {_named(error)})"
        return (_copied(run) if _share_memory(outputs_of(results), tensors) else run), ""

    def _variant(self, tensors: Tensors, given: Mapping[str, Run] = {}) -> tuple[Run, str]:
        """The fastest of the reference's variants and the given implementations."""
        eager = self._bound(tensors)
        label = self._compiling(tensors[0].device.type, [t.numel() for t in tensors])
        if label.startswith("eager"):
            return eager, label
        candidates, failure = self._candidates(tensors)
        candidates |= given
        name, why = self._first(candidates, tensors)
        return candidates[name], name + why + failure

    def _first(self, candidates: Mapping[str, Run], tensors: Tensors) -> tuple[str, str]:
        """The name of the candidate that runs, and a note about why."""
        first = next(iter(candidates))
        if len(candidates) == 1:
            return first, ""
        if torch.are_deterministic_algorithms_enabled():
            return first, ", not timed: deterministic algorithms are required"
        mine = fastest(candidates, tensors)
        chosen = settle.agreed_choice(str(self.program(tensors)), mine)
        if chosen not in candidates:
            return mine, f", by time; another process runs {chosen}"
        return chosen, ", by time"

    def _candidates(self, tensors: Tensors) -> tuple[dict[str, Run], str]:
        """The candidates by name, and a note about those that failed."""
        on_cpu = tensors[0].device.type == "cpu"
        makers: dict[str, Callable[[Tensors], Run | None]] = {"inductor": self._compiled}
        if on_cpu:
            makers |= {"blocked": self._blocked, "blocked inductor": self._compiled_blocks}
        candidates: dict[str, Run] = {}
        failure = ""
        for name, make in makers.items():
            try:
                run = make(tensors)
            except Exception as error:  # compilers, and what they call, raise anything
                failure = failure or f" ({name} failed: {_named(error)})"
            else:
                candidates |= {} if run is None else {name: run}
        if on_cpu or not candidates:
            candidates["eager"] = self._bound(tensors)
        return candidates, failure

    def _compiled(self, tensors: Tensors) -> Run:
        program = self.program(tensors)
        bound, single = compiled(program, tensors), len(program.results) == 1

        def run(*args: torch.Tensor) -> Any:
            results = bound(list(args))
            return results[0] if single else tuple(results)

        return run

    def _blocked(self, tensors: Tensors, compiling: bool = False) -> Run | None:
        """The operations, in blocks of rows; None where that does not apply."""
        layout = None if self.dims is None else RowLayout.of(self.dims, tensors)
        if layout is None:
            return None
        count, added = len(tensors), [n is None for n in layout.outputs]
        if compiling and not any(added):
            return None  # compiled loops are as good unless they sum over rows

        def bound(given: Tensors, most: bool) -> Run:
            program = writing(self.program(given[:count]), added)
            return compiled(program, given) if compiling and most else bind(program)

        results = [VAL.of(node) for node in self.program(tensors).results]
        return blocked(bound, layout, tensors, results)

    def _compiled_blocks(self, tensors: Tensors) -> Run | None:
        run = self._blocked(tensors, compiling=True)
        if run is not None:
            run(*tensors)  # compilation errors are raised here
        return run

    def _check(self, results: Any, tensors: Tensors) -> None:
        """Check that an implementation returns the shapes and dtypes of its reference."""
        wanted = [VAL.of(node) for node in self.program(tensors).results]
        want = [_described(r) for r in wanted]
        several = isinstance(results, tuple) or (isinstance(results, list) and len(want) > 1)
        have = [_described(r) for r in (results if several else [results])]
        if have != want:
            raise KernelError(
                f"kernel {self.name!r} returned {', '.join(have)} for "
                f"{', '.join(map(_described, tensors))}; its reference returns {', '.join(want)}. "
                "Both must agree; inside, the kernel may compute in any dtype."
            )


def _share_memory(results: Tensors, tensors: Tensors) -> bool:
    """Whether a result is an argument, or a view of one."""
    given = {t.untyped_storage().data_ptr() for t in tensors if t.nbytes}
    return any(r.untyped_storage().data_ptr() in given for r in results if r.nbytes)


def _copied(run: Run) -> Run:
    """An implementation that returns its arguments, so that callers can write to what it returns."""

    def copied(*tensors: torch.Tensor) -> Any:
        results = run(*tensors)
        one = isinstance(results, torch.Tensor)
        return results.clone() if one else tuple(result.clone() for result in results)

    return copied


def _described(value: Any) -> str:
    """A tensor's shape and dtype."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _named(error: Exception) -> str:
    """The name of the original error, which compilers wrap."""
    inner: Any = error
    while inner is not None:
        error, inner = inner, inner.__cause__ or getattr(inner, "inner_exception", None)
    return type(error).__name__


def fastest(candidates: Mapping[str, Run], tensors: Tensors) -> str:
    """The name of the candidate with the least time in any of some interleaved rounds, after a warm-up.

    With one thread, the thread's CPU time is measured, not the wall-clock time.
    """
    clock = thread_time if torch.get_num_threads() == 1 else perf_counter
    least = dict.fromkeys(candidates, math.inf)
    for number in range(1 + _ROUNDS):
        for name, run in candidates.items():
            start = clock()
            result = run(*tensors)
            seconds = clock() - start
            del result
            if number:
                least[name] = min(least[name], seconds)
    return min(least, key=least.__getitem__)
