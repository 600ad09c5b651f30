"""Draws a block of planned memory over time: lifetimes as rectangles, and the bytes in use."""

from __future__ import annotations

import os
from pathlib import Path

from torchard.functional.memory.lifetimes import Buffer, held
from torchard.functional.memory.plan import MemoryPlan
from torchard.functional.reports.draw import figure_of
from torchard.functional.reports.text import value_text

__all__ = ["draw_block"]

_COLORS = {"forward": "#9dbde8", "backward": "#edb88a"}
_COLLECTIVE, _OTHER = "#c0392b", "#bbbbbb"
# Parts of the picture's height and width from which on a rectangle is labelled.
_HIGH, _WIDE = 0.02, 0.06


def draw_block(plan: MemoryPlan, path: str | os.PathLike[str]) -> Path:
    """Draw the largest block of a plan: calls to the right, offsets upwards.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    device = max(plan.sizes, key=plan.sizes.__getitem__, default=None)
    places = {b: o for b, o in plan.offsets.items() if b.device == device}
    steps, size = len(plan.tape.steps), max(plan.sizes.values(), default=0)
    with figure_of(9, 5) as figure:
        axes = figure.add_subplot()
        axes.set_xlim(0, max(steps, 1))
        axes.set_ylim(0, max(size, 1) / 1e6)
        for buffer, offset in places.items():
            _rectangle(axes, buffer, offset, steps, size)
        used = [total / 1e6 for total in held(list(places), steps)]
        axes.plot(range(len(used)), used, color="black", lw=0.8, drawstyle="steps-post", label="in use")
        axes.set_xlabel("calls")
        axes.set_ylabel("MB")
        bound = sum(p.bound for d, p in plan.packings.items() if d == device)
        gap = f", {size / bound:.3f} of the bound" if bound else ""
        axes.set_title(f"{plan.code.name}: {size:,} bytes for {len(places)} buffers{gap}")
        axes.legend(loc="upper right")
        figure.savefig(path)
    return Path(path)


def _rectangle(axes: object, buffer: Buffer, offset: int, steps: int, size: int) -> None:
    from matplotlib.patches import Rectangle

    assert buffer.maker is not None
    label = buffer.maker.label
    color = _COLORS.get(label.phase, _OTHER) if label.collective is None else _COLLECTIVE
    width, height = buffer.end - buffer.begin + 1, buffer.nbytes
    corner = (buffer.begin, offset / 1e6)
    shape = Rectangle(corner, width, height / 1e6, facecolor=color, edgecolor="white", lw=0.3)
    axes.add_patch(shape)  # type: ignore[attr-defined]
    if height > _HIGH * size and width > _WIDE * steps:
        text = f"{label.place} {label.op.partition('.')[0]} {value_text(buffer.value)}".strip()
        middle = buffer.begin + width / 2, (offset + height / 2) / 1e6
        axes.text(*middle, text, ha="center", va="center", fontsize=5, clip_on=True)  # type: ignore[attr-defined]
