"""Draws a program: layers as boxes, values between them as arrows, collectives marked.

The forward goes down the left column, the backward up the right one, so that a layer is beside its
backward, and residuals cross from one to the other.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.loops import carried, times
from torchard.functional.programs.markers import again, is_marker
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, LOOP, PHASE, SCOPE, STEP, VAL
from torchard.functional.reports.text import value_text

__all__ = ["ScopeBox", "draw", "figure_of", "layers_of"]

# In inches: the width of a box, the height of a line, the gap between boxes, the margin.
_WIDTH, _ROW, _GAP, _SIDE = 4.6, 0.2, 0.5, 0.9


@dataclass
class ScopeBox:
    """One box of the picture.

    Attributes:
        name: the scope; "inputs" or "outputs" for operations without one.
        phase: "forward" or "backward".
        times: how many iterations of it run; 1 for one in no loop.
        nodes: its operations.
        feeds: for every box that reads from it, by index, the values read.
    """

    name: str
    phase: str
    times: int = 1
    nodes: list[fx.Node] = field(default_factory=list)
    feeds: dict[int, list[fx.Node]] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The lines in the box: operations, then each kind of collective with its bytes."""
        counts: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        for node in self.nodes:
            record = COLLECTIVE.get(node)
            if record is not None:
                key = f"{record.kind}({'·'.join(record.axes)})"
                counts[key] += self.times
                sent[key] += record.bytes * self.times
        steps = sum(STEP.on(node) for node in self.nodes)
        repeated = f" × {self.times}" if self.times > 1 else ""
        head = [f"{len(self.nodes) - steps} operations{repeated}"]
        return head + [f"{n} × {key}  {_bytes(sent[key])}" for key, n in counts.items()]


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def _name(scope: str | None) -> str:
    """The name of a layer: its scope up to the first number, or else the first part."""
    parts = (scope or "").split("/")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit() or part[:1] in ("*", "{")), 0)
    return "/".join(parts[: numbered + 1])


def layers_of(program: Program) -> list[ScopeBox]:
    """The boxes of a program, in order, and the values between them."""
    boxes: dict[tuple[str, str], ScopeBox] = {}
    box_of: dict[fx.Node, int] = {}
    name_of = _names(program)
    for node in program.calls:
        if is_marker(node):
            continue
        phase, name = PHASE.get(node) or "forward", name_of(node)
        if not name:
            later = any(p == phase and n not in ("inputs", "outputs") for n, p in boxes)
            name = "outputs" if later == (phase == "forward") else "inputs"
        boxes.setdefault((name, phase), ScopeBox(name, phase, times(node))).nodes.append(node)
    layers = list(boxes.values())
    for i, layer in enumerate(layers):
        box_of.update(dict.fromkeys(layer.nodes, i))
    for node, i in box_of.items():
        for user in {box_of[user] for user in _readers(node) if box_of[user] != i}:
            layers[i].feeds.setdefault(user, []).append(node)
    return layers


def _names(program: Program) -> Callable[[fx.Node], str]:
    """The name of a node's layer, which tells apart the parts of a loop, and what runs once for all."""
    spans: dict[str, set[range]] = {}
    for node in program.calls:
        if LOOP.on(node) and not is_marker(node):
            spans.setdefault(_name(SCOPE.get(node)), set()).add(LOOP.of(node).span)

    def name_of(node: fx.Node) -> str:
        name, loop = _name(SCOPE.get(node)), LOOP.get(node)
        if loop is None:
            return f"{name}, once" if name in spans and name else name
        span = f" {loop.first}–{loop.span.stop - 1}" if len(spans[name]) > 1 else ""
        return (name or loop.name) + span

    return name_of


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The operations that read a value, also when it enters a loop or leaves one."""
    waiting, seen = list(node.users), set[fx.Node]()
    while waiting:
        user = waiting.pop()
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        if is_marker(user):
            waiting += [*user.users, *(carried(user)[1].users if user.target is again else ())]
        else:
            yield user


@contextlib.contextmanager
def figure_of(width: float, height: float) -> Iterator[Any]:
    """A figure of matplotlib, width and height in inches, with small text that stays text.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "draw() needs matplotlib: pip install 'torchard[examples]'."
        ) from error
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 8}):
        yield Figure(figsize=(width, height))


