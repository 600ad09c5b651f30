"""The classes and functions from which transforms are built, for authors of custom transforms.

A transform returns ``Transformed(fn, [rewrite])``. A `Rewrite` turns a program into another that computes
the same values: it determines how and where they are computed, and which of them a backward keeps. A
`ValueRewrite` changes values, and the changed function is differentiated. The example below is a
`Rewrite`; ``examples/quantize.py`` is a `ValueRewrite`.

>>> import torch
>>> from torchard import transforms
>>> class Show(transforms.Rewrite):
...     def __call__(self, program):
...         print(program.name, [transforms.op_name(node) for node in program.calls])
...         return program
>>> def f(x):
...     return x.sin().sum()
>>> shown = transforms.Transformed(f, [Show()])
>>> shown(torch.zeros(3))
f ['aten.sin', 'aten.sum']
tensor(0.)
"""

from torchard.functional.costs.flops import op_name
from torchard.functional.derivatives.value_rewrite import ValueRewrite
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.program import (
    FREE,
    Bound,
    Compiler,
    Hint,
    Leaf,
    Pass,
    Placement,
    Program,
    Rewrite,
    Runtime,
    Stage,
)
from torchard.functional.programs.records import Record, Records
from torchard.functional.programs.tagging import (
    TAGS,
    Tag,
    TagError,
    declare,
    inherit,
    inherited_tags,
)
from torchard.functional.reports.lowered import Lowered

__all__ = [
    "FREE",
    "TAGS",
    "Bound",
    "Compiler",
    "Hint",
    "Leaf",
    "Lowered",
    "Pass",
    "Placement",
    "Program",
    "Record",
    "Records",
    "Rewrite",
    "Runtime",
    "Stage",
    "Tag",
    "TagError",
    "Transformed",
    "ValueRewrite",
    "declare",
    "inherit",
    "inherited_tags",
    "op_name",
]
