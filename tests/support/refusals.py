"""What counts as a refusal by the library, and not as a failure."""

from __future__ import annotations

import traceback

__all__ = ["refuses"]


def refuses(error: BaseException) -> bool:
    """A torchard error: of a class of its own for users, or raised on purpose with its remedy."""
    if type(error).__name__ == "RuleError":
        return False  # a rule that does not fit is a bug of the rule
    if type(error).__module__.startswith("torchard."):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, NotImplementedError) and "/torchard/" in last.filename
