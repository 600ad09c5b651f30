"""The time of planning by depth: training steps as a Python loop over layers, and with `repeat`.

The models are examples/train_gpt.py's GPT and HuggingFace's Llama, whose layers are repeated by
``functionalize(..., stacked="model.layers")``. Nothing is run on the meshes, and no weights are
allocated: planning needs shapes only. A Python loop is traced layer by layer; its equal layers are
planned, matched and compiled once.

    python benchmarks/depth.py                    trace and plan, and fuse
    python benchmarks/depth.py --budget           a budget of peak memory, half way from the least, too
    python benchmarks/depth.py --compile          the first call of the compiled step of a small GPT, too
    python benchmarks/depth.py --steady           steps of 12 layers with loops beside steps without
    python benchmarks/depth.py --first            first calls of small steps on two simulated ranks
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optree
import torch
from torch import Tensor

from torchard import (
    Colwise,
    Mesh,
    P,
    Rowwise,
    checkpoint,
    functionalize,
    fuse,
    jit,
    name,
    nn,
    optim,
    parallelize,
    pipeline,
    place,
    policies,
    random,
    repeat,
    scope,
    shard,
    stack,
    stage_specs,
)
from torchard.functional.loops import equal_layers
from torchard.functional.torch_internals import FakeTensorMode

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import train_gpt

GPT2 = train_gpt.Size(context=1024, width=768, heads=12, layers=12)
TINY = train_gpt.Size(context=32, width=64, heads=4, layers=2)
PLANS = {"fully sharded over 8": {"dp": 8}, "2 x 2 tensor parallel": {"dp": 2, "tp": 2}}
INIT, UPDATE = optim.adamw(3e-4)


def repeated(size: train_gpt.Size, params: Any, batch: Tensor) -> Tensor:
    """The loss of examples/train_gpt.py, with stacked blocks."""

    def block(p: Any, x: Tensor) -> Tensor:
        x = name(x + train_gpt.attention(size, p, train_gpt.norm(p["norm1"], x)), "stream")
        return name(x + train_gpt.mlp(p, train_gpt.norm(p["norm2"], x)), "stream")

    context = batch[:, :-1]
    with scope("embedding"):
        x = nn.embedding(params["embedding"], context) + params["positions"][: context.shape[1]]
    x = repeat(block, params["blocks"], name(x, "stream"))
    with scope("head"):
        scores = nn.linear(train_gpt.norm(params["norm"], x), params["embedding"])
    with scope("loss"):
        return nn.cross_entropy(scores, batch[:, 1:])


@dataclass(frozen=True)
class Model:
    """A model with a loss of (params, tokens [batch, context + 1]).

    Attributes:
        specs: a tree like params, for the axes of a mesh.
    """

    loss: Callable[..., Tensor]
    params: Any
    specs: Callable[[dict[str, int]], Any]
    context: int


def gpt(size: train_gpt.Size, stacked: bool, on: str) -> Model:
    """examples/train_gpt.py's, as a list of layers or with `repeat`."""
    with FakeTensorMode() if on == "meta" else torch.device(on):
        params = train_gpt.init(size, random.key(0))
        params = {**params, "blocks": stack(params["blocks"])} if stacked else params
    if on == "meta":
        params = optree.tree_map(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), params)

    def specs(axes: dict[str, int]) -> Any:
        by_name = train_gpt.megatron(size)
        if "tp" not in axes:
            by_name = optree.tree_map(lambda _: P("dp"), by_name)
        return {**by_name, "blocks": stack(by_name["blocks"])} if stacked else by_name

    loss = repeated if stacked else train_gpt.loss
    return Model(functools.partial(loss, size), params, specs, size.context)


