"""What the benchmark's chains become: which kernels, how many operations, and bytes as few as can be.

In bf16, two bytes an element, of the large operands, n elements each: what a kernel must read and write
at least. Of rows and columns there are so few that a quarter of a byte more per element is left for them.
"""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from any_size import fuse
from paths import BENCHMARKS

from torchard import trace

ELEMENTS = 1 << 14
FEW = 0.75

# Of each chain: kernels of the forward with the bytes per element that each moves, operations before and
# after, and the same with the gradients.
Row = tuple[list[tuple[str, int]], tuple[int, int], list[tuple[str, int]], tuple[int, int]]
EXPECTED: dict[str, Row] = {
    **{
        f"bias_{f}": (
            [(f"bias_{f}", 4)],
            (2, 1),
            [(f"bias_{f}", 4), (f"bias_{f}_backward", 6)],
            (12 if f == "silu" else 5, 6),
        )
        for f in ("gelu", "gelu_tanh", "silu", "relu")
    },
    "layer_norm": (
        [("layer_norm", 4)],
        (2, 1),
        [("layer_norm", 4), ("layer_norm_backward", 6)],
        (8, 5),
    ),
    "rms_norm": ([("rms_norm", 4)], (8, 1), [("rms_norm", 4), ("rms_norm_backward", 6)], (27, 4)),
    "rms_norm_by_hand": (
        [("rms_norm", 4)],
        (6, 1),
        [("rms_norm", 4), ("rms_norm_backward", 6)],
        (22, 6),
    ),
    "add_rms_norm": (
        [("add_rms_norm", 8)],
        (9, 3),
        [("add_rms_norm", 8), ("add_rms_norm_backward", 8)],
        (29, 6),
    ),
    "add_layer_norm": (
        [("add_layer_norm", 8)],
        (3, 3),
        [("add_layer_norm", 8), ("add_layer_norm_backward", 8)],
        (10, 7),
    ),
    "swiglu": ([("swiglu", 6)], (2, 1), [("swiglu", 6), ("swiglu_backward", 10)], (12, 4)),
    "geglu": ([("geglu", 6)], (2, 1), [("geglu", 6), ("geglu_backward", 10)], (5, 4)),
    "softmax": ([], (1, 1), [], (2, 2)),
    "softmax_by_hand": (
        [("softmax", 4)],
        (5, 1),
        [("softmax", 4), ("softmax_backward", 6)],
        (21, 2),
    ),
    "bias_dropout_residual": (
        [("bias_dropout_residual", 6)],
        (6, 1),
        [("bias_dropout_residual", 6), ("bias_dropout_residual_backward", 4)],
        (10, 6),
    ),
    "bias_dropout_residual_layer_norm": (
        [("bias_dropout_residual_layer_norm", 8)],
        (8, 3),
        [
            ("bias_dropout_residual_layer_norm", 8),
            ("bias_dropout_residual_layer_norm_backward", 10),
        ],
        (19, 11),
    ),
    "cross_entropy": ([("cross_entropy", 2)], (3, 1), [("cross_entropy_with_backward", 4)], (6, 3)),
    "linear_cross_entropy": (
        [("linear_cross_entropy", 2)],
        (4, 1),
        [("linear_cross_entropy_with_backward", 4)],
        (11, 4),
    ),
}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def half(x: Any) -> Any:
    return x.bfloat16() if x.is_floating_point() else x


def described(fn: Any, *args: Any) -> tuple[list[tuple[str, float]], tuple[int, int]]:
    """Kernels with bytes per element of the largest operand; operations before and after."""
    leaves = [x for x in optree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    largest = max(x.numel() for x in leaves)
    program = fuse(fn).lower(*args)
    kernels = [(str(use), use.bytes_after / largest) for use in program.kernels]
    return kernels, (len(trace(fn)(*args).calls), len(program.calls))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", EXPECTED)
def test_chains_become_kernels_that_move_as_few_bytes_as_can_be(name: str) -> None:
    import fusion
    from chains import CHAINS, Chain

    made = CHAINS[name](ELEMENTS)
    chain = Chain(made.name, made.fn, tuple(map(half, made.args)))
    cotangents = [half(c) for c in fusion.cotangents_of(chain)]
    forward, counts, both, both_counts = EXPECTED[name]
    for found, kernels, operations in (
        (described(chain.fn, *chain.args), forward, counts),
        (described(fusion.step_of(chain), chain.args, cotangents), both, both_counts),
    ):
        assert [kernel for kernel, _ in found[0]] == [kernel for kernel, _ in kernels]
        assert found[1] == operations
        for (kernel, moved), (_, floor) in zip(found[0], kernels, strict=True):
            assert floor <= moved <= floor + FEW, (kernel, moved)


def test_every_chain_is_there() -> None:
    from chains import CHAINS

    assert set(CHAINS) == set(EXPECTED)


def test_single_operations_are_fused_where_their_results_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No fewer bytes; but on a CPU they lie in memory that is used again."""
    import fusion
    from chains import CHAINS

    from torchard.kernels.execution import buffers

    monkeypatch.setattr(buffers, "LARGE", 1)
    chain = CHAINS["softmax"](ELEMENTS)
    cotangents = fusion.cotangents_of(chain)
    (kernels, _) = described(fusion.step_of(chain), chain.args, cotangents)
    assert kernels == [("softmax", 8), ("softmax_backward", 12)]
