"""Optimizers as pairs of pure functions on pytrees, with the arithmetic of `torch.optim`.

>>> import torch
>>> from torchard import optim
>>> optimizer = optim.sgd(0.5)
>>> params = {"w": torch.tensor([1.0, 2.0])}
>>> state = optimizer.init(params)
>>> params, state = optimizer.update({"w": torch.tensor([2.0, 2.0])}, state, params)
>>> params
{'w': tensor([0., 1.])}
"""

from torchard.functional.optim import *  # noqa: F403
from torchard.functional.optim import __all__ as __all__
