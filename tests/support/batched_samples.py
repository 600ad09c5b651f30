"""Sample calls of operations that treat the dims in front alike: matrices, transforms, windows."""

from __future__ import annotations

from typing import Any

import torch
from sample_calls import F64, S, Sample, x

from torchard.functional.torch_internals.operators import aten

C128 = torch.complex128


def matrices(*batch: int, n: int = 3) -> torch.Tensor:
    """Well conditioned: large on the diagonal."""
    return x(*batch, n, n) + 20 * torch.eye(n, dtype=F64)


def definite(*batch: int) -> torch.Tensor:
    a = matrices(*batch)
    return a @ a.mT


def lower(*batch: int) -> torch.Tensor:
    return torch.linalg.cholesky(definite(*batch))


def near(*args: Any, **kwargs: Any) -> Sample:
    """LAPACK rounds a batch as it rounds its members, up to the last digits."""
    return S(*args, tolerance=1e-10, **kwargs)


LU = aten.linalg_lu_factor_ex(matrices(4))
LDL = aten.linalg_ldl_factor_ex(definite(4))
QR = aten.geqrf(matrices(4))
BOTH = [near(matrices(4)), near(matrices(2, 5).mT), near(matrices())]

LINALG: dict[Any, list[Sample]] = {
    **{
        getattr(aten, name).default: BOTH
        for name in [
            "geqrf",
            "linalg_eig",
            "linalg_eigvals",
            "linalg_inv_ex",
            "linalg_lu",
            "linalg_lu_factor_ex",
            "linalg_qr",
            "_linalg_det",
            "_linalg_slogdet",
        ]
    },
    aten.linalg_matrix_exp.default: [near(x(4, 3, 3) / 4), near(x(2, 5, 2, 2))],
    aten.cholesky.default: [near(definite(4)), near(definite(2, 3), True)],
    aten.cholesky_inverse.default: [near(lower(4))],
    aten.cholesky_solve.default: [near(x(4, 3, 2), lower(4))],
    aten.linalg_cholesky_ex.default: [near(definite(4)), near(definite())],
    aten.linalg_householder_product.default: [near(QR[0], QR[1])],
    aten.linalg_ldl_factor_ex.default: [near(definite(4))],
    aten.linalg_ldl_solve.default: [near(LDL[0], LDL[1], x(4, 3, 2))],
    aten.linalg_lu_solve.default: [near(LU[0], LU[1], x(4, 3, 2)), near(LU[0], LU[1], x(5, 4, 3, 2))],
    aten.linalg_pinv.atol_rtol_tensor: [
        near(matrices(4), rtol=torch.full((4,), 1e-9, dtype=F64)),
        near(matrices(4)),
    ],
    aten.linalg_solve_triangular.default: [near(lower(4), x(4, 3, 2), upper=False)],
    aten.lu_unpack.default: [near(LU[0], LU[1]), near(LU[0], LU[1], True, False)],
    aten.ormqr.default: [near(QR[0], QR[1], x(4, 3, 2))],
    aten.triangular_solve.default: [near(x(4, 3, 2), lower(4), False)],
    aten._linalg_eigh.default: [near(definite(4)), near(definite(2, 3), "L", False)],
    aten._linalg_solve_ex.default: [
        near(matrices(4), x(4, 3, 2)),
        near(matrices(4), x(4, 3)),
        near(matrices(), x(3)),
        near(matrices(4), x(5, 4, 3, 2)),
    ],
    aten._linalg_svd.default: [near(matrices(4)), near(matrices(4), False, False)],
    aten._cdist_forward.default: [
        near(x(2, 5, 3), x(2, 4, 3), 2.0, None),
        near(x(40, 3), x(4, 3), 2.0, None),
        near(x(5, 3), x(4, 3), 1.0, 0),
    ],
    aten._euclidean_dist.default: [
        near(x(2, 5, 3), 2 + x(2, 4, 3)),
        near(x(40, 3), 2 + x(4, 3)),
    ],
    aten._cdist_backward.default: [
        near(x(2, 5, 4), a := x(2, 5, 3), b := x(2, 4, 3), 2.0, torch.cdist(a, b)),
    ],
}

IMAGE, VOLUME, ROW = x(2, 3, 4, 6), x(2, 3, 4, 4, 4), x(2, 3, 5)
IMAGES = {1: ROW, 2: IMAGE, 3: VOLUME}
RESIZED = {1: [7], 2: [7, 5], 3: [5, 3, 6]}


def pooled(name: str, dims: int, *settings: Any) -> dict[Any, list[Sample]]:
    """A pooling operation and its backward, which may want the places of maxima."""
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    image = IMAGES[dims]
    made = forward(image, *settings)
    out, *places = made if isinstance(made, tuple) else (made,)
    rest = () if "adaptive" in name else settings
    return {
        forward: [near(image, *settings), near(image[0], *settings)],
        backward: [near(x(*out.shape), image, *rest, *places)],
    }


