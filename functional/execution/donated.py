"""Donated inputs: which ones a program may write to, and copies of those that others hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.programs.program import Placement, Program
from torchard.functional.programs.tags import HALVES

__all__ = ["Owned", "donated_inputs", "donated_parts", "own"]


def donated_inputs(program: Program) -> list[int]:
    """The inputs that are donated; none in a joint program or its halves: a backward may read them."""
    if HALVES.on(program.output) or program.is_joint or program.compiler is None:
        return []
    starts = tuple(f"args[{n}]" for n in program.compiler.donate_argnums)
    leaves = enumerate(program.inputs)
    return [i for i, leaf in leaves if leaf.role == "primal" and leaf.path.startswith(starts)]


def donated_parts(program: Program) -> list[int]:
    """The positions of the donated inputs' parts among the parts of all inputs."""
    donated = set(donated_inputs(program))
    parts: list[int] = []
    position = 0
    for i, leaf in enumerate(program.inputs):
        width = leaf.tag.width if isinstance(leaf.tag, Placement) else 1
        if i in donated:
            parts += range(position, position + width)
        position += width
    return parts


def own(parts: list[torch.Tensor], donated: Sequence[int]) -> None:
    """Copy the donated inputs whose memory something else than the list holds."""
    for i in internals.held_elsewhere(parts, donated):
        parts[i] = parts[i].detach().clone()


class Owned:
    """What a program that writes in place does first.

    Args:
        written: the positions of the donated inputs that it writes to.
    """

    def __init__(self, written: Sequence[int]) -> None:
        self.written = written

    def __call__(self, args: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """The inputs, of which those that are written are the program's own.

        None if writes would be seen, by a transform or autograd, or would not do what copies do.
        """
        if internals.has_transforms() or internals.forward_ad_active():
            return None
        if torch.is_grad_enabled() and any(map(_requires_grad, args)):
            return None
        if any(map(internals.is_legacy_batched, args)):
            return None
        if not self.written:
            return args
        if not _are_plain([args[i] for i in self.written]):
            return None
        parts = args if isinstance(args, list) else list(args)
        own(parts, self.written)
        return parts


_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    if any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
        return False
    return torch.is_inference_mode_enabled() or not any(map(torch.Tensor.is_inference, tensors))
