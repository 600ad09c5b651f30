"""Predicted beside published TFLOP/s per GPU: HuggingFace's models, plain and with Megatron's plan.

    python benchmarks/published.py           the table, which is saved in results/ (three minutes)
    python benchmarks/published.py --where   and where each step's seconds go

Nothing is run: ranks are virtual, and seconds are those of `Program.time` of one training step in
float16 with float32 parameters, dropout and AdamW. Published: 19 and 42 TFLOP/s per GPU of GPT-2,
31 and 43 of BERT, on eight V100s (Slapo, arXiv:2302.08005, motivation).

Known, from the benchmark folder of awslabs/slapo and its history: V100s of 16 GB; BERT is
bert-large-uncased with 512 tokens, eight sequences on a GPU without Megatron, 48 on eight GPUs with
tp=8, seven on each with dp=8; HuggingFace's models are trained by its own script with --fp16, which
is autocast. It counts the model's FLOPs: with n layers of width h, s tokens and a vocabulary v, a
sequence has 3 (n (4 h s² + 24 s h²) + 2 s h v), and those are divided by seconds and GPUs.

Assumed: GPT-2 is gpt2-medium with 1,024 tokens, as in mli/transformers-benchmarks, from which
Slapo's script is made, and as many sequences as fit. (Its notebook has nearly the same figures for
one RTX 3090 Ti: 19.1 and 42.2, 30.3 and 44.6.) Whether Megatron's figures are of tp=8 or dp=8 is
not known: both are predicted. Megatron pads the vocabulary to a multiple of 1,024; its attention is
not one kernel.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
import transformers
from bench import RESULTS
from torch.overrides import TorchFunctionMode

from torchard import (
    Colwise,
    Machine,
    Mesh,
    P,
    Rowwise,
    functionalize,
    fuse,
    machines,
    optim,
    parallelize,
    place,
    shard,
    trace,
)
from torchard.functional.costs.seconds import family
from torchard.functional.torch_internals import FakeTensorMode

# What torch.autocast on GPUs computes in which dtype; all else is in the dtype of its operands.
PRODUCTS = (F.linear, torch.matmul, torch.addmm, torch.Tensor.matmul, torch.bmm)
IN_FLOAT = (F.softmax, F.layer_norm, F.cross_entropy, torch.pow, torch.Tensor.pow)
PRECISION = dict.fromkeys(PRODUCTS, torch.float16) | dict.fromkeys(IN_FLOAT, torch.float32)

GPUS, MEMORY = 8, 16 * 2**30
LAYERS, WIDTH, HEADS = 24, 1024, 16
# torch's dropout draws in registers; torchard's operation that draws words is not charged here.
DRAWN = {"torchard.random_bits": 1e9, "aten.lt": 1e9}
# Measured on a V100 by mli/transformers-benchmarks: FLOP/s of float16 products, and products per
# second of a float32 vector and a number, each of which reads and writes four bytes.
REACHED = {"flops": 95e12, "bandwidth": 0.098e12 * 8}
REASONS = """\
limit: by the data sheet's rates, which no program reaches. reached: by rates measured on a V100
(mli/transformers-benchmarks: 95 TFLOP/s of products, 784 GB/s). Launches and links are those of the
data sheet in both.

Not reproduced: Megatron's figures by tp=8, where a layer of width 1,024 sends about as long as it
multiplies; they are nearer to those of dp=8. Differences from what was measured: no scaling of the
loss, no clipping of gradients; today's version of the models, not that of 2022; one rate for
products and links of all sizes; in plain dp=8, updates in other operations than
transformers.AdamW's; and with dp=8 no kernel joins dropout, bias and residual, as Megatron's does.
"""

class Autocast(TorchFunctionMode):
    """torch.autocast on a GPU, on values of any device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (dtype := PRECISION.get(func)) is not None:
            args, kwargs = optree.tree_map(lambda x: _cast(x, dtype), (args, kwargs))
        return func(*args, **kwargs)


