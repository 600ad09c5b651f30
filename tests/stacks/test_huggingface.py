"""HuggingFace's models through functionalize: logits, loss and all gradients under every plan."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import (
    Colwise,
    Mesh,
    P,
    Rowwise,
    checkpoint,
    functionalize,
    parallelize,
    place,
    shard,
    trace,
)
from torchard.functional.costs.flops import flops, op_name
from torchard.functional.programs.program import Program
from torchard.functional.programs.unrolled import has_loops, unrolled

transformers = pytest.importorskip("transformers")

WIDTH, VOCAB, BATCH, CONTEXT = 24, 32, 4, 6
LAYERS = {"gpt2": 2, "llama": 1}
IDS = torch.arange(BATCH * CONTEXT).mul(7).remainder(VOCAB).reshape(BATCH, CONTEXT)


def gpt2() -> Any:
    """Four heads of six features."""
    size = {"n_layer": LAYERS["gpt2"], "n_embd": WIDTH, "n_head": 4, "n_inner": 40}
    more = {"vocab_size": VOCAB, "n_positions": CONTEXT, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **more))


def llama() -> Any:
    """Eight heads of four features in four groups: over three ranks, 2, 2 and no groups."""
    size = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS["llama"]}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    more = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads, **more))


GPT2 = {
    "transformer.wte": Rowwise(),  # the head is tied to it
    "*.attn.c_attn": Colwise(),
    "*.attn.c_proj": Rowwise(),
    "*.mlp.c_fc": Colwise(),
    "*.mlp.c_proj": Rowwise(),
}
LLAMA = {
    "model.embed_tokens": Rowwise(),
    "*.[qkv]_proj": Colwise(),
    "*.o_proj": Rowwise(),
    "*.gate_proj": Colwise(),
    "*.up_proj": Colwise(),
    "*.down_proj": Rowwise(),
    "lm_head": Colwise(),
}
# What is found in a trace, said by hand.
TOLD = {
    "gpt2": {"*.attn.c_attn": Colwise(parts=3, heads=4), "*.attn.c_proj": Rowwise(heads=4)},
    "llama": {"*.[qkv]_proj": Colwise(heads=4), "*.o_proj": Rowwise(heads=4)},
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {"gpt2": (gpt2, GPT2), "llama": (llama, LLAMA)}
# The library's rotary embeddings and RMS norms work in float32 whatever the model is in.
CLOSE = {"gpt2": {"rtol": 1e-11, "atol": 1e-12}, "llama": {"rtol": 1e-5, "atol": 1e-7}}

TENSOR: dict[str, Any] = {"axis": "tp"}
DATA: dict[str, Any] = {"batch": "dp"}
FULLY: dict[str, Any] = {"batch": "dp", "fsdp": "dp"}
MESHES = {
    "tp=3": ({"tp": 3}, TENSOR),
    "dp=2 tp=2": ({"dp": 2, "tp": 2}, DATA),
    "fsdp=4": ({"dp": 4}, FULLY),
    "fsdp=2 tp=2": ({"dp": 2, "tp": 2}, FULLY),
}


@functools.cache
def model(name: str) -> Any:
    """fn, params, and what one device makes of them: gradients, and (loss, logits)."""
    torch.manual_seed(0)
    module = MODELS[name][0]().double().eval()
    for parameter in module.parameters():  # ones and zeros would hide what is dropped
        torch.nn.init.normal_(parameter, std=0.3)
    fn, params = functionalize(module)
    logits = module(IDS, use_cache=False).logits
    value = of_logits(logits, IDS)
    value.backward()
    gradients = {k: p.grad for k, p in module.named_parameters()}
    return fn, params, (gradients, (value.detach(), logits.detach()))


def of_logits(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean cross-entropy of the next token, in float64: the library's own is in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@functools.cache
def traced(name: str) -> Program:
    fn, params, _ = model(name)
    return trace(lambda p, ids: fn(p, ids, use_cache=False).logits)(params, IDS)


def step(name: str) -> Any:
    fn = model(name)[0]

    def loss(p: Any, ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        logits = fn(p, ids, use_cache=False).logits
        value = of_logits(logits, ids)
        return value, (value, logits)

    return torch.func.grad(loss, has_aux=True)


def whole(value: Any) -> Tensor:
    return value.full() if hasattr(value, "full") else value


def compare(name: str, have: Any) -> None:
    gradients, aux = model(name)[2]
    for a, b in zip(have[1], aux, strict=True):
        torch.testing.assert_close(whole(a), b, **CLOSE[name])
    assert have[0].keys() == gradients.keys()
    for path, want in gradients.items():
        got = whole(have[0][path])
        torch.testing.assert_close(got, want, **CLOSE[name], msg=lambda m, p=path: f"{p}: {m}")


def sharded(name: str, on: str) -> tuple[Any, Any, Any]:
    """A training step under a plan, and its arguments."""
    fn, params, _ = model(name)
    axes, how = MESHES[on]
    mesh = Mesh(axes, virtual=True)
    plan = MODELS[name][1] if "tp" in axes else {}
    specs, pins = parallelize(fn, mesh, plan, program=traced(name), **how)
    ids = place(IDS, mesh, P("dp")) if "dp" in axes else IDS
    run = shard(step(name), mesh, out_specs=(specs, (P(), None)), constrain_at=pins)
    return run, place(params, mesh, specs), ids


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_found_in_a_trace(name: str) -> None:
    mesh, (fn, _, _), plan = Mesh({"tp": 3}, virtual=True), model(name), MODELS[name][1]
    found, _ = parallelize(fn, mesh, plan, program=traced(name))
    told, _ = parallelize(fn, mesh, {**plan, **TOLD[name]})
    assert found == told
    assert found != parallelize(fn, mesh, plan)[0]


@pytest.mark.parametrize("name", MODELS)
def test_functionalized_as_it_is(name: str) -> None:
    compare(name, step(name)(model(name)[1], IDS))


def crossed(program: Any, phase: str, kind: str, axis: str) -> list[int]:
    """The elements of each collective of a kind."""
    plan = program.collectives
    assert not any("no factor rule" in c.note for c in plan), str(plan)
    found = [c for c in plan if (c.phase, c.kind, c.axes) == (phase, kind, (axis,))]
    return [torch.Size(c.shape).numel() for c in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_device(name: str, on: str) -> None:
    """And moves what the recipes of test_transformer.py do: heads stay whole, layers are gathered."""
    run, params, ids = sharded(name, on)
    have = run(params, ids)
    compare(name, have)
    for path, gradient in have[0].items():
        assert getattr(gradient, "spec", P()).axes == params[path].spec.axes, path
    axes, how = MESHES[on]
    stream = IDS.numel() * WIDTH // axes.get("dp", 1)
    for phase in ("forward", "backward"):
        program = run.lower(params, ids)
        if "tp" in axes:  # an embedding or a head, and two sums in each layer
            sums = crossed(program, phase, "all_reduce", "tp")
            with_loss = sums.count(stream + 1) if phase == "backward" else 0
            assert sums.count(stream) + with_loss == 2 * LAYERS[name] + 1
            assert not crossed(program, phase, "all_gather", "tp")
        if "fsdp" in how:
            assert len(crossed(program, phase, "all_gather", "dp")) == LAYERS[name] + 1


# -- stacked layers ---------------------------------------------------------------------------------

DEPTH = 3
LISTS = {"gpt2": "transformer.h", "llama": "model.layers"}


@functools.cache
def deep(name: str) -> Any:
    """The function and parameters of a deeper model, without stacked layers and with them."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAYERS, name, DEPTH)
        module = MODELS[name][0]().double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return functionalize(module), functionalize(module, stacked=LISTS[name])


