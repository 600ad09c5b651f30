"""nn.Modules sharded by a plan from module names to styles, as in PyTorch's parallelize_module.

    python examples/parallelize_plan.py                          # ranks inside this process
    torchrun --nproc-per-node 4 examples/parallelize_plan.py     # four processes

`functionalize` makes a pure function of the module; `parallelize` turns a plan into specs of its
parameters and of the activations between layers. The module is not changed, and the specs are data that
can be printed, changed and compared. A wrong plan raises one error that lists all its mistakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from _mesh import mesh_of
from torch import Tensor, nn

from torchard import (
    Colwise,
    Mesh,
    P,
    Pairwise,
    Rowwise,
    SequenceParallel,
    SpecError,
    Style,
    functionalize,
    parallelize,
    place,
    shard,
)
from torchard.testing import equal


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.l1, self.l2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.l2(nn.functional.gelu(self.l1(self.norm(x))))
        return y


def tower(width: int, linears: int) -> nn.Module:
    """A sequence of linears, each followed by tanh."""
    return nn.Sequential(
        *[layer for _ in range(linears) for layer in (nn.Linear(width, width), nn.Tanh())]
    )


def compare(title: str, module: nn.Module, x: Tensor, mesh: Mesh, plan: Mapping[str, Style]) -> str:
    """Run a module by a plan: print its specs and collectives, and return those of the forward."""
    fn, params = functionalize(module)
    specs, pins = parallelize(fn, mesh, plan, axis="tp", batch="dp")
    run = shard(fn, mesh, constrain_at=pins)
    placed, data = place(params, mesh, specs), place(x, mesh, P("dp"))

    collectives = run.lower(placed, data).collectives
    print(f"\n{title}, over {mesh}\n{'-' * 98}")
    for path, spec in specs.items():
        print(f"{path:18} {list(params[path].shape)!s:12} {spec}")
    for path, spec in pins.items():
        print(f"{path:18} {'pinned':12} {spec}")
    print(f"\n{collectives}\n")

    errors = [row.error for row in equal(run, fn, placed, data, orders=("value", "gradient"))]
    print(f"largest error, outputs and gradients, against one device in float64: {max(errors):.1e}")
    kinds = Counter((c.kind, *c.axes) for c in collectives)
    return ", ".join(f"{n} {' over '.join(kind)}" for kind, n in kinds.items())


def main(width: int = 64) -> None:
    torch.manual_seed(0)
    blocks, x = nn.Sequential(Block(width), Block(width)), torch.randn(4, 6, width)
    with mesh_of(dp=2, tp=2) as mesh:
        by_name: dict[str, Style] = {"*.l1": Colwise(), "*.l2": Rowwise()}
        collectives = compare("By name: columns, then rows", blocks, x, mesh, by_name)
        assert collectives == "2 all_reduce over tp"

        by_position = {
            "*.norm": SequenceParallel(),
            "*.l1": Colwise(),
            "*.l2": Rowwise(output_layouts=1),
        }
        collectives = compare("The same, norms split by position", blocks, x, mesh, by_position)
        assert collectives == "2 all_gather over tp, 2 psum_scatter over tp"

        # Five linears are two pairs; the last one stays replicated.
        collectives = compare("In pairs", tower(width, 5), x, mesh, {"": Pairwise()})
        assert collectives == "2 all_reduce over tp"

        print("\nA wrong plan:\n")
        # "columns" is not a style, which a type checker reports as well.
        wrong = {"*.l3": Colwise(), "*.norm": Rowwise(), "*.l1": "columns"}
        try:
            parallelize(functionalize(blocks)[0], mesh, wrong)  # type: ignore[arg-type]
        except SpecError as error:
            print(error)


if __name__ == "__main__":
    main()
