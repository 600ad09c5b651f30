"""S0 to its end: sharded, found, fused, built, in every order; HuggingFace's models, counted."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from comparing import compare
from seeds import S0, Seed, whole

from torchard import Mesh, checkpoint, functionalize, jit, place, shard, trace
from torchard.functional.programs.program import Program
from torchard.kernels.rewriting.memory_traffic import moved

SMALL = Seed((8, 12, 8), (2, 4), S0.specs, None, S0.out_spec, F.gelu)
MESH = {"tp": 4}
STEPS: dict[str, Any] = {
    "fuse": lambda fn, mesh: fuse(fn, lambda x, b: F.gelu(x + b), name="BiasGeLU"),
    "shard": lambda fn, mesh: shard(fn, mesh, out_specs=S0.out_spec),
    "build": lambda fn, mesh: jit(fn, backend="eager"),
    "checkpoint": lambda fn, mesh: checkpoint(fn),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "order", list(itertools.permutations(["fuse", "shard", "build"])), ids="∘".join
)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_s0_in_every_order(order: tuple[str, ...], checkpointed: bool) -> None:
    """Slapo's own tutorial fails on two ranks in one order and loses a collective in the other."""
    mesh = Mesh(MESH, virtual=True)
    params, x, ct = SMALL.normal(torch.float64)
    fn: Any = SMALL.forward
    for step in (*order, *(["checkpoint"] if checkpointed else [])):
        fn = STEPS[step](fn, mesh)
    placed = place(params, mesh, SMALL.specs)
    lowered = fn.lower(placed, x)
    assert list(map(str, lowered.kernels)) == ["BiasGeLU"]
    assert [(c.kind, c.phase) for c in lowered.collectives] == [("all_reduce", "forward")]
    # The bias has been split off the product, and is added after the sum over ranks.
    assert [str(n.target) for n in lowered.calls].count("aten.mm.default") == 2

    def loss(run: Any, params: Any, x: torch.Tensor) -> torch.Tensor:
        return (whole(run(params, x)) * ct).sum()

    compare(whole(fn(placed, x)), SMALL.forward(params, x))
    have = torch.func.grad(functools.partial(loss, fn), (0, 1))(placed, x)
    compare(have, torch.func.grad(functools.partial(loss, SMALL.forward), (0, 1))(params, x))
    joint = fn.lower_joint(placed, x)
    names = Counter(map(str, joint.kernels))
    assert names == {"BiasGeLU": 1 + checkpointed, "BiasGeLU_backward": 1}
    reduced = [(c.kind, c.phase) for c in joint.collectives]
    assert reduced == [("all_reduce", "forward"), ("all_reduce", "backward")]


# -- HuggingFace ----------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")
WIDTH, VOCAB, BATCH, CONTEXT = 24, 32, 4, 6
IDS = torch.arange(BATCH * CONTEXT).mul(7).remainder(VOCAB).reshape(BATCH, CONTEXT)


def gpt2(layers: int) -> Any:
    size = {"n_layer": layers, "n_embd": WIDTH, "n_head": 4, "n_inner": 40, "vocab_size": VOCAB}
    more = {"n_positions": CONTEXT, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **more))


def llama(layers: int) -> Any:
    size = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
    more = {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, **heads, **more))


MODELS = {"gpt2": gpt2, "llama": llama}


@functools.cache
def model(name: str, layers: int = 2) -> tuple[Any, Any]:
    """The loss as a function of the parameters, and those."""
    torch.manual_seed(0)
    module = MODELS[name](layers).eval()
    for parameter in module.parameters():  # ones and zeros would hide what is dropped
        torch.nn.init.normal_(parameter, std=0.3)
    fn, params = functionalize(module)

    def loss(params: Any) -> torch.Tensor:
        logits = fn(params, IDS).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())

    return loss, params


def bytes_of(program: Program) -> int:
    return sum(moved(node) for node in program.calls)


# For each model, how many there are in every layer, and how many besides. Norms are counted with and
# without the sum in front of them.
COUNTS: dict[str, dict[str, tuple[int, int]]] = {
    "gpt2": {"layer_norm": (2, 1), "bias_gelu_tanh": (1, 0), "cross_entropy": (0, 1)},
    "llama": {
        "rms_norm": (2, 1),
        "rope": (2, 0),
        "qkv": (1, 0),
        "gate_up": (1, 0),
        "swiglu": (1, 0),
        "cross_entropy": (0, 1),
    },
}


def counted(program: Program) -> Counter[str]:
    """By name; one that is both a kernel and its gradient counts as either."""
    found: Counter[str] = Counter()
    for use in program.kernels:
        name = str(use).removeprefix("add_")
        both = name.removesuffix("_with_backward")
        found.update([name] if both == name else [both, f"{both}_backward"])
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_every_instance_is_found(name: str, dtype: torch.dtype) -> None:
    layers = 2
    loss, params = model(name, layers)
    params = optree.tree_map(lambda t: t.to(dtype), params)
    gradients = torch.func.grad(loss)
    forward = Counter({k: a * layers + b for k, (a, b) in COUNTS[name].items()})
    backward = Counter({f"{k}_backward": n for k, n in forward.items()})
    for fn, counts in ((loss, forward), (gradients, forward + backward)):
        before, fused = trace(fn)(params), fuse(fn).lower(params)
        assert counted(fused) == counts
        assert len(fused.calls) < len(before.calls)
        assert bytes_of(fused) < bytes_of(before)
        # Nothing else is nearly a kernel; what was found and left was refused.
        missed = fused.kernels.missed
        assert all("it would move" in one.why for one in missed) and len(missed) <= layers
        if fn is loss:  # what is not matched keeps its operations
            kept = Counter(str(n.target) for n in fused.calls) & Counter(
                str(n.target) for n in before.calls
            )
            attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
            assert kept[attention] == layers and kept["aten.embedding.default"] >= 1


def drawn(params: Any, seed: int) -> Any:
    """Other weights of the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    return optree.tree_map(lambda t: torch.randn(t.shape, generator=generator) * 0.3, params)


@pytest.mark.parametrize("name", MODELS)
def test_as_close_to_float64_as_eager(name: str) -> None:
    """Over several draws: one alone differs by a tenth either way."""
    loss, params = model(name, 2)
    with_value = torch.func.grad_and_value(loss)
    fused = fuse(with_value)
    ratios = []
    for seed in range(6):
        params = drawn(params, seed)
        exact = with_value(optree.tree_map(lambda t: t.double(), params))
        ratios.append(error(fused(params), exact) / error(with_value(params), exact))
    assert torch.tensor(ratios).log().mean().exp() <= 1.1, ratios


def error(values: Any, exact: Any) -> float:
    """Root of the mean square, each leaf in units of its own largest element."""
    pairs = zip(optree.tree_leaves(values), optree.tree_leaves(exact), strict=True)
    rows = [((v.double() - e) / e.abs().max()).square().mean() for v, e in pairs]
    return float(torch.stack(rows).mean().sqrt())
