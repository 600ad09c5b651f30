"""The arithmetic of an optimizer's update of one parameter: that of `torch.optim`, in the same order.

Numbers that all parameters share are float64, so that float64 parameters keep their precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["adam_corrections", "adamw_step", "sgd_step"]


def adam_corrections(count: Tensor, rate: Any, b1: float, b2: float) -> tuple[Any, Tensor]:
    """The learning rate over the correction of the mean, and the root of that of the square.

    Args:
        count: the number of steps, this one included: 1 - 0.999^count would lose half its digits in
            float32.
    """
    correction1, correction2 = 1 - b1**count, 1 - b2**count
    return rate / correction1, correction2.sqrt()


def adamw_step(
    p: Tensor,
    m: Tensor,
    s: Tensor,
    g: Tensor,
    corrections: tuple[Any, Tensor],
    factor: Any,
    b1: float,
    b2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next parameter, mean and square.

    Args:
        factor: what the parameter is multiplied by first, for its decay.
    """
    shift, root_of_correction = corrections
    # As torch's lerp: towards the end that is nearer, from which nothing is lost.
    m = torch.add(m, g - m, alpha=1 - b1) if b1 > 0.5 else torch.sub(g, g - m, alpha=b1)
    s = torch.addcmul(b2 * s, g, g, value=1 - b2)
    root = s.sqrt() / root_of_correction + eps
    decayed = (p * factor).to(p.dtype)
    return _stepped(decayed, shift * (m / root)), m, s


def sgd_step(
    p: Tensor, v: Tensor | None, g: Tensor, rate: Any, decay: Any, momentum: float, nesterov: bool
) -> tuple[Tensor, ...]:
    """The next parameter, and with momentum the next velocity."""
    g = _decayed(p, g, decay)
    if v is None:
        return (_stepped(p, rate * g),)
    v = momentum * v + g
    return _stepped(p, rate * (g + momentum * v if nesterov else v)), v


def _stepped(p: Tensor, change: Tensor) -> Tensor:
    """p - change, in p's dtype: a 0-d p would otherwise take the dtype of a 0-d learning rate."""
    return (p - change).to(p.dtype)


def _decayed(p: Tensor, g: Tensor, decay: Any) -> Tensor:
    """g + decay * p, in p's dtype: a 0-d p would otherwise take the dtype of a 0-d decay."""
    is_zero = not isinstance(decay, Tensor) and not decay
    return g if is_zero else (g + decay * p).to(p.dtype)