def padded(name: str, dims: int) -> dict[Any, list[Sample]]:
    pads, image = [1, 2] * dims, IMAGES[dims]
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    out = forward(image, pads)
    return {
        forward: [S(image, pads), S(image[0], pads)],
        backward: [S(x(*out.shape), image, pads)],
    }


def resampled(name: str, dims: int, *settings: Any) -> dict[Any, list[Sample]]:
    image, size = IMAGES[dims], RESIZED[dims]
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    grad = x(*image.shape[:2], *size)
    return {
        forward: [near(image, size, *settings)],
        backward: [near(grad, size, list(image.shape), *settings)],
    }


def sampled(image: torch.Tensor, dims: int) -> dict[Any, list[Sample]]:
    forward = getattr(aten, f"grid_sampler_{dims}d").default
    backward = getattr(aten, f"grid_sampler_{dims}d_backward").default
    grid = x(2, *[3] * dims, dims) / 5
    grad = x(2, 3, *[3] * dims)
    masks = ([True, True], [True, False])
    return {
        forward: [near(image, grid, 0, 0, False)],
        backward: [near(grad, image, grid, 0, 0, False, mask) for mask in masks],
    }


IMAGED: dict[Any, list[Sample]] = {
    **pooled("_adaptive_avg_pool2d", 2, [2, 3]),
    **pooled("_adaptive_avg_pool3d", 3, [2, 3, 2]),
    **pooled("adaptive_max_pool2d", 2, [2, 3]),
    **pooled("adaptive_max_pool3d", 3, [2, 3, 2]),
    **pooled("avg_pool2d", 2, [2, 2], [2, 2], [1, 0], False, True, None),
    **pooled("avg_pool3d", 3, [2, 2, 2], [2, 2, 1], [0, 0, 0], False, True, None),
    **pooled("max_pool2d_with_indices", 2, [2, 2], [2, 1], [0, 1], [1, 1], False),
    **pooled("max_pool3d_with_indices", 3, [2, 2, 2], [1, 1, 1], [0, 0, 0], [1, 1, 1], False),
    **padded("reflection_pad1d", 1),
    **padded("reflection_pad2d", 2),
    **padded("reflection_pad3d", 3),
    **padded("replication_pad1d", 1),
    **padded("replication_pad2d", 2),
    **padded("replication_pad3d", 3),
    **resampled("_upsample_bilinear2d_aa", 2, False),
    **resampled("_upsample_bicubic2d_aa", 2, False),
    **resampled("_upsample_nearest_exact1d", 1),
    **resampled("_upsample_nearest_exact2d", 2),
    **resampled("_upsample_nearest_exact3d", 3),
    **resampled("upsample_bicubic2d", 2, True),
    **resampled("upsample_bilinear2d", 2, False),
    **resampled("upsample_linear1d", 1, False),
    **resampled("upsample_nearest1d", 1),
    **resampled("upsample_nearest2d", 2),
    **resampled("upsample_nearest3d", 3),
    **resampled("upsample_trilinear3d", 3, False),
    **sampled(IMAGE, 2),
    **sampled(VOLUME, 3),
    aten.im2col.default: [
        S(IMAGE, [2, 2], [1, 1], [0, 0], [1, 1]),
        S(IMAGE[0], [2, 1], [1, 1], [0, 0], [2, 1]),
    ],
    aten.col2im.default: [S(x(2, 12, 15), [4, 6], [2, 2], [1, 1], [0, 0], [1, 1])],
    aten.pixel_shuffle.default: [S(x(2, 12, 3, 2), 2), S(x(9, 2, 2), 3)],
    aten.pixel_unshuffle.default: [S(x(2, 3, 6, 4), 2)],
}

