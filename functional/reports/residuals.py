"""Residuals: the values of the forward that a backward reads, and why each was saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import op_name
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Records
from torchard.functional.programs.tags import ITERATION, SCOPE, SOURCE, VAL, WHY
from torchard.functional.programs.views import labels_of, storage_of
from torchard.functional.remat.liveness import bytes_in
from torchard.functional.remat.rematerialise import passes_of
from torchard.functional.remat.segments import Why, segments_of, why_kept
from torchard.functional.reports.text import value_text

__all__ = ["Residual", "Residuals", "residuals_of"]


@dataclass(frozen=True)
class Residual:
    """A value of the forward that is saved for a backward.

    Attributes:
        kind: ``"argument"``, ``"output"`` or ``"value"``.
        what: the path of an argument or output, or the operation.
        name: the label of the value or of a view of it.
        shape, dtype: the shape and dtype of the global value.
        bytes: the bytes on one device.
        device: the device on which the value is saved: ``"cpu"`` if it was offloaded.
        times: in a table, the number of iterations of the loop that computes the value.
    """

    kind: str
    what: str
    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    device: str
    scope: str
    source: str
    why: str
    times: int = 1


class Residuals(Records):
    """A list of `Residual`, which prints as a table."""

    @property
    def bytes(self) -> int:
        """The total bytes, without arguments, which the caller keeps anyway."""
        return sum(residual.bytes for residual in self if residual.kind != "argument")

    def __str__(self) -> str:
        rows = [("kind", "what", "name", "value", "bytes", "device", "scope", "source", "why")]
        for residual in self if self._shown is None else self._shown:
            value = value_text(torch.empty(residual.shape, dtype=residual.dtype, device="meta"))
            size = f"{residual.bytes:,}"
            where = residual.scope, residual.source, residual.why
            kind = residual.kind + (f" × {residual.times}" if residual.times > 1 else "")
            what = kind, residual.what, residual.name or ""
            rows.append((*what, value, size, residual.device, *where))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(w) if i == 4 else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        kept = sum(residual.kind != "argument" for residual in self)
        return "\n".join([*lines, f"{kept} values, {self.bytes:,} bytes, and the arguments"])


def residuals_of(program: Program, joint: Callable[[], Program] | None = None) -> Residuals:
    """The values that an earlier pass of a program computes and a later one reads, each storage once.

    For a program without a backward, those of its gradient by all floating arguments.
    """
    passes = passes_of(program)
    if not any(passes.values()):
        return Residuals() if joint is None else residuals_of(joint())
    read: dict[fx.Node, Why] = {}
    for node in program.calls:
        for source in node.all_input_nodes:
            if passes[source] < passes[node]:
                root = storage_of(source)
                if passes[root] < passes[node]:
                    read.setdefault(root, WHY.get(root) or why_kept(segments_of(root), segments_of(node)))
    paths = {n: leaf.path for leaf, n in zip(program.inputs, program.placeholders, strict=True)}
    outputs = {
        n: leaf.path
        for leaf, n in zip(program.outputs, program.results, strict=True)
        if leaf.role != "gradient"
    }
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    size = bytes_in(program)
    residuals = {
        node: _residual(node, paths, outputs, size(node, 0), str(read[node]))
        for node in sorted(read, key=order.__getitem__)
    }
    return Residuals(residuals.values(), shown=_shown(residuals))


def _shown(residuals: dict[fx.Node, Residual]) -> list[Residual]:
    """The residuals in a table: one for values that each iteration of a loop saves."""
    groups: dict[Any, list[tuple[fx.Node, Residual]]] = {}
    for node, residual in residuals.items():
        iteration = ITERATION.get(node)
        # The halves of a loop that was split save values for different reasons.
        key = node if iteration is None else (iteration, residual.kind, _reason(node, residual))
        groups.setdefault(key, []).append((node, residual))
    return [_of_loop(*group[0], len(group)) for group in groups.values()]


def _of_loop(node: fx.Node, residual: Residual, times: int) -> Residual:
    """One value that represents the values of several iterations."""
    if times == 1:
        return residual
    return replace(residual, scope=ITERATION.of(node).scope, why=_reason(node, residual), times=times)


def _reason(node: fx.Node, residual: Residual) -> str:
    """Why an iteration keeps a value, with the loop's scope in place of the iteration's."""
    own, common = residual.scope.split("/"), ITERATION.of(node).scope.split("/")
    for depth in range(len(own), 0, -1):
        enclosing = "/".join(own[:depth])
        if residual.why.endswith(f" {enclosing}"):
            return residual.why.removesuffix(enclosing) + "/".join(common[:depth])
    return residual.why


def _residual(
    node: fx.Node, arguments: dict[fx.Node, str], outputs: dict[fx.Node, str], size: int, why: str
) -> Residual:
    val: torch.Tensor = VAL.of(node)
    if node in arguments:
        kind, what = "argument", arguments[node]
    elif node in outputs:
        kind, what = "output", outputs[node]
    else:
        kind, what = "value", op_name(node)
    return Residual(
        kind,
        what,
        next(iter(labels_of(node)), None),
        tuple(val.shape),
        val.dtype,
        size,
        val.device.type,
        SCOPE.get(node) or "",
        SOURCE.get(node) or "",
        "an argument" if kind == "argument" else why,
    )