def llama(size: train_gpt.Size, stacked: bool, on: str) -> Model:
    """HuggingFace's Llama of the same width, as it is or with stacked layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shapes = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "vocab_size": 256}
    more = {"num_hidden_layers": size.layers, "num_attention_heads": size.heads}
    with torch.device(on):
        module = LlamaForCausalLM(LlamaConfig(**shapes, **more, max_position_embeddings=size.context))
    fn, params = functionalize(module, stacked="model.layers" if stacked else ())

    def loss(params: Any, batch: Tensor) -> Tensor:
        logits = fn(params, batch[:, :-1], use_cache=False).logits
        return nn.cross_entropy(logits, batch[:, 1:])

    def specs(axes: dict[str, int]) -> Any:
        mesh = Mesh(axes, virtual=True)
        if "tp" not in axes:
            return parallelize(fn, mesh, {}, fsdp="dp")[0]
        return parallelize(fn, mesh, LLAMA, batch="dp")[0]

    return Model(loss, params, specs, size.context)


HEADS = {"heads": GPT2.heads}
LLAMA = {
    "model.embed_tokens": Rowwise(),
    **{"*.[qkv]_proj": Colwise(**HEADS), "*.o_proj": Rowwise(**HEADS)},
    **{"*.gate_proj": Colwise(), "*.up_proj": Colwise(), "*.down_proj": Rowwise()},
    "lm_head": Colwise(),
}
MODELS = {"GPT": gpt, "Llama": llama}


def step(loss: Callable[..., Tensor], params: Any, state: Any, batch: Tensor) -> Any:
    """A training step: forward, backward and AdamW."""
    grads, value = torch.func.grad_and_value(loss)(params, batch)
    params, state = UPDATE(grads, state, params)
    return params, state, value


def tokens(model: Model, on: str) -> Tensor:
    return torch.zeros(16, model.context + 1, dtype=torch.int64, device=on)


def state_of(model: Model, on: str) -> Any:
    """The optimizer's state."""
    if on != "meta":
        return INIT(model.params)
    zeros = optree.tree_map(torch.empty_like, model.params)
    return optim.AdamState(torch.zeros((), dtype=torch.int64, device="meta"), zeros, zeros)


def seconds(run: Callable[[], Any]) -> float:
    gc.collect()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def planned(model: Model, axes: dict[str, int]) -> float:
    """The seconds in which the step is traced and planned for a mesh."""
    mesh, by_name = Mesh(axes, virtual=True), model.specs(axes)
    state = state_of(model, "meta")
    held = optim.AdamState(state.step, *(place(m, mesh, by_name) for m in state[1:]))
    out = by_name, optim.AdamState(P(), by_name, by_name), P()
    run = shard(functools.partial(step, model.loss), mesh, out_specs=out)
    args = place(model.params, mesh, by_name), held, place(tokens(model, "meta"), mesh, P("dp"))
    return seconds(lambda: run.lower(*args))


def fused(model: Model) -> float:
    run = fuse(torch.func.grad(model.loss))
    return seconds(lambda: run.lower(model.params, tokens(model, "meta")))


def budgeted(model: Model) -> float:
    """The seconds in which the gradient is traced, and what it keeps within a budget is chosen."""
    loss = checkpoint(model.loss, policy=policies.budget(fraction=0.5))
    run = jit(lambda params, batch: torch.func.grad(loss)(params, batch))
    return seconds(lambda: run.lower(model.params, tokens(model, "meta")))


def compiled(model: Model) -> float:
    """The seconds of a first call of the compiled step."""
    args = model.params, state_of(model, "cpu"), tokens(model, "cpu")
    run = jit(functools.partial(step, model.loss))
    return seconds(lambda: run(*args))


def compiled_anew(model: str, way: str, layers: int) -> float:
    """The same, in a process of its own with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--first-call", model, way, str(layers)]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(run.stdout.split()[-1])


MEMORY: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"backend": "eager", "donate_argnums": (0, 1)},
    "planned": {"backend": "eager", "donate_argnums": (0, 1), "memory": "planned"},
}
FIRST = {"pipeline": "pp", "data parallel": "dp", "fully sharded": "dp", "tensor parallel": "tp"}


def first_call(way: str, jitted: str, layers: int) -> float:
    """The seconds from a step and plain tensors to the results of the first call, on two ranks.

    They include `stage_specs`, placement and the optimizer's state. The ranks are simulated in one
    process, so that twice the work of one is lowered and run.
    """
    model = gpt(replace(TINY, layers=layers), False, "cpu")
    mesh, batch = Mesh({FIRST[way]: 2}, virtual=True), tokens(model, "cpu")
    train = functools.partial(step, model.loss)

    def run() -> None:
        by_name, rows = optree.tree_map(lambda _: P(), model.params), P()
        if way == "pipeline":
            how = {"stages": "block/*", "microbatches": 4, "batch": (None, None, 0)}
            call = pipeline(train, mesh, "pp", **how)
            by_name = stage_specs(call, model.params, INIT(model.params), batch)
        else:
            if way != "data parallel":
                by_name = model.specs(mesh.shape)
            rows = P() if way == "tensor parallel" else P("dp")
            out = by_name, optim.AdamState(P(), by_name, by_name), P()
            call = shard(train, mesh, out_specs=out)
        if MEMORY[jitted]:
            call = jit(call, **MEMORY[jitted])
        params = place(model.params, mesh, by_name)
        call(params, INIT(params), place(batch, mesh, rows))

    return seconds(run)


def first_call_anew(way: str, jitted: str, layers: int) -> float:
    """The same, in a process of its own, after torch's tracer is imported, which takes a second."""
    command = [sys.executable, "-W", "ignore", __file__, "--first-call-of", way, jitted, str(layers)]
    run = subprocess.run(command, env=dict(os.environ), check=True, capture_output=True, text=True)
    return float(run.stdout.split()[-1])


