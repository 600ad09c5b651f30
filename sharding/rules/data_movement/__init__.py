"""Factor rules of operations that rearrange, read or write elements, one file per family."""

from torchard.sharding.rules.data_movement import (
    bags,
    copies,
    diagonal,
    index,
    select,
    slicing,
    unfold,
    views,
)

__all__ = [
    "bags",
    "copies",
    "diagonal",
    "index",
    "select",
    "slicing",
    "unfold",
    "views",
]
