"""Models for pipelines: tied embeddings, skips across stages, values that several stages read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from microbatched import draw

from torchard import MeshTensor, P, random, scope

__all__ = ["MODELS", "Model", "model", "placed_specs", "whole"]

Tree = dict[str, Any]
ROWS, LENGTH, WIDTH, WORDS = 40, 3, 4, 7


@dataclass(frozen=True)
class Model:
    """A loss of parameters, inputs and targets, with arguments for it.

    Attributes:
        layers: the pattern of scopes that stages are made of.
    """

    loss: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    layers: str


def mlp(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(params["layers"]):
        with scope(f"layer/{i}"):
            x = x + torch.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return (x - y).square().mean()


def _attend(layer: Tree, x: torch.Tensor, memory: torch.Tensor, causal: bool) -> torch.Tensor:
    scores = (x @ layer["q"]) @ (memory @ layer["k"]).mT / WIDTH**0.5
    if causal:
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ (memory @ layer["v"])


def gpt(params: Tree, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The embedding is the head as well; some labels are ignored."""
    x = F.embedding(ids, params["embedding"]) + params["positions"]
    for i, layer in enumerate(params["layers"]):
        with scope(f"layer/{i}"):
            h = F.layer_norm(x, (WIDTH,), params["gain"])
            x = x + _attend(layer, h, h, causal=True)
            x = x + F.gelu(F.layer_norm(x, (WIDTH,), params["gain"]) @ layer["up"]) @ layer["down"]
    logits = F.layer_norm(x, (WIDTH,)) @ params["embedding"].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def translator(params: Tree, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """All layers of the decoder read the encoder's last value."""
    half = len(params["layers"]) // 2
    memory = F.embedding(ids, params["embedding"])
    for i, layer in enumerate(params["layers"][:half]):
        with scope(f"layer/{i}"):
            memory = memory + _attend(layer, memory, memory, causal=False)
            memory = memory + torch.tanh(memory @ layer["up"]) @ layer["down"]
    x = F.embedding(ids.flip(1), params["embedding"])
    for i, layer in enumerate(params["layers"][half:]):
        with scope(f"layer/{half + i}"):
            x = x + _attend(layer, x, memory, causal=False)
            x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
    return F.cross_entropy((x @ params["head"]).flatten(0, 1), labels.flatten(), ignore_index=-1)


def unet(params: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The second half adds the values of the first in reverse."""
    half, kept = len(params["layers"]) // 2, []
    for i, layer in enumerate(params["layers"]):
        with scope(f"layer/{i}"):
            if i >= half:
                x = x + kept.pop()
            x = torch.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
            if i < half:
                kept.append(x)
    return (x - y).abs().mean()


def _layers(count: int) -> list[Tree]:
    shapes = {"up": (WIDTH, 8), "down": (8, WIDTH), "bias": (8,)}
    shapes |= {name: (WIDTH, WIDTH) for name in "qkv"}
    return [
        {name: draw(100 * i + j, *shape) for j, (name, shape) in enumerate(shapes.items())}
        for i in range(count)
    ]


_IDS = random.randint(random.key(1), (ROWS, LENGTH), 0, WORDS)
_LABELS = random.randint(random.key(2), (ROWS, LENGTH), -1, WORDS)
_LABELS[:5] = -1  # a whole microbatch without labels
_BATCHES = {
    mlp: (draw(3, ROWS, WIDTH), draw(4, ROWS, WIDTH)),
    unet: (draw(3, ROWS, WIDTH), draw(4, ROWS, WIDTH)),
    gpt: (_IDS, _LABELS),
    translator: (_IDS, _LABELS),
}
_OTHERS = {
    "embedding": draw(5, WORDS, WIDTH),
    "head": draw(6, WIDTH, WORDS),
    "positions": draw(7, LENGTH, WIDTH),
    "gain": 1 + draw(8, WIDTH),
}
_PARAMETERS: dict[Callable[..., Any], tuple[str, str]] = {
    mlp: ("up bias down", ""),
    unet: ("up bias down", ""),
    gpt: ("q k v up down", "embedding positions gain"),
    translator: ("q k v up down", "embedding head"),
}
MODELS = {fn.__name__: fn for fn in _PARAMETERS}


def model(name: str, layers: int = 4) -> Model:
    """A model with a number of layers."""
    fn = MODELS[name]
    in_layer, others = (names.split() for names in _PARAMETERS[fn])
    params: Tree = {name: _OTHERS[name] for name in others}
    params["layers"] = [{name: layer[name] for name in in_layer} for layer in _layers(layers)]
    return Model(fn, (params, *_BATCHES[fn]), "layer/*")


def whole(tree: Any) -> Any:
    """A tree with plain tensors in place of placed ones."""
    return optree.tree_map(lambda v: v.full() if isinstance(v, MeshTensor) else v, tree)


_SPLIT = {"up": (None, "tp"), "bias": ("tp",), "down": ("tp",)}


def placed_specs(params: Tree, stages: int, tp: bool = False) -> Tree:
    """Specs that put the layers of a model on stages in equal parts, and the rest on the first."""
    layers = params["layers"]
    specs: Tree = {name: P().at(pp=0) for name in params if name != "layers"}
    specs["layers"] = [
        {
            name: P(*(_SPLIT.get(name, ()) if tp else ())).at(pp=i * stages // len(layers))
            for name in layer
        }
        for i, layer in enumerate(layers)
    ]
    return specs
