"""Results: what the caller gets is copied if it is a small part of the memory that it would keep.

A loss that is reduced in one bucket with the gradients is a view of that bucket. Where it is returned,
the bucket could not be in a block, and would be held as long as the loss.
"""

from __future__ import annotations

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.tape import Recorder, Tape
from torchard.functional.torch_internals.operators import aten

__all__ = ["with_results_apart"]

# Results are copied out of memory that is so many times larger than all of them.
_SMALL = 4


def with_results_apart(tape: Tape, fakes: object, count: int | None = None) -> Tape:
    """The tape, with copies of results that are small parts of their memory.

    Args:
        fakes: the mode of the tape's tensors.
        count: how many of the outputs are the caller's; by default all.
    """
    held = set(map(internals.storage_id, tape.inputs))
    used: dict[int, int] = {}
    outputs = [x for x in tape.outputs[:count] if isinstance(x, torch.Tensor)]
    for x in {id(x): x for x in outputs}.values():
        number = internals.storage_id(x)
        used[number] = used.get(number, 0) + x.nbytes
    small = {
        number
        for number, x in zip(map(internals.storage_id, outputs), outputs, strict=True)
        if number not in held and used[number] * _SMALL <= x.untyped_storage().nbytes()
    }
    steps = list(tape.steps)
    recorder = Recorder(fakes, steps)
    copies: dict[int, torch.Tensor] = {}
    for x in outputs:
        if internals.storage_id(x) in small and id(x) not in copies:
            label = next(step.label for step in steps if any(x is y for y in step.tensors))
            copies[id(x)] = recorder.call(aten.clone.default, label, x)
    results = [copies.get(id(x), x) for x in tape.outputs[:count]]
    return Tape(tape.inputs, steps, [*results, *tape.outputs[len(results) :]])
