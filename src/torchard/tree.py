"""Pytrees, and types that are nodes of them; `torchard.functional.core.tree` under its public name."""

from torchard.functional.core.tree import *  # noqa: F403
from torchard.functional.core.tree import __all__ as __all__
