"""Sample calls of every operation with a factor rule."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from attention_kernels import SAMPLES as ATTENTION_ON_CUDA
from bag_samples import BAGS
from batched_samples import BATCHED
from block_samples import BLOCKS
from pointwise_samples import pointwise_samples
from sample_calls import F64, S, Sample, bools, holes, ids, onto_zeros, x

from torchard.functional.effects.grouped_products import GROUPED_MM, GROUPED_OUTER
from torchard.functional.programs.markers import (
    after,
    again,
    chosen,
    enter,
    first,
    goes_on,
    item,
    leave,
    listed,
    row,
    rows,
    total,
)

aten, prims = torch.ops.aten, torch.ops.prims
# Of groups: one is empty, and a row is in none.
BEGINS, ENDS = (torch.tensor(each, dtype=torch.int32) for each in ([0, 2, 2, 3], [2, 2, 3, 6]))
# In three blocks of five rows.
BLOCKS_BEGIN = torch.tensor([[0, 2, 2, 3], [0, 0, 0, 1], [0, 1, 2, 5]], dtype=torch.int32)
BLOCKS_END = torch.tensor([[2, 2, 3, 4], [0, 0, 1, 5], [1, 2, 5, 5]], dtype=torch.int32)


def twice(places: torch.Tensor) -> torch.Tensor:
    """Of each owner, the places in two blocks."""
    return places[:, None].expand(-1, 2, -1)


def backward_of_norm(full: bool = True, mask: list[bool] | None = None, inner: int = 1) -> Sample:
    a = x(3, 4, 5)
    shape = a.shape[3 - inner :]
    w = x(*shape) if full else None
    _, mean, scale = aten.native_layer_norm(a, shape, w, w, 1e-5)
    return S(
        *(x(3, 4, 5), a, shape, mean, scale, w, w, mask or [True, full, full]), tolerance=1e-13
    )


def likelihood(*shape: int, how: int = 1, weight: bool = False, ignored: int = -100) -> Sample:
    """A loss of [c], [n, c] or [n, c, h, w]."""
    at = min(len(shape) - 1, 1)
    target = ids(shape[at], *shape[:at], *shape[at + 1 :])
    if ignored == -100 and len(shape) > 1:
        target.view(-1)[0] = -100
    w = x(shape[at], low=1) if weight else None
    return S(x(*shape), target, w, how, ignored, tolerance=1e-14)


def likelihood_backward(*shape: int, how: int = 1, **options: Any) -> Sample:
    forward = likelihood(*shape, how=how, **options)
    op = aten.nll_loss2d_forward if len(shape) == 4 else aten.nll_loss_forward
    loss, total = op(*forward.args)
    return S(x(*loss.shape), *forward.args, total, tolerance=1e-14)


def attention(
    heads: int = 4, groups: int = 4, mask: tuple[int, ...] | None = None, causal: bool = False
) -> Sample:
    """[batch, heads, queries, width] on [batch, groups, keys, width]; some keys are out of sight."""
    q, k, v = x(2, heads, 5, 3), x(2, groups, 6, 3), x(2, groups, 6, 3)
    bias = None if mask is None else x(*mask).masked_fill(bools(*mask), -10.0)
    return S(q, k, v, 0.0, causal, attn_mask=bias, tolerance=1e-13)


def attention_backward(**options: Any) -> Sample:
    forward = attention(**options)
    op = aten._scaled_dot_product_flash_attention_for_cpu
    out, logsumexp = op(*forward.args, **forward.kwargs)
    q, k, v, *rest = forward.args
    args = (x(*out.shape), q, k, v, out, logsumexp, *rest)
    return S(*args, **forward.kwargs, tolerance=1e-12)


DISTINCT = (7 * torch.arange(20) % 20).reshape(5, 4)
ATTENTION: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"heads": 6, "groups": 3},
    {"heads": 6, "groups": 2, "causal": True},
    {"mask": (5, 6)},
    {"mask": (2, 1, 5, 6)},
    {"heads": 4, "groups": 2, "mask": (1, 4, 1, 6)},
]
def convolution(
    image: tuple[int, ...] = (7,), groups: int = 1, bias: bool = True, transposed: bool = False
) -> Sample:
    """Three images of four channels to six, or of six to four."""
    i, o, n = 4, 6, len(image)
    weight = x(i, o // groups, *[3] * n) if transposed else x(o, i // groups, *[3] * n)
    how = ([2] * n, [1] * n, [1] * n, transposed, [0] * n, groups)
    return S(x(3, i, *image), weight, x(o) if bias else None, *how, tolerance=1e-13)


def convolution_backward(mask: tuple[bool, bool, bool] = (True,) * 3, **options: Any) -> Sample:
    forward = convolution(**options)
    out = aten.convolution(*forward.args)
    image, weight, _, *how = forward.args
    return S(x(*out.shape), image, weight, [out.shape[1]], *how, mask, tolerance=1e-12)


CONVOLUTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"image": (5, 4), "groups": 2},
    {"groups": 2, "bias": False},
    {"transposed": True},
    {"image": (4, 3), "transposed": True, "groups": 2, "bias": False},
]
def group_norm(groups: int = 3, weight: bool = True, image: tuple[int, ...] = (5,)) -> Sample:
    n, c = 4, 6
    area = torch.Size(image).numel()
    w = x(c) if weight else None
    return S(x(n, c, *image), w, w, n, c, area, groups, 1e-5, tolerance=1e-13)


def group_norm_backward(mask: tuple[bool, bool, bool] = (True,) * 3, **options: Any) -> Sample:
    a, w, _, *sizes, eps = group_norm(**options).args
    _, mean, scale = aten.native_group_norm(a, w, w, *sizes, eps)
    return S(x(*a.shape), a, mean, scale, w, *sizes, mask, tolerance=1e-12)


def batch_norm(
    image: tuple[int, ...] = (5,), weight: bool = True, running: bool = True, training: bool = True
) -> Sample:
    channels = 4
    w = x(channels) if weight else None
    stats = (x(channels), x(channels, low=1)) if running else (None, None)
    return S(x(6, channels, *image), w, w, *stats, training, 1.0, 0.5, tolerance=1e-13)


def batch_norm_backward(mask: tuple[bool, bool, bool] = (True,) * 3, **options: Any) -> Sample:
    a, w, _, *stats, training, momentum, eps = batch_norm(**options).args
    _, *saved = aten.native_batch_norm(a, w, w, *stats, training, momentum, eps)
    saved = saved if training else [None, None]
    grad = x(*a.shape)
    return S(grad, a, w, *stats, *saved, training, eps, mask, tolerance=1e-12)


HOWS = [
    dict(how=0),
    dict(how=1),
    dict(how=2),
    dict(how=1, weight=True),
    dict(how=2, weight=True),
    dict(how=1, ignored=1),
]
SOFT = S(x(4, 5, 3), 1, False, tolerance=1e-14)
SOFTS = [SOFT, S(x(5), 0, False, tolerance=1e-14), S(x(4, 3), -1, False, tolerance=1e-14)]
SOFT_BACK = [S(x(4, 5), x(4, 5), d, F64, tolerance=1e-14) for d in (1, -1)]
DIM = [S(x(5, 4, 2), [1]), S(x(5, 4), [0, -1], True), S(x(5, 4), [-2]), S(x(5, 4), [])]
EXTREME = [
    *DIM,
    S(holes(5, 4), [0]),
    S(holes(4, 5), [0, 1], True),
    S(bools(5, 4), [0]),
    S(x(5, 3, dtype=torch.int64), [0]),
]
ONE_DIM = [S(x(5, 4), 0), S(x(5, 4), -1, True)]
ALL = [S(x(5, 4)), S(x(7)), S(x())]
LOGICAL = [S(bools(5, 4)), S(x(3))]
VAR = [
    S(x(5, 4), [1], correction=1, tolerance=1e-14),
    S(x(5, 4), None, correction=0, tolerance=1e-14),
    S(x(5, 4), [0], keepdim=True, tolerance=1e-14),
]
LIKE = [S(x(5, 4)), S(x())]
VIEWS = [
    S(x(6, 4), [24]),
    S(x(24), [6, 4]),
    S(x(2, 6, 3), [12, 3]),
    S(x(6, 4), [8, 3]),
    S(x(5, 1, 3), [5, 3]),
    S(x(4, 3), [2, -1]),
    S(x(0, 3), [3, 0]),
    S(x(1), []),
]
SQUEEZE = x(1, 5, 1, 4)
SIZES = [S([5, 4], dtype=F64), S([], dtype=F64)]
KEYS = torch.tensor([[3, 5], [4, 6], [7, 1]], dtype=torch.int64)
PAIR = [S(x(5, 4), x(5, 4)), S(x(5, 4), x(4)), S(x(5, 1), x(1, 4)), S(x(4), 2)]

SAMPLES: dict[Any, list[Sample]] = {
    aten.mm.default: [S(x(5, 4), x(4, 3)), S(x(1, 2), x(2, 5))],
    aten.bmm.default: [S(x(3, 5, 4), x(3, 4, 2))],
    aten.mv.default: [S(x(5, 4), x(4))],
    aten.dot.default: [S(x(5), x(5))],
    aten.vdot.default: [S(x(5), x(5))],
    aten.addmm.default: [
        S(x(3), x(5, 4), x(4, 3)),
        S(x(5, 1), x(5, 4), x(4, 3)),
        S(x(), x(5, 4), x(4, 3)),
        S(x(5, 3), x(5, 4), x(4, 3), beta=2, alpha=3),
        S(x(3, 3), x(3, 2), x(2, 3)),
        S(x(1), x(5, 4), x(4, 3)),
    ],
    aten.baddbmm.default: [S(x(3, 5, 2), x(3, 5, 4), x(3, 4, 2)), S(x(2), x(3, 5, 4), x(3, 4, 2))],
    aten.full.default: [S([5, 4], 7.0, dtype=F64), S([], 1.0)],
    aten.zeros.default: SIZES,
    aten.ones.default: SIZES,
    aten.empty.memory_format: [S([5, 4], dtype=F64, values=False)],
    aten.scalar_tensor.default: [S(3.0)],
    aten.new_zeros.default: [S(x(3), [5, 4]), S(x(2, 2), [])],
    aten.new_ones.default: [S(x(3), [5, 4])],
    aten.new_full.default: [S(x(3), [5, 4], 2.0)],
    aten.new_empty.default: [S(x(3), [5, 4], values=False)],
    aten.arange.default: [S(5), S(5.5, dtype=F64)],
    aten.arange.start: [S(2, 7), S(0.5, 5.0, dtype=F64)],
    aten.arange.start_step: [
        S(9, -2, -2),
        S(0, 9, 2, dtype=torch.int32),
        S(0.0, 1.0, 0.3, dtype=F64),
        S(1, 10, 3),
    ],
    torch.ops.torchard.random_bits.default: [
        S(KEYS[0], [5, 4], [0, 0], [5, 4]),
        S(KEYS, [5], [1], [4]),
    ],
    aten.embedding.default: [
        S(x(5, 3), ids(5, 4, 2)),
        S(x(5, 3), ids(5, 3), 2),
        S(x(5, 3), ids(5)),
    ],
    aten.embedding_dense_backward.default: [
        S(x(4, 2, 3), ids(5, 4, 2), 5, -1, False),
        S(x(7, 3), ids(5, 7), 5, 3, False),
        S(x(7, 3), ids(5, 7), 5, 0, False),
        S(x(3), ids(5), 5, -1, False),
    ],
    GROUPED_MM: [
        S(x(7, 3), x(4, 3, 2), BEGINS, ENDS, 4),
        S(x(15, 3), x(4, 3, 2), BLOCKS_BEGIN, BLOCKS_END, 4),
        S(x(2, 7, 3), x(2, 2, 3, 2), BEGINS.reshape(2, 2), ENDS.reshape(2, 2), 4),
        S(x(3, 10, 3), x(3, 4, 3, 2), twice(BLOCKS_BEGIN), twice(BLOCKS_END), 12),
    ],
    GROUPED_OUTER: [
        S(x(7, 3), x(7, 2), BEGINS, ENDS, 4),
        S(x(15, 3), x(15, 2), BLOCKS_BEGIN, BLOCKS_END, 4),
        S(x(2, 7, 3), x(2, 7, 2), BEGINS.reshape(2, 2), ENDS.reshape(2, 2), 4),
    ],
    aten.gather.default: [
        S(x(5, 4), 0, ids(5, 3, 4)),
        S(x(5, 4), -1, ids(4, 5, 2)),
        S(x(5, 4), 1, ids(4, 3, 2)),
        S(x(5), 0, ids(5, 7)),
        S(holes(5, 4), 0, ids(5, 3, 4)),
        S(x(), 0, ids(1)),
        S(x(5), 0, ids(5, 2, 0)),
    ],
    aten.scatter.value: [S(x(5, 4), 0, ids(5, 1, 4), 9.0), S(x(5, 4), 1, ids(4, 5, 1), 9.0)],
    aten.scatter.src: [
        S(x(5, 4), 0, ids(5, 1, 4), x(1, 4)),
        S(x(5, 4), 1, ids(4, 3, 1), x(3, 1)),
        S(x(5, 4), 0, ids(5, 1, 4), x(3, 4)),
    ],
    aten.scatter_add.default: [
        S(x(5, 4), 0, ids(5, 0), x(0)),
        S(x(5, 4), 0, ids(5, 7, 4), x(7, 4)),
        S(x(5, 4), 1, ids(4, 5, 3), x(5, 3)),
        onto_zeros(x(5, 4), 0, ids(5, 7, 4), x(7, 4)),
        onto_zeros(x(5, 4), -1, ids(4, 3, 6), x(3, 6)),
    ],
    aten.scatter_reduce.two: [
        S(x(5, 4), 0, ids(5, 7, 4), x(7, 4), "sum"),
        S(x(5, 4), 1, ids(4, 5, 3), x(5, 3), "mean"),
        S(x(5, 4), -1, ids(4, 3, 6), x(3, 6), "amax", include_self=False),
    ],
    aten.index_select.default: [
        S(x(5, 4), 0, ids(5, 7)),
        S(x(5, 4), -1, ids(4, 3)),
        S(x(5, 4), 1, ids(4)),
    ],
    aten.index_add.default: [S(x(5, 4), 0, ids(5, 7), x(7, 4)), S(x(5, 4), -1, ids(4, 3), x(5, 3)),
                             S(x(5), 0, ids(5, 7), x(7), alpha=2),
                             onto_zeros(x(5, 4), 1, ids(4, 6), x(5, 6), alpha=2)],
    aten.index.Tensor: [
        S(x(5, 4), [ids(5, 7)]),
        S(x(5, 4), [ids(5, 3) - 5]),
        S(x(5, 4, 3), [None, ids(4, 2, 3)]),
        S(x(5, 4, 3), [ids(5, 2), None, ids(3, 2)]),
        S(x(5, 4, 3), [None, ids(4, 2, 5), ids(3, 2, 5) - 3]),
        S(x(5, 4), [ids(5, 6), ids(4, 6)]),
        S(x(5, 4), [bools(5)]),
        S(x(5, 4), [ids(5, 3, 1), ids(4, 2)]),
        S(x(5, 4), [ids(5)]),
    ],
    aten.index_put.default: [
        S(x(5, 4), [ids(5, 7)], x(7, 4), True),
        S(x(5, 4), [torch.tensor([4, -5, 2])], x(3, 4)),
        S(x(5, 4), [None, ids(4, 6)], x(5, 6), True),
        S(x(5, 4), [ids(5, 7)], x(4), True),
        S(x(5, 4), [ids(5, 6), ids(4, 6)], x(6), True),
        S(x(5, 4, 3), [None, ids(4, 2, 5), ids(3, 2, 5) - 3], x(5, 2, 5), True),
        onto_zeros(x(5, 4), [ids(5, 7)], x(7, 4), True),
        onto_zeros(x(5, 4), [ids(5, 7)], x(4), True),
        onto_zeros(x(5, 4), [ids(5, 6), ids(4, 6)], x(6), True),
        onto_zeros(x(5, 4, 3), [ids(5, 2, 4), None, ids(3, 2, 1) - 3], x(2, 4, 4), True),
        onto_zeros(x(5, 4, 3), [None, ids(4, 2, 5), ids(3, 2, 5) - 3], x(5, 2, 5), True),
    ],
    aten._scaled_dot_product_flash_attention_for_cpu.default: [attention(**o) for o in ATTENTION],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [
        attention_backward(**o) for o in ATTENTION
    ],
    **ATTENTION_ON_CUDA,
    aten.convolution.default: [convolution(**o) for o in CONVOLUTIONS],
    aten.convolution_backward.default: [
        *(convolution_backward(**o) for o in CONVOLUTIONS),
        convolution_backward((False, True, False)),
        convolution_backward((True, False, True), groups=2),
    ],
    aten.native_group_norm.default: [
        group_norm(),
        group_norm(2, weight=False),
        group_norm(6, image=(2, 3)),
        group_norm(1, image=()),
    ],
    aten.native_group_norm_backward.default: [
        group_norm_backward(),
        group_norm_backward((True, False, False), weight=False),
        group_norm_backward((False, True, True), groups=2, image=(2, 3)),
    ],
    aten._native_batch_norm_legit_functional.default: [
        batch_norm(),
        batch_norm((2, 3), weight=False),
        batch_norm(()),
    ],
    aten.native_batch_norm.default: [
        batch_norm(running=False),
        batch_norm((2, 3), weight=False, running=False),
        batch_norm(training=False),
        batch_norm((), weight=False, training=False),
    ],
    aten.native_batch_norm_backward.default: [
        batch_norm_backward(running=False),
        batch_norm_backward((True, False, False), weight=False, running=False, image=()),
        batch_norm_backward((False, True, True), image=(2, 3), running=False),
        batch_norm_backward(training=False),
        batch_norm_backward((True, False, False), weight=False, training=False),
        batch_norm_backward((False, True, True), image=(2, 3), training=False),
    ],
    aten.cummax.default: [S(x(5, 4), 0), S(x(5, 4), -1)],
    aten.cummin.default: [S(x(5, 4), 0)],
    aten.sort.default: [S(DISTINCT, 0)],
    aten.sort.stable: [S(x(5, 4), stable=True, dim=0, descending=True), S(x(5, 4), stable=True)],
    aten.topk.default: [S(DISTINCT, 2, 0)],
    aten.view.default: VIEWS,
    aten._unsafe_view.default: VIEWS,
    aten.reshape.default: VIEWS,
    aten.as_strided.default: [S(x(5, 4), [3, 4], [1, 3], 2), S(x(5, 4).t(), [3, 4], [1, 3])],
    aten.squeeze.default: [S(SQUEEZE), S(x(1, 1))],
    aten.squeeze.dim: [S(SQUEEZE, 0), S(SQUEEZE, -2), S(SQUEEZE, 1)],
    aten.squeeze.dims: [S(SQUEEZE, [0, 2]), S(SQUEEZE, [0, 1])],
    aten.unsqueeze.default: [S(x(5, 4), 1), S(x(5, 4), -1), S(x(), 0)],
    aten.permute.default: [S(x(5, 4, 3), [2, 0, 1]), S(x(5, 4), [-1, -2]), S(x(), [])],
    aten.transpose.int: [S(x(5, 4, 3), 0, -1), S(x(5), 0, 0)],
    aten.t.default: [S(x(5, 4)), S(x(5))],
    aten.expand.default: [
        S(x(5, 1), [5, 4]),
        S(x(4), [5, 4]),
        S(x(1, 4), [3, -1, 4]),
        S(x(), [5]),
        S(x(1), [1]),
        S(x(5), [5]),
    ],
    aten.slice.Tensor: [
        S(x(5, 4), 0, 1, 3),
        S(x(5, 4), -1, 0, 4),
        S(x(5, 4), 0, -5, 9),
        S(x(5, 4), 1, 0, 4, 2),
        S(x(5, 4)),
        S(x(5, 4), 0, 3, 3),
        S(x(12, 4), 0, 4, 8),
        S(x(10, 4), 0, -5, 20),
    ],
    enter: [S(x(5, 4))],
    again: [S(x(5, 4), x(5, 4))],
    goes_on: [S(torch.tensor(True))],
    first: [S()],
    after: [S(x(5, 4), torch.tensor(False), False)],
    chosen: [
        S(torch.tensor(1), x(5, 4), x(5, 4)),
        S(torch.tensor(0), x(4), x(4), x(4)),
    ],
    row: [S(x(3, 5, 4))],
    listed: [S([x(5, 4), x(5, 4), x(5, 4)])],
    item: [S(x(3, 5, 4), 1)],
    leave: [S(x(5, 4))],
    rows: [S(x(5, 4), 3)],
    total: [S(x(5, 4))],
    aten.select.int: [S(x(5, 4), 0, -1), S(x(5, 4), -1, 2)],
    aten.split.Tensor: [
        S(x(10, 4), 5),
        S(x(5, 4), 2),
        S(x(5, 4), 2, -1),
        S(x(5, 4), 5),
        S(x(5, 4), 9, 1),
    ],
    aten.split_with_sizes.default: [
        S(x(5, 4), [2, 3]),
        S(x(5, 4), [1, 3], -1),
        S(x(5, 4), [4], 1),
        S(x(5, 4), [0, 5]),
        S(x(15, 4), [5, 10]),
    ],
    aten.unbind.int: [S(x(3, 4)), S(x(3, 2), -1)],
    aten.flip.default: [S(x(5, 4), [0]), S(x(5, 4), [-1, 0]), S(x(5, 4), [])],
    aten.roll.default: [S(x(5, 4), [2], [0]), S(x(5, 4), [1, 1], [0, -1]), S(x(5, 4), [3])],
    aten.slice_backward.default: [
        S(x(2, 4), [5, 4], 0, 1, 3, 1),
        S(x(5, 2), [5, 4], -1, 0, 4, 2),
        S(x(5, 4), [5, 4], 0, 0, 5, 1),
        S(x(5, 4), [15, 4], 0, 5, 10, 1),
    ],
    aten.select_backward.default: [S(x(4), [5, 4], 0, 2), S(x(5), [5, 4], -1, -1)],
    aten.slice_scatter.default: [S(x(5, 4), x(2, 4), 0, 1, 3), S(x(5, 4), x(5, 2), -1, 0, 4, 2)],
    aten.select_scatter.default: [S(x(5, 4), x(4), 0, 1), S(x(5, 4), x(5), -1, 0)],
    aten.cat.default: [
        S([x(2, 4), x(3, 4)]),
        S([x(5, 4), x(5, 1), x(5, 2)], -1),
        S([x(0), x(5)]),
        S([x(0), x(5, 4)]),
        S([x(5, 4)], 1),
        S([x(5, 4), x(10, 4)]),
    ],
    aten.stack.default: [S([x(5, 4), x(5, 4)]), S([x(5), x(5), x(5)], -1)],
    aten.constant_pad_nd.default: [
        S(x(5, 4), [1, 2]),
        S(x(5, 4), [0, 0, 2, 0], 7.0),
        S(x(5, 4), [-1, 1, 0, 0]),
    ],
    aten.tril.default: [S(x(5, 4)), S(x(3, 5, 4), 1)],
    aten.triu.default: [S(x(5, 4)), S(x(3, 5, 4), -1)],
    aten._softmax.default: SOFTS,
    aten._log_softmax.default: SOFTS,
    aten._softmax_backward_data.default: SOFT_BACK,
    aten._log_softmax_backward_data.default: SOFT_BACK,
    aten.native_layer_norm.default: [
        S(x(3, 4, 5), [5], x(5), x(5), 1e-5, tolerance=1e-13),
        S(x(3, 4, 5), [4, 5], None, None, 1e-5, tolerance=1e-13),
        S(x(3, 5), [5], x(5), None, 1e-5, tolerance=1e-13),
    ],
    aten.native_layer_norm_backward.default: [
        backward_of_norm(),
        backward_of_norm(full=False),
        backward_of_norm(mask=[False, True, True]),
        backward_of_norm(inner=2),
        backward_of_norm(inner=3),
    ],
    aten.nll_loss_forward.default: [likelihood(5, 4, **h) for h in HOWS] + [likelihood(4)],
    aten.nll_loss2d_forward.default: [likelihood(2, 3, 2, 4, **h) for h in HOWS],
    aten.nll_loss_backward.default: [likelihood_backward(5, 4, **h) for h in HOWS]
    + [likelihood_backward(4)],
    aten.nll_loss2d_backward.default: [likelihood_backward(2, 3, 2, 4, **h) for h in HOWS],
    aten.add.Tensor: [*PAIR, S(x(5, 4), x(5, 4), alpha=3), S(x(5), 0), S(bools(5), bools(5))],
    aten.sub.Tensor: [*PAIR, S(x(5, 4), x(4), alpha=2), S(x(5), 0)],
    aten.mul.Tensor: [*PAIR, S(x(), x(5)), S(bools(5), x(5))],
    aten.mul.Scalar: [S(x(5, 4), 3)],
    aten.div.Tensor: [
        S(x(5, 4), 2),
        S(x(5, 4), torch.tensor(4.0, dtype=F64)),
        S(x(5, 4), torch.tensor([1.0, 2, 4, 8], dtype=F64)),
    ],
    aten.div.Scalar: [S(x(5, 4), 2)],
    aten.neg.default: LIKE,
    aten.real.default: LIKE,
    aten.where.self: [
        S(bools(5, 4), x(5, 4), x(5, 4)),
        S(bools(5, 1), x(4), x()),
        S(bools(4), holes(5, 4), x(5, 4)),
    ],
    aten.masked_fill.Scalar: [
        S(x(5, 4), bools(4), 0),
        S(x(5, 4), bools(5, 4), 3.0),
        S(x(4), bools(5, 4), 0),
    ],
    aten._to_copy.default: [
        S(x(5, 4), dtype=torch.float32),
        S(x(5, 4), dtype=torch.int64),
        S(x(5, 4, dtype=torch.float32), dtype=F64),
        S(bools(5), dtype=F64),
    ],
    prims.convert_element_type.default: [
        S(x(5, 4), torch.float32),
        S(x(5, 4, dtype=torch.float32), F64),
    ],
    aten.clone.default: LIKE,
    aten.detach.default: LIKE,
    aten.alias.default: LIKE,
    aten.lift_fresh_copy.default: LIKE,
    aten.zeros_like.default: LIKE,
    aten.ones_like.default: LIKE,
    aten.full_like.default: [S(x(5, 4), 3.0)],
    aten.empty_like.default: [S(x(5, 4), values=False)],
    aten.sum.dim_IntList: [
        *DIM,
        S(x(5, 4), None),
        S(bools(5, 4), [0]),
        S(x(5, 4), [1], dtype=torch.float32),
    ],
    aten.sum.default: [*ALL, S(bools(5, 4))],
    aten.amax.default: EXTREME,
    aten.amin.default: EXTREME,
    aten.max.default: [*ALL, S(holes(5, 4)), S(bools(5))],
    aten.min.default: [*ALL, S(holes(5, 4)), S(x(5, dtype=torch.int32))],
    aten.mean.default: ALL,
    aten.prod.default: ALL,
    aten.any.default: LOGICAL,
    aten.all.default: LOGICAL,
    aten.mean.dim: [*DIM, S(x(5, 4), None)],
    aten.any.dim: ONE_DIM,
    aten.all.dim: ONE_DIM,
    aten.prod.dim_int: ONE_DIM,
    aten.argmax.default: [*ONE_DIM, S(x(5, 4)), S(holes(5, 4), 0), S(holes(4, 5)), S(ids(3, 5, 4), 0)],
    aten.argmin.default: [*ONE_DIM, S(x(5, 4))],
    aten.logsumexp.default: [
        S(x(5, 4), [0], tolerance=1e-14),
        S(x(5, 4), [1], True, tolerance=1e-14),
    ],
    aten.linalg_vector_norm.default: [
        S(x(5, 4)),
        S(x(5, 4), 2, [0], tolerance=1e-14),
        S(x(5, 4), 1, [1], True, tolerance=1e-14),
        S(x(5, 4), 3, tolerance=1e-14),
        S(x(5, 4), float("inf"), [1]),
        S(x(5, 4), 0),
    ],
    aten.max.dim: [*ONE_DIM, S(holes(5, 4), 0, True), S(bools(5, 4), 0), S(ids(3, 5, 4), -2)],
    aten.min.dim: ONE_DIM,
    aten.cumsum.default: [S(x(5, 4), 0), S(x(5, 4), -1), S(x(), 0)],
    aten.cumprod.default: [S(x(5, 4), 0), S(x(5, 4), -1)],
    aten.var.correction: VAR,
    aten.masked_fill.Tensor: [S(x(5, 4), bools(4), x()), S(x(4), bools(5, 4), x())],
    aten._prelu_kernel.default: [S(x(5, 4), x(1, 4))],
    aten.clamp.default: [S(x(5, 4), -1, 2), S(x(5, 4), None, 2)],
    aten.clip.default: [S(x(5, 4), -1, 2)],
    aten.clamp.Tensor: [S(x(5, 4), x(4), x(5, 1)), S(x(5, 4), None, x(5, 4))],
    aten.clip.Tensor: [S(x(5, 4), x(4), x(5, 1))],
    aten.div.Tensor_mode: [S(x(5, 4), x(4, low=1), rounding_mode="floor")],
    aten.div.Scalar_mode: [S(x(5, 4), 2, rounding_mode="trunc")],
    aten.logit_backward.default: [S(x(5, 4), torch.full((5, 4), 0.5, dtype=F64))],
    aten.std.correction: VAR,
    aten.var_mean.correction: VAR,
}
SAMPLES |= BAGS | BATCHED | BLOCKS


@functools.cache
def called(target: Any) -> str:
    """The operation in the name of a test: the same in every process."""
    return target.__name__ if isinstance(target, types.FunctionType) else str(target)


def samples(target: Any) -> list[Sample]:
    """The sample calls of an operation."""
    if target in SAMPLES:
        return SAMPLES[target]
    return [s for s in pointwise_samples(target) if _callable(target, s)]


def _callable(target: Any, sample: Sample) -> bool:
    try:
        target(*sample.args, **sample.kwargs)
    except Exception:  # a made-up call need not fit; test_rules lists those that have none at all
        return False
    return True
