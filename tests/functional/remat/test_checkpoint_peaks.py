"""Peaks, counted from outside: what programs say, and torch.utils.checkpoint beside them."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
import train_gpt
from _live import LiveBytes
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from torchard import checkpoint, jit, nn, policies, random
from torchard.functional.costs.flops import DOTS

SIZE = train_gpt.Size(context=8, width=16, heads=2, layers=4)
PARAMS = train_gpt.init(SIZE, random.key(0))
DATA = torch.randint(0, 256, (4, SIZE.context + 1))
LOSS = functools.partial(train_gpt.loss, SIZE)


def block(p: Any, x: Tensor) -> Tensor:
    """One of train_gpt's."""
    x = x + train_gpt.attention(SIZE, p, train_gpt.norm(p["norm1"], x))
    return x + train_gpt.mlp(p, train_gpt.norm(p["norm2"], x))


def eager(context: Any, params: Any, batch: Tensor) -> Tensor:
    """The same model, its blocks checkpointed by torch."""
    places = params["positions"][: SIZE.context]
    x = nn.embedding(params["embedding"], batch[:, :-1]) + places
    for p in params["blocks"]:
        x = torch_checkpoint(block, p, x, use_reentrant=False, **context)
    logits = nn.linear(train_gpt.norm(params["norm"], x), params["embedding"])
    return nn.cross_entropy(logits, batch[:, 1:])


def saves_dots(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(op, "overloadpacket", op)
    keep = str(packet) in DOTS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> Any:
    return create_selective_checkpoint_contexts(saves_dots)


def measured(fn: Any) -> tuple[int, list[Tensor]]:
    """The most bytes alive during forward and backward, and the gradients."""
    params = tree_map(lambda t: t.detach().clone().requires_grad_(), PARAMS)
    leaves = tree_leaves(params)
    one = torch.ones(())

    def run() -> list[Tensor]:
        return list(torch.autograd.grad(fn(params, DATA), leaves, one))

    run()
    gc.collect()
    with LiveBytes([*leaves, DATA, one]) as count:
        found = run()
    return count.peak(), found


@pytest.mark.parametrize(
    ("policy", "context"),
    [
        (policies.save_nothing, {}),
        (policies.save_dots, {"context_fn": selective}),
    ],
    ids=["save_nothing", "save_dots"],
)
def test_no_more_than_torch_s(policy: Any, context: Any) -> None:
    """Of the same model, by the same policy, each in plain autograd."""
    made = checkpoint(LOSS, policy=policy, where="block/*")
    ours, found = measured(made)
    theirs, expected = measured(functools.partial(eager, context))
    most, _ = measured(LOSS)
    assert ours <= theirs < most
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert ours == made.lower_joint(PARAMS, DATA, argnums=0).peak


ALL = {
    "nothing": policies.save_nothing,
    "dots": policies.save_dots,
    "everything": policies.save_everything,
    "all but names": policies.save_all_but_names("stream"),
    "offload": policies.offload_names("stream"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ALL)
def test_a_step_holds_what_its_program_says(policy: str) -> None:
    made = checkpoint(LOSS, policy=ALL[policy], where="block/*")
    step = jit(lambda p, b: torch.func.grad(made)(p, b), backend="eager")
    step(PARAMS, DATA)
    gc.collect()
    with LiveBytes([*tree_leaves(PARAMS), DATA]) as count:
        step(PARAMS, DATA)
    assert count.peak() == step.lower(PARAMS, DATA).peak


def test_less_is_kept_by_what_keeps_less() -> None:
    """Nothing, the labelled sums, products, everything: each peak is below the next."""
    chain = (
        policies.save_nothing,
        policies.save_names("stream"),
        policies.save_dots,
        policies.save_everything,
    )
    peaks = [
        checkpoint(LOSS, policy=policy, where="block/*").lower_joint(PARAMS, DATA, argnums=0).peak
        for policy in chain
    ]
    assert peaks == sorted(set(peaks))