def steady(size: train_gpt.Size, backend: str, rounds: int = 20) -> str:
    """Steps of the list of layers with loops and without, in turns: medians, and their ratio."""
    model = gpt(size, False, "cpu")
    args, runs = (model.params, state_of(model, "cpu"), tokens(model, "cpu")), {}
    for least in (equal_layers.MIN_SAVED, sys.maxsize):
        equal_layers.MIN_SAVED, kept = least, equal_layers.MIN_SAVED
        fn = functools.partial(step, model.loss)
        runs[least] = jit(fn, backend=backend)
        runs[least](*args)
        equal_layers.MIN_SAVED = kept
    times: dict[int, list[float]] = {least: [] for least in runs}
    for _ in range(rounds):
        for least, run in runs.items():
            times[least].append(seconds(lambda run=run: run(*args)))
    rolled, unrolled = map(statistics.median, times.values())
    both = f"{rolled * 1e3:9.1f} ms with loops {unrolled * 1e3:9.1f} without"
    return f"{backend:10} {both} {unrolled / rolled:8.3f}"


def row(what: str, name: str, way: str, of: Callable[[int], float], depths: list[int]) -> str:
    times = {depth: of(depth) for depth in depths}
    ratio = f"{times[96] / times[12]:8.2f}" if {12, 96} <= times.keys() else f"{'':8}"
    return f"{what:36}{name:7}{way:8}" + "".join(f"{t:9.2f}" for t in times.values()) + f"{ratio:>10}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="measure first calls of the compiled step")
    parser.add_argument("--budget", action="store_true", help="measure budgets of peak memory, too")
    parser.add_argument("--loop", type=int, nargs="*", default=[6, 12], help="depths of the Python loop")
    parser.add_argument("--repeat", type=int, nargs="*", default=[6, 12, 48, 96], help="depths of repeat")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steady", action="store_true", help="compare steps with loops and without")
    parser.add_argument("--first-call", nargs=3, help="compile a step once: model, way, layers")
    parser.add_argument("--first", action="store_true", help="measure first calls of small steps")
    parser.add_argument("--first-call-of", nargs=3, help="one of them: way, jit, layers")
    given = parser.parse_args()
    if given.first_call_of:
        way, jitted, layers = given.first_call_of
        FakeTensorMode()
        print(first_call(way, jitted, int(layers)))
        return
    if given.first:
        print("seconds to the end of the first call, width 64, 4 and 12 layers; medians of three")
        for way in FIRST:
            for jitted in MEMORY:
                times = [
                    statistics.median(first_call_anew(way, jitted, n) for _ in range(3)) for n in (4, 12)
                ]
                print(f"{way:16}{jitted:9}" + "".join(f"{t:9.2f}" for t in times), flush=True)
        return
    if given.first_call:
        name_of, way, layers = given.first_call
        print(compiled(MODELS[name_of](replace(TINY, layers=int(layers)), way == "repeat", "cpu")))
        return
    if given.steady:
        for width in (64, 256):
            size = replace(TINY, layers=12, width=width)
            for backend in ("eager", "inductor"):
                print(f"width {width:4}  {steady(size, backend)}", flush=True)
        return
    depths = {"loop": given.loop, "repeat": given.repeat}
    print(f"seconds, width {GPT2.width}; depths {depths}; last the ratio of 96 to 12 layers")
    measures: dict[str, tuple[Callable[[Model], float], train_gpt.Size, str]] = {
        f"trace + plan, {label}": (functools.partial(planned, axes=axes), GPT2, "meta")
        for label, axes in PLANS.items()
    }
    measures["fuse"] = fused, GPT2, "meta"
    if given.budget:
        measures["budget"] = budgeted, GPT2, "meta"
    # Derives the kernels' gradients, once in a process.
    fused(gpt(replace(TINY, layers=2), False, "meta"))
    for model_name in given.models:
        for way, counts in depths.items():
            for label, (measure, size, on) in measures.items():

                def of(n: int) -> float:
                    model = MODELS[model_name](replace(size, layers=n), way == "repeat", on)  # noqa: B023
                    return measure(model)  # noqa: B023

                if counts:
                    print(row(label, model_name, way, of, counts), flush=True)
            if given.compile and counts:
                anew = functools.partial(compiled_anew, model_name, way)
                print(row("first call, compiled, width 64", model_name, way, anew, counts), flush=True)


if __name__ == "__main__":
    main()
