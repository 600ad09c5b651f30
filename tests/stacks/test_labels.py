"""A label is on the value that was given it, and on no other, whatever has become of the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import torchard as ta
from torchard import Mesh, P, shard

F64 = torch.float64
MESH = Mesh({"x": 2}, virtual=True)
Name = Callable[[Tensor, str], Tensor]
X = torch.arange(1.0, 65.0, dtype=F64).reshape(8, 8).sin()


def softmax(name: Name, x: Tensor) -> Tensor:
    return name(torch.softmax(x, 1), "it").sin()


def log_softmax(name: Name, x: Tensor) -> Tensor:
    return name(F.log_softmax(x, 1), "it").sin()


def layer_norm(name: Name, x: Tensor) -> Tensor:
    return name(F.layer_norm(x, (8,)), "it").sin()


def batch_norm(name: Name, x: Tensor) -> Tensor:
    return name(F.batch_norm(x, None, None, training=True), "it").sin()


def updating_batch_norm(name: Name, x: Tensor) -> Tensor:
    mean, var = torch.zeros(8, dtype=F64), torch.ones(8, dtype=F64)
    return name(F.batch_norm(x, mean, var, training=True), "it").sin() + mean + var


def written(name: Name, x: Tensor) -> Tensor:
    return name(x.clone().mul_(2), "it").sin()


def written_row(name: Name, x: Tensor) -> Tensor:
    y = x.clone()
    name(y[1].copy_(x[0]), "it")
    return y.sin()


def added_to_zeros(name: Name, x: Tensor) -> Tensor:
    return name(torch.zeros_like(x) + x.cos(), "it").sin()


def filled(name: Name, x: Tensor) -> Tensor:
    return name(torch.full_like(x, 2.0), "it") * x


def filled_by_a_tensor(name: Name, x: Tensor) -> Tensor:
    return name(torch.ops.aten.fill.Tensor(x, x.sum()), "it") * x


def number(name: Name, x: Tensor) -> Tensor:
    return name(torch.ops.aten.mul.Tensor(x, 2.0), "it").sin()


def rows(name: Name, x: Tensor) -> Tensor:
    return sum((name(x[i], f"row {i}").sin() for i in range(7)), x[7])


def pieces(name: Name, x: Tensor) -> Tensor:
    return name(x.split(4, 1)[1], "it").sin()


def equal_views(name: Name, x: Tensor) -> Tensor:
    return name(x.t(), "it").sin() @ x.t().cos()


def strided(name: Name, x: Tensor) -> Tensor:
    return name(x.clone().as_strided((8, 4), (8, 2)), "it").sin()


def strided_after_a_write(name: Name, x: Tensor) -> Tensor:
    y = x.clone()
    rows = y.as_strided((8, 8), (8, 1))
    y[0] = 3.0
    every, other = rows.as_strided((8, 8), (8, 1)), rows.as_strided((4, 8), (16, 1))
    return name(every, "every")[:4] + name(other, "other")


def part_of_written(name: Name, x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2)
    left, right = y.split(4, 1)
    return name(left, "left") * name(right, "right") + y[:, 2:6]


def read_before_and_after(name: Name, x: Tensor) -> Tensor:
    y = name(x.clone(), "before")
    row = name(y[1], "row before").sin()
    y.mul_(2)
    return name(y[1], "row after") + row + y


def turned(name: Name, x: Tensor) -> Tensor:
    return name(x.clone().mul_(2).t_(), "it").sin()


def two_written(name: Name, x: Tensor) -> Tensor:
    out, at = x.clone(), torch.zeros(8, dtype=torch.int64)
    torch.max(x, 1, out=(out[0], at))
    return name(out[0], "greatest").sin() + name(at, "where")


def flipped(name: Name, x: Tensor) -> Tensor:
    return name(x.flip(1).cumsum(1).flip(1), "it").sin()


FUNCTIONS = (
    *(softmax, log_softmax, layer_norm, batch_norm, updating_batch_norm, written, written_row),
    *(added_to_zeros, filled, filled_by_a_tensor, number, rows, pieces, equal_views, strided, flipped),
    *(strided_after_a_write, part_of_written, read_before_and_after, turned, two_written),
)


class Values(fx.Interpreter):
    """What the nodes of a plan hold; a step of a reshard is the identity on global values."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), graph))
        self.labelled: list[tuple[str, Any]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = self.env[n.all_input_nodes[0]] if "step" in n.meta else super().run_node(n)
        if "name" in n.meta:
            self.labelled.append((n.meta["name"], value))
        return value


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_has_a_label_is_what_was_labelled(function: Callable[..., Tensor], spec: P) -> None:
    wanted: dict[str, Tensor] = {}

    def remember(x: Tensor, label: str) -> Tensor:
        wanted[label] = x.clone()
        return x

    function(remember, X)
    run = shard(lambda x: function(ta.name, x), MESH, in_specs=(spec,))
    values = Values(run.lower(X).graph)
    values.run(X)
    assert {label for label, _ in values.labelled} == set(wanted), "labels were lost"
    for label, value in values.labelled:
        torch.testing.assert_close(value, wanted[label])
