"""Methods of modules that functions made of them lack: the error says what takes their place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch import nn

from torchard import Mesh, checkpoint, functionalize, jit, shard, tree

REMEDIES = {
    "eval": r"functionalize\(module.eval\(\)\); or call \w+(.fn)?.module.eval\(\)",
    "train": r"functionalize\(module.train\(\)\); or call \w+(.fn)?.module.train\(\)",
    "to": r"torchard.tree.map\(lambda p: p.to\(...\), params\)",
    "cuda": r"torchard.tree.map\(lambda p: p.cuda\(...\), params\)",
    "half": r"torchard.tree.map\(lambda p: p.half\(...\), params\)",
    "double": r"torchard.tree.map\(lambda p: p.double\(...\), params\)",
    "parameters": r"fn, params = functionalize\(module\)",
    "named_parameters": r"fn, params = functionalize\(module\)",
    "state_dict": r"fn, params = functionalize\(module\)",
    "load_state_dict": r"fn, params = functionalize\(module\)",
    "zero_grad": "torch.func.grad returns",
    "requires_grad_": r"fn.split\(params\)",
    "compile": r"torchard.jit\(fn\)",
    "forward": r"fn\(params, ...\)",
    "config": r"\w+(.fn)?.module.config",
    "named_modules": r"\w+(.fn)?.module.named_modules",
}
MADE: dict[str, Callable[[Any], Any]] = {
    "functionalized": lambda f: f,
    "jit": jit,
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": lambda f: shard(f, Mesh({"x": 2}, virtual=True)),
    "nested": lambda f: jit(checkpoint(f)),
}


def module() -> nn.Module:
    made: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    made.config = {"layers": 1}
    return made


@pytest.mark.parametrize("name", REMEDIES)
@pytest.mark.parametrize("made", MADE)
def test_a_method_of_modules_is_refused_with_what_takes_its_place(made: str, name: str) -> None:
    fn = MADE[made](functionalize(module())[0])
    assert not hasattr(fn, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'.*{REMEDIES[name]}"):
        getattr(fn, name)()


def test_the_remedies_are_right() -> None:
    x = torch.randn(4, 3)
    original = module()
    fn, params = functionalize(original)
    run = jit(fn, backend="eager")
    run(params, x, buffers=fn.buffers)
    fn.module.eval()
    want = copy.deepcopy(original).eval()
    for f in (fn, run, checkpoint(fn)):
        torch.testing.assert_close(f(params, x), want(x).detach())
    double, buffers = (tree.map(lambda p: p.double(), each) for each in (params, fn.buffers))
    found, _ = run(double, x.double(), buffers=buffers)
    torch.testing.assert_close(found, want.double()(x.double()).detach())


def test_other_names_and_other_functions_have_torchs_error() -> None:
    fn, _ = functionalize(module())
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'\.$"):
        fn.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="'Transformed' object has no attribute 'eval'"):
        jit(torch.sin).eval  # noqa: B018
    assert copy.deepcopy(fn).module is not fn.module
    assert pickle.loads(pickle.dumps(jit(torch.sin))).fn is torch.sin
