"""A factor rule written against public names, for an operator of one's own."""

from __future__ import annotations

import torch

from torchard import Mesh, P, place, register_rule, shard


@torch.library.custom_op("torchard_extension::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x * s.unsqueeze(-1)


@scaled_rows.register_fake
def _(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_it_keeps_what_is_split_split() -> None:
    register_rule(torch.ops.torchard_extension.scaled_rows.default, text="i j, i -> i j")
    mesh = Mesh({"x": 2}, virtual=True)
    x, s = torch.arange(12.0).reshape(4, 3), torch.arange(4.0)
    run = shard(lambda x, s: scaled_rows(x, s), mesh)
    placed = place(x, mesh, P("x")), place(s, mesh, P("x"))
    assert not run.lower(*placed).collectives
    assert torch.equal(run(*placed).full(), x * s.unsqueeze(-1))