def gradient(fn: Any) -> Any:
    return torch.func.grad(lambda p, ids: of_logits(fn(p, ids, use_cache=False).logits, ids))


def sharded_gradient(name: str, on: str, fn: Any, params: Any) -> tuple[Any, Any, Any]:
    axes, how = MESHES[on]
    mesh = Mesh(axes, virtual=True)
    program = trace(lambda p, ids: fn(p, ids, use_cache=False).logits)(params, IDS)
    plan = MODELS[name][1] if "tp" in axes else {}
    specs, pins = parallelize(fn, mesh, plan, program=program, **how)
    ids = place(IDS, mesh, P("dp")) if "dp" in axes else IDS
    run = shard(gradient(fn), mesh, out_specs=specs, constrain_at=pins)
    return run, place(params, mesh, specs), ids


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_plans_of_stacked_layers_are_those_of_lists(name: str, on: str) -> None:
    """The same collectives, bytes and FLOPs, and the gradients of one device."""
    (fn, params), (stacked, rows) = deep(name)
    run, *args = sharded_gradient(name, on, stacked, rows)
    have, want = run(*args), stacked.stack(gradient(fn)(params, IDS))
    assert have.keys() == want.keys()
    for path, value in want.items():
        torch.testing.assert_close(whole(have[path]), value, **CLOSE[name])
    other, *others = sharded_gradient(name, on, fn, params)
    programs = run.lower(*args), other.lower(*others)
    assert has_loops(programs[0])
    counted = [Counter((c.kind, c.axes, c.phase, c.bytes) for c in p.collectives) for p in programs]
    assert counted[0] == counted[1]
    assert counted[0].total() > 4 * DEPTH
    work = [
        sum(flops(node) for node in unrolled(p).calls if op_name(node) not in _ONCE) for p in programs
    ]
    assert work[0] == work[1]


# Rows of gradients are stacked; the mask, which all layers make, is made once for a stack.
_ONCE = {"aten.stack", "aten.where", "aten.scalar_tensor"}


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_of_stacked_layers(name: str) -> None:
    (fn, params), (stacked, rows) = deep(name)
    want = stacked.stack(gradient(fn)(params, IDS))
    have = gradient(checkpoint(stacked, where=f"{LISTS[name]}.*"))(rows, IDS)
    for path, value in want.items():
        torch.testing.assert_close(have[path], value, **CLOSE[name])
