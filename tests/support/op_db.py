"""torch's own table of operations and sample calls, as pure functions of tensors.

``torch.testing._internal`` is torch's, unstable and for tests only: nothing but the operator sweep
reads it. ``op_db`` lives in a module that also defines torch's own TestCase and for that alone needs
``expecttest``; where it is not installed an empty one stands in, as no test of torch's is run here.
"""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from hypothesis import settings
from torch.utils import _pytree as pytree

__all__ = ["Case", "cases", "entries", "name_of"]

# What their results hold is not determined: shapes and dtypes are all there is to compare.
UNDETERMINED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


@cache
def entries() -> list[Any]:
    """Every OpInfo of torch's table."""
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            stand_in = types.ModuleType("expecttest")
            stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
            sys.modules["expecttest"] = stand_in
    profile = settings.get_current_profile_name()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's test modules import what torch has deprecated
        from torch.testing._internal.common_methods_invocations import op_db
    settings.load_profile(profile)  # they load one of torch's own
    return list(op_db)


def name_of(entry: Any) -> str:
    """Its name, and the variant where there are several."""
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


@dataclass
class Case:
    """One sample call: a function of its tensors alone; everything else of it is fixed.

    Attributes:
        wanted: for each tensor, whether the sample asks for its gradient.
    """

    entry: Any
    sample: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        leaves, self._tree = pytree.tree_flatten(
            (self.sample.input, self.sample.args, self.sample.kwargs)
        )
        self._fixed = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self._at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        given = [leaves[i] for i in self._at]
        self.wanted = [x.requires_grad for x in given]
        self.tensors = [x.detach() for x in given]

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """All tensors among the results."""
        leaves = list(self._fixed)
        for i, x, wanted in zip(self._at, tensors, self.wanted, strict=True):
            leaves[i] = x if wanted else x.detach()
        first, args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        out = self.sample.output_process_fn_grad(self.entry.op(first, *args, **kwargs))
        return [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]

    @property
    def differentiable(self) -> bool:
        return any(self.wanted)

    @property
    def determined(self) -> bool:
        return self.entry.name not in UNDETERMINED

    def __str__(self) -> str:
        def short(x: Any) -> Any:
            return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else x

        given = pytree.tree_map(short, (self.sample.input, *self.sample.args))
        return f"{name_of(self.entry)}{given} {pytree.tree_map(short, self.sample.kwargs) or ''}"


def _dtype(entry: Any) -> torch.dtype:
    """float64 where the operation takes it, else the widest integer, complex or float it takes."""
    order: Callable[[torch.dtype], Any] = lambda d: (d.is_floating_point, d.itemsize)  # noqa: E731
    taken = entry.supported_dtypes("cpu")
    wide = (torch.float64, torch.int64, torch.complex128)
    return next((d for d in wide if d in taken), None) or max(taken, key=order)


def cases(entry: Any, dtype: torch.dtype | None = None) -> Iterator[Case]:
    """Every sample of an entry, with gradients where it has them; in its widest dtype by default."""
    dtype = dtype or _dtype(entry)
    follow = entry.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # samples of sparse, deprecated and beta operations
        torch.manual_seed(0)
        for sample in entry.sample_inputs("cpu", dtype, requires_grad=follow):
            yield Case(entry, sample)
