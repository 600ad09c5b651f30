"""Settings of torch's compilers that torch.compiler does not expose."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torchard.functional.torch_internals.accessors.required import needed, require

__all__ = ["activation_memory_budget", "compile_in_this_process", "memory_planned_by_inductor"]


def compile_in_this_process() -> None:
    """Make Inductor compile without subprocesses; its environment variable is only read at import."""
    with needed():
        from torch._inductor import config

        require(config, "compile_threads")
    config.compile_threads = 1


def activation_memory_budget(fraction: float) -> AbstractContextManager[None]:
    """A context with the fraction of residuals that torch.compile's partitioner may keep."""
    with needed():
        from torch._functorch import config

        require(config, "activation_memory_budget")
    patched: AbstractContextManager[None] = config.patch(activation_memory_budget=fraction)
    return patched


def memory_planned_by_inductor() -> AbstractContextManager[None]:
    """A context in which Inductor's code has pools of its own planning, which benchmarks compare with."""
    with needed():
        from torch._inductor import config

        require(config, "memory_planning")
    patched: AbstractContextManager[None] = config.patch(memory_planning=True)
    return patched
