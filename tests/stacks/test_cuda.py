"""On a CUDA device: stacks, kernels, offloading, planned memory, and the model of torch's allocator."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from any_size import fuse
from kernel_cases import Case, inputs_of, names_of, outputs, plain
from torch import Tensor
from transformer import RECIPES, Recipe, batch, parameters

from torchard import (
    Mesh,
    MeshTensor,
    P,
    checkpoint,
    jit,
    name,
    nn,
    place,
    policies,
    random,
    shard,
)
from torchard.kernels import KERNELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")

DEVICE = "cuda"
Fn = Callable[..., Any]


def leaves(tree: Any) -> list[Tensor]:
    found = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, MeshTensor))
    return [x.full() if isinstance(x, MeshTensor) else x for x in found]


def there(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """The same values on the device, floats in a dtype."""

    def move(x: Tensor) -> Tensor:
        return x.to(DEVICE, dtype if x.is_floating_point() else None)

    return optree.tree_map(move, tree)


def distance(values: Any, exact: Any) -> float:
    """The norm-wise relative error of all leaves together; they are on the device."""
    pairs = list(zip(leaves(values), leaves(exact), strict=True))
    assert all(a.device.type == DEVICE for a, _ in pairs)
    squares = sum(float((a.cpu().double() - b.cpu().double()).norm()) ** 2 for a, b in pairs)
    return float((squares / sum(float(b.double().norm()) ** 2 for _, b in pairs)) ** 0.5)


# -- stacks ---------------------------------------------------------------------------------------


STACKS: dict[str, Callable[[Fn], Fn]] = {
    "jit": jit,
    "jit, eager": lambda fn: jit(fn, backend="eager"),
    "jit, planned memory": lambda fn: jit(fn, backend="eager", memory="planned"),
    "fuse": fuse,
    "jit(fuse)": lambda fn: jit(fuse(fn)),
    "checkpoint": checkpoint,
    "jit(checkpoint)": lambda fn: jit(checkpoint(fn, policy=policies.save_dots)),
    "jit(fuse(checkpoint))": lambda fn: jit(fuse(checkpoint(fn))),
}
STEP = Recipe({}, P()).step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stack", STACKS)
def test_a_step_is_that_of_one_cpu(stack: str, dtype: torch.dtype) -> None:
    args = there((parameters(), *batch()), dtype)
    exact = STEP(parameters(), *batch())
    run = STACKS[stack](STEP)
    eager = distance(STEP(*args), exact)
    for _ in range(2):
        assert distance(run(*args), exact) <= 2 * eager + 1e-13


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_on_a_virtual_mesh(recipe: str) -> None:
    how = RECIPES[recipe]
    mesh = Mesh(how.mesh, virtual=True)
    params = place(there(parameters()), mesh, how.specs)
    args = (params, *(place(there(t), mesh, how.batch) for t in batch()))
    exact = STEP(parameters(), *batch())
    split = shard(how.step, mesh, out_specs=(how.specs, P()))
    for run in (split, jit(split, backend="eager"), fuse(split)):
        assert distance(run(*args), exact) < 1e-12


def test_one_rank_by_nccl() -> None:
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = Mesh({"dp": 1}, device_type=DEVICE)
        specs = P("dp")
        args = (
            place(there(parameters()), mesh, specs),
            *(place(there(t), mesh, specs) for t in batch()),
        )
        step = shard(Recipe({}, P()).step, mesh, out_specs=(specs, P()))
        assert distance(step(*args), STEP(parameters(), *batch())) < 1e-12
    finally:
        dist.destroy_process_group()


def test_masks_are_those_of_a_cpu() -> None:
    key, x = random.key(3), torch.linspace(1, 2, 3 * 4096, dtype=torch.float64).reshape(3, 4096)
    want = nn.dropout(key, x, 0.4)

    def drop(key: Tensor, x: Tensor) -> Tensor:
        return nn.dropout(key, x, 0.4)

    for run in (drop, jit(drop), fuse(drop), jit(fuse(drop))):
        assert torch.equal(run(there(key), there(x)).cpu(), want)


# -- kernels --------------------------------------------------------------------------------------

IN_TRITON = [name for name, kernel in sorted(KERNELS.items()) if "cuda" in kernel.implementations]
# Lengths of rows about Triton's blocks, whole counters of random numbers or not; the layouts of operands.
SIZES = (
    (5, ("plain",)),
    (128, ("transposed", "plain")),
    (1000, ("plain", "cut")),
    (4099, ("strided",)),
)


def scores(fn: Fn, args: list[Tensor]) -> Any:
    """Values and gradients."""
    floats = [i for i, x in enumerate(args) if x.is_floating_point()]

    def loss(*moving: Tensor) -> Any:
        given = list(args)
        for i, value in zip(floats, moving, strict=True):
            given[i] = value
        found = outputs(fn(*given))
        total = sum((x.double() ** 2).mean() for x in found if x.is_floating_point())
        return total, [x.detach() for x in found]

    grads, values = torch.func.grad(loss, tuple(range(len(floats))), has_aux=True)(
        *(args[i] for i in floats)
    )
    return values, grads


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", IN_TRITON)
def test_kernels_are_as_exact_as_their_references(kernel: str, dtype: torch.dtype) -> None:
    chosen = KERNELS[kernel]
    pattern = chosen.patterns[0]
    names = names_of(pattern)
    for size, layouts in SIZES:
        sizes = {n: size if n in "dv" else 6 for n in names}
        lead = (3, 7) if set(names) & {"d", "v"} else (3, size)
        args = inputs_of(chosen, pattern, Case(sizes, lead, torch.float64, layouts, 1))
        args = [x.cuda() for x in args]
        rounded = [x.to(dtype) if x.is_floating_point() else x for x in args]
        fn = plain(pattern)
        fused = fuse(fn, chosen)
        uses = {use.how for use in fused.lower(*rounded).kernels}
        assert all("triton" in how for how in uses), uses
        exact = scores(fn, [x.double() if x.is_floating_point() else x for x in rounded])
        roundings = 4 * torch.finfo(dtype).eps
        eager, have = (distance(scores(run, rounded), exact) for run in (fn, fused))
        assert have <= max(2.0, chosen.tolerance) * eager + roundings, (size, layouts)


# -- memory ---------------------------------------------------------------------------------------


def deep(ws: list[Tensor], x: Tensor) -> Tensor:
    for w in ws:
        x = F.gelu(name(x @ w, "hidden"))
    return (x * x).mean()


def deep_arguments() -> Any:
    ws = [torch.randn(256, 256, device=DEVICE, dtype=torch.float64) / 16 for _ in range(12)]
    return ws, torch.randn(8192, 256, device=DEVICE, dtype=torch.float64)


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that a call allocates on the device."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("backend", [None, "eager"])
def test_offloaded_values_come_back(backend: str | None) -> None:
    args = deep_arguments()
    want = torch.func.grad(deep)(*args)
    kept = jit(torch.func.grad(deep), backend="eager")
    grad: Fn = torch.func.grad(checkpoint(deep, policy=policies.offload_names("hidden")))
    grad = grad if backend is None else jit(grad, backend=backend)
    for _ in range(20):
        for have, expected in zip(grad(*args), want, strict=True):
            torch.testing.assert_close(have, expected, rtol=1e-12, atol=1e-14)
    one = args[1].nbytes
    assert peak(lambda: grad(*args)) < peak(lambda: kept(*args)) - 8 * one


def test_expanded_and_strided_values_are_offloaded() -> None:
    def fn(x: Tensor) -> Tensor:
        wide = name(x.sin().expand(64, 32), "a") * 2
        tall = name(x.cos().expand(64, 32).t()[::2], "a") * 3
        return (wide.exp()[:, 0].sum() + tall.exp().sum()) * wide.sum()

    x = torch.randn(32, device=DEVICE, dtype=torch.float64)
    want = torch.func.grad(fn)(x)
    for policy in (policies.offload_names("a"), policies.save_names("a")):
        torch.testing.assert_close(torch.func.grad(checkpoint(fn, policy=policy))(x), want)


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_the_peak_is_the_program_s(memory: Any) -> None:
    """Of a call's own values: results included, arguments not."""
    args = deep_arguments()
    step = jit(torch.func.grad(deep), backend="eager", memory=memory)
    program = jit(torch.func.grad(deep), backend="eager").lower(*args)
    arguments = sum(x.nbytes for x in leaves(args))
    have = peak(lambda: step(*args))
    assert have <= 1.02 * (program.memory.peak - arguments)


def test_what_the_allocator_reserves() -> None:
    args = deep_arguments()
    step = jit(torch.func.grad(deep), backend="eager")
    predicted = step.lower(*args).memory.reserved
    step(*args)
    kept = copy.deepcopy(args)
    del args
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() - sum(x.nbytes for x in leaves(kept))
    step(*kept)
    torch.cuda.synchronize()
    after = torch.cuda.memory_reserved() - before
    assert 0.9 * predicted <= after <= 1.1 * predicted
