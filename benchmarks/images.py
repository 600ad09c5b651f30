"""Plans for convolutional networks, with and without a constraint after every layer.

An expert would constrain every activation to the spec of the input. Without constraints a plan should
cost no more, in bytes sent, in peak memory and in the busiest rank's FLOPs, for networks of any depth and
images split by lines, by lines and columns, or by channels. Nothing is run: planning needs shapes only.

    python benchmarks/images.py            2, 4 and 8 levels, forward and gradients
    python benchmarks/images.py --quick    2 and 4 levels, forward
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import Mesh, P, ShapeDtype, constrain, shard

__all__ = ["NETS", "SPLITS", "Cost", "Net", "cost", "report", "worse"]

CHANNELS = 32
Pin = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Net:
    """A network: ``fn(params, x, pin)``, in which every activation goes through ``pin``."""

    fn: Callable[[Any, Tensor, Pin], Tensor]
    params: Any
    image: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """The bytes sent, the peak memory and the FLOPs of a plan, per rank."""

    bytes: int
    peak: int
    flops: int


# -- networks -------------------------------------------------------------------------------------


def layer_shapes(channels: int, out: int) -> list[ShapeDtype]:
    """The shapes of a layer's parameters: a norm's scale and shift, a convolution's weight and bias."""
    shapes = [(channels,), (channels,), (out, channels, 3, 3), (out,)]
    return [ShapeDtype(shape) for shape in shapes]


def layer(x: Tensor, params: Sequence[Tensor]) -> Tensor:
    """A layer: GroupNorm, SiLU, convolution."""
    scale, shift, weight, bias = params
    return F.conv2d(F.silu(F.group_norm(x, 8, scale, shift)), weight, bias, padding=1)


def convolutions(levels: int, size: int) -> Net:
    """A sequence of layers."""

    def fn(params: Any, x: Tensor, pin: Pin) -> Tensor:
        x = pin(x)
        for layer_params in params:
            x = pin(layer(x, layer_params))
        return x

    params = [layer_shapes(CHANNELS, CHANNELS) for _ in range(levels)]
    return Net(fn, params, (1, CHANNELS, size, size))


def halved(x: Tensor, how: str, weight: Tensor) -> Tensor:
    if how == "strides":
        return F.conv2d(x, weight, stride=2, padding=1)
    return F.max_pool2d(x, 2) if how == "max pools" else F.avg_pool2d(x, 2)


def doubled(x: Tensor, how: str, weight: Tensor) -> Tensor:
    if how == "transposed":
        return F.conv_transpose2d(x, weight, stride=2)
    return F.interpolate(x, scale_factor=2, mode=how)


def unet(levels: int, size: int, down: str = "strides", up: str = "nearest") -> Net:
    """A U-Net: a layer at each level, at half the resolution of the level above, and back with skips."""

    def fn(params: Any, x: Tensor, pin: Pin) -> Tensor:
        x, skips = pin(x), []
        for i, layer_params in enumerate(params["down"]):
            x = pin(layer(x, layer_params))
            if i + 1 < levels:
                skips.append(x)
                x = pin(halved(x, down, params["halving"][i]))
        for i in reversed(range(levels - 1)):
            x = pin(doubled(x, up, params["doubling"][i]))
            x = pin(torch.cat([x, skips[i]], 1))
            x = pin(layer(x, params["up"][i]))
        return x

    params = {
        "down": [layer_shapes(CHANNELS, CHANNELS) for _ in range(levels)],
        "up": [layer_shapes(2 * CHANNELS, CHANNELS) for _ in range(levels - 1)],
        "halving": [ShapeDtype((CHANNELS, CHANNELS, 3, 3)) for _ in range(levels - 1)],
        "doubling": [ShapeDtype((CHANNELS, CHANNELS, 2, 2)) for _ in range(levels - 1)],
    }
    return Net(fn, params, (1, CHANNELS, max(size, 2**levels), max(size, 2**levels)))


NETS: dict[str, Callable[[int, int], Net]] = {
    "convolutions": convolutions,
    "U-Net": unet,
    "U-Net, max pools, transposed": lambda n, size: unet(n, size, "max pools", "transposed"),
    "U-Net, mean pools, bilinear": lambda n, size: unet(n, size, "mean pools", "bilinear"),
}
SPLITS: dict[str, tuple[dict[str, int], P]] = {
    "lines": ({"sp": 4}, P(None, None, "sp")),
    "lines, columns": ({"h": 2, "w": 2}, P(None, None, "h", "w")),
    "channels": ({"tp": 4}, P(None, "tp")),
}


# -- plans ----------------------------------------------------------------------------------------


def cost(net: Net, split: str, *, pinned: bool, gradients: bool) -> Cost:
    """The cost of the plan for a split input; ``pinned`` constrains all activations to its spec."""
    axes, spec = SPLITS[split]

    def forward(params: Any, x: Tensor) -> Tensor:
        return net.fn(params, x, (lambda y: constrain(y, spec)) if pinned else (lambda y: y))

    def loss(params: Any, x: Tensor) -> Tensor:
        return (forward(params, x) ** 2).sum()

    fn = torch.func.grad(loss) if gradients else forward
    run = shard(fn, Mesh(axes, virtual=True), in_specs=(P(), spec))
    program = run.lower(net.params, ShapeDtype(net.image))
    sent = sum(record.bytes for record in program.collectives)
    return Cost(sent, program.peak, program.work.rank_flops)


def worse(free: Cost, pinned: Cost) -> tuple[float, float, float]:
    """The ratios of the cost without constraints to the cost with them."""
    return (
        free.bytes / max(pinned.bytes, 1),
        free.peak / max(pinned.peak, 1),
        free.flops / max(pinned.flops, 1),
    )


def row(name: str, levels: int, split: str, gradients: bool) -> tuple[str, tuple[float, ...]]:
    """A line of the table, and its ratios."""
    net = NETS[name](levels, 64)
    free, pinned = (cost(net, split, pinned=p, gradients=gradients) for p in (False, True))
    cells = [f"{c.bytes:12,}{c.peak:13,}{c.flops / 1e6:10,.1f}" for c in (free, pinned)]
    ratios = worse(free, pinned)
    title = f"{f'{levels} {name}':31.31}{split:>15.15}{'  grad' if gradients else '':6}"
    return "  ".join([title, *cells, "".join(f"{r:7.2f}" for r in ratios)]), ratios


def report(levels: Sequence[int], gradients: Sequence[bool]) -> None:
    """Print the table: without constraints, with them, and the ratios."""
    columns = f"{'bytes':>12}{'peak':>13}{'MFLOPs':>10}"
    print(f"{'':52}  {'unconstrained':>35}  {'constrained':>35}")
    print("  ".join([" " * 52, columns, columns, f"{'bytes':>7}{'peak':>7}{'FLOPs':>7}"]))
    worst: tuple[float, ...] = (0.0, 0.0, 0.0)
    for name, n, split, gradient in itertools.product(NETS, levels, SPLITS, gradients):
        text, ratios = row(name, n, split, gradient)
        worst = tuple(map(max, worst, ratios))
        print(text, flush=True)
    print(f"at worst {worst[0]:.2f} x bytes, {worst[1]:.2f} x peak, {worst[2]:.2f} x FLOPs")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few levels, forward only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report((2, 4) if options.quick else (2, 4, 8), (False,) if options.quick else (False, True))


if __name__ == "__main__":
    main()
