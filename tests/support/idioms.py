"""Short functions as people write them, that random programs of tensors alone would not draw.

No ``linspace`` between tensors: torch has no derivative of it, and its ``func.grad`` says zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["IDIOMS"]

F64 = torch.float64
X = torch.tensor([[0.3, -1.2, 0.7], [1.1, 0.4, -0.6]], dtype=F64)
W = torch.tensor([[0.5, -0.3, 0.8, 0.1], [0.2, 0.9, -0.4, 0.6], [-0.7, 0.25, 0.35, -0.15]], dtype=F64)
IDS = torch.tensor([2, 0])
TWO, TWO32, TWO_INT = (torch.tensor(2.0, dtype=d) for d in (F64, torch.float32, torch.int64))

IDIOMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {}


def idiom(*inputs: torch.Tensor) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        IDIOMS[fn.__name__] = fn, inputs
        return fn

    return add


@idiom(X)
def a_number_added_to_a_sum(x: Any) -> Any:
    return (x.sum() + 1,)


@idiom(X)
def an_epsilon(x: Any) -> Any:
    return ((x.mean() + 1e-6).square(), x / (x.square().sum() + 1e-6))


@idiom(X)
def a_loss_from_zero(x: Any) -> Any:
    loss = 0
    for row in x:
        loss += row.square().sum()
    return (loss,)


@idiom(X)
def numbers_on_every_side(x: Any) -> Any:
    s = x.sum()
    return 1 - s, 2 / (s * s + 1), 2**s, (s * s + 1) ** 0.5, s // 2, s % 2, -1 + s * 3 - 2


@idiom(X, W)
def a_layer(x: Any, w: Any) -> Any:
    return (torch.tanh(x @ w).sum(),)


@idiom(X, IDS)
def one_hot(x: Any, ids: Any) -> Any:
    return (F.one_hot(ids, 3).to(x.dtype) * x,)


@idiom(X)
def one_hot_of_the_largest(x: Any) -> Any:
    return (F.one_hot(x.argmax(-1), num_classes=3).to(x.dtype) * x,)


@idiom(X)
def scalars_of_other_dtypes(x: Any) -> Any:
    return x * TWO32, x.sum() * TWO_INT, x.float() * TWO, x.sum().float() + TWO


@idiom(X, TWO)
def a_scalar_argument(x: Any, s: Any) -> Any:
    return x * s, torch.where(x > 0, x, s), x.clamp(max=s), (x * x + 1) ** s


@idiom(X)
def softmaxes(x: Any) -> Any:
    return torch.softmax(x, -1), x.log_softmax(0), torch.logsumexp(x, 1)


@idiom(X, W)
def one_input_unused(x: Any, w: Any) -> Any:
    return (x.sin(),)


@idiom(X, W)
def one_output_of_none(x: Any, w: Any) -> Any:
    return x.sin(), torch.ones(2, dtype=F64), w * 0 + 1


@idiom(X)
def transforms_of_fourier(x: Any) -> Any:
    return torch.fft.rfft(x).abs().square(), torch.fft.irfft(torch.fft.rfft(x) ** 2, n=3)


@idiom(X)
def a_complex_factor(x: Any) -> Any:
    return ((torch.fft.rfft(x) * (1 + 2j)).real,)


@idiom(X)
def a_norm_of_columns(x: Any) -> Any:
    return torch.linalg.matrix_norm(x, 1), torch.linalg.vector_norm(x, dim=1)


@idiom(X)
def a_short_time_transform(x: Any) -> Any:
    window = torch.ones(4, dtype=F64)
    return (torch.stft(x.repeat(1, 4), 4, window=window, return_complex=True).abs(),)


@idiom(X)
def zero_times_infinity(x: Any) -> Any:
    """What has no tangent is zero whatever it is multiplied with."""
    huge = torch.tensor([float("inf"), 1.0, float("nan")], dtype=F64)
    return ((huge * x.detach()).nan_to_num(0.0, 0.0, 0.0) + x * x,)


@idiom(X)
def statistics(x: Any) -> Any:
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt(), x.std(0), x.quantile(0.5, dim=-1)


@idiom(X)
def sorted_and_cut(x: Any) -> Any:
    value, place = x.sort(-1)
    return value[:, 1:], x.topk(2, -1).values, place, x.max(0).values


@idiom(X)
def rows_one_by_one(x: Any) -> Any:
    return (torch.stack([row.sum() * i for i, row in enumerate(x)]),)


@idiom(X, W)
def contracted(x: Any, w: Any) -> Any:
    return torch.einsum("bi,io,bi->o", x, w, x), torch.einsum("bi,bi->b", x, x)


@idiom(X)
def written(x: Any) -> Any:
    y = x.clone()
    y[1:] = 2 * x[:1]
    y[0, 0] = 1
    return (y * x,)


@idiom(X, IDS)
def a_cross_entropy(x: Any, ids: Any) -> Any:
    return F.cross_entropy(x, ids), F.nll_loss(x.log_softmax(-1), ids, reduction="sum")


@idiom(X)
def masked(x: Any) -> Any:
    return torch.where(x > 0, x.log(), x).nan_to_num(0.0), x.masked_fill(x > 0.5, 2.0), x.tril()


@idiom(X)
def norms(x: Any) -> Any:
    return F.layer_norm(x, (3,)), F.rms_norm(x, (3,)), F.normalize(x, dim=-1), x.norm()


@idiom(X)
def views(x: Any) -> Any:
    return x.T.reshape(2, 3), x.unfold(1, 2, 1), x.unflatten(1, (3, 1)).squeeze(-1), x.diagonal()


@idiom(X)
def stopped(x: Any) -> Any:
    return (x * x.detach() + x.sum().detach(),)


@idiom(X, W)
def attention(x: Any, w: Any) -> Any:
    q = (x @ w)[None, None]
    return (F.scaled_dot_product_attention(q, q, q),)


@idiom(X)
def an_image(x: Any) -> Any:
    image = x.reshape(1, 1, 2, 3)
    return F.conv2d(image, image[:, :, :1, :2]), F.avg_pool2d(image, 2), F.pad(image, (1, 1))


@idiom(X)
def repeated(x: Any) -> Any:
    return x.sum().expand(3), x.unsqueeze(0).expand(2, 2, 3), x.new_ones(()).expand(2)


@idiom(X)
def a_sum_alone(x: Any) -> Any:
    return ((x**3).sum(),)
