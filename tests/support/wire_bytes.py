"""Bytes of transformer layers' collectives, ours beside DTensor's; argument: cases, printed: JSON.

Both run on torch's fake process group, which sends nothing: one process stands for rank 0 of any number.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

warnings.simplefilter("error")
# torch imports its own TorchScript modules, and says so.
warnings.filterwarnings("ignore", "`torch.jit.*` is deprecated", DeprecationWarning)
# Blocks in a row: the output of one is the output of all.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformer  # noqa: E402
from torch import fx, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.distributed.tensor.experimental import implicit_replication  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from torchard import Mesh, P, constrain, place, shard  # noqa: E402
from torchard.functional.programs.program import Program  # noqa: E402
from torchard.sharding.lowering.runtime import Distributed  # noqa: E402

WIDTH, HEADS, LENGTH, BATCH, LAYERS = 48, 4, 16, 12, 2

# -- what is sent ---------------------------------------------------------------------------------

# Where among a collective's arguments what a rank hands over is, and how much of it goes to each of the
# other ranks in a ring (Patarasuk & Yuan 2009).
RING: dict[str, tuple[int, Callable[[int], float]]] = {
    "all_reduce": (0, lambda ranks: 2 / ranks),
    "allreduce_": (0, lambda ranks: 2 / ranks),
    "all_gather_into_tensor": (0, lambda ranks: 1),
    "_allgather_base_": (1, lambda ranks: 1),
    "reduce_scatter_tensor": (0, lambda ranks: 1 / ranks),
    "_reduce_scatter_base_": (1, lambda ranks: 1 / ranks),
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd"}


class Wire(CommDebugMode):  # type: ignore[misc]
    """Bytes that rank 0 sends, by phase and collective; what is handed over is padded already."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        kind = func.overloadpacket.__name__ if "c10d" in func.namespace else "wait_tensor"
        if out is not NotImplemented and kind not in SILENT:
            self.sent[self.phase, kind] += _sent(kind, args)
        return out

    def table(self) -> dict[str, dict[str, int]]:
        """Bytes by collective, by phase."""
        phases: dict[str, dict[str, int]] = {"forward": {}, "backward": {}}
        for (phase, kind), size in self.sent.items():
            phases[phase][kind] = size
        return phases


def _sent(kind: str, args: Any) -> int:
    """The bytes that rank 0 hands over for other ranks."""
    if kind == "all_to_all_single":
        x, _, (own, *others), *_ = args
        return x.numel() * x.element_size() * sum(others) // (own + sum(others))
    at, part = RING[kind]
    ranks = dist.get_world_size()
    sent = args[at] if isinstance(args[at], (list, tuple)) else [args[at]]
    size = sum(t.numel() * t.element_size() for t in sent)
    return math.ceil(size * part(ranks) * (ranks - 1))


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,), mesh_dim_names=("x",))
    finally:
        dist.destroy_process_group()


# -- DTensor's ------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            m(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        done: torch.Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return done


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.down(F.gelu(self.up(x)))
        return done


class Block(nn.Module):
    """``transformer.block`` as a module; without attention where heads can not be shared out."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        if attention:
            self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()
        self.attends = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attends:
            x = x + self.attention(self.norm1(x))
        done: torch.Tensor = x + self.mlp(self.norm2(x))
        return done


class Stack(nn.Module):
    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(attention) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tensor_parallel(mesh: DeviceMesh, stack: Stack) -> nn.Module:
    """Inputs are made DTensors once for all projections, so that their gradients are summed once."""
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    for layer in stack.layers:
        parallelize_module(layer, mesh, styles(layer, whole, {}))
    return stack


def sequence_parallel(mesh: DeviceMesh, stack: Stack) -> nn.Module:
    gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scattered = {"output_layouts": Shard(1), "use_local_output": False}
    for layer in stack.layers:
        norms = {n: SequenceParallel() for n, _ in layer.named_children() if n.startswith("norm")}
        parallelize_module(layer, mesh, {**norms, **styles(layer, gathered, scattered)})
    return stack


def styles(layer: Any, enter: ParallelStyle, leave: dict[str, Any]) -> dict[str, ParallelStyle]:
    heads = {
        "attention": enter,
        **{f"attention.{n}": ColwiseParallel() for n in "qkv"},
        "attention.proj": RowwiseParallel(**leave),
    }
    hidden = {"mlp": enter, "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(**leave)}
    return {**(heads if layer.attends else {}), **hidden}


def fully_sharded(mesh: DeviceMesh, stack: Stack) -> nn.Module:
    for layer in stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(stack, mesh=mesh)
    return stack


def data_parallel(mesh: DeviceMesh, stack: Stack) -> nn.Module:
    """Parameters replicated; DistributedDataParallel's reducer does not run on a fake group."""
    return distribute_module(stack, mesh)


