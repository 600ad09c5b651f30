"""A Program as readable text: one line per node, in aligned columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.program import Free, Leaf, Program
from torchard.functional.programs.tagging import Tag
from torchard.functional.programs.tags import (
    COLLECTIVE,
    CUT,
    KERNEL,
    LAYOUT,
    NAME,
    OFFLOAD,
    PHASE,
    RECOMPUTE,
    RESIDUAL,
    SCOPE,
    SOURCE,
    VAL,
)
from torchard.functional.remat.liveness import writes_of
from torchard.functional.updates.merging import with_updates

__all__ = ["program_text"]

_DTYPES = {
    "float": "f",
    "bfloat": "bf",
    "int": "i",
    "uint": "u",
    "complex": "c",
    "bool": "bool",
}


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype in short: f32, bf16, i64, bool."""
    name = str(dtype).removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _DTYPES.get(letters, letters) + name[len(letters) :]


def value_text(value: Any) -> str:
    """A value in short: f32[8, 4]; several are in parentheses."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_text(value.dtype)}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(value_text, value))})"
    return ""


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_argument, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _target(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).removesuffix(".default")


def _call(node: fx.Node) -> str:
    arguments = [*map(_argument, node.args)]
    arguments += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return f"{_target(node)}({', '.join(arguments)})"


_MARKS: tuple[Tag[Any], ...] = (PHASE, SCOPE, NAME, KERNEL, LAYOUT, COLLECTIVE)
_FLAGS: tuple[Tag[Any], ...] = (RECOMPUTE, RESIDUAL, OFFLOAD, CUT)


def _notes(node: fx.Node, written: bool) -> list[str]:
    said = [(tag.name, tag.get(node)) for tag in _MARKS]
    marks = [f"{name}={_mark(value)}" for name, value in said if value not in (None, "forward")]
    flags = [tag.name for tag in _FLAGS if tag.get(node)] + ["in place"] * written
    return [str(SOURCE.get(node) or ""), " ".join([*marks, *flags])]


def _mark(value: Any) -> str:
    """A tag's value; those of several results once, if they are equal."""
    if type(value) is not tuple:
        return str(value)
    each = list(map(str, value))
    return each[0] if len(set(each)) == 1 else f"({', '.join(each)})"


def _leaf(leaf: Leaf) -> str:
    tag = "" if leaf.tag is None or isinstance(leaf.tag, Free) else f" {leaf.tag}"
    role = "" if leaf.role in ("primal", "output") else f" ({leaf.role})"
    return f"{leaf.path}{role}{tag}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(max(map(len, column)), 72) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def program_text(program: Program) -> str:
    """A line for every node: its name, operation, shape, source line and tags; and if it is in place."""
    program = with_updates(program)
    leaves, rows, writes = iter(program.inputs), [], writes_of(program)
    for node in program.graph.nodes:
        shown = value_text(VAL.get(node))
        if node.op == "placeholder":
            rows.append([node.name, "", shown, "# " + _leaf(next(leaves)), ""])
        elif node.op == "call_function":
            source, notes = _notes(node, node in writes)
            rows.append([node.name, "= " + _call(node), shown, "# " + source, notes])
    heads = _aligned(rows) if rows else []
    results = [
        f"    {_argument(value)}  # {_leaf(leaf)}"
        for value, leaf in zip(program.results, program.outputs, strict=True)
    ]
    body = [f"  {line}" for line in heads]
    unrolled = f"  # unrolled: {program.unrolled}" if program.unrolled else ""
    return "\n".join([f"def {program.name}:{unrolled}", *body, "  return", *results])