MATRIX = x(3, 5, 4)
MOVED: dict[Any, list[Sample]] = {
    aten.diagonal.default: [S(MATRIX), S(MATRIX, 1, -1, 0)],
    aten.diagonal_copy.default: [S(MATRIX, 0, 1, 2)],
    aten.diagonal_backward.default: [S(x(3, 4), [3, 5, 4], 0, 1, 2), S(x(5, 3), [3, 5, 4], 1, 0, -1)],
    aten.diagonal_scatter.default: [S(MATRIX, x(3, 4), 0, 1, 2)],
    aten.diag_embed.default: [S(x(3, 4)), S(x(3, 4), 1, 0, 2)],
    aten.unfold.default: [S(x(7, 4), 0, 3, 2), S(x(4, 7), -1, 2, 1), S(x(), 0, 1, 1)],
    aten.unfold_copy.default: [S(x(7, 4), 0, 3, 2)],
    aten.unfold_backward.default: [S(x(3, 4, 3), [7, 4], 0, 3, 2), S(x(4, 6, 2), [4, 7], 1, 2, 1)],
    aten.repeat.default: [S(x(5, 4), [2, 1]), S(x(5), [3, 2]), S(x(), [4]), S(x(5, 1), [1, 3])],
    aten.alias_copy.default: [S(x(5, 4))],
    aten.as_strided_copy.default: [S(x(5, 4), [3, 4], [1, 3], 2)],
    aten.expand_copy.default: [S(x(5, 1), [5, 4])],
    aten.permute_copy.default: [S(MATRIX, [2, 0, 1])],
    aten.select_copy.int: [S(x(5, 4), 0, -1)],
    aten.slice_copy.Tensor: [S(x(5, 4), 0, 1, 3), S(x(12, 4), 0, 4, 8)],
    aten.unsafe_split.Tensor: [S(x(10, 4), 5)],
    aten.unsafe_split_with_sizes.default: [S(x(5, 4), [2, 3])],
    aten.squeeze_copy.default: [S(x(1, 5, 1))],
    aten.squeeze_copy.dim: [S(x(1, 5, 1), 0)],
    aten.squeeze_copy.dims: [S(x(1, 5, 1), [0, 2])],
    aten.t_copy.default: [S(x(5, 4))],
    aten.transpose_copy.int: [S(MATRIX, 0, -1)],
    aten.unbind_copy.int: [S(x(3, 4)), S(x(3, 2), -1)],
    aten.unsqueeze_copy.default: [S(x(5, 4), 1)],
    aten.view_copy.default: [S(x(6, 4), [24]), S(x(24), [6, 4])],
    aten.fill.Tensor: [S(x(5, 4), x())],
    aten._conj.default: [S(x(5, 4, dtype=C128))],
    aten._conj_physical.default: [S(x(5, 4, dtype=C128))],
    aten._neg_view.default: [S(x(5, 4))],
    aten.view_as_real.default: [S(x(5, 4, dtype=C128))],
    aten.view_as_complex.default: [S(x(5, 4, 2))],
}

ROWS = x(4, 5).sort().values
FOUND: dict[Any, list[Sample]] = {
    aten._fft_c2c.default: [
        near(x(5, 4, dtype=C128), [1], 0, True),
        near(x(5, 4, 3, dtype=C128), [0, 2], 2, False),
    ],
    aten._fft_r2c.default: [near(x(5, 4), [1], 0, True), near(x(5, 4, 3), [2, 0], 0, False)],
    aten._fft_c2r.default: [
        near(x(5, 4, dtype=C128), [1], 2, 6),
        near(x(5, 4, 3, dtype=C128), [2, 0], 0, 5),
    ],
    aten.bucketize.Tensor: [S(x(5, 4), ROWS[0])],
    aten.searchsorted.Tensor: [S(ROWS, x(4, 3)), S(ROWS[0], x(5, 4)), S(ROWS[0], x())],
    aten.isin.Tensor_Tensor: [S(x(5, 4), x(3)), S(x(5), x())],
    aten.kthvalue.default: [S(x(5, 4), 2), S(x(5, 4), 1, 0, True), S(x(), 1)],
    aten.mode.default: [S(x(5, 4)), S(x(5, 4), 0, True)],
    aten.median.dim: [S(x(5, 4), 1), S(x(5, 4), 0, True), S(x(), 0)],
    aten.nanmedian.dim: [S(x(5, 4), 1)],
    aten.glu.default: [near(x(5, 4)), near(x(4, 5), 0)],
    aten.glu_backward.default: [near(x(5, 2), x(5, 4), -1)],
    aten.linspace.default: [S(0.5, 7, 5, dtype=F64)],
    aten.linspace.Tensor_Tensor: [S(x(), x(), 5, dtype=F64)],
    aten.linspace.Tensor_Scalar: [S(x(), 3.0, 5, dtype=F64)],
    aten.linspace.Scalar_Tensor: [S(3.0, x(), 5, dtype=F64)],
    aten.logspace.default: [S(0.5, 2, 5, dtype=F64)],
    aten.logspace.Tensor_Tensor: [S(x(), x(), 5, dtype=F64)],
    aten.logspace.Tensor_Scalar: [S(x(), 3.0, 5, dtype=F64)],
    aten.logspace.Scalar_Tensor: [S(3.0, x(), 5, dtype=F64)],
    aten.tril_indices.default: [S(4, 3)],
    aten.triu_indices.default: [S(4, 5, 1)],
    aten.eye.default: [S(4, dtype=F64)],
    aten.eye.m: [S(3, 5), S(4, 2, dtype=torch.bool)],
}

BATCHED: dict[Any, list[Sample]] = LINALG | IMAGED | MOVED | FOUND
