"""A program as text: each line says what is computed, of what shape, and where it was written."""

from __future__ import annotations

import torch
from torch import Tensor

from torchard import trace


def step(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x @ params["w"]).sin()
    return y.sum(), y.detach().bfloat16()


def test_a_program_as_text() -> None:
    text = str(trace(step)({"w": torch.ones(3, 4)}, torch.ones(2, 3)))
    at = step.__code__.co_firstlineno
    lines = [line.split() for line in text.replace("test_text.py:", "").splitlines()]
    assert [" ".join(line) for line in lines] == [
        "def step:",
        "in0 f32[3, 4] # args[0]['w']",
        "in1 f32[2, 3] # args[1]",
        f"mm = mm(in1, in0) f32[2, 4] # {at + 1} in step",
        f"sin = sin(mm) f32[2, 4] # {at + 1} in step",
        f"sum_1 = sum(sin) f32[] # {at + 2} in step",
        f"detach = detach(sin) f32[2, 4] # {at + 2} in step cut",
        f"_to_copy = _to_copy(detach, dtype=torch.bfloat16) bf16[2, 4] # {at + 2} in step",
        "return",
        "sum_1 # out[0]",
        "_to_copy # out[1]",
    ]
    assert len({line.index("#") for line in text.splitlines()[1:8]}) == 1, "columns are aligned"