def draw(program: Program, path: str | os.PathLike[str]) -> Path:
    """Draw a program to a file, in the format of its suffix (svg, pdf, png).

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    layers = layers_of(program)
    places = _places(layers)
    right = max((x for x, *_ in places), default=0.0) + _WIDTH
    low = min((y for _, y, _ in places), default=0.0)
    with figure_of(right + 2 * _SIDE, 1.0 - low + 0.3) as figure:
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-_SIDE, right + _SIDE)
        axes.set_ylim(low - 0.3, 1.0)
        axes.set_axis_off()
        axes.text(0, 0.6, f"{program.name}: {_total(program)}", weight="bold", fontsize=10)
        for layer, place in zip(layers, places, strict=True):
            _box(axes, layer, place)
        for i, layer in enumerate(layers):
            for j, values in layer.feeds.items():
                _arrow(axes, layers, places, i, j, values)
        figure.savefig(path)
    return Path(path)


def _total(program: Program) -> str:
    sent = sum(record.bytes for record in program.collectives)
    count = len(program.collectives)
    nodes = sum(not is_marker(node) for node in program.calls)
    return f"{nodes} nodes, {count} collective{'s' * (count != 1)}, {_bytes(sent)} per rank"


Place = tuple[float, float, float]  # left, bottom, height


def _places(layers: list[ScopeBox]) -> list[Place]:
    """Positions: the forward from the top down, each backward box beside its forward, or below all."""
    places: list[Place | None] = [None] * len(layers)
    left: dict[str, Place] = {}
    y = 0.0
    for i, layer in enumerate(layers):
        if layer.phase == "forward":
            twins = [o for o in layers if o.name == layer.name]
            height = _ROW * (1.5 + max(len(twin.lines) for twin in twins))
            y -= height
            places[i] = left[layer.name] = (0.0, y, height)
            y -= _GAP
    for i, layer in enumerate(layers):
        if places[i] is None:
            height = _ROW * (1.5 + len(layer.lines))
            _, at, height = left.get(layer.name, (0.0, y - height, height))
            y = min(y, at - _GAP)
            places[i] = (_WIDTH + 1.6, at, height)
    return [place for place in places if place is not None]


def _box(axes: Any, layer: ScopeBox, place: Place) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y, height = place
    sends = any(COLLECTIVE.on(node) for node in layer.nodes)
    color = {"forward": "#e8f0fb", "backward": "#fbf0e4"}.get(layer.phase, "#eeeeee")
    shape = FancyBboxPatch(
        (x, y), _WIDTH, height, boxstyle="round,pad=0.02", facecolor=color, edgecolor="#555555"
    )
    axes.add_patch(shape)
    axes.text(x + 0.1, y + height - _ROW, f"{layer.name}  ({layer.phase})", weight="bold")
    for k, line in enumerate(layer.lines):
        tone = "#b03020" if sends and k else "#333333"
        axes.text(x + 0.1, y + height - _ROW * (k + 2), line, color=tone)


def _arrow(
    axes: Any, layers: list[ScopeBox], places: list[Place], i: int, j: int, values: list[fx.Node]
) -> None:
    """An arrow from one layer to another, labelled with the largest value."""
    source, target = places[i], places[j]
    same = layers[i].phase == layers[j].phase
    style = {"arrowstyle": "->", "color": "#777777", "lw": 1.0 if same else 0.5}
    if same:
        near = abs(source[1] - target[1]) <= max(source[2], target[2]) + _GAP + 0.01
        down = source[1] > target[1]
        x = source[0] + _WIDTH / 2
        start = (x, source[1] if down else source[1] + source[2])
        end = (x, target[1] + target[2] if down else target[1])
        if not near:  # beside the boxes between
            side = source[0] if down else source[0] + _WIDTH
            style |= {"connectionstyle": "arc3,rad=0.2", "lw": 0.5}
            start, end = (side, source[1] + source[2] / 2), (side, target[1] + target[2] / 2)
    else:
        left, right = sorted((source, target))
        start = (left[0] + _WIDTH, left[1] + left[2] / 2)
        end = (right[0], right[1] + right[2] / 2)
        start, end = (start, end) if source == left else (end, start)
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
    if same and near:
        axes.text(start[0] + 0.1, (start[1] + end[1]) / 2, _flow(values), va="center", fontsize=7)
    elif layers[i].name == layers[j].name:
        total = _bytes(sum(_size(v) * times(v) for v in values))
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.08)
        count = layers[i].times
        kept = f"{len(values)} residual{'s'[: len(values) - 1]}" + (f" × {count}" if count > 1 else "")
        axes.text(*middle, f"{kept}\n{total}", ha="center", fontsize=7)


def _flow(values: list[fx.Node]) -> str:
    largest = max(values, key=_size)
    layout = LAYOUT.get(largest)
    text = value_text(VAL.get(largest))
    shown = text if layout is None else f"{text} {layout}"
    return shown if len(values) == 1 else f"{shown}, {len(values) - 1} more"


def _size(node: fx.Node) -> int:
    """Bytes of the global value."""

    def of(val: Any) -> int:
        if isinstance(val, torch.Tensor):
            return math.prod(val.shape) * val.dtype.itemsize
        return sum(map(of, val)) if isinstance(val, Iterable) else 0

    return of(VAL.get(node))
