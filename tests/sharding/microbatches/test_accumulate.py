"""accumulate: the plain function's values and derivatives, in every stack, and the expert's counts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import optree
import pytest
import torch
from any_size import fuse
from microbatched import BATCH, CASES, DERIVED, ROWS, STACKS
from paths import EXAMPLES
from torch.nn import functional as F

import torchard
from torchard import AccumulateError, Mesh, P, accumulate, jit, place, random, scope, shard

sys.path.append(str(EXAMPLES))

from _live import LiveBytes

F64 = torch.float64


def whole(tree: Any) -> Any:
    return optree.tree_map(lambda v: v.full() if isinstance(v, torchard.MeshTensor) else v, tree)


# torch refuses to map its own kernel over labels.
NOT_MAPPED = {("weighted", "vmap"), ("weighted", "vmap of grad")}


@pytest.mark.sampled(40)
@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(("name", "derived"), [c for c in product(CASES, DERIVED) if c not in NOT_MAPPED])
def test_equals_the_plain_function(name: str, stack: str, derived: str) -> None:
    case = CASES[name]
    want = DERIVED[derived](lambda f: f, case.loss)(*case.args)
    steps = 3 if stack != "nested" else 2
    have = DERIVED[derived](lambda f: STACKS[stack](f, steps), case.loss)(*case.args)
    torch.testing.assert_close(whole(have), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("steps", [1, 2, 4, 12])
def test_integers_are_exact(steps: int, dtype: torch.dtype) -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> Any:
        h = x * w
        return {"each": h, "sum": h.sum(0), "max": h.amax(0), "any": (h > 2).any(0), "n": (h > 0).sum()}

    w = random.randint(random.key(0), (8,), -2, 3).to(dtype)
    x = random.randint(random.key(1), (ROWS, 8), -2, 3).to(dtype)
    have, want = accumulate(fn, steps, batch=(None, 0))(w, x), fn(w, x)
    assert all(torch.equal(have[k], want[k]) and have[k].dtype == want[k].dtype for k in want)


def test_narrow_sums_are_added_up_in_float32() -> None:
    x = torch.full((512, 1), 1.0, dtype=torch.bfloat16)
    assert accumulate(lambda x: x.sum(), 512, batch=0)(x) == 512  # 256 + 1 is 256 in bfloat16


# -- what runs ------------------------------------------------------------------------------------------


def test_the_experts_collectives() -> None:
    """Whatever the number of slices: the number of labels, then the loss and all gradients in one."""
    case = CASES["gpt"]
    mesh = Mesh({"dp": 2}, virtual=True)
    for steps in (1, 2, 3):
        step = accumulate(torch.func.grad_and_value(case.loss), steps, batch=BATCH)
        run = shard(step, mesh, in_specs=(None, P("dp"), P("dp")), out_specs=P())
        sent = [(c.kind, c.shape) for c in run.lower(*case.args).collectives]
        size = sum(p.numel() for p in case.args[0].values())
        assert sorted(sent) == [("all_reduce", ()), ("all_reduce", (size + 1,))]


def test_a_placed_batch_is_sliced_on_its_ranks() -> None:
    mesh = Mesh({"dp": 4}, virtual=True)
    x = place(torch.arange(48.0).reshape(24, 2), mesh, P("dp"))
    run = shard(accumulate(lambda x: (x * x, x.sum(0)), 3, batch=0), mesh)
    squares, total = run(x)
    assert squares.spec == P("dp", None)
    assert torch.equal(squares.full(), x.full() ** 2) and torch.equal(whole(total), x.full().sum(0))
    assert [c.kind for c in run.lower(x).collectives] == ["all_reduce"]


def test_what_no_slice_changes_is_computed_once() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.linalg.qr(w).Q).sum().sqrt()

    program = accumulate(fn, 4, batch=(None, 0)).lower(torch.eye(3), torch.ones(8, 3))
    ops = [str(node.target) for node in program.calls]
    names = ("aten.linalg_qr.default", "aten.mm.default", "aten.sqrt.default")
    assert [ops.count(name) for name in names] == [1, 4, 1]
    assert ops.index(names[0]) < ops.index(names[1])


def test_kernels_run_in_every_slice() -> None:
    case = CASES["gpt"]
    step = torch.func.grad_and_value(case.loss)
    plain = [kernel.kernel for kernel in fuse(step).lower(*case.args).kernels]
    have = [kernel.kernel for kernel in fuse(accumulate(step, 3, batch=BATCH)).lower(*case.args).kernels]
    assert len(plain) >= 6 and sorted(have) == sorted(3 * plain)


def test_traced_once() -> None:
    case = CASES["mlp"]
    step = accumulate(torch.func.grad(case.loss), 4, batch=BATCH)
    for _ in range(3):
        step(*case.args)
    assert step.traces == 1


def residual_mlp(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i, w in enumerate(params):
        with scope(f"block/{i}"):
            x = x + torch.tanh(x @ w)
    return x.square().mean()


@pytest.mark.parametrize("inside", [True, False], ids=["gradients inside", "gradients outside"])
def test_one_slice_is_alive_at_a_time(inside: bool) -> None:
    """The peak is simulated exactly, and that of the slices falls as their rows do."""
    params = [random.normal(random.key(i), (16, 16)) for i in range(6)]
    x = random.normal(random.key(9), (1024, 16))
    fixed = 4 * (2 * 6 * 16 * 16 + x.numel())  # parameters, gradients and the batch
    above = []
    for steps in (2, 4, 8):
        if inside:
            step: Callable[..., Any] = accumulate(torch.func.grad(residual_mlp), steps, batch=(None, 0))
            simulated = step.lower(params, x).peak  # type: ignore[attr-defined]
        else:
            loss = accumulate(residual_mlp, steps, batch=(None, 0))
            step, simulated = torch.func.grad(loss), loss.lower_joint(params, x, argnums=0).peak
        step(params, x)
        gc.collect()
        with LiveBytes([*params, x]) as live:
            step(params, x)
        assert live.peak() == simulated
        above.append(simulated - fixed)
    assert above[0] > 1.8 * above[1] > 3.2 * above[2]


# -- what is refused ------------------------------------------------------------------------------------


def batch_norm(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x @ w, None, None, training=True).square().mean()


@torch.library.custom_op("test_accumulate::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)


def frequent(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(x.long(), w, scale_grad_by_freq=True).sum()


REFUSED: dict[str, tuple[Callable[..., Any], int, Any, str]] = {
    "batch norm": (batch_norm, 2, (None, 0), r"in batch_norm: .* whole batch.*layer or group norm"),
    "contrastive": (lambda w, x: (x @ w @ x.T).logsumexp(1).sum(), 2, (None, 0), "needs the whole batch"),
    "sort": (
        *(lambda w, x: (x @ w).sort(0).values.sum(), 2, (None, 0)),
        r"aten.sort.*dim 0 here\. Compute it outside .* use checkpoint",
    ),
    "bags scaled by frequencies": (
        *(torch.func.grad(frequent), 2, (None, 0)),
        r"_embedding_bag_backward.* needs the whole batch",
    ),
    "an operator": (
        *(lambda w, x: halved(x @ w).sum(), 2, (None, 0)),
        r"register_rule\(torch\.ops\.test_accumulate\.halved\.default, text='n",
    ),
    "no multiple": (lambda w, x: (x @ w).sum(), 5, (None, 0), r"dim 0 of args\[1\].*steps=4 or 6"),
    "no such dim": (lambda w, x: (x @ w).sum(), 2, (None, 2), r"args\[1\] has shape .* no dim 2"),
    "no batch": (lambda w, x: (x @ w).sum(), 2, (None, None), "no argument has a batch"),
    "no argument": (lambda w, x: (x @ w).sum(), 2, {"y": 0}, "names 'y', but the arguments are w, x"),
    "two dims": (accumulate(lambda w, x: x.sum(), 2, batch=(None, 0)), 2, (None, 1), "use the same dim"),
    "a spec": (lambda w, x: (x @ w).sum(), 2, (None, P("dp")), "batch has a leaf P"),
    "a number": (lambda w, x, n: (x @ w).sum() * n, 2, (None, 0, 0), r"args\[2\] .* not a tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    fn, steps, batch, message = REFUSED[name]
    args = (torch.ones(4, 4), torch.ones(ROWS, 4)) + ((2,) if name == "a number" else ())
    with pytest.raises(AccumulateError, match=message):
        accumulate(fn, steps, batch=batch)(*args)
    if name == "batch norm":
        with pytest.raises(AccumulateError, match=message):
            jit(torch.func.grad(accumulate(fn, steps, batch=batch)), backend="eager")(*args)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "two"])
def test_the_number_of_slices(steps: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="steps"):
        accumulate(torch.sum, steps, batch=0)


def test_slices_of_slices_and_loops_side_by_side() -> None:
    """A function that is called inside, with another number of slices."""
    case = CASES["mlp"]

    def both(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        inner = accumulate(case.loss, 2, batch=BATCH)
        return inner(p, x, y) + inner(p, x * 2, y), accumulate(case.loss, 4, batch=BATCH)(p, -x, y)

    def plain(p: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return case.loss(p, x, y) + case.loss(p, x * 2, y), case.loss(p, -x, y)

    for run in (jit(both, backend="eager"), accumulate(both, 3, batch=BATCH)):
        torch.testing.assert_close(run(*case.args), plain(*case.args), rtol=1e-9, atol=1e-9)


def test_a_gradient_of_accumulated_gradients_without_specs() -> None:
    """An output that all slices add up to is planned before its cotangent, which slices use."""
    case = CASES["mlp"]
    mesh = Mesh({"dp": 2}, virtual=True)

    def twice(transform: Callable[[Any], Any]) -> Any:
        return DERIVED["gradient of a gradient"](transform, case.loss)(*case.args)

    have = twice(lambda f: shard(accumulate(f, 2, batch=BATCH), mesh))
    torch.testing.assert_close(whole(have), twice(lambda f: f), rtol=1e-9, atol=1e-9)
