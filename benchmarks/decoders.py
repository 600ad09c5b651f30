"""Decoders with caches of keys and values, one token at a time: in place, and as a pure function.

    params: {"embed": [vocab, width], "head": [width, vocab], "layers": [{"q", "k", "v", "o", ...}, ...]}
    caches: [(keys, values), ...] of each layer, [1, heads, length, width / heads]
    step(params, caches, token, position) -> (token, caches)        token and position: [1]

An expert writes into the caches (`Tensor.index_copy_`), a pure function returns new ones
(`Tensor.index_copy`); nothing else differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchard import Mesh, P, functionalize, place, shard, tree

__all__ = [
    "SPLIT",
    "Size",
    "Step",
    "by_hand",
    "caches",
    "decode",
    "hugging_face",
    "in_place",
    "params",
    "plain",
    "pure",
    "sharded",
    "step",
]

Step = Callable[..., tuple[Tensor, Any]]

# The dim of each weight that tensor parallelism splits.
SPLIT = {"q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0}


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder; `length` is that of its caches."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    length: int = 2048
    vocab: int = 256

    @property
    def features(self) -> int:
        """Of each head."""
        return self.width // self.heads

    @property
    def cache_bytes(self) -> int:
        """Of the keys, or the values, of one layer."""
        return 4 * self.length * self.width


def params(size: Size) -> Any:
    """Random weights, the same in each call."""
    draw = torch.Generator().manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * rows**-0.5

    width = size.width
    shapes = {name: (width, width) for name in "qkvo"}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: normal(*shapes[name]) for name in SPLIT} for _ in range(size.layers)]
    embed, head = normal(size.vocab, width), normal(width, size.vocab)
    return {"embed": embed, "head": head, "layers": layers}


def caches(size: Size) -> list[tuple[Tensor, Tensor]]:
    """Empty ones."""
    shape = (1, size.heads, size.length, size.features)
    return [(torch.zeros(shape), torch.zeros(shape)) for _ in range(size.layers)]


def step(
    params: Any,
    caches: Any,
    token: Tensor,
    position: Tensor,
    *,
    features: int,
    write: Callable[..., Tensor] = Tensor.index_copy,
    total: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The most likely next token, and the caches with this one's keys and values.

    Args:
        features: the width of a head.
        write: a write of rows into a cache, which returns it.
        total: the sum over the ranks, of products whose weights are split by rows.
    """
    x = params["embed"][token]
    length = caches[0][0].shape[2]
    seen = (torch.arange(length) <= position)[None, None, None]
    written = []
    for layer, (keys, values) in zip(params["layers"], caches, strict=True):
        y = F.layer_norm(x, x.shape[-1:])
        query, key, value = ((y @ layer[name]).view(1, 1, -1, features).transpose(1, 2) for name in "qkv")
        keys, values = write(keys, 2, position, key), write(values, 2, position, value)
        written.append((keys, values))
        scores = (query @ keys.mT) * features**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + total((weights @ values).transpose(1, 2).reshape(1, -1) @ layer["o"])
        y = F.layer_norm(x, x.shape[-1:])
        x = x + total(F.gelu(y @ layer["up"]) @ layer["down"])
    logits = F.layer_norm(x, x.shape[-1:]) @ params["head"]
    return logits.argmax(-1), written


def decode(run: Step, params: Any, caches: Any, tokens: int, start: int = 0) -> tuple[Tensor, Any]:
    """The tokens that follow token 1, [tokens], greedily, and the caches after them."""
    token, found = torch.tensor([1]), []
    for position in range(start, start + tokens):
        token, caches = run(params, caches, token, torch.tensor([position]))
        found.append(token)
    return torch.cat(found), caches


def hugging_face(size: Size) -> tuple[Any, Step, Any]:
    """HuggingFace's Llama with its static cache: the module, the same as a pure step, and parameters.

    The cache's own code writes into clones of the arguments.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    torch.manual_seed(0)
    sizes = {"hidden_size": size.width, "intermediate_size": 4 * size.width, "vocab_size": size.vocab}
    heads = {"num_attention_heads": size.heads, "num_key_value_heads": size.heads}
    layers = {"num_hidden_layers": size.layers, "max_position_embeddings": size.length}
    config = LlamaConfig(**sizes, **heads, **layers)
    module = LlamaForCausalLM(config).eval().requires_grad_(False)
    fn, params = functionalize(module)

    def pure(
        params: Any, caches: Any, token: Tensor, position: Tensor
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        cache = StaticCache(config=config, max_cache_len=size.length)
        for layer, (keys, values) in zip(cache.layers, caches, strict=True):
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.cumulative_length, layer.is_initialized = position[0].clone(), True
            layer.dtype, layer.device = keys.dtype, keys.device
        out = fn(params, token[None], past_key_values=cache, position_ids=position[None])
        return out.logits[0].argmax(-1), [(layer.keys, layer.values) for layer in cache.layers]

    return module, pure, params


def in_place(module: Any, size: Size) -> Step:
    """The step of HuggingFace's module with one static cache, which is written; it starts empty."""
    from transformers import StaticCache

    cache = StaticCache(config=module.config, max_cache_len=size.length)

    def run(_params: Any, _caches: Any, token: Tensor, position: Tensor) -> tuple[Tensor, Any]:
        for layer in cache.layers:
            if layer.is_initialized:
                layer.cumulative_length.copy_(position[0])
        out = module(token[None], past_key_values=cache, position_ids=position[None])
        return out.logits[0].argmax(-1), None

    return run


def plain(size: Size) -> Step:
    """An expert's step, which writes into the caches."""
    return functools.partial(step, features=size.features, write=Tensor.index_copy_)


def pure(size: Size) -> Step:
    """The same step with new caches."""
    return functools.partial(step, features=size.features)


# -- over several ranks ---------------------------------------------------------------------------------


def sharded(size: Size, mesh: Mesh) -> tuple[Step, Any, Any]:
    """The step with heads and hidden features split over the axis "tp"; placed parameters and caches."""
    weights, empty = params(size), caches(size)
    specs = tree.map(lambda _: P(), weights)
    for layer in specs["layers"]:
        layer.update({name: P(None, "tp") if dim else P("tp") for name, dim in SPLIT.items()})
    heads = tree.map(lambda _: P(None, "tp"), empty)
    run = shard(pure(size), mesh, out_specs=(P(), heads))
    return run, place(weights, mesh, specs), place(empty, mesh, heads)


def by_hand(size: Size, rank: int, ranks: int) -> tuple[Step, Any, Any]:
    """An expert's loop: two sums over the ranks in each layer."""
    weights, empty = params(size), caches(size)
    for layer in weights["layers"]:
        for name, dim in SPLIT.items():
            layer[name] = layer[name].chunk(ranks, dim)[rank].clone()
    mine = tree.map(lambda x: x.chunk(ranks, 1)[rank].clone(), empty)

    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    return functools.partial(plain(size), total=total), weights, mine
