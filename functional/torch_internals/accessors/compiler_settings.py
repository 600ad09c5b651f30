"""Settings of torch's compilers that torch.compiler has no names for."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torchard.functional.torch_internals.accessors.required import needed, require

__all__ = ["activation_memory_budget", "compile_in_this_process"]


def compile_in_this_process() -> None:
    """Inductor starts no processes of its own; its environment variable is read at import only."""
    with needed():
        from torch._inductor import config

        require(config, "compile_threads")
    config.compile_threads = 1


def activation_memory_budget(fraction: float) -> AbstractContextManager[None]:
    """What torch.compile's partitioner may keep inside, of what it would keep."""
    with needed():
        from torch._functorch import config

        require(config, "activation_memory_budget")
    patched: AbstractContextManager[None] = config.patch(activation_memory_budget=fraction)
    return patched
