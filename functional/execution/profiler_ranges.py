"""Profiler ranges of a running program: its scopes and its collectives, by the plan's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.profiler import record_function

from torchard.functional import torch_internals as internals
from torchard.functional.programs.labels import Label

__all__ = ["WAIT", "OpenRanges", "Path", "paths_of"]

WAIT = "wait for "
"""How the names of ranges begin in which a rank waits for others."""


@dataclass(frozen=True)
class ProfilerRange:
    """A range in a profile; the key distinguishes adjacent ranges with the same name."""

    name: str
    key: int = 0


# The ranges that an operation is in, outermost first.
Path = tuple[ProfilerRange, ...]


def paths_of(labels: Sequence[Label], name: str) -> list[Path]:
    """The path of ranges of each operation of a program.

    A scope is nested in the enclosing scopes that have operations of their own, or are numbered (layers),
    and in the task of a pipeline's schedule.
    A collective is in the scope that runs while it is issued or waited for, which is not always the scope
    that needs it; its name has that.
    """
    scopes = {label.scope for label in labels}
    has_tasks = any(label.task for label in labels)
    around: Path = (ProfilerRange(name),)
    paths: list[Path] = []
    for number, label in enumerate(labels, 1):
        if label.collective is not None:
            paths.append((*around, _collective(label, number)))
            continue
        if label.place or has_tasks:
            task = [ProfilerRange(label.task)] if label.task else []
            around = (ProfilerRange(name), *task, *_scopes(label, scopes))
        paths.append(around)
    return paths


def _scopes(label: Label, scopes: set[str]) -> list[ProfilerRange]:
    if not label.scope:
        return [ProfilerRange(label.place)] if label.place else []
    parts = label.scope.split("/")
    outer = [("/".join(parts[: i + 1]), part) for i, part in enumerate(parts)]
    kept = [scope for scope, part in outer if scope in scopes or part.isdigit() or part == "*"]
    return [ProfilerRange(f"{scope} {label.phase}".strip()) for scope in kept]


def _collective(label: Label, number: int) -> ProfilerRange:
    """The range of a collective: one call, or all its operations where ranks are simulated."""
    assert label.collective is not None  # only calls of collectives have a stage
    title = label.collective.title
    if not label.stage:
        return ProfilerRange(title, id(label.collective))
    return ProfilerRange(WAIT + title if label.stage == "wait" else title, number)


class OpenRanges:
    """The ranges that are open in one call of a program."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.path: Path = ()
        self.open: list[Any] = []
        # A mode (a tracer, a counter) would treat the marks as operations of the program.
        self.quiet = internals.has_modes()

    def __call__(self, number: int, i: int | None = None) -> None:
        """Go to a path: close the ranges that are not in it, and open those that are not open.

        Args:
            number: the number of the path.
            i: the iteration of a loop, which takes the place of a ``*`` in the names of ranges.
        """
        if self.quiet:
            return
        path, shared = self.paths[number], 0
        if i is not None:
            path = tuple(replace(each, name=each.name.replace("*", str(i), 1)) for each in path)
        for old, new in zip(self.path, path, strict=False):
            if old != new:
                break
            shared += 1
        self._leave(shared)
        for opened in path[shared:]:
            self.open.append(record_function(opened.name).__enter__())
        self.path = path

    def close(self) -> None:
        """Close all ranges."""
        self._leave(0)

    def _leave(self, depth: int) -> None:
        while len(self.open) > depth:
            self.open.pop().__exit__(None, None, None)
