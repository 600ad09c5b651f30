"""Proves the plans of recipes and models, and writes a table: nodes, what is not proved, seconds.

    make proofs

Fails where a plan is not proved. "Planned" is the time of tracing and planning, "proved" that of the
proof; certificates are tested anew for each plan.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "stacks"))
sys.path.append(str(Path(__file__).parents[1] / "sharding" / "manual"))

import llama
import sequence_parallel
import slapo_mlp
import test_experts
import test_huggingface
import train_gpt
import transformer
from test_shard_map import ring_attention

from torchard import Mesh, P, place, random, shard, shard_map
from torchard.functional.programs.program import Program
from torchard.testing import Proof, Unproved, prove
from torchard.testing.prove import certificates

Plan = Callable[[], Program]
GPT = train_gpt.Size(context=16, width=32, heads=4, layers=2)
RANKS = {"dp": 8, "fsdp": 64, "tp": 8}


ABOUT = """# Proofs of plans

By `torchard.testing.prove`, as `make proofs` wrote them with torch {torch}, on one core; certificates are
tested anew for each row. Plans are of forward and backward; the small models' weights are small, those of
Llama 3 405B have its shapes on `meta`, on a mesh of dp 8 × fsdp 64 × tp 8.

{checker}
"""


def virtual(**axes: int) -> Mesh:
    return Mesh(axes, virtual=True)


def transformers() -> Iterator[tuple[str, Plan]]:
    for name, recipe in transformer.RECIPES.items():
        mesh = virtual(**recipe.mesh)
        args = (
            place(transformer.parameters(), mesh, recipe.specs),
            *(place(t, mesh, recipe.batch) for t in transformer.batch(4)),
        )
        run = shard(recipe.step, mesh, out_specs=(recipe.specs, P()))
        yield f"transformer, {name}", functools.partial(run.lower, *args)


def experts() -> Iterator[tuple[str, Plan]]:
    for on in test_experts.MESHES:
        run, args = test_experts.sharded(2, on)
        yield f"mixture of experts, {on}", functools.partial(run.lower, *args)


def huggingface() -> Iterator[tuple[str, Plan]]:
    for name in test_huggingface.MODELS:
        for on in test_huggingface.MESHES:
            run, *args = test_huggingface.sharded(name, on)
            yield f"HuggingFace {name}, {on}", functools.partial(run.lower, *args)


def examples() -> Iterator[tuple[str, Plan]]:
    """Of the examples' functions; of `train_gpt` a step of each of its recipes."""
    up, down = torch.ones(16, 16), torch.ones(16, 16)
    params = {"w1": up, "b1": torch.ones(16), "w2": down, "b2": torch.ones(16)}
    run = shard(slapo_mlp.mlp, virtual(tp=2), (slapo_mlp.SPECS, P()), P())
    yield "MLP, Megatron", functools.partial(run.lower_joint, params, torch.ones(4, 16))

    shapes, rows = sequence_parallel.SHAPES, sequence_parallel.BY_POSITION
    params = {name: torch.ones(shape) for name, shape in shapes.items()}
    mesh, pins = virtual(tp=3), sequence_parallel.PINS
    run = shard(
        sequence_parallel.mlp, mesh, (sequence_parallel.SPECS, rows), rows, constrain_at=pins
    )
    yield (
        "MLP, sequence parallel",
        functools.partial(run.lower_joint, params, torch.ones(4, 12, 10)),
    )

    mesh, params = virtual(dp=2, tp=2), train_gpt.init(GPT, random.key(0))
    batch = torch.zeros(8, GPT.context + 1, dtype=torch.int64)
    step = torch.func.grad_and_value(functools.partial(train_gpt.loss, GPT))
    for name, recipe in train_gpt.recipes(GPT).items():
        specs = (recipe.specs, recipe.batch)
        run = shard(step, mesh, specs, (recipe.specs, P()), constrain_at=recipe.pins)
        yield f"GPT, {name}", functools.partial(run.lower, params, batch)

    ring = shard_map(ring_attention, virtual(x=3), P("x"), P("x"))
    yield "ring attention, by shard_map", functools.partial(ring.lower, *[torch.ones(12, 4)] * 3)


def llamas(most: int) -> Iterator[tuple[str, Plan]]:
    for layers in sorted({2, most}):
        shapes = replace(llama.LLAMA_405B, layers=layers)
        plan = functools.partial(llama.lowered, shapes, virtual(**RANKS))
        yield f"Llama 3 405B, {layers} layers, 4,096 ranks", plan


def proof_of(plan: Program) -> Proof:
    try:
        return prove(plan)
    except Unproved as error:
        return error.proof


def row(name: str, plan: Plan) -> tuple[str, Proof]:
    certificates._KNOWN.clear()
    start = time.perf_counter()
    program = plan()
    planned = time.perf_counter()
    proof = proof_of(program)
    seconds = f"{planned - start:.1f} | {time.perf_counter() - planned:.2f}"
    counts = (
        proof.operations,
        proof.steps,
        proof.certificates,
        len(proof.assumed),
        len(proof.gaps),
    )
    return f"| {name} | {' | '.join(f'{n:,}' for n in counts)} | {seconds} |", proof


def checker() -> str:
    files = sorted(Path(certificates.__file__).parent.glob("*.py"))
    counts = {f.stem: len(f.read_text().splitlines()) for f in files if f.stem != "__init__"}
    listed = ", ".join(f"{name} {n}" for name, n in counts.items())
    return f"The checker is {sum(counts.values()):,} lines with their docstrings: {listed}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=126, help="of Llama 3 405B")
    options = parser.parse_args()
    head = "| plan | operations | steps | certificates | assumed | not proved | planned, s | proved, s |"
    table, bad = [head, "|---|" + "---:|" * 7], []
    groups = (examples(), transformers(), experts(), huggingface(), llamas(options.layers))
    for name, plan in (case for group in groups for case in group):
        line, proof = row(name, plan)
        table.append(line)
        bad += [f"{name}: {gap}" for gap in proof.gaps]
        print(line, flush=True)
    about = ABOUT.format(torch=torch.__version__, checker=checker())
    text = "\n".join([about, *table, "", "Assumed are the collectives of a `shard_map`.", ""])
    if options.out:
        options.out.write_text(text)
    sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
