"""Replacements for functions of torch.

Some read values, but only to validate them. ``embedding_bag`` has a kernel for bags of any sizes; bags
that are rows of a matrix are lookups and a sum, which can be split and sliced in more ways. ``rms_norm``
has a kernel on CUDA devices only: programs are to be the same on all. Under vmap, torch adds offsets to
the indices of mapped tables, after which no index belongs to its example, and runs ``index_add`` example
by example; selecting and scattering rows keep examples together.

A replacement runs as the user's own code would, so that its ``detach`` stops gradients. It returns
NotImplemented for calls that it leaves to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from torchard.functional.torch_internals.functorch_levels import batch_dims
from torchard.functional.torch_internals.modes import no_function_modes
from torchard.functional.torch_internals.operators import Absent, aten

__all__ = ["COMPOSED"]


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch.cov, without the check that weights are positive."""
    if input.ndim > 2:
        raise RuntimeError(f"cov(): expected input to have two or fewer dimensions but got {input.ndim}")
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    weights = _product(fweights, aweights)
    if weights is None:
        count: Any = rows.shape[1]
        mean, factor = rows.mean(1, keepdim=True), max(count - correction, 0)
        centred = rows - mean
        scaled = centred
    else:
        total = weights.sum()
        mean = (rows * weights).sum(1, keepdim=True) / total
        factor = _norm_factor(total, weights, aweights, correction)
        centred = rows - mean
        scaled = centred * weights
    covariance: torch.Tensor = scaled @ centred.mT.conj() / factor
    return covariance.squeeze()


def _product(fweights: torch.Tensor | None, aweights: torch.Tensor | None) -> torch.Tensor | None:
    if fweights is None or aweights is None:
        return aweights if fweights is None else fweights
    return fweights * aweights


def _norm_factor(
    total: torch.Tensor, weights: torch.Tensor, aweights: torch.Tensor | None, correction: int
) -> torch.Tensor:
    """The divisor of the sum of products, at least zero."""
    if aweights is None or correction == 0:
        return (total - correction).clamp(min=0)
    return (total - correction * (weights * aweights).sum() / total).clamp(min=0)


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    """torch.corrcoef: covariances divided by standard deviations."""
    covariance = _cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt()
    scaled = covariance / deviation[:, None] / deviation[None, :]
    if scaled.is_complex():
        return torch.complex(scaled.real.clamp(-1, 1), scaled.imag.clamp(-1, 1))
    return scaled.clamp(-1, 1)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.gaussian_nll_loss without its check for negative variances: they are clamped to eps."""
    if not isinstance(var, torch.Tensor):
        var = input.new_full(input.shape, var)
    elif var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif not _one_dim_is_1(var.shape, input.shape):
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    # Clamped variances keep their gradient: torch clamps them under no_grad.
    var = torch.where(var < eps, var - var.detach() + eps, var)
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _one_dim_is_1(shape: torch.Size, of: torch.Size) -> bool:
    """Whether the shapes are equal, except for at most one dim, which is 1."""
    if len(shape) != len(of):
        return False
    other = [n for n, m in zip(shape, of, strict=True) if n != m]
    return not other or other == [1]


def _embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """F.embedding_bag; bags that are rows, and summed or averaged, without its kernel."""
    as_rows = _ids_in_rows(input) and offsets is None and mode in ("sum", "mean")
    if not as_rows or max_norm is not None or scale_grad_by_freq or sparse or include_last_offset:
        return NotImplemented
    if per_sample_weights is not None and not _weights_fit(per_sample_weights, input, weight, mode):
        return NotImplemented
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    padding = input == padding_idx % weight.shape[0]
    total = rows.masked_fill(padding[..., None], 0).sum(1)
    return total if mode == "sum" else total / (~padding).sum(1, keepdim=True).clamp(min=1)


def _embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """F.embedding; rows of a table that vmap maps are selected."""
    special = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
    if special or not _are_tensors(input, weight) or not batch_dims(weight) or weight.ndim != 2:
        return NotImplemented
    fits = input.dtype in (torch.int32, torch.int64) and weight.dtype in _SCATTERED
    if not (fits and input.numel() and weight.shape[0]):
        return NotImplemented
    rows = input.long().reshape(-1, 1).expand(-1, weight.shape[1])
    return weight.gather(0, rows).reshape(*input.shape, weight.shape[1])


def _index_add(
    input: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    *,
    alpha: Any = 1,
    **out: torch.Tensor,
) -> Any:
    """torch.index_add; of what vmap maps, by an operation that keeps examples together."""
    return NotImplemented if out else _added(input, dim, index, source, alpha, torch.Tensor.scatter_add)


def _index_add_(
    self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> Any:
    """Tensor.index_add_, like `_index_add`."""
    return _added(self, dim, index, source, alpha, torch.Tensor.scatter_add_)


def _added(
    x: torch.Tensor,
    dim: int,
    index: torch.Tensor,
    source: torch.Tensor,
    alpha: Any,
    scatter: Callable[..., torch.Tensor],
) -> Any:
    """The elements of ``source`` added to x by an index for each element."""
    if not _adds_by_example(x, dim, index, source, alpha):
        return NotImplemented
    along = [1] * source.ndim
    along[dim] = -1
    terms = source if alpha == 1 else source * alpha
    return scatter(x, dim, index.long().reshape(along).expand(source.shape), terms)


# In others, torch adds in a wider dtype than it scatters in.
_SCATTERED = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int32, torch.int64)


def _adds_by_example(x: Any, dim: int, index: Any, source: Any, alpha: Any) -> bool:
    """Whether torch takes these, and some of them are mapped."""
    if not _are_tensors(x, index, source) or not any(map(batch_dims, (x, index, source))):
        return False
    if not (0 < x.ndim == source.ndim and index.ndim == 1 and -x.ndim <= dim < x.ndim):
        return False
    rest = [d for d in range(x.ndim) if d != dim % x.ndim]
    return (
        x.dtype == source.dtype
        and x.dtype in _SCATTERED
        and index.dtype in (torch.int32, torch.int64)
        and source.shape[dim] == index.shape[0] > 0
        and all(x.shape[d] == source.shape[d] for d in rest)
        and (type(alpha) is int or (type(alpha) is float and x.dtype.is_floating_point))
    )


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _ids_in_rows(ids: torch.Tensor) -> bool:
    return ids.ndim == 2 and ids.shape[1] > 0 and ids.dtype in (torch.int32, torch.int64)


def _weights_fit(given: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, mode: str) -> bool:
    """Whether torch takes weights of examples."""
    return mode == "sum" and given.shape == ids.shape and given.dtype == table.dtype


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """F.rms_norm by the operations that a device without a kernel for it runs."""
    shape = list(normalized_shape)
    fits = list(input.shape[input.ndim - len(shape) :]) == shape and len(shape) > 0
    fits &= weight is None or list(weight.shape) == shape
    kernel: Any = aten._fused_rms_norm.default
    if not fits or isinstance(kernel, Absent):
        return NotImplemented
    with no_function_modes():  # they would call the kernel
        return kernel.decompose(input, shape, weight, eps)[0]


COMPOSED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
    torch.index_add: _index_add,
    torch.Tensor.index_add: _index_add,
    torch.Tensor.index_add_: _index_add_,
}
