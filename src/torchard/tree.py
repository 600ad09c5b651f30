"""Pytrees: those of optree, with None as a leaf.

Types that are registered here are nodes for `torch.func` as well. Dicts are ordered by key.

>>> from dataclasses import dataclass, field
>>> import torch
>>> from torchard import tree
>>> @tree.register_dataclass
... @dataclass
... class Layer:
...     w: torch.Tensor
...     steps: torch.Tensor                                           # an integer: no gradient
...     act: str = field(default="gelu", metadata={"static": True})
>>> layer = Layer(torch.ones(2), torch.tensor(0))
>>> trained, rest = tree.partition(layer)                             # floating tensors; other leaves
>>> torch.func.grad(lambda t: tree.combine(t, rest).w.square().sum())(trained)
Layer(w=tensor([2., 2.]), steps=..., act='gelu')
"""

from torchard.functional.core.tree import *  # noqa: F403
from torchard.functional.core.tree import __all__ as __all__
