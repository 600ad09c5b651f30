"""Modules whose parameters and buffers are drawn, where constructors give ordinary ones only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from hypothesis import strategies as st

from torchard.functional.core.arguments import CheckedInside, checked
from torchard.testing.strategies.source import tensor_source
from torchard.testing.strategies.tensors import Values, tensors

__all__ = ["modules"]


@checked
def modules(
    make: Callable[[], torch.nn.Module],
    *,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    values: Annotated[Values, CheckedInside] = "ordinary",
    training: bool | None = None,
) -> st.SearchStrategy[torch.nn.Module]:
    """A hypothesis strategy of modules with drawn parameters.

    Args:
        make: creates the module: ``lambda: nn.LayerNorm(4)``.
        dtype: the dtype of floating parameters and buffers, or several dtypes from which one is drawn.
        values: the values of the parameters' entries; see `tensors`. Buffers are not changed.
        training: whether the module is in training mode; by default both are drawn.

    Raises:
        TypeError: ``make`` is a module.

    Returns:
        A strategy of modules, which shrinks towards evaluation mode and parameters of zeros. Hypothesis
        prints the module that was drawn.

    >>> import torch
    >>> from hypothesis import find
    >>> from torchard.testing import strategies as ts
    >>> find(ts.modules(lambda: torch.nn.Linear(1, 1)), lambda m: m.training and m.bias.item() > 1)
    Linear(in_features=1, out_features=1, bias=True) in training, with
      weight = torch.tensor([[0.0]])
      bias = torch.tensor([2.0])
    """
    if isinstance(make, torch.nn.Module):
        raise TypeError(
            f"modules: make is a module; each example needs its own: lambda: {type(make).__name__}(...)"
        )
    return _modules(make, dtype, values, training)


@st.composite
def _modules(
    draw: st.DrawFn, make: Callable[[], torch.nn.Module], dtype: Any, values: Any, training: Any
) -> torch.nn.Module:
    module = make().to(dtype if isinstance(dtype, torch.dtype) else draw(st.sampled_from([*dtype])))
    module.train(draw(st.booleans()) if training is None else training)
    for parameter in module.parameters():
        dims = " ".join(map(str, parameter.shape))
        (drawn,) = draw(
            tensors(dims, dtype=parameter.dtype, values=values, layouts=["contiguous"])
        )
        with torch.no_grad():
            parameter.copy_(drawn)
    return _said(module)


def _said(module: torch.nn.Module) -> torch.nn.Module:
    """The module, of a class whose text is all that was drawn."""
    cls: Any = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"__repr__": _text, "__module__": cls.__module__})
    return module


def _text(module: torch.nn.Module) -> str:
    plain = super(type(module), module).__repr__()
    mode = "training" if module.training else "evaluation"
    parameters = (f"  {name} = {tensor_source(p)}" for name, p in module.named_parameters())
    return "\n".join([f"{plain} in {mode}, with", *parameters])
