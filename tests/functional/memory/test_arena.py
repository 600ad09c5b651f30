"""The arena: blocks that programs share, one call at a time, and that are freed with them."""

from __future__ import annotations

import gc

import pytest
import torch
from planned import planned

from torchard.functional.memory import arena as arena_module
from torchard.functional.memory import planned as planned_module
from torchard.functional.memory.arena import release, reserved

CPU = torch.device("cpu")


class Program:
    """What an arena knows of a program: when it is gone."""


def test_shapes_take_turns_in_one_block() -> None:
    release()
    run = planned(lambda x: ((x * 2).tanh() @ x).sum())
    for size in (8, 64, 32):
        run(torch.randn(size, size))
    most = reserved()
    for _ in range(3):
        for size in (8, 64, 32):
            run(torch.randn(size, size))
    assert reserved() == most
    assert most[CPU] == 2 * 64 * 64 * 4  # tanh is written over x * 2; and the product


def test_blocks_of_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put on a stream may still run when the call returns: another stream has its own block."""
    release()
    run, x = planned(lambda x: (x * 2).tanh().sum()), torch.randn(8, 8)
    seen = []
    for stream in ("a", "a", "b", "a"):
        monkeypatch.setattr(arena_module, "_streams", lambda sizes, stream=stream: {CPU: stream})
        run(x)
        seen.append(reserved()[CPU])
    assert seen == [256, 256, 512, 512]


def test_memory_is_freed_with_the_last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a graph is dropped without a backward."""
    own = arena_module.Arena()
    monkeypatch.setattr(planned_module, "arena", own)
    run = planned(lambda x: (x * 2).tanh().sum())
    x = torch.randn(8, 8, requires_grad=True)
    value = run(x)
    assert own._blocks
    del run, value
    gc.collect()
    assert not own._blocks


def test_programs_are_collected_before_what_they_left() -> None:
    """The garbage collector tells of a program's end before it frees the tensors of the same cycle."""
    own, program = arena_module.Arena(), Program()
    with own.lent(program, {CPU: 256}) as block:
        memory = block.memory[CPU].view(torch.float32)
        (left,) = block.leave(program, [memory[:8].fill_(3)])
    del block, memory, program
    assert not own._blocks
    assert left.tolist() == [3.0] * 8  # its storage keeps the memory
