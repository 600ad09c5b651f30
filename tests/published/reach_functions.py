"""Functions of published packages, with the arguments that they take; chosen before any was run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Reached:
    """A function, or a module's class.

    Attributes:
        package: what is installed.
        path: where it is, "module:name".
        spec: its tensors, as `draws.draw` takes them.
        init: what a class is made with, or None of a function.
        options: keyword arguments of the call.
        made: keyword arguments of the class.
        method: the method of an object that is called.
        most: the largest decimal exponent of its arguments.
    """

    package: str
    path: str
    spec: str
    init: tuple[Any, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    method: str = ""
    most: float = 0.0

    @property
    def name(self) -> str:
        return self.path.split(":")[1] + (f".{self.method}" if self.method else "")


IMAGES = "b 3 12 12 :probability"
TWO_IMAGES = "b 1 12 12 :probability, b 1 12 12 :probability"
POINTS = "b 6 2"
ROTATION = "b 3 3 :definite"


def kornia(path: str, spec: str, **options: Any) -> Reached:
    return Reached("kornia", f"kornia.{path}", spec, options=options)


def metric(name: str, spec: str, **options: Any) -> Reached:
    return Reached("torchmetrics", f"torchmetrics.functional:{name}", spec, options=options)


def loss(name: str, **made: Any) -> Reached:
    return Reached("pytorch-metric-learning", f"pytorch_metric_learning.losses:{name}",
                   "8 4, 8 :index=3", init=(), made=made)  # fmt: skip


FUNCTIONS = [
    Reached("entmax", "entmax:sparsemax", "b d"),
    Reached("entmax", "entmax:entmax15", "b d"),
    Reached("entmax", "entmax:sparsemax_loss", "b 4, b :index=4"),
    Reached("entmax", "entmax:entmax15_loss", "b 4, b :index=4"),
    Reached("entmax", "entmax:entmax_bisect", "b d", options={"alpha": 1.7}),
    Reached("entmax", "entmax:sparsemax_bisect", "b d"),
    Reached("torch-dct", "torch_dct:dct", "b d"),
    Reached("torch-dct", "torch_dct:idct", "b d"),
    Reached("torch-dct", "torch_dct:dct_2d", "b d d"),
    Reached("torch-dct", "torch_dct:dct1", "b d"),
    Reached("pytorch-msssim", "pytorch_msssim:ssim", TWO_IMAGES, options={"data_range": 1.0}),
    Reached("fvcore", "fvcore.nn:sigmoid_focal_loss", "b d, b d :probability"),
    Reached("fvcore", "fvcore.nn:smooth_l1_loss", "b d, b d", options={"beta": 0.5}),
    Reached("fvcore", "fvcore.nn:giou_loss", "b 4 :increasing, b 4 :increasing"),
    kornia("color:rgb_to_grayscale", IMAGES),
    kornia("color:rgb_to_hsv", IMAGES),
    kornia("color:hsv_to_rgb", IMAGES),
    kornia("color:rgb_to_lab", IMAGES),
    kornia("color:rgb_to_ycbcr", IMAGES),
    kornia("color:rgb_to_xyz", IMAGES),
    kornia("color:rgb_to_luv", IMAGES),
    kornia("filters:gaussian_blur2d", IMAGES, kernel_size=(3, 3), sigma=(1.0, 1.0)),
    kornia("filters:box_blur", IMAGES, kernel_size=(3, 3)),
    kornia("filters:sobel", IMAGES),
    kornia("filters:laplacian", IMAGES, kernel_size=3),
    kornia("filters:spatial_gradient", IMAGES),
    kornia("filters:median_blur", IMAGES, kernel_size=(3, 3)),
    kornia("filters:unsharp_mask", IMAGES, kernel_size=(3, 3), sigma=(1.0, 1.0)),
    kornia("enhance:adjust_gamma", IMAGES, gamma=2.2),
    kornia("enhance:adjust_contrast", IMAGES, factor=0.7),
    kornia("enhance:adjust_saturation", IMAGES, factor=0.7),
    kornia("losses:ssim_loss", TWO_IMAGES, window_size=5),
    kornia("losses:psnr_loss", TWO_IMAGES, max_val=1.0),
    kornia("losses:dice_loss", "b 3 4 4, b 4 4 :index=3"),
    kornia("losses:focal_loss", "b 3 4 4, b 4 4 :index=3", alpha=0.5),
    kornia("losses:tversky_loss", "b 3 4 4, b 4 4 :index=3", alpha=0.5, beta=0.5),
    kornia("losses:total_variation", IMAGES),
    kornia("losses:charbonnier_loss", "b d, b d"),
    kornia("losses:cauchy_loss", "b d, b d"),
    kornia("geometry.conversions:axis_angle_to_rotation_matrix", "b 3"),
    kornia("geometry.conversions:quaternion_to_rotation_matrix", "b 4"),
    kornia("geometry.conversions:convert_points_to_homogeneous", POINTS),
    kornia("geometry.transform:resize", IMAGES, size=(8, 8)),
    kornia("geometry.transform:warp_affine", f"{IMAGES}, b 2 3", dsize=(8, 8)),
    kornia("morphology:dilation", f"{IMAGES}, 3 3 :positive"),
    metric("mean_squared_error", "b, b"),
    metric("pearson_corrcoef", "8, 8"),
    metric("cosine_similarity", "b d, b d"),
    metric("pairwise_euclidean_distance", "b d, c d"),
    metric("pairwise_cosine_similarity", "b d, c d"),
    metric("kl_divergence", "b c :simplex, b c :simplex"),
    metric("signal_noise_ratio", "b 8, b 8"),
    metric("scale_invariant_signal_distortion_ratio", "b 8, b 8"),
    metric("explained_variance", "8, 8"),
    metric("r2_score", "8, 8"),
    metric("total_variation", IMAGES),
    Reached("rotary-embedding-torch", "rotary_embedding_torch.rotary_embedding_torch:rotate_half",
            "b s 4"),
    Reached("rotary-embedding-torch", "rotary_embedding_torch:apply_rotary_emb", "s 4, b s 4"),
    Reached("torchcde", "torchcde:linear_interpolation_coeffs", "b 5 d"),
    Reached("torchcde", "torchcde:hermite_cubic_coefficients_with_backward_differences", "b 5 d"),
    Reached("torchcde", "torchcde:natural_cubic_coeffs", "b 5 d"),
    Reached("torch_geometric", "torch_geometric.nn:global_mean_pool", "6 d, 6 :index=2"),
    Reached("torch_geometric", "torch_geometric.nn:global_max_pool", "6 d, 6 :index=2"),
    Reached("torch_geometric", "torch_geometric.utils:softmax", "6 d, 6 :index=2"),
    Reached("torch_geometric", "torch_geometric.utils:scatter", "6 d, 6 :index=2"),
    Reached("x-transformers", "x_transformers.x_transformers:l2norm", "b s d", options={"groups": 1}),
]  # fmt: skip