def by_dtensor(recipe: Recipe, mesh: DeviceMesh, attention: bool) -> Wire:
    model, x = recipe.module(mesh, Stack(attention)), torch.zeros(BATCH, LENGTH, WIDTH)
    if recipe.module is fully_sharded:  # whose batch is each rank's own
        x = x.tensor_split(mesh.size())[0].clone()
    elif recipe.stream.axes:
        x = distribute_tensor(x, mesh, [Shard(recipe.stream.entries.index("x"))])
    x.requires_grad_()  # CommDebugMode's hooks want it; what is in front of the layers has its gradient
    # DTensor has no rule for the CPU's fused attention, and torch's own other one makes a plain mask.
    with Wire() as wire, sdpa_kernel(SDPBackend.MATH), implicit_replication():
        y = model(x)
        wire.phase = "backward"
        y.backward(torch.ones_like(y))
        for p in model.parameters():
            settle(p)
    return wire


def settle(p: nn.Parameter) -> None:
    """A gradient laid out as its parameter, which is what an update needs."""
    if isinstance(p.grad, DTensor) and isinstance(p.data, DTensor):
        p.grad.redistribute(placements=p.data.placements)


# -- ours -----------------------------------------------------------------------------------------

Params = dict[str, Any]
OF_MLP = "norm2", "norm2_bias", "up", "up_bias", "down", "down_bias"


def mlp(p: Params, x: torch.Tensor, keep: transformer.Keep) -> torch.Tensor:
    """The second half of ``transformer.block``."""
    normed = F.layer_norm(x, (WIDTH,), p["norm2"], p["norm2_bias"])
    hidden = F.gelu(F.linear(normed, p["up"], p["up_bias"]))
    return keep(x + F.linear(hidden, p["down"], p["down_bias"]))


class Rank(fx.Interpreter):
    """Runs a rank's graph and tells the wire in which phase it is."""

    def __init__(self, graph: fx.GraphModule, wire: Wire) -> None:
        super().__init__(graph)
        self.wire = wire

    def run_node(self, n: fx.Node) -> Any:
        self.wire.phase = n.meta.get("phase") or "forward"
        return super().run_node(n)


def by_torchard(recipe: Recipe, mesh: DeviceMesh, attention: bool) -> tuple[Wire, int]:
    """What rank 0 sends, and what its plan says that it does."""
    keep: transformer.Keep = lambda x: constrain(x, recipe.stream)  # noqa: E731
    block = transformer.block if attention else mlp

    def stack(layers: list[Params], x: torch.Tensor) -> torch.Tensor:
        x = keep(x)
        for layer in layers:
            x = block(layer, x, keep)
        return x

    layers, specs = transformer.parameters(torch.float32, LAYERS)["layers"], recipe.specs()
    if not attention:
        layers = [{k: layer[k] for k in OF_MLP} for layer in layers]
        specs = specs if isinstance(specs, P) else [{k: layer[k] for k in OF_MLP} for layer in specs]
    x = torch.zeros(BATCH, LENGTH, WIDTH)
    virtual, real = Mesh({"x": mesh.size()}, virtual=True), Mesh(mesh)  # one plan for either
    of_batch = recipe.stream if recipe.stream.entries[:1] == ("x",) else P()
    placed = place(layers, virtual, specs), place(x, virtual, of_batch)
    program = shard(stack, virtual, out_specs=recipe.stream).lower_joint(*placed, argnums=0)
    with Wire() as wire:
        Rank(Distributed(real).graph(program), wire).run(*zeros(program, real))
    return wire, sum(c.bytes for c in program.collectives)


def zeros(program: Program, mesh: Mesh) -> list[torch.Tensor]:
    """This rank's parts of a program's inputs."""
    assert mesh.coords is not None
    found = []
    for node in program.placeholders:
        layout, val = node.meta["layout"], node.meta["val"]
        found.append(torch.zeros(layout.local_shape(mesh.coords, mesh.shape), dtype=val.dtype))
    return found


# -- the recipes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A parallel plan, as specs and as a DTensor user's code.

    Attributes:
        specs: of the layers' parameters.
        stream: where the layers' input, what is between them, and their output live.
        module: what is made of the module.
    """

    specs: Callable[[], Any]
    stream: P
    module: Callable[[DeviceMesh, Stack], nn.Module]


def megatron() -> Any:
    return transformer.tensor_parallel("x")["layers"]


RECIPES = {
    "tensor parallel": Recipe(megatron, P(), tensor_parallel),
    "sequence parallel": Recipe(megatron, P(None, "x"), sequence_parallel),
    "fully sharded": Recipe(lambda: P("x"), P("x"), fully_sharded),
    "data parallel": Recipe(P, P("x"), data_parallel),
}


def compared(name: str, ranks: int, attention: bool) -> dict[str, Any]:
    """Bytes by phase; where DTensor can not, what it says."""
    found: dict[str, Any] = {}
    with fake_group(ranks) as mesh:
        ours, planned = by_torchard(RECIPES[name], mesh, attention)
        found = {"ours": ours.table(), "planned": planned}
    with fake_group(ranks) as mesh:
        try:
            found["theirs"] = by_dtensor(RECIPES[name], mesh, attention).table()
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    for key, value in {"WIDTH": WIDTH, "HEADS": HEADS, "LAYERS": LAYERS}.items():
        setattr(transformer, key, value)
    cases = [c.split(",") for c in sys.argv[1:]]
    print(json.dumps([compared(name, int(ranks), part == "layer") for name, ranks, part in cases]))


if __name__ == "__main__":
    main()
