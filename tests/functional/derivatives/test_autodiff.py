"""joint and split: every value and gradient, any saved set, in as little memory as it says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dummies import Identity
from torch.func import hessian, jacfwd, jvp

from torchard.functional.derivatives.autodiff import joint, pullback
from torchard.functional.engine.transformed import Transformed
from torchard.functional.execution.binding import bind
from torchard.functional.programs.program import Program
from torchard.functional.remat.split import split
from torchard.functional.trace import trace

F64 = torch.float64


def net(w: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = F.gelu(x @ w + b)
    h = F.layer_norm(h.view(2, -1, 4), (4,)).view(-1, 4)
    top, at = h.max(1)
    return h.softmax(-1) * 2, top.sum(), at, x


def arguments() -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(4, 4, dtype=F64),
        torch.randn(4, dtype=F64),
        torch.randn(6, 4, dtype=F64),
    )


def cotangents(program: Program) -> list[torch.Tensor]:
    return [
        torch.randn(node.meta["val"].shape, dtype=node.meta["val"].dtype)
        for leaf, node in zip(program.inputs, program.placeholders, strict=True)
        if leaf.role == "cotangent"
    ]


def expected(args: Any, mask: Any, cts: Any) -> tuple[Any, Any]:
    args = [a.clone().requires_grad_(m) for a, m in zip(args, mask, strict=True)]
    outputs = net(*args)
    pairs = zip((o for o in outputs if o.is_floating_point()), cts, strict=True)
    ys, vs = zip(*((o, c) for o, c in pairs if o.requires_grad), strict=True)
    wanted = [a for a, m in zip(args, mask, strict=True) if m]
    return outputs, torch.autograd.grad(ys, wanted, vs, allow_unused=True)


def halves(program: Program, args: Any, cts: Any) -> tuple[list[Any], list[Any]]:
    """Outputs and gradients by way of the split."""
    cut = split(program)
    results = bind(cut.forward)(list(args))
    count = len(results) - sum(s.kind == "value" for s in cut.saved)
    lists = {"input": args, "output": results[:count], "value": results[count:]}
    residuals = [lists[s.kind][s.index] for s in cut.saved]
    return results[:count], bind(cut.backward)([*residuals, *cts])


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3))[:-1])
def test_joint_and_its_halves(mask: tuple[bool, ...]) -> None:
    args = arguments()
    program = joint(trace(net)(*args), mask)
    cts = cotangents(program)
    outputs, gradients = expected(args, mask, cts)
    whole = bind(program)([*args, *cts])
    firsts, seconds = halves(program, args, cts)
    for got in (whole, [*firsts, *seconds]):
        assert len(got) == len(outputs) + sum(mask)
        for a, b in zip(got, (*outputs, *gradients), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


def test_leaves_say_what_is_what() -> None:
    program = joint(trace(net)(*arguments()), (True, False, True))
    roles = [(leaf.role, leaf.of) for leaf in program.inputs]
    assert roles == [("primal", None)] * 3 + [("cotangent", i) for i in (0, 1, 3)]
    roles = [(leaf.role, leaf.of) for leaf in program.outputs]
    assert roles == [("output", None)] * 4 + [("gradient", 0), ("gradient", 2)]
    assert program.differentiable == (True, True, False, True)


def test_autograds_own_detaches_are_gone() -> None:
    program = joint(trace(lambda x: x.tanh().exp())(torch.randn(3)), (True,))
    assert not [node for node in program.calls if "detach" in node.name]


def test_autocast_around_it_adds_nothing() -> None:
    base = trace(lambda w, x: x @ w)(torch.randn(3, 3), torch.randn(2, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = joint(base, (True, True))
    assert not [node for node in program.calls if "_to_copy" in node.name]


def test_only_what_is_asked_for_is_computed() -> None:
    base = trace(lambda a, b: (a @ b).sum())(torch.randn(2, 3), torch.randn(3, 2))
    matmuls = [
        sum("mm" in node.name for node in joint(base, mask).calls)
        for mask in [(True, True), (True, False), (False, False)]
    ]
    assert matmuls == [3, 2, 1]


def test_an_input_the_output_ignores_has_no_gradient() -> None:
    program = joint(trace(lambda a, b: a * 2)(*arguments()[:2]), (True, True))
    assert [leaf.of for leaf in program.outputs] == [None, 0]


def test_every_saved_set_gives_the_same_gradients() -> None:
    args = arguments()
    mask = (True, True, True)
    program = joint(trace(net)(*args), mask)
    cts = cotangents(program)
    _, gradients = expected(args, mask, cts)
    names = [node.name for node in program.calls if node.meta["phase"] == "forward"]
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        tagged = program.copy()
        chosen = torch.rand(len(names), generator=generator) < 0.5
        picked = {name for name, c in zip(names, chosen, strict=True) if c}
        for node in tagged.calls:
            if node.name in picked:
                node.meta["recompute"] = True
        cut = split(tagged)
        assert not any(node.meta.get("recompute") for node in cut.backward.placeholders), (
            "a recompute node was saved"
        )
        for a, b in zip(halves(tagged, args, cts)[1], gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_recompute_comes_late() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
        return x.sum()

    program = joint(trace(chain)(torch.randn(3)), (True,))
    for node in program.calls:
        if "sin" in node.name:
            node.meta["recompute"] = True
    cut = split(program)
    assert [s.kind for s in cut.saved] == ["input"]
    order = [node.name for node in cut.backward.calls]
    cos = [i for i, name in enumerate(order) if name.startswith("cos")]
    assert order.index("expand") < order.index("sin") < cos[0] < cos[1]


def test_residuals_are_storages() -> None:
    def views(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        return (h.view(-1) * h.t().reshape(-1).sin()).sum() + (h[0] * h[1]).sum()

    cut = split(joint(trace(views)(torch.randn(4, 4)), (True,)))
    kept = [node.name for node in cut.forward.graph.nodes if "residual" in node.meta]
    assert "exp" in kept and not {"view", "t", "select", "select_1"} & set(kept)

    def through_input(x: torch.Tensor) -> torch.Tensor:
        return x.t().sin().sum()

    cut = split(joint(trace(through_input)(torch.randn(4, 8)), (True,)))
    assert [s.kind for s in cut.saved] == ["input"]


def test_an_output_is_saved_as_the_output() -> None:
    cut = split(joint(trace(lambda x: x.exp())(torch.randn(4)), (True,)))
    assert [(s.kind, s.index) for s in cut.saved] == [("output", 0)]
    assert len(cut.forward.outputs) == 1


def test_unknown_operations_in_the_graph() -> None:
    """A rewrite may put anything between: here an opaque node on either side."""

    def gather(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    program = joint(trace(lambda w, x: (x @ w).tanh())(*arguments()[::2]), (True, True))
    for node in [n for n in program.calls if n.name in ("mm", "tanh_backward")]:
        with program.graph.inserting_after(node):
            new = program.graph.call_function(gather, (node,))
        new.meta = {**node.meta, "collective": "sent"}
        node.replace_all_uses_with(new)
        new.args = (node,)
    args = arguments()[::2]
    cts = cotangents(program)
    outputs, gradients = halves(program, args, cts)
    torch.testing.assert_close(outputs[0], (args[1] @ args[0]).tanh())
    torch.testing.assert_close(
        gradients[0], args[1].T @ (cts[0] * (1 - outputs[0] ** 2)), rtol=1e-12, atol=1e-12
    )
    cut = split(program)
    assert len(cut.forward.collectives) == len(cut.backward.collectives) == 1


def test_a_gathered_value_is_made_again_if_tagged() -> None:
    def gather(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    program = joint(trace(lambda w, x: (x @ w).sin())(*arguments()[::2]), (True, True))
    first = program.placeholders[0]
    with program.graph.inserting_before(program.calls[0]):
        new = program.graph.call_function(gather, (first,))
    new.meta = {**first.meta, "recompute": True, "collective": "all_gather"}
    first.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    cut = split(program)
    assert len(cut.forward.collectives) == 1
    assert cut.backward.collectives == ["all_gather"]


def test_pullback_is_the_gradient_and_differentiable() -> None:
    base = trace(lambda a: a.sin().sum())(torch.randn(3, dtype=F64))
    pull = pullback(base, (True,), [None])
    second = joint(pull, (True, False))
    a, ct, v = torch.randn(3, dtype=F64), torch.tensor(2.0, dtype=F64), torch.randn(3, dtype=F64)
    gradient, hessian_v = bind(second)([a, ct, v])
    torch.testing.assert_close(gradient, 2 * a.cos())
    torch.testing.assert_close(hessian_v, -2 * a.sin() * v)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def test_what_a_graph_does_not_show_is_differentiated_right() -> None:
    def no_grad(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return x * scale

    for fn in (Straight.apply, no_grad, lambda x: x.detach() * x):
        x = torch.randn(3, dtype=F64, requires_grad=True)
        (want,) = torch.autograd.grad(fn(x).sum(), x)
        *_, got = bind(joint(trace(fn)(x), (True,)))([x.detach(), torch.ones(3, dtype=F64)])
        torch.testing.assert_close(got, want)


def test_a_leaking_cotangent_is_refused() -> None:
    program = joint(trace(lambda x: x * 2)(torch.randn(3)), (True,))
    output = program.graph.output_node()
    gradient = output.args[0][1]
    output.args = ((gradient, gradient),)
    with pytest.raises(ValueError, match="depends on a cotangent"):
        split(program)


def test_overwritten_parts_have_gradients() -> None:
    """Functionalisation leaves ``copy`` behind, of which torch knows no derivative."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(3, 4)
        out[:2] = x * w
        out[2:, :3] = w.to(torch.float32)[:3]
        return out

    x, w = torch.randn(2, 4), torch.randn(4, dtype=torch.float64)
    same = Transformed(fn, (Identity(),))
    ct = torch.randn(3, 4)
    have, want = (torch.func.vjp(f, x, w)[1](ct) for f in (same, fn))
    for h, wanted in zip(have, want, strict=True):
        torch.testing.assert_close(h, wanted)


