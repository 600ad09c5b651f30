"""Donation: the memory of an argument may be reused, and using the argument again is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import DonatedError
from torchard.functional.core.placed import is_placed

__all__ = ["Donated", "give_up"]


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
    if len(set(ids)) < len(ids):
        _check_distinct(leaves, donated, ids)
    if internals.has_transforms() or internals.forward_ad_active():
        return parts  # what is passed are values of a transform, which may be needed again
    followed = torch.is_grad_enabled()
    with torch.no_grad():
        for i in donated:
            leaf = leaves[i]
            if is_placed(leaf):
                leaf.__torchard_donate__()
            elif _may_empty(leaf) and not (followed and leaf.requires_grad):
                # Not detach(): that makes a view of the leaf, and may be what the program returns.
                parts[positions[i]] = internals.in_memory_of(leaf, leaf.shape, leaf.stride(), 0)
                # Only this tensor's hold on the storage is dropped: other views of it stay valid. DLPack
                # exports the tensor itself: then it keeps its storage, so that results are not put there.
                if internals.tensor_uses(leaf) == 1:
                    leaf.set_()
                leaf.__class__ = Donated
    return parts


def _check_distinct(leaves: Sequence[Any], donated: Sequence[int], ids: Sequence[int]) -> None:
    for i in donated:
        if not isinstance(leaves[i], float) and ids.count(ids[i]) > 1:
            raise ValueError(
                f"a donated value of shape {list(leaves[i].shape)} is passed twice in one call: pass a "
                "clone, or leave its argument out of donate_argnums."
            )


def _may_empty(leaf: Any) -> bool:
    """Whether a leaf is an ordinary tensor that torch lets us set."""
    if type(leaf) is not torch.Tensor and type(leaf) is not torch.nn.Parameter:
        return False
    return not leaf.is_inference() or torch.is_inference_mode_enabled()
