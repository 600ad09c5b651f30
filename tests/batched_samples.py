"""Sample calls of operations that treat the dims in front alike: matrices, transforms, windows."""

from __future__ import annotations

from typing import Any

import torch
from sample_calls import Sample

aten = torch.ops.aten

BATCHED: dict[Any, list[Sample]] = {}
