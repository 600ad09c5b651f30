"""trace: what becomes an input, what is refused, and what is written on the nodes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dummies import Identity, Mark, halves
from torch.func import grad, vmap

from torchard import Mesh, P, full, jit, shard
from torchard.functional.core.errors import PurityError, StaticArgumentError
from torchard.functional.engine.transformed import Transformed
from torchard.functional.trace import name, scope, trace
from torchard.functional.tracing.signature import ShapeDtype

W = torch.randn(4, 4)
X = torch.randn(2, 4)
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
MESH = Mesh({"d": 2}, virtual=True)


def ops(program: Any) -> list[str]:
    return [node.target.overloadpacket.__name__ for node in program.calls]


def run(program: Any, *parts: torch.Tensor) -> list[torch.Tensor]:
    closures = [closure.value for closure in program.closures]
    return list(program.bind()((*parts, *closures, *program.constants)))


def test_arguments_become_inputs_with_their_paths() -> None:
    program = trace(lambda p, x, scale: p["w"] * x * scale)({"w": X}, X, scale=0.5)
    assert [leaf.path for leaf in program.inputs] == ["args[0]['w']", "args[1]", "kwargs['scale']"]
    assert [node.meta["val"].dtype for node in program.placeholders][2] == torch.float64


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: x.sum() * s,
        lambda x, s: x.to(torch.int64) * s,
        lambda x, s: x.bfloat16() * s,
        lambda x, s: x * (s * 2 + 1),
        lambda x, s: torch.where(x > 0, x, s),
        lambda x, s: torch.arange(4) + s,
        lambda x, s: x.sum() * (x * s),
        lambda x, s: x.double().sum() - s,
    ],
)
def test_traced_floats_promote_like_floats(fn: Any) -> None:
    (ours,) = run(trace(fn)(X, 0.3), X, torch.tensor(0.3, dtype=torch.float64))
    theirs = fn(X, 0.3)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_the_graph_is_pure_and_clean() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x, (4,))
        y = y.clone()
        y[0] = 1.0
        y.add_(torch.tensor([1.0, 2.0, 3.0, 4.0])).mul_(torch.tensor(2.0))
        _ = y.sin()
        return y

    program = trace(fn)(X)
    assert not any(node.target._schema.is_mutable for node in program.calls)
    assert "sin" not in ops(program)
    assert all(node.op != "get_attr" for node in program.graph.nodes)
    assert len(program.constants) == 1
    torch.testing.assert_close(run(program, X)[0], fn(X))


def test_only_the_users_detach_stays() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * x.detach().sigmoid()).sum()

    assert ops(trace(grad(inner))(X)).count("detach") == 1


def test_closures_are_lifted_once_and_pruned() -> None:
    held = {"w": W, "unused": W.clone()}

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert held["unused"].shape == (4, 4)
        _ = held["unused"] + 1
        return x @ held["w"] + (x @ held["w"]).sin() + F.linear(x, held["w"])

    program = trace(fn)(X)
    assert [(leaf.path, leaf.role) for leaf in program.inputs[1:]] == [
        ("closure 'held['w']'", "closure")
    ]
    assert program.closures[0].value is W
    torch.testing.assert_close(run(program, X)[0], fn(X))


def test_closures_inside_transforms_inside() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return grad(lambda w: vmap(lambda row: (row @ w).sin().sum())(x).sum())(W)

    program = trace(fn)(X)
    assert sum(leaf.role == "closure" for leaf in program.inputs) == 1
    torch.testing.assert_close(run(program, X)[0], fn(X))


def test_a_placed_argument_is_one_global_value() -> None:
    program = trace(lambda x: x.sum(0))(halves(torch.randn(6, 4)))
    assert program.inputs[0].tag.width == 2
    assert program.placeholders[0].meta["val"].shape == (6, 4)


def test_a_placed_closure_reaches_a_nested_call() -> None:
    w = halves(W)
    nested = Transformed(lambda w, x: x @ w, [Identity()])
    program = trace(lambda x: nested(w, x))(X)
    assert program.inputs[1].tag == w.placement
    assert program.inputs[1].path == "closure 'w'"


def test_structures_in_and_out() -> None:
    program = trace(lambda p, n: {"y": (p[0] * n, None), "n": n})([X], 3)
    assert [leaf.path for leaf in program.outputs] == ["out['y'][0]"]
    built = program.out_tree.build(run(program, X))
    assert built["n"] == 3 and built["y"][1] is None
    torch.testing.assert_close(built["y"][0], X * 3)


def test_outputs_that_are_inputs_or_twice() -> None:
    program = trace(lambda x: (x, x.sin(), x, W))(X)
    found = run(program, X)
    assert found[0] is X and found[2] is X and found[3] is W


@pytest.mark.parametrize(
    "like", [ShapeDtype((2, 4), torch.bfloat16), torch.empty(2, 4, device="meta")]
)
def test_shapes_are_enough(like: Any) -> None:
    program = trace(lambda x: x @ x.T)(like)
    assert program.results[0].meta["val"].shape == (2, 2)
    assert program.results[0].meta["val"].dtype == like.dtype


# -- purity ---------------------------------------------------------------------------------------


def branches(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


def items(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def masks(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def mutates(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).add_(1)


def mutates_a_closure(x: torch.Tensor) -> torch.Tensor:
    W[0] = 1.0
    return x @ W


def draws(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(2, 4)


def drops(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    ("fn", "says", "remedy"),
    [
        (branches, "needs the value of a tensor", "torch.where"),
        (items, "needs the value of a tensor", "static"),
        (masks, "needs the value of a tensor", "torch.where"),
        (mutates, r"changes args\[0\] in place", "clone"),
        (mutates_a_closure, "changes a tensor it closes over in place", "clone"),
        (draws, "draws random numbers from torch's global", "Pass a key"),
        (drops, "draws random numbers from torch's global", "Pass a key"),
    ],
)
def test_impurity_names_the_line_and_the_way_out(fn: Any, says: str, remedy: str) -> None:
    with pytest.raises(PurityError, match=rf"^test_trace\.py:\d+ in {fn.__name__} {says}") as error:
        trace(fn)(X.clone())
    assert remedy in str(error.value)
    line = int(str(error.value).split(":")[1].split()[0])
    assert line > fn.__code__.co_firstlineno


COUNTS: dict[str, tuple[Any, Any]] = {
    "plain": (torch.bincount, lambda x: x.new_zeros(6).scatter_add(0, x, torch.ones_like(x))),
    "minlength": (
        lambda x: torch.bincount(x, minlength=6),
        lambda x: x.new_zeros(6).scatter_add(0, x, torch.ones_like(x)),
    ),
    "weights": (
        lambda x: torch.bincount(x, WEIGHTS, 6),
        lambda x: WEIGHTS.new_zeros(6).scatter_add(0, x, WEIGHTS),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_values_have_a_size_that_is_known(name: str) -> None:
    """The remedy that the refusal names does what bincount does, under transforms too."""
    refused, remedy = COUNTS[name]
    x = torch.tensor([0, 5, 1, 1])
    with pytest.raises(PurityError, match=r"bincount.* size that depends on values.*scatter_add\(0, x"):
        trace(refused)(x)
    want = refused(x)
    eager = jit(remedy, backend="eager")
    for run in (eager, shard(remedy, MESH), shard(remedy, MESH, in_specs=(P("d"),))):
        assert torch.equal(full(run(x)), want)


class Held:
    """An object that is no pytree."""

    def __init__(self, value: torch.Tensor) -> None:
        self.rows = [value]


@pytest.mark.parametrize("path", ["args[1]", "args[1]['held']", "kwargs['held']"])
def test_writes_to_tensors_in_objects_name_the_argument(path: str) -> None:
    def by_place(x: torch.Tensor, held: Any) -> torch.Tensor:
        held = held["held"] if isinstance(held, dict) else held
        held.rows[0][0] += x
        return held.rows[0]

    held = Held(torch.zeros(2, 4))
    args, kwargs = {
        "args[1]": ((X[0], held), {}),
        "args[1]['held']": ((X[0], {"held": held}), {}),
        "kwargs['held']": ((X[0],), {"held": held}),
    }[path]
    says = re.escape(f"changes {path}.rows[0] in place")
    with pytest.raises(PurityError, match=f"{says}.* {re.escape(path)} is a Held, which is no pytree"):
        trace(by_place)(*args, **kwargs)


def test_attention_without_dropout_is_not_random() -> None:
    q = torch.randn(1, 2, 8, 4)
    trace(F.scaled_dot_product_attention)(q, q, q)


def test_a_static_argument_must_be_hashable() -> None:
    with pytest.raises(StaticArgumentError, match=r"args\[1\]\['a'\] is a bytearray"):
        trace(lambda x, y: x)(X, {"a": bytearray(2)})


def test_no_tensor_comes_back() -> None:
    with pytest.raises(PurityError, match="returned int without a tensor"):
        trace(lambda x: 3)(X)


# -- tags -----------------------------------------------------------------------------------------


@scope("head")
def head(x: torch.Tensor) -> torch.Tensor:
    return name(x.cos(), "out")


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with scope("body"), scope("0"):
        h = (x @ w).tanh()
    return head(h).sum()


def tags(program: Any, op: str, key: str) -> list[Any]:
    found = [n for n in program.calls if n.target.overloadpacket.__name__ == op]
    return [node.meta.get(key) for node in found]


def test_nodes_know_their_line_scope_and_name() -> None:
    program = trace(loss)(W, X)
    first = loss.__code__.co_firstlineno
    assert tags(program, "mm", "source") == [f"test_trace.py:{first + 2} in loss"]
    assert tags(program, "mm", "scope") == ["body/0"]
    assert tags(program, "cos", "scope") == ["head"]
    assert tags(program, "cos", "name") == ["out"]
    assert tags(program, "sum", "scope") == [None]


def test_backward_nodes_know_their_forwards() -> None:
    program = trace(grad(loss, argnums=(0, 1)))(W, X)
    line = f"test_trace.py:{loss.__code__.co_firstlineno + 2} in loss"
    assert tags(program, "mm", "source") == [line] * 3
    assert tags(program, "mm", "phase") == ["forward", "backward", "backward"]
    assert tags(program, "tanh_backward", "scope") == ["body/0"]
    assert tags(program, "sin", "source")[0].endswith("in head")


def test_tags_survive_inlining_forward_and_backward() -> None:
    marked = Transformed(loss, [Mark("layout", "L")])

    def outer(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with scope("outer"):
            return marked(w, x * 2)

    program = trace(outer)(W, X)
    assert tags(program, "tanh", "layout") == ["L"]
    assert tags(program, "mul", "layout") == [None]
    assert tags(program, "mm", "scope") == ["outer/body/0"]
    program = trace(grad(outer, argnums=(0, 1)))(W, X)
    assert tags(program, "mm", "layout") == ["L"] * 3
    assert tags(program, "mm", "scope") == ["outer/body/0"] * 3
    assert tags(program, "mm", "phase") == ["forward", "backward", "backward"]
    assert None in tags(program, "mul", "layout")


def test_a_scope_costs_nothing_outside() -> None:
    assert head(X).equal(X.cos())


def test_constants_of_a_function_without_arguments() -> None:
    program = trace(lambda: torch.tensor([1.0, 2.0]) * 2 + W[0, :2])()
    assert [n.op for n in program.graph.nodes][-1] == "output"
    assert torch.equal(run(program)[0], torch.tensor([2.0, 4.0]) + W[0, :2])


def test_a_value_read_by_torch_itself() -> None:
    with pytest.raises(PurityError, match="needs the value of a tensor"):
        trace(lambda x, at: x.tensor_split(at))(X, torch.tensor([1]))


def test_sparse_arguments_are_refused() -> None:
    with pytest.raises(StaticArgumentError, match=r"args\[1\] has the layout torch.sparse_coo"):
        trace(lambda x, s: s @ x)(X, torch.eye(2).to_sparse())


@pytest.mark.parametrize("file", ["<stdin>", "<python-input-0>", "<ipython-input-1>", "<doctest f[2]>"])
def test_what_is_typed_at_a_prompt_is_named_by_line(file: str) -> None:
    names: dict[str, Any] = {}
    # Code that differs in its file alone is equal, and known from then on.
    exec(compile(f"def typed(x):\n    {file!r}\n    return x.sin()\n", file, "exec"), names)
    (node,) = trace(names["typed"])(torch.ones(3)).calls
    assert node.meta["source"] == f"{file}:3 in typed"
