import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchard.functional import optim, tree
from torchard.functional.optim import adamw, sgd, warmup_cosine


def start(dtype=torch.float64):
    return {
        "w": torch.randn(4, 3, dtype=dtype),
        "rest": [torch.randn(5, dtype=dtype), torch.tensor(0.7, dtype=dtype)],
    }


def loss(params, shift):
    return sum((p.sin() * (p + shift) ** 2).sum() for p in tree.leaves(params) if p is not None)


CASES = [
    (sgd(0.1), torch.optim.SGD, {"lr": 0.1}),
    (
        sgd(0.1, momentum=0.9, weight_decay=0.03),
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.03},
    ),
    (
        sgd(0.05, momentum=0.8, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "nesterov": True},
    ),
    (
        sgd(torch.tensor(0.1, dtype=torch.float64), weight_decay=0.1),
        torch.optim.SGD,
        {"lr": 0.1, "weight_decay": 0.1},
    ),
    (adamw(0.03), torch.optim.AdamW, {"lr": 0.03}),
    (adamw(0.03, weight_decay=0.0), torch.optim.Adam, {"lr": 0.03}),
    (
        adamw(lambda step: 0.03, b1=0.7, b2=0.95, eps=1e-4, weight_decay=0.2),
        torch.optim.AdamW,
        {"lr": 0.03, "betas": (0.7, 0.95), "eps": 1e-4, "weight_decay": 0.2},
    ),
]


def twenty_steps(update, params, state):
    for number in range(20):
        grads = torch.func.grad(loss)(params, number / 20)
        params, state = update(grads, state, params)
    return params, state


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES)
def test_twenty_steps_are_torchs(ours, theirs, options):
    params = start()
    reference = [p.clone().requires_grad_() for p in tree.leaves(params)]
    optimizer = theirs(reference, **options)
    for number in range(20):
        optimizer.zero_grad()
        loss(reference, number / 20).backward()
        optimizer.step()
    got, state = twenty_steps(ours.update, params, ours.init(params))
    assert state.step.item() == 20
    for mine, other in zip(tree.leaves(got), reference, strict=True):
        assert (mine - other).abs().max() <= 1e-12


@pytest.mark.parametrize(("ours", "_theirs", "_options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_arguments_stay_as_they_were(ours, _theirs, _options, dtype):
    params, grads = start(dtype), start(dtype)
    state = ours.init(params)
    before = [t.clone() for t in tree.leaves((params, grads, state)) if t is not None]
    new, later = ours.update(grads, state, params)
    after = [t for t in tree.leaves((params, grads, state)) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert tree.structure((new, later)) == tree.structure((params, state))
    for old, fresh in zip(tree.leaves((params, state)), tree.leaves((new, later)), strict=True):
        assert old is None or (fresh.dtype, fresh.shape) == (old.dtype, old.shape)
        assert old is None or not torch.equal(old, fresh)


@pytest.mark.parametrize("rate", [warmup_cosine(0.1, 10, warmup=3), lambda s: 0.1 / (s + 1)])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_one_trace_serves_every_step(make, rate):
    ours = make(rate)
    params = start()
    state = ours.init(params)
    traced = make_fx(ours.update, tracing_mode="fake")(start(), state, params)
    by_trace = twenty_steps(traced, params, state)
    eager = twenty_steps(ours.update, params, state)
    for got, expected in zip(tree.leaves(by_trace), tree.leaves(eager), strict=True):
        assert got is expected is None or torch.equal(got, expected)
    constant = twenty_steps(make(0.1).update, params, state)
    assert not torch.equal(constant[0]["w"], eager[0]["w"])


def test_schedule_is_called_with_the_steps_taken_so_far():
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    ours = sgd(lambda step: step + 1.0)
    state = ours.init(params)
    for expected in (-1.0, -3.0, -6.0):
        params, state = ours.update({"w": torch.ones(1, dtype=torch.float64)}, state, params)
        assert params["w"].item() == expected


def test_adamw_scales_with_its_schedule():
    params, grads = start(), start()
    ours, unit = adamw(lambda step: step + 3.0), adamw(1.0)
    state = unit.init(params)
    for rate in (3.0, 4.0):
        new, _ = ours.update(grads, state, params)
        by_one, state = unit.update(grads, state, params)
        torch.testing.assert_close(new["w"] - params["w"], rate * (by_one["w"] - params["w"]))


def test_warmup_cosine():
    rate = warmup_cosine(2.0, 12, warmup=4, floor=0.5)
    got = torch.stack([rate(torch.tensor(s)) for s in range(15)])
    expected = [0.5, 1.0, 1.5, 2.0]
    expected += [0.5 + 0.75 * (1 + math.cos(math.pi * s / 8)) for s in range(9)] + [0.5, 0.5]
    torch.testing.assert_close(got, torch.tensor(expected))


@pytest.mark.parametrize("ours", [sgd(0.1), sgd(0.1, momentum=0.9), adamw(0.1)])
def test_absent_parameters_stay_absent(ours):
    params = {"w": torch.ones(2), "b": None}
    new, _ = ours.update(params, ours.init(params), params)
    assert new["b"] is None and not torch.equal(new["w"], params["w"])


@pytest.mark.parametrize("ours", [sgd(0.1), sgd(0.1, momentum=0.9), adamw(0.1)])
def test_a_tree_without_parameters(ours):
    new, state = ours.update({}, ours.init({}), {})
    assert new == {} and state.step.item() == 1


def test_an_update_can_be_differentiated():
    """As meta-learning does: the loss after a step, by the learning rate before it."""
    params = start()
    grads = torch.func.grad(loss)(params, 0.3)

    def after(rate):
        ours = adamw(rate)
        return loss(ours.update(grads, ours.init(params), params)[0], 0.3)

    rate, h = torch.tensor(0.01, dtype=torch.float64), 1e-6
    numeric = (after(rate + h) - after(rate - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(after)(rate), numeric, rtol=1e-6, atol=0)


def test_registered_nodes_are_seen_through():
    class Box:
        def __init__(self, inner):
            self.inner = inner

    tree.register(Box, lambda b: ((b.inner,), None), lambda _, children: Box(*children))
    ours = optim.adamw(0.1)
    params = Box({"w": torch.ones(2)})
    new, state = ours.update(params, ours.init(params), params)
    assert isinstance(new, Box) and isinstance(state.mean, Box)
    bare, _ = ours.update(params.inner, ours.init(params.inner), params.inner)
    assert torch.equal(new.inner["w"], bare["w"])


def test_errors():
    with pytest.raises(ValueError, match="momentum > 0"):
        sgd(0.1, nesterov=True)
    params = start()
    with pytest.raises(ValueError, match="rest"):
        sgd(0.1).update({"w": params["w"], "rest": []}, sgd(0.1).init(params), params)
