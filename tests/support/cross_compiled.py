"""The library's Triton kernels, compiled for a GPU that need not be here: they are never launched."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreted import Kind, kernel_of
from kernel_cases import LITERALS, inputs_of

from torchard.kernels.execution.optional_backends import implementation

__all__ = ["compile_for_hopper", "compiling"]


@contextmanager
def compiling(cache: Path) -> Iterator[ProcessPoolExecutor]:
    """Where to submit what is here: a process in which Triton's driver is a false one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        process.submit(_prepare).result()
    with process:
        yield process


class _Driver:
    """What Triton asks of a device before it launches."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def _prepare() -> None:
    import triton.runtime.jit
    from triton.runtime import driver

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    driver.set_active(_Driver())
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        COMPILED.append(run(self, *args, warmup=True, **options))

    triton.runtime.jit.JITFunction.run = compile_only


# What has been compiled in this process.
COMPILED: list[Any] = []


def compile_for_hopper(name: str, backward: bool, dtype: torch.dtype) -> tuple[int, int]:
    """How many kernels it took, and the least width in bits of what reads or writes rows in them."""
    kernel = kernel_of(name, backward)
    pattern = kernel.patterns[0]
    run = implementation(kernel.implementations, "cuda").run
    assert run is not None
    (case,) = Kind((64,), 1024, dtypes=[dtype]).cases(pattern)
    COMPILED.clear()
    run(*inputs_of(kernel, pattern, case), **{n: LITERALS[n] for n in pattern.literals})
    widest = []
    for one in COMPILED:
        found = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", one.asm["ptx"])
        widest.append(max(int(count or 1) * int(bits) for count, bits in found))
    return len(COMPILED), min(widest)
