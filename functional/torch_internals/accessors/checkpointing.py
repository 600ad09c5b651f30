"""The functions by which torch.utils.checkpoint runs and recomputes a function.

No public interface tells that a checkpoint begins: saved-tensor hooks see saved tensors, not the call.
"""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint as torchs

__all__ = ["CHECKPOINT_FUNCTION", "CHECKPOINT_FUNCTIONS", "replace_checkpoint_functions"]

# For use_reentrant=True: an autograd Function.
CHECKPOINT_FUNCTION = "CheckpointFunction"
# For use_reentrant=False: generator functions; torch calls the function at their yield. From 2.15 on
# torch calls the second; the first remains for other callers.
_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",
)
# torch's own, by name. Where a version has other names, these run unchanged: a call is not a segment,
# and under a gradient inside a trace it raises an error that says to use torchard.checkpoint.
CHECKPOINT_FUNCTIONS: dict[str, Any] = {
    name: getattr(torchs, name)
    for name in (CHECKPOINT_FUNCTION, *_GENERATORS)
    if hasattr(torchs, name)
}


def replace_checkpoint_functions(functions: dict[str, Any]) -> None:
    """Replace torch's functions of these names, process-wide."""
    for name, function in functions.items():
        setattr(torchs, name, function)
