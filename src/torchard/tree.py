"""Pytrees, and types that are nodes of them; `torchard.functional.tree` under its public name."""

from torchard.functional.tree import *  # noqa: F403
from torchard.functional.tree import __all__ as __all__
