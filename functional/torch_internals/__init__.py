"""torch's private interfaces and what differs between its versions, behind names of our own."""

from torchard.functional.torch_internals.private import *  # noqa: F403
from torchard.functional.torch_internals.private import __all__ as __all__
