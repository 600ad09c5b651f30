"""Pytrees: those of optree, with None as a leaf. A placed value (`MeshTensor`) is one leaf.

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

from torchard.functional.core import tree as parts
from torchard.functional.core.tree import *  # noqa: F403
from torchard.functional.core.tree import __all__ as __all__
from torchard.sharding.values.placed_trees import placed_as_leaves

flatten = placed_as_leaves(parts.flatten)
leaves = placed_as_leaves(parts.leaves)
structure = placed_as_leaves(parts.structure)
map = placed_as_leaves(parts.map)
paths = placed_as_leaves(parts.paths)
partition = placed_as_leaves(parts.partition)
broadcast = placed_as_leaves(parts.broadcast)
