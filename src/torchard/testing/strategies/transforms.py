"""Checkpoint policies, and stacks of transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hypothesis import strategies as st

from torchard.functional.core.arguments import checked
from torchard.functional.remat import policies as known
from torchard.functional.remat.policies import Policy
from torchard.testing.laws.transforms import check_layers

__all__ = ["policies", "stacks"]

_SIMPLE = (
    known.save_nothing,
    known.save_everything,
    known.save_dots,
    known.save_dots_with_no_batch_dims,
    known.save_collectives,
)
_LAYERS = ("shard", "checkpoint", "fuse", "jit", "vmap", "grad", "jvp")
_DERIVATIVES = ("grad", "jvp")


@checked
def policies(names: Sequence[str] = ()) -> st.SearchStrategy[Policy]:
    """A hypothesis strategy of checkpoint policies: those of `torchard.policies`, and two combined.

    Args:
        names: labels that the function gives to values by `torchard.name`; policies then save, recompute
            or offload some of them.

    Returns:
        A strategy of policies, which shrinks towards ``save_nothing``.

    >>> from hypothesis import find
    >>> from torchard.testing import strategies as ts
    >>> find(ts.policies(), lambda policy: "|" in str(policy))
    (save_nothing | save_nothing)
    """
    simple: st.SearchStrategy[Policy] = st.sampled_from(_SIMPLE)
    if names:
        some = st.lists(st.sampled_from(list(names)), min_size=1, unique=True)
        for policy in (known.save_names, known.save_all_but_names, known.offload_names):
            simple |= some.map(partial(_of_names, policy))
    both = st.builds(lambda one, other: one & other, simple, simple)
    either = st.builds(lambda one, other: one | other, simple, simple)
    return simple | both | either


def _of_names(policy: Callable[..., Policy], names: list[str]) -> Policy:
    return policy(*names)


@checked
def stacks(
    layers: Sequence[str] = _LAYERS, *, max_size: int = 4, max_derivatives: int = 2
) -> st.SearchStrategy[tuple[str, ...]]:
    """A hypothesis strategy of stacks of transforms, for `torchard.testing.check_stack`.

    Args:
        layers: the layers of which a stack consists, which `check_stack` lists.
        max_size: the maximum number of layers of a stack.
        max_derivatives: the maximum number of layers that differentiate; each makes programs several
            times as long.

    Returns:
        A strategy of tuples of names, from the inside out, which shrinks towards ``("shard",)``.

    Raises:
        ValueError: a layer is unknown.

    >>> import torch
    >>> from hypothesis import given
    >>> from torchard.testing import check_stack, strategies as ts
    >>> @given(ts.stacks(["shard", "checkpoint", "grad"], max_size=3))
    ... def check(word):
    ...     check_stack(lambda w, x: torch.tanh(x @ w), [word], torch.ones(2, 2), torch.ones(3, 2))
    """
    check_layers("stacks", layers)
    words = st.lists(st.sampled_from(list(layers)), min_size=1, max_size=max_size)
    few = words.filter(lambda word: sum(layer in _DERIVATIVES for layer in word) <= max_derivatives)
    return few.map(tuple)
