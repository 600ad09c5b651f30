"""Losses written twice, in torch and in JAX, with one set of weights, inputs and specs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as F

import torchard as ta

Spec = tuple[Any, ...]  # an axis, axes or None for each dim, as both libraries' P take them
Arrays = dict[str, np.ndarray[Any, Any]]

AXES = {"dp": 2, "tp": 4}


@dataclass(frozen=True)
class Case:
    """A loss of parameters and a batch.

    Attributes:
        torch, jax: the loss, as a function of the parameters and the batch by name.
        params, batch: shapes by name; integer arrays are given as values.
        specs: of parameters and batch, by name; what is not there is replicated.
        note: why the collectives differ, where they do.
    """

    torch: Callable[..., Any]
    jax: Callable[..., Any]
    params: dict[str, tuple[int, ...]]
    batch: dict[str, Any]
    specs: dict[str, Spec] = field(default_factory=dict)
    note: str = ""

    def arrays(self) -> tuple[Arrays, Arrays]:
        """Parameters and batch; weights are scaled by their first dim but one."""
        draw = np.random.default_rng(0)

        def made(given: Any) -> np.ndarray[Any, Any]:
            if isinstance(given, np.ndarray):
                return given
            scale = 1 / math.sqrt(given[-2]) if len(given) > 1 else 1.0
            return (draw.standard_normal(given) * scale).astype(np.float32)

        return (
            {name: made(shape) for name, shape in self.params.items()},
            {name: made(shape) for name, shape in self.batch.items()},
        )


def _constrain(x: Any, *spec: Any) -> Any:
    """The constraint in either library; JAX finds the mesh by context."""
    if isinstance(x, torch.Tensor):
        return ta.constrain(x, ta.P(*spec))
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec(*spec))


# -- what models are made of, in torch and in JAX -----------------------------------------------------


def torch_norm(x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:])


def jax_norm(x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def torch_mlp(p: Any, x: Any) -> Any:
    return F.gelu(x @ p["up"], approximate="tanh") @ p["down"]


def jax_mlp(p: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ p["up"], approximate=True) @ p["down"]


def torch_attention(p: Any, x: Any) -> Any:
    q, k, v = (torch.einsum("bsd,dhe->bhse", x, p[name]) for name in ("q", "k", "v"))
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return torch.einsum("bhse,hed->bsd", scores.softmax(-1) @ v, p["o"])


def jax_attention(p: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhe->bhse", x, p[name]) for name in ("q", "k", "v"))
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = q @ jnp.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhse,hed->bsd", weights @ v, p["o"])


def torch_layer(p: Any, x: Any) -> Any:
    x = x + torch_attention(p, torch_norm(x))
    return x + torch_mlp(p, torch_norm(x))


def jax_layer(p: Any, x: Any) -> Any:
    x = x + jax_attention(p, jax_norm(x))
    return x + jax_mlp(p, jax_norm(x))


def squared(model: Callable[..., Any]) -> Callable[..., Any]:
    """The mean squared error of a model of x to y."""

    def loss(p: Any, batch: Any) -> Any:
        return ((model(p, batch["x"]) - batch["y"]) ** 2).mean()

    return loss


# -- losses ---------------------------------------------------------------------------------------


def sequence_parallel(layer: Callable[..., Any]) -> Callable[..., Any]:
    def model(p: Any, x: Any) -> Any:
        return _constrain(layer(p, _constrain(x, "dp", "tp", None)), "dp", "tp", None)

    return squared(model)


def torch_vocabulary(p: Any, batch: Any) -> Any:
    logits = batch["x"] @ p["table"].T
    return F.cross_entropy(logits, batch["targets"])


def jax_vocabulary(p: Any, batch: Any) -> Any:
    logits = batch["x"] @ p["table"].T
    counts = batch["targets"] != -100  # which torch leaves out
    rows = jnp.take_along_axis(logits, batch["targets"][:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - rows
    return jnp.where(counts, losses, 0.0).sum() / counts.sum()


def torch_embedding(p: Any, batch: Any) -> Any:
    return (F.embedding(batch["tokens"], p["table"]) @ p["w"]).square().mean()


def jax_embedding(p: Any, batch: Any) -> Any:
    return ((p["table"][batch["tokens"]] @ p["w"]) ** 2).mean()


def torch_experts(p: Any, x: Any) -> Any:
    gates = (x @ p["gate"]).softmax(-1)
    hidden = torch.relu(torch.einsum("td,edh->eth", x, p["w1"]))
    return torch.einsum("te,eth,ehd->td", gates, hidden, p["w2"])


def jax_experts(p: Any, x: Any) -> Any:
    gates = jax.nn.softmax(x @ p["gate"])
    hidden = jax.nn.relu(jnp.einsum("td,edh->eth", x, p["w1"]))
    return jnp.einsum("te,eth,ehd->td", gates, hidden, p["w2"])


def torch_image(p: Any, x: Any) -> Any:
    for name in ("k1", "k2"):
        x = F.silu(F.conv2d(x, p[name], padding=1))
    return x


def jax_image(p: Any, x: Any) -> Any:
    for name in ("k1", "k2"):
        x = jax.nn.silu(jax.lax.conv(x, p[name], (1, 1), "SAME"))
    return x


def torch_batch_norm(p: Any, x: Any) -> Any:
    return F.batch_norm(x @ p["w"], None, None, training=True)


def jax_batch_norm(p: Any, x: Any) -> Any:
    h = x @ p["w"]
    mean = h.mean(0)
    return (h - mean) / jnp.sqrt(((h - mean) ** 2).mean(0) + 1e-5)


def torch_recurrence(p: Any, x: Any) -> Any:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ p["w"] + h @ p["u"])
    return h


def jax_recurrence(p: Any, x: Any) -> Any:
    h = jnp.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = jnp.tanh(x[:, t] @ p["w"] + h @ p["u"])
    return h


def torch_last_token(p: Any, x: Any) -> Any:
    return (x.cumsum(1)[:, -1] + x[:, 0]) @ p["w"]


def jax_last_token(p: Any, x: Any) -> Any:
    return (x.cumsum(1)[:, -1] + x[:, 0]) @ p["w"]


TOKENS = np.random.default_rng(1).integers(0, 64, (16,))
XY = {"x": (8, 16), "y": (8, 16)}
SEQUENCE = {"x": (4, 8, 16), "y": (4, 8, 16)}
BATCH = {"x": ("dp",), "y": ("dp",)}
MLP = {"up": (16, 64), "down": (64, 16)}
HEADS = {name: (16, 4, 8) for name in "qkv"} | {"o": (4, 8, 16)}
TP = {
    "up": (None, "tp"),
    "down": ("tp", None),
    **{name: (None, "tp", None) for name in "qkv"},
    "o": ("tp", None, None),
}
WHOLE = ("dp", "tp")

LOSS = "XLA sends the loss with the gradients; torchard as soon as it is known"
BY_AXIS = "torchard sums the loss over all ranks at once, XLA axis by axis"

CASES: dict[str, Case] = {
    "mlp, data parallel": Case(
        squared(torch_mlp),
        squared(jax_mlp),
        MLP,
        XY,
        {"x": (WHOLE,), "y": (WHOLE,)},
        note=LOSS,
    ),
    "mlp, tensor parallel": Case(
        squared(torch_mlp),
        squared(jax_mlp),
        MLP,
        XY,
        {**BATCH, **TP},
        note=LOSS,
    ),
    "mlp, fully sharded": Case(
        squared(torch_mlp),
        squared(jax_mlp),
        MLP,
        XY,
        {"x": (WHOLE,), "y": (WHOLE,), "up": (WHOLE,), "down": (WHOLE,)},
        note=(
            "torchard scatters both gradients; XLA sums one whole and scatters the other by "
            "all_to_all"
        ),
    ),
    "attention, heads": Case(
        squared(torch_attention),
        squared(jax_attention),
        HEADS,
        SEQUENCE,
        {**BATCH, **TP},
        note=LOSS,
    ),
    "layer, tensor parallel": Case(
        squared(torch_layer),
        squared(jax_layer),
        {**HEADS, **MLP},
        SEQUENCE,
        {**BATCH, **TP},
        note=LOSS,
    ),
    "layer, sequence parallel": Case(
        sequence_parallel(torch_layer),
        sequence_parallel(jax_layer),
        {**HEADS, **MLP},
        SEQUENCE,
        {"x": ("dp", "tp"), "y": ("dp", "tp"), **TP},
        note=(
            "torchard gathers and scatters activations as Megatron-LM does; XLA sums them "
            "whole, and gathers scores"
        ),
    ),
    "loss, vocabulary": Case(
        torch_vocabulary,
        jax_vocabulary,
        {"table": (64, 16)},
        {"x": (16, 16), "targets": TOKENS},
        {"table": ("tp",), "x": ("dp",), "targets": ("dp",)},
        note=(
            "torchard adds the targets' logits of all ranks in the loss itself: 3 bytes more, "
            "as 8 ranks sum it instead of 2"
        ),
    ),
    "embedding, vocabulary": Case(
        torch_embedding,
        jax_embedding,
        {"table": (64, 16), "w": (16, 16)},
        {"tokens": TOKENS},
        {"table": ("tp",), "tokens": ("dp",)},
        note=LOSS,
    ),
    "experts": Case(
        squared(torch_experts),
        squared(jax_experts),
        {"gate": (16, 8), "w1": (8, 16, 32), "w2": (8, 32, 16)},
        XY,
        {**BATCH, "w1": ("tp",), "w2": ("tp",)},
        note=(
            "torchard computes all gates on every rank; XLA splits them, and sums their "
            "maxima and totals"
        ),
    ),
    "convolutions, rows of the image": Case(
        squared(torch_image),
        squared(jax_image),
        {"k1": (4, 4, 3, 3), "k2": (4, 4, 3, 3)},
        {"x": (2, 4, 16, 16), "y": (2, 4, 16, 16)},
        {"x": ("dp", None, "tp"), "y": ("dp", None, "tp")},
        note=(
            "one all_to_all brings the halos of both neighbours; torchard sums gradients over "
            "all ranks at once, XLA axis by axis"
        ),
    ),
    "batch norm": Case(
        squared(torch_batch_norm),
        squared(jax_batch_norm),
        {"w": (16, 16)},
        XY,
        {**BATCH, "w": (None, "tp")},
        note="torchard sums the loss over all ranks at once, XLA axis by axis, and one vector more",
    ),
    "recurrence": Case(
        squared(torch_recurrence),
        squared(jax_recurrence),
        {"w": (16, 16), "u": (16, 16)},
        {"x": (8, 4, 16), "y": (8, 16)},
        {**BATCH, "w": (None, "tp"), "u": (None, "tp")},
        note=(
            "torchard scatters the gradients of the state, XLA sums them whole; torchard adds "
            "the weight's gradients of all steps before it sends them"
        ),
    ),
    "layer norm, width": Case(
        squared(lambda p, x: torch_norm(x) * p["g"]),
        squared(lambda p, x: jax_norm(x) * p["g"]),
        {"g": (16,)},
        XY,
        {"x": ("dp", "tp"), "y": ("dp", "tp"), "g": ("tp",)},
        note=BY_AXIS,
    ),
    "softmax, width": Case(
        squared(lambda p, x: (x * p["g"]).softmax(-1)),
        squared(lambda p, x: jax.nn.softmax(x * p["g"])),
        {"g": (16,)},
        XY,
        {"x": ("dp", "tp"), "y": ("dp", "tp"), "g": ("tp",)},
        note=BY_AXIS,
    ),
    "last token of a split sequence": Case(
        squared(torch_last_token),
        squared(jax_last_token),
        {"w": (16, 16)},
        {"x": (4, 8, 16), "y": (4, 16)},
        {"x": ("dp", "tp"), "y": ("dp",)},
        note="for the running sum torchard sends the total of each rank, XLA the whole sequence",
    ),
}
