"""What code reads of torch's modes while it is traced is what the plain call reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch.compiler import is_compiling

from torchard import Mesh, P, PurityError, checkpoint, full, jit, shard

X = torch.ones(4)
MESH = Mesh({"dp": 2}, virtual=True)
STACKS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse of jit": lambda f: fuse(jit(f, backend="eager")),
    "shard": lambda f: shard(f, MESH, in_specs=(P("dp"),)),
    "vmap": lambda f: jit(torch.vmap(f), backend="eager"),
}
AROUND: dict[str, Callable[[], Any]] = {
    "nothing": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
}
READS: dict[str, Callable[[], bool]] = {
    "torch.compiler": lambda: torch.compiler.is_compiling(),
    "imported": lambda: is_compiling(),
    "dynamo": lambda: torch._dynamo.is_compiling(),
    "jit": lambda: torch.jit.is_tracing() or torch.jit.is_scripting(),
    "inference": lambda: torch.is_inference_mode_enabled(),
    "gradients": lambda: torch.is_grad_enabled(),
    "autocast": lambda: torch.is_autocast_enabled("cpu"),
}


@pytest.mark.parametrize("stack", STACKS)
def test_every_mode_is_that_of_the_call(stack: str) -> None:
    def told(x: torch.Tensor) -> torch.Tensor:
        seen = [2**i for i, read in enumerate(READS.values()) if read()]
        return x * sum(seen)

    run = STACKS[stack](told)
    for around in [*AROUND, *reversed(AROUND)]:
        with AROUND[around]():
            assert torch.equal(full(run(X)), told(X)), around
    assert run.traces == len(AROUND)


def test_inference_mode_inside_is_told() -> None:
    def told(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            inner = jit(
                lambda x: x * (2 if torch.is_inference_mode_enabled() else 1), backend="eager"
            )
            y = inner(x) * (3 if torch.is_inference_mode_enabled() else 1)
        return y.clone() * (5 if torch.is_inference_mode_enabled() else 1)

    assert torch.equal(jit(told, backend="eager")(X), told(X))


def test_whether_a_tensor_is_of_inference_mode_is_refused_by_line() -> None:
    with pytest.raises(PurityError, match=r"test_told_modes.py:\d+ in .* \(is_inference\)"):
        jit(lambda x: x * (2 if x.is_inference() else 1), backend="eager")(X)


def test_the_functions_are_torchs_again() -> None:
    with pytest.raises(ZeroDivisionError):
        jit(lambda x: x / (1 // 0), backend="eager")(X)
    assert not torch.compiler.is_compiling()
    assert torch.is_inference_mode_enabled is torch._C.is_inference_mode_enabled
    assert torch.compiler.is_compiling.__code__.co_filename.startswith(torch.__path__[0])
