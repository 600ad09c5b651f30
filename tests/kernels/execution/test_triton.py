"""Triton's kernels are what their references are, by its interpreter; and are done without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import cross_compiled
import interpreted
import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from paths import BENCHMARKS
from torch import Tensor
from torch_version import TORCH

from torchard.kernels import KERNELS, Kernel
from torchard.kernels.execution.optional_backends import Imported
from torchard.kernels.rewriting.region import KernelRegion

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="triton is not installed")
every_kernel = pytest.mark.parametrize("name", interpreted.NAMES)
X, B = torch.randn(5, 6), torch.randn(6)


# -- what they compute ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    if TORCH < (2, 12):  # Triton comes with torch
        pytest.skip("the interpreter of torch 2.11's Triton converts arrays as NumPy forbids")
    with interpreted.interpreting() as process:
        yield process


@pytest.mark.sampled(8)
@needs_triton
@every_kernel
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_as_exact_as_its_references(
    name: str, backward: bool, elsewhere: ProcessPoolExecutor
) -> None:
    elsewhere.submit(interpreted.check, name, backward).result()


@needs_triton
@pytest.mark.parametrize("name", ["bias_gelu", "add_layer_norm", "cross_entropy"])
def test_fuse_runs_them_and_says_so(name: str, elsewhere: ProcessPoolExecutor) -> None:
    assert elsewhere.submit(interpreted.fused_with_its_gradient, name).result() == {"triton"}


@needs_triton
@pytest.mark.parametrize("length, threshold", [(24, 1 << 30), (19, 3 << 30)])
def test_masks_are_those_of_the_library(
    length: int, threshold: int, elsewhere: ProcessPoolExecutor
) -> None:
    elsewhere.submit(interpreted.check_masks, length, threshold).result()


@needs_triton
def test_labels_that_do_not_count(elsewhere: ProcessPoolExecutor) -> None:
    elsewhere.submit(interpreted.check_labels).result()


@needs_triton
def test_rows_of_infinities(elsewhere: ProcessPoolExecutor) -> None:
    elsewhere.submit(interpreted.check_infinite_rows).result()


@needs_triton
def test_what_is_not_a_number(elsewhere: ProcessPoolExecutor) -> None:
    elsewhere.submit(interpreted.check_not_a_number).result()


@needs_triton
def test_the_error_function_of_half_precisions(elsewhere: ProcessPoolExecutor) -> None:
    elsewhere.submit(interpreted.check_short_gelu).result()


# -- for a device that is not here ----------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with cross_compiled.compiling(tmp_path_factory.mktemp("triton")) as process:
        yield process


@pytest.mark.sampled(8)
@needs_triton
@every_kernel
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_compiled_for_a_gpu_they_move_16_bytes_at_a_time(
    name: str, backward: bool, compiler: ProcessPoolExecutor
) -> None:
    job = compiler.submit(cross_compiled.compile_for_hopper, name, backward, torch.bfloat16)
    assert job.result() == (1, 128)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bias_gelu", "softmax"])
def test_exponentials_are_compiled_in_all_dtypes(
    name: str, dtype: torch.dtype, compiler: ProcessPoolExecutor
) -> None:
    job = compiler.submit(cross_compiled.compile_for_hopper, name, True, dtype)
    assert job.result() == (1, 128)


# -- without it -----------------------------------------------------------------------------------


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torchard.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)


def label(kernel: Kernel, compiler: str = "inductor") -> str:
    """What is said of a kernel on a CUDA device before it runs."""
    pattern = kernel.patterns[0]
    found: Any = SimpleNamespace(alternative=pattern.alternatives[0], literals=(), pattern=pattern)
    return KernelRegion(kernel, found, compiler).label("cuda", [1])


def gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def run_by(run: Imported) -> str:
    """How bias_gelu runs on the CPU if this is its implementation there."""
    fused = fuse(gelu, replace(KERNELS["bias_gelu"], implementations={"cpu": run}))
    torch.testing.assert_close(fused(X, B), gelu(X, B))
    (use,) = fused.lower(X, B).kernels
    return str(use.how)


@needs_triton
@every_kernel
def test_with_triton_all_are_for_cuda(name: str) -> None:
    gradient = KERNELS[name].backward
    assert gradient is not None and gradient.implementations.keys() >= {"cuda"}
    assert label(KERNELS[name]) == label(gradient) == "triton"


@every_kernel
def test_without_triton_they_are_compiled_and_say_so(name: str, without_triton: None) -> None:
    kernel = KERNELS[name]
    how = "kernel" if "any" in kernel.implementations else "inductor"
    assert label(kernel) == f"{how} (no triton)"
    assert how == "kernel" or label(kernel, "eager") == "eager (requested) (no triton)"


def test_without_triton_values_are_right(without_triton: None) -> None:
    given = KERNELS["bias_gelu"].implementations["cuda"]
    assert isinstance(given, Imported)
    assert run_by(given) == "eager (small) (no triton)"


def test_what_fails_is_done_without() -> None:
    def failing(name: str) -> str:
        return run_by(Imported("torch", "torch", name))

    assert failing("mm") == "eager (small) (torch failed: RuntimeError)"
    assert failing("mv") == "eager (small) (torch failed: KernelError)"  # another shape


def test_other_missing_modules_are_errors() -> None:
    with pytest.raises(ModuleNotFoundError):
        Imported("triton", "torchard.kernels.none_such", "f").load()


def test_the_benchmark_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", ["accelerator.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    import accelerator

    with pytest.raises(SystemExit, match="no CUDA device"):
        accelerator.main()