def test_kernels_torch_picks_where_no_gradient_is_asked_for() -> None:
    """While tracing none is; embedding_bag's then has no derivative, and chunked losses give zeros."""

    def bags(w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(torch.tensor([0, 2, 1]), w, torch.tensor([0, 2]), mode="sum").sin()

    w = torch.randn(3, 4)
    same = Transformed(bags, (Identity(),))
    have, want = (torch.func.vjp(f, w)[1](torch.ones(2, 4))[0] for f in (same, bags))
    torch.testing.assert_close(have, want)


def test_attention_to_a_learned_bias() -> None:
    """torch's fast kernel has no gradient for the mask; it is not what eager torch would run."""

    def attend(q: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias * 2)

    q, bias = torch.randn(2, 2, 5, 4), torch.randn(5, 5)
    same = Transformed(attend, (Identity(),))
    have, want = (torch.func.vjp(f, q, bias)[1](torch.ones_like(q)) for f in (same, attend))
    for h, wanted in zip(have, want, strict=True):
        torch.testing.assert_close(h, wanted)


@pytest.mark.parametrize("norm", ["layer", "batch", "rms"])
def test_forward_mode_through_norms(norm: str) -> None:
    """torch pushes the tangents of weights to where it takes a fake tensor to be, which is on meta.

    Its second derivative of batch norm, where weights depend on the input, is wrong by itself.
    """

    def normed(x: torch.Tensor, w: torch.Tensor, by_hand: bool = False) -> torch.Tensor:
        if norm == "layer":
            y = F.layer_norm(x, (3,), w, w)
        elif norm == "rms":
            y = F.rms_norm(x, (3,), w)
        elif by_hand:
            var, mean = torch.var_mean(x, 0, correction=0)
            y = (x - mean) * (var + 1e-5).rsqrt() * w + w
        else:
            y = F.batch_norm(x, None, None, w, w, training=True)
        return (y**3).sum()

    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    closed = (
        (x, lambda x, *how: normed(x, w, *how)),
        (w, lambda w, *how: normed(x, w, *how)),
        (x, lambda x, *how: normed(x, x[0], *how)),
    )
    for at, fn in closed:
        T = Transformed(fn, ())
        torch.testing.assert_close(jvp(T, (at,), (at.cos(),)), jvp(fn, (at,), (at.cos(),)))
        want = hessian(lambda x, fn=fn: fn(x, norm == "batch"))(at)
        torch.testing.assert_close(hessian(T)(at), want)
    T = Transformed(normed, ())
    torch.testing.assert_close(jacfwd(T)(x, w), jacfwd(normed)(x, w))
