"""Donation: the memory of an argument may be reused, and using the argument again is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from torchard.functional.core.errors import DonatedError
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.cache_entry import is_under
from torchard.functional.programs.program import Placement, Program

__all__ = ["Donated", "donated_parts", "give_up"]


class Donated(torch.Tensor):
    """The class of a plain tensor once it is donated: every operation on it raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise DonatedError(
            "a tensor was used after it had been donated "
            "(jit(..., donate_argnums=...)): its memory belongs to the results. Use the value the "
            "step returned, pass a clone, or leave this argument out of donate_argnums."
        )


def give_up(
    leaves: Sequence[Any],
    donated: Sequence[int],
    parts: list[torch.Tensor],
    positions: Mapping[int, int],
) -> list[torch.Tensor]:
    """The parts, with the program as the only owner of the donated ones.

    Raises:
        ValueError: a donated value is passed twice.
    """
    ids = [id(leaf) for leaf in leaves]
    for i in donated:
        if not isinstance(leaves[i], float) and ids.count(id(leaves[i])) > 1:
            raise ValueError(
                f"a donated value of shape {list(leaves[i].shape)} is passed twice in one call: pass a "
                "clone, or leave its argument out of donate_argnums."
            )
    for i in donated:
        leaf = leaves[i]
        if is_placed(leaf):
            leaf.__torchard_donate__()
        elif type(leaf) in (torch.Tensor, torch.nn.Parameter) and not _followed(leaf):
            parts[positions[i]] = leaf.detach()
            _empty(leaf)
    return parts


def donated_parts(program: Program, numbers: Sequence[int]) -> list[int]:
    """The positions of the donated arguments' parts among the parts of all inputs."""
    starts = [f"args[{n}]" for n in numbers]
    parts: list[int] = []
    position = 0
    for leaf in program.inputs:
        width = leaf.tag.width if isinstance(leaf.tag, Placement) else 1
        if leaf.role == "primal" and is_under(leaf.path, starts):
            parts += range(position, position + width)
        position += width
    return parts


def _followed(tensor: torch.Tensor) -> bool:
    """Whether autograd needs the tensor itself."""
    return tensor.requires_grad and torch.is_grad_enabled()


def _empty(tensor: torch.Tensor) -> None:
    # set_ drops this tensor's hold on the storage only: other views of it stay valid.
    with torch.no_grad():
        tensor.set_()  # type: ignore[call-overload]  # unannotated without a source
    tensor.__class__ = Donated
