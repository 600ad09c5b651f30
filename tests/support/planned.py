"""What tests of planned memory share: models, comparisons, calls from threads, holders of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from torchard import checkpoint, jit, policies, repeat, tree

__all__ = [
    "HOLDERS",
    "assert_right_in_threads",
    "block",
    "cloned",
    "layers",
    "loop",
    "plain",
    "plain_stack",
    "planned",
    "same",
    "stack",
    "stacked",
    "tensor_of",
]


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


def planned(fn: Callable[..., Any], **options: Any) -> Any:
    return jit(fn, backend="eager", memory="planned", **options)


def plain(fn: Callable[..., Any]) -> Any:
    return jit(fn, backend="eager")


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def stack(params: Any, x: Tensor) -> Tensor:
    for p in params:
        x = checkpoint(block, policy=policies.save_nothing)(p, x)
    return x.square().mean()


def plain_stack(params: Any, x: Tensor) -> Tensor:
    for p in params:
        x = block(p, x)
    return x.square().mean()


def loop(params: Any, x: Tensor) -> Tensor:
    return repeat(block, params, x).square().mean()


def layers(count: int, width: int = 16) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {k: torch.randn(width, width, generator=numbers) / 8 for k in ("a", "b")} for _ in range(count)
    ]


def stacked(count: int) -> Any:
    return tree.map(lambda *xs: torch.stack(xs), *layers(count))


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
