"""What tests of planned memory share: comparisons, copies, calls from threads, holders of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from torchard import tree

__all__ = ["HOLDERS", "assert_right_in_threads", "cloned", "same", "tensor_of"]


def same(have: Any, want: Any) -> bool:
    pairs = zip(tree.leaves(have), tree.leaves(want), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def cloned(values: Any) -> Any:
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, values)


def assert_right_in_threads(
    run: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], wanted: Sequence[Tensor]
) -> None:
    """Many calls from as many threads as there are inputs."""
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(run(inputs[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def tensor_of(value: Any) -> Tensor:
    """A tensor of what one of HOLDERS returned."""
    if isinstance(value, tuple):
        return torch.empty(0).set_(*value)
    return torch.as_tensor(value)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[:1],
    "its data": lambda x: x.detach(),
    "its storage": lambda x: (x.untyped_storage(), x.storage_offset(), x.shape, x.stride()),
    "an array": lambda x: x.detach().numpy(),
    "by dlpack": lambda x: from_dlpack(x.detach()),
}
"""What else may hold the memory of a tensor."""
