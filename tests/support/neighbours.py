"""Functions that read neighbours along a split dim, for virtual and for real ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from torchard import Mesh, P, place, shard

KERNEL = torch.randn(3, 3, 3, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

# Of an image [2, 3, n, 4], split along its lines.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:, :, 2:9],
    "slice with a step": lambda x: x[:, :, 1::3],
    "difference": lambda x: x[:, :, 1:] - x[:, :, :-1],
    "pad": lambda x: F.pad(x, (1, 0, 2, 3), value=1.5),
    "crop": lambda x: F.pad(x, (0, 0, -2, 1)),
    "roll": lambda x: x.roll((5, 1), (2, 3)),
    "flip": lambda x: x.flip(2, 3),
    "cat": lambda x: torch.cat([x, x[:, :, :3].sin(), x], 2),
    "cat of masks": lambda x: torch.where(torch.cat([x > 0, x[:, :, :3] > 0], 2), 1.0, 0.0),
    "cumsum": lambda x: x.cumsum(2),
    "running sum back": lambda x: x.flip(2).cumsum(2),
    "topk": lambda x: x.topk(2, 2)[0],
    "convolution": lambda x: F.conv2d(x, KERNEL, padding=(1, 0)),
    "convolution without padding": lambda x: F.conv2d(x, KERNEL),
    "convolution, dilated": lambda x: F.conv2d(x, KERNEL, padding=(3, 0), dilation=(2, 1)),
    "convolution with strides": lambda x: F.conv2d(x, KERNEL, padding=(1, 0), stride=2),
    "convolution of single lines": lambda x: F.conv2d(x, KERNEL[:, :, :1], stride=2),
    "max pool": lambda x: F.max_pool2d(x, 3, 1, padding=1),
    "max pool with strides": lambda x: F.max_pool2d(x, (3, 1), (2, 1), ceil_mode=True),
    "mean pool": lambda x: F.avg_pool2d(x, 3, 1, padding=1),
    "mean pool with strides": lambda x: F.avg_pool2d(x, 2),
    "each line twice": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "three lines between": lambda x: F.interpolate(x, size=(3 * x.shape[2], 4), mode="bilinear"),
}


def slope(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gradient of a scalar to which every element of the result adds in its own way."""

    def scalar(x: torch.Tensor) -> torch.Tensor:
        y = fn(x)
        return (y.sin() * torch.arange(y.numel()).reshape(y.shape)).sum()

    return torch.func.grad(scalar)


def image(lines: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(lines)
    return torch.randn(2, 3, lines, 4, generator=made, dtype=torch.float64)


# One of each kind of exchange, which real ranks make as well: neighbours, strides, far elements, masks.
SENT = {
    **{k: FUNCTIONS[k] for k in ("difference", "slice with a step", "roll", "cat of masks")},
    **{f"gradient of {k}": slope(FUNCTIONS[k]) for k in ("convolution", "max pool")},
}


def differing(one: Mesh, other: Mesh, lines: int = 13) -> list[str]:
    """Functions that two meshes do not agree on bit for bit."""
    spec, found = P(None, None, "tp"), []
    for name, fn in SENT.items():
        both = [shard(fn, m, out_specs=spec)(place(image(lines), m, spec)) for m in (one, other)]
        if not torch.equal(both[0].full(), both[1].full()):
            found.append(name)
    return found
