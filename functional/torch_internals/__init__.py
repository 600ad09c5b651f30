"""Every private interface of torch that the project uses, behind public names, each with its reason.

No other code uses one (`test_torch_privates.py`). Where a version of torch lacks one, the docstring says
what is done instead; otherwise importing this package raises an error that names it. `thread_state.py`,
`modes.py` and `functorch_levels.py` set up where a trace runs, `told_modes.py` says what the user's code
is told there, `proxies.py` records it, `compilers.py`, `donated_buffers.py` and `changed_inductor.py`
compile it, `ownership.py` counts references, and `accessors` reads private attributes of torch's objects.
Also here: differences between versions (`operators.py`, `versions.py`), and between torch's treatment of
fake and of real tensors (`zero_tangents.py`, `scalar_operands.py`, `composite_functions.py`).
"""

import torch

from torchard.functional.torch_internals import versions
from torchard.functional.torch_internals.accessors.required import needed

versions.check(torch.__version__)
with needed():
    from torchard.functional.torch_internals import (
        compilers,
        donated_buffers,
        functorch_levels,
        modes,
        ownership,
        proxies,
        thread_state,
        told_modes,
    )
    from torchard.functional.torch_internals.accessors import (
        fakes,
        gloo_threads,
        graphs,
        modules,
        multi_tensor,
        optional,
        single_level,
        tensors,
    )
    from torchard.functional.torch_internals.accessors.fakes import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.gloo_threads import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.graphs import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.modules import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.multi_tensor import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.optional import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.single_level import *  # noqa: F403
    from torchard.functional.torch_internals.accessors.tensors import *  # noqa: F403
    from torchard.functional.torch_internals.compilers import *  # noqa: F403
    from torchard.functional.torch_internals.donated_buffers import *  # noqa: F403
    from torchard.functional.torch_internals.functorch_levels import *  # noqa: F403
    from torchard.functional.torch_internals.modes import *  # noqa: F403
    from torchard.functional.torch_internals.ownership import *  # noqa: F403
    from torchard.functional.torch_internals.proxies import *  # noqa: F403
    from torchard.functional.torch_internals.thread_state import *  # noqa: F403
    from torchard.functional.torch_internals.told_modes import *  # noqa: F403

__all__: list[str] = []
__all__ += fakes.__all__
__all__ += gloo_threads.__all__
__all__ += graphs.__all__
__all__ += modules.__all__
__all__ += multi_tensor.__all__
__all__ += optional.__all__
__all__ += single_level.__all__
__all__ += tensors.__all__
__all__ += compilers.__all__
__all__ += donated_buffers.__all__
__all__ += functorch_levels.__all__
__all__ += modes.__all__
__all__ += ownership.__all__
__all__ += proxies.__all__
__all__ += thread_state.__all__
__all__ += told_modes.__all__