class Autocasted(torch.nn.Module):
    """A model under `Autocast`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with Autocast():
            return self.model(*args, **kwargs)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x


class Way(NamedTuple):
    """How a model is trained: the axis, sequences (None: what fits), and whether by kernels."""

    axis: str
    batch: int | None
    fused: bool

    def __str__(self) -> str:
        return f"{'Megatron' if self.fused else 'HuggingFace'} {self.axis}={GPUS}"


class Model(NamedTuple):
    """A model of HuggingFace's, its list of layers, Megatron's plan, and published TFLOP/s."""

    make: Callable[[int], Any]
    layers: str
    vocabulary: int
    tokens: int
    plan: dict[str, Any]
    published: tuple[float, float]
    ways: tuple[Way, ...]
    where: Callable[[str], bool] | None = None


def gpt2(vocabulary: int) -> Any:
    size = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": vocabulary}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, attn_implementation="eager")
    )


def bert(vocabulary: int) -> Any:
    size = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": HEADS}
    more = {"intermediate_size": 4 * WIDTH, "vocab_size": vocabulary}
    config = transformers.BertConfig(**size, **more, attn_implementation="eager")
    return transformers.BertForMaskedLM(config)


GPT2 = {
    "transformer.wte": Rowwise(),
    "*.c_attn": Colwise(),
    "*.attn.c_proj": Rowwise(),
    "*.c_fc": Colwise(),
    "*.mlp.c_proj": Rowwise(),
}
BERT = {
    "bert.embeddings.word_embeddings": Rowwise(),
    "*.self.query": Colwise(),
    "*.self.key": Colwise(),
    "*.self.value": Colwise(),
    "*.attention.output.dense": Rowwise(),
    "*.intermediate.dense": Colwise(),
    "bert.encoder.layer.*.output.dense": Rowwise(),
}
MODELS = {
    "GPT-2": Model(
        gpt2, "transformer.h", 50257, 1024, GPT2,
        (19, 42), (Way("dp", None, False), Way("tp", None, True), Way("dp", None, True)),
    ),
    "BERT": Model(
        bert, "bert.encoder.layer", 30522, 512, BERT,
        (31, 43), (Way("dp", 64, False), Way("tp", 48, True), Way("dp", 56, True)),
        lambda scope: "attention.self" not in scope,
    ),
}  # fmt: skip


def lowered(model: Model, way: Way, batch: int) -> Any:
    """The program of one training step of a rank."""
    vocabulary = -(-model.vocabulary // 1024) * 1024 if way.fused else model.vocabulary
    with FakeTensorMode():
        module = model.make(vocabulary).train()
        tokens = torch.empty(batch, model.tokens, dtype=torch.int64)
        key, step = torch.empty(2, dtype=torch.int64), torch.tensor(0)
    if way.fused:
        fn, params = functionalize(module, stacked=model.layers)
    else:
        fn, params = functionalize(Autocasted(module))
    params = {name: p.detach() for name, p in params.items()}
    options = {"use_cache": False} if model.make is gpt2 else {}

    def logits(p: Any, tokens: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fn(p, tokens, key=key, **options).logits
        return out

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor, key: torch.Tensor) -> Any:
        if way.fused:
            p = {name: value.half() for name, value in p.items()}
        return F.cross_entropy(logits(p, tokens, key).flatten(0, 1).float(), targets.flatten())

    loss = fuse(loss, compiler="eager", where=model.where) if way.fused else loss
    optimizer = optim.adamw(1e-4)

    def train(p: Any, state: Any, *data: torch.Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(p, *data)
        return (*optimizer.update(grads, state, p), value)

    mesh = Mesh({way.axis: GPUS}, virtual=True)
    specs, pins, rows = {name: P() for name in params}, {}, P("dp")
    if way.axis == "tp":
        program = trace(logits)(params, tokens, key)
        (specs, pins), rows = parallelize(fn, mesh, model.plan, program=program), P()
    held = optim.AdamState(P(), specs, specs)
    run = shard(train, mesh, out_specs=(specs, held, P()), constrain_at=pins)
    state = optim.AdamState(step, params, params)
    data = place(tokens, mesh, rows)
    return run.lower(place(params, mesh, specs), place(state, mesh, held), data, data, key)


def tera(model: Model, batch: int) -> float:
    """10^12 FLOPs of the model for a batch, by the formula of Slapo's benchmark."""
    n, h, s, v = LAYERS, WIDTH, model.tokens, model.vocabulary
    return 3 * batch * (n * (4 * h * s**2 + 24 * s * h**2) + 2 * s * h * v) / 1e12


def rates() -> dict[str, Machine]:
    """A V100 by its data sheet, and by what was measured."""
    sheet = replace(machines.v100(), efficiency=DRAWN)
    flops = {**sheet.flops, "float16": REACHED["flops"]}
    reached = replace(sheet, flops=flops, bandwidth=REACHED["bandwidth"])
    return {"limit": sheet, "reached": reached}


def fitting(model: Model, way: Way) -> tuple[int, Any]:
    """The batch, by default the largest multiple of GPUS that fits, and a step's program."""
    if way.batch is not None:
        return way.batch, lowered(model, way, way.batch)
    fits = (GPUS, lowered(model, way, GPUS))
    for batch in itertools.count(2 * GPUS, GPUS):
        program = lowered(model, way, batch)
        if program.peak > MEMORY:
            return fits
        fits = batch, program
    raise AssertionError


def rows(name: str, model: Model, where: bool) -> Iterator[tuple[str, ...]]:
    """A row for each way: TFLOP/s per GPU by both rates, errors, and gains over the first way."""
    first: dict[str, float] = {}
    for way in model.ways:
        batch, program = fitting(model, way)
        published = model.published[way.fused]
        row = [name, str(way), str(batch), f"{program.peak / 1e9:.1f}"]
        gains = []
        for rate, machine in rates().items():
            time = program.time(machine)
            if abs(time.flops * GPUS / 1e12 / tera(model, batch) - 1) > 0.03:
                raise AssertionError(f"{name}, {way}: {time.flops:.3g} FLOPs are not the model's")
            found = tera(model, batch) / GPUS / time.seconds
            row += [f"{found:.1f}", f"{found / published - 1:+.0%}"]
            gains.append(f"{found / first.setdefault(rate, found):.2f}")
            if where:
                print(f"\n{name}, {way}, {rate}: {time}\n{spent(time)}")
        yield (*row, str(published), *gains, f"{published / model.published[0]:.2f}")


def spent(time: Any) -> str:
    """Milliseconds by operation, the most first."""
    seconds: Counter[str] = Counter()
    for each in time.timelines[0].intervals:
        if not each.stream:
            name = "waits" if each.waits else family(each.node)
            seconds[name] += each.end - each.begin
    return "\n".join(f"{1e3 * s:8.2f}  {name}" for name, s in seconds.most_common(12))


HEAD = ("model", "plan", "batch", "peak GB", "limit", "error", "reached", "error", "published")
GAINS = ("gain, limit", "reached", "published")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--where", action="store_true", help="print where the seconds go")
    options = parser.parse_args()
    lines: list[tuple[str, ...]] = [(*HEAD, *GAINS)]
    for name, model in MODELS.items():
        lines += rows(name, model, options.where)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in lines)
    text = f"TFLOP/s per GPU, eight V100s\n\n{table}\n\n{REASONS}"
    print(text)
    file = f"{datetime.date.today()}-published-torch-{torch.__version__.split('+')[0]}.txt"
    (RESULTS / file).write_text(text)


if __name__ == "__main__":
    main()
