"""What torch.utils.checkpoint calls to run a function now and again in the backward.

Nothing public says that a checkpoint begins: hooks for saved tensors see what is saved, not the call.
"""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torchs

__all__ = ["CHECKPOINT_FUNCTION", "CHECKPOINT_FUNCTIONS", "replace_checkpoint_functions"]

# With use_reentrant=True: an autograd Function.
CHECKPOINT_FUNCTION = "CheckpointFunction"
# With use_reentrant=False: generators around whose one yield torch calls the function. From 2.15 on torch
# calls the second; the first is then for others.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)
# torch's own, by name. On a version that has others they run as they are: a call is no segment,
# and under a gradient inside of a trace they are an error, which says to use torchard.checkpoint.
CHECKPOINT_FUNCTIONS: dict[str, Any] = {
    name: getattr(torchs, name)
    for name in (CHECKPOINT_FUNCTION, *_GENERATORS)
    if hasattr(torchs, name)
}


def replace_checkpoint_functions(functions: dict[str, Any]) -> None:
    """Have torch call these by those names; for the process."""
    for name, function in functions.items():
        setattr(torchs, name, function)
