"""Checkpoint policies: which values the backward keeps, recomputes, or offloads to host memory.

A policy is a function ``(op, shapes, scope, name)`` of one value that the forward computes. It returns
"save", "recompute" or "offload"; True and False mean the first two.

- ``op``: the operation, such as ``"aten.mm"``, ``"collective.all_reduce"``, or a fused kernel's name.
- ``shapes``: the shapes of its operands and of its result; see `Shapes`.
- ``scope``: the scope that it runs in, such as ``"block/3"``, or ``""``.
- ``name``: the label that `torchard.name` gave the value, or None.

The policies of this module combine by ``&`` and ``|``, with plain functions too.

>>> import torch, torchard as ta
>>> from torchard import policies
>>> def pointwise(op, shapes, scope, name):
...     return op in ("aten.sin", "aten.exp")
>>> def f(w, x):
...     return (x @ w).sin().exp().sum()
>>> w, x = torch.ones(4, 4), torch.ones(2, 4)
>>> for policy in (policies.save_nothing, policies.save_dots, policies.save_dots | pointwise):
...     print(policy, [r.what for r in ta.saved_residuals(ta.checkpoint(f, policy=policy), w, x)])
save_nothing ['args[0]', 'args[1]']
save_dots ['args[0]', 'args[1]', 'aten.mm']
(save_dots | pointwise) ['args[0]', 'args[1]', 'aten.mm', 'aten.exp']
"""

from torchard.functional.remat.policies import *  # noqa: F403
from torchard.functional.remat.policies import __all__ as __all__
