"""Kernels that torch has, or calls otherwise, on other devices than a CPU: what their programs are."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import jit, trace
from torchard.functional.compiling.rounded_constants import round_numbers
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten

ATTENTION = {
    torch.float32: aten._scaled_dot_product_efficient_attention,
    torch.bfloat16: aten._scaled_dot_product_cudnn_attention,
}


@pytest.mark.parametrize("dtype", ATTENTION)
def test_attention_keeps_what_its_backward_reads(dtype: torch.dtype) -> None:
    """Selected for operands that do not require grad, the kernel leaves out the log-sum-exp."""
    kernel = ATTENTION[dtype]

    def attend(q: Tensor) -> Any:
        return kernel(q, q, q, None, False)[0].sum()

    x = torch.zeros(2, 4, 8, 16, dtype=dtype)
    for program in (trace(attend)(x), jit(attend).lower_joint(x)):
        (node,) = program.graph.find_nodes(op="call_function", target=kernel.default)
        items = {item.args[1]: VAL.of(item) for item in node.users}
        assert VAL.of(node)[1].numel() >= 2 * 4 * 8 and node.args[4] is True
        assert all(items[i].shape == VAL.of(node)[i].shape for i in items)


@pytest.mark.parametrize("training", [False, True])
def test_batch_norm_in_evaluation_hands_its_backward_statistics_of_no_elements(
    training: bool,
) -> None:
    def loss(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Any:
        return (
            F.batch_norm(x, mean.detach().clone(), var.detach().clone(), w, w, training)
            .square()
            .sum()
        )

    for device, none in (("cpu", True), ("meta", training)):
        x, v = torch.zeros(4, 3, 5, device=device), torch.zeros(3, device=device)
        graph = jit(loss).lower_joint(x, v, v, v).graph
        (node,) = graph.find_nodes(
            op="call_function", target=aten.native_batch_norm_backward.default
        )
        read, unread = (node.args[5:7], node.args[3:5])[:: 1 if training else -1]
        assert all(value is not None for value in read)
        assert [value is None for value in unread] == [none, none]
        assert none or [VAL.of(value).numel() for value in unread] == [0, 0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_a_cpu_rounds_numbers(device: str) -> None:
    x = torch.zeros(4, dtype=torch.bfloat16, device=device)
    graph = trace(lambda x: x + 0.3)(x).graph
    before = str(graph)
    round_numbers(graph)
    assert (str(graph) == before) is (device != "cpu")


def test_indices_are_where_the_indexed_is() -> None:
    """On CUDA devices torch's kernels alone take indices of a CPU, such as those of a list."""

    def lookups(x: Tensor, ids: Tensor) -> Any:
        y = x * 2
        y[[0, -1]] = 1
        return y[ids] + y[[1, 2]].sum()

    x = torch.zeros(4, 3, device="meta")
    graph = jit(lookups).lower_joint(x, torch.tensor([2, 1])).graph
    picks = [n for n in graph.nodes if n.target in (aten.index.Tensor, aten.index_put.default)]
    operands = [i for n in picks for i in n.all_input_nodes]
    assert len(picks) > 3 and {VAL.of(i).device.type for i in operands} == {"meta"}


RMS_NORM = """
import torch
import torch.nn.functional as F
from torchard import jit

def text():
    def norm(x, w):
        return F.rms_norm(x, (8,), w).sum() + torch.rms_norm(x, (8,), w, 1e-3).sum()
    return str(jit(norm).lower_joint(torch.ones(4, 8), torch.ones(8)))

before = text()
library = torch.library.Library("aten", "IMPL")
library.impl("_fused_rms_norm", lambda x, *_: (x * 2, x[..., :1]), "CPU")
assert F.rms_norm(torch.ones(1, 8), (8,)).max() == 2
assert "rsqrt" in before and text() == before
"""


def test_rms_norm_is_the_same_program_where_it_has_a_kernel() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", RMS_NORM], check=True)
