"""What a backward keeps: lists derived by hand from the sizes of two models, and one rank's part."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import train_gpt
from torch import Tensor

from torchard import checkpoint, jit, name, nn, policies, random, saved_residuals, scope
from torchard.functional.costs.flops import DOTS, flops, op_name
from torchard.functional.engine.lowered_function import lower
from torchard.functional.programs.program import Program
from torchard.functional.programs.unrolled import unrolled

# Kind, what, name, bytes, scope, why.
Row = tuple[str, str, str | None, int, str, str]
FLOAT = 4


def rows(found: Any) -> list[Row]:
    return [(one.kind, one.what, one.name, one.bytes, one.scope, one.why) for one in found]


def tensor(what: str, label: str | None, elements: int, scope: str, why: str) -> Row:
    return "value", what, label, FLOAT * elements, scope, why


def argument(what: str, elements: int) -> Row:
    return "argument", what, None, FLOAT * elements, "", "an argument"


# -- eight blocks of an MLP -------------------------------------------------------------------------

BLOCKS, ROWS, WIDTH, HIDDEN = 8, 6, 4, 16


def mlp(params: Any, x: Tensor) -> Tensor:
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            pre = name(nn.linear(x, p["up"], p["b"]), "pre")
            hidden = name(nn.gelu(pre, "tanh"), "hidden")
            x = name(x + nn.linear(hidden, p["down"]), "stream")
    return x.square().mean()


def mlp_params() -> Any:
    shapes = {"up": (HIDDEN, WIDTH), "b": (HIDDEN,), "down": (WIDTH, HIDDEN)}
    return [{k: torch.randn(*shape) for k, shape in shapes.items()} for _ in range(BLOCKS)]


def mlp_residuals(policy: str, pre: str | None, hidden: str | None) -> list[Row]:
    """Of a block: what its backward reads, of which `pre` and `hidden` are kept if they say why.

    gelu's backward reads pre, that of the weights x and hidden, that of x both weights; pre is made
    again of x, the first weight and its bias, and hidden of pre. The sum is handed on to the next.
    """
    weights = [
        argument(f"args[0][{i}][{w!r}]", n)
        for i in range(BLOCKS)
        for w, n in (("b", HIDDEN), ("down", WIDTH * HIDDEN), ("up", WIDTH * HIDDEN))
        if w != "b" or pre is None
    ]
    values = []
    for i in range(BLOCKS):
        at, why = f"block/{i}", f"{policy} keeps it"
        if pre:
            offloads = f"{policy} offloads it"
            moved = pre == "torchard.offload"
            values.append(tensor(pre, "pre", ROWS * HIDDEN, at, offloads if moved else why))
        if hidden:
            values.append(tensor(hidden, "hidden", ROWS * HIDDEN, at, why))
        values.append(tensor("aten.add", "stream", ROWS * WIDTH, at, f"output of {at}"))
    return [*weights, argument("args[1]", ROWS * WIDTH), *values]


MLP: dict[str, tuple[Any, str | None, str | None]] = {
    "save_nothing": (policies.save_nothing, None, None),
    "save_everything": (policies.save_everything, "aten.addmm", "aten.gelu"),
    "save_dots": (policies.save_dots, "aten.addmm", None),
    "save_dots_with_no_batch_dims": (policies.save_dots_with_no_batch_dims, "aten.addmm", None),
    "save_names": (policies.save_names("hidden"), None, "aten.gelu"),
    "save_all_but_names": (policies.save_all_but_names("hidden"), "aten.addmm", None),
    "offload_names": (policies.offload_names("pre"), "torchard.offload", None),
    "both": (policies.save_dots | policies.save_names("hidden"), "aten.addmm", "aten.gelu"),
    "intersection": (policies.save_everything & policies.save_names("hidden"), None, "aten.gelu"),
}


@pytest.mark.parametrize("kind", MLP)
def test_an_mlp_keeps_what_its_policy_says(kind: str) -> None:
    policy, pre, hidden = MLP[kind]
    args = mlp_params(), torch.randn(ROWS, WIDTH)
    found = saved_residuals(checkpoint(mlp, policy=policy, where="block/*"), *args)
    want = mlp_residuals(str(policy), pre, hidden)
    assert rows(found) == want
    assert found.bytes == sum(row[3] for row in want if row[0] != "argument")
    ending = f"{len(want) - len(weights_in(want))} values, {found.bytes:,} bytes, and the arguments"
    assert str(found).endswith(ending)


def test_a_checkpoint_of_the_function_is_around_those_of_its_parts() -> None:
    """In either order: the parts keep what they say only once the function runs again."""
    args = mlp_params(), torch.randn(ROWS, WIDTH)
    parts = dict(policy=policies.save_dots, where="block/*")
    for run in (checkpoint(checkpoint(mlp), **parts), checkpoint(checkpoint(mlp, **parts))):
        assert all(row[0] == "argument" for row in rows(saved_residuals(run, *args)))


def weights_in(listed: list[Row]) -> list[Row]:
    return [row for row in listed if row[0] == "argument"]


@pytest.mark.parametrize("kind", MLP)
def test_an_mlp_makes_again_the_rest(kind: str) -> None:
    """The first product and gelu of each block, as far as they are not kept; never the second."""
    policy, pre, hidden = MLP[kind]
    run = checkpoint(mlp, policy=policy, where="block/*")
    program = run.lower_joint(mlp_params(), torch.randn(ROWS, WIDTH))
    products, elements = made_again(program)
    assert products == (0 if pre else BLOCKS * 2 * ROWS * WIDTH * HIDDEN)
    each = BLOCKS * ROWS * HIDDEN
    expected = {} if hidden else {"aten.gelu": each}
    if pre == "torchard.offload":
        expected["torchard.reload"] = each
    assert elements == expected


@pytest.mark.parametrize("kind", MLP)
def test_a_step_keeps_the_same(kind: str) -> None:
    """The gradient taken inside of what is lowered, and a checkpoint around all of it."""
    policy, pre, hidden = MLP[kind]
    args = mlp_params(), torch.randn(ROWS, WIDTH)
    piece = checkpoint(mlp, policy=policy, where="block/*")
    inside = jit(lambda p, x: torch.func.grad(piece)(p, x), backend="eager")
    around = checkpoint(torch.func.grad(mlp), policy=policy, where="block/*")
    want = mlp_residuals(str(policy), pre, hidden)
    for made in (inside, around):
        *found, cotangent = rows(saved_residuals(made, *args))
        assert cotangent[1] == "aten.ones_like"
        kept = [row for row in found if row[0] != "argument"]
        assert kept == [row for row in want if row[0] != "argument"]
        # The first weights are not needed for the gradient of x, which nobody asked for.
        rest = {*weights_in(want)} - {*weights_in(found)}
        assert rest == ({argument("args[0][0]['up']", WIDTH * HIDDEN)} if pre else set())


def made_again(program: Program) -> tuple[int, dict[str, int]]:
    """FLOPs of what is made again: of contractions, and of other operations each."""
    products, elements = 0, dict[str, int]()
    for node in unrolled(program).calls:
        if node.meta.get("recompute"):
            op, count = op_name(node), flops(node)
            if op in DOTS:
                products += count
            elif count:
                elements[op] = elements.get(op, 0) + count
    return products, elements


# -- the GPT of the examples ------------------------------------------------------------------------

SIZE = train_gpt.Size(context=8, width=16, heads=2, layers=12)
BATCH = 2
TOKENS, W = BATCH * SIZE.context, SIZE.width
NORM = "aten.native_layer_norm"
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
# What a block makes, in order: key, operation, label, elements. Statistics of norms and attention are
# one number for each row (and head).
MADE = [
    ("norm1", NORM, None, TOKENS * W),
    ("norm1", NORM, None, TOKENS),
    ("norm1", NORM, None, TOKENS),
    ("qkv", "aten.addmm", None, 3 * TOKENS * W),
    ("attention", ATTENTION, None, TOKENS * W),
    ("attention", ATTENTION, None, TOKENS * SIZE.heads),
    ("out", "aten.addmm", None, TOKENS * W),
    ("middle", "aten.add", "stream", TOKENS * W),
    ("norm2", NORM, None, TOKENS * W),
    ("norm2", NORM, None, TOKENS),
    ("norm2", NORM, None, TOKENS),
    ("up", "aten.addmm", None, 4 * TOKENS * W),
    ("gelu", "aten.gelu", None, 4 * TOKENS * W),
]
# What the backward reads, and what it takes to make each again; out is needed for middle alone.
NEEDED = {"norm1", "qkv", "attention", "middle", "norm2", "up", "gelu"}
OPERANDS = {"attention": ["qkv"], "qkv": ["norm1"], "norm2": ["middle"], "middle": ["out"]} | {
    "out": ["attention"],
    "up": ["norm2"],
    "gelu": ["up"],
}
CONTRACTIONS = {
    "qkv": 2 * TOKENS * W * 3 * W,
    "attention": 2 * 2 * TOKENS * SIZE.context * W,
    "out": 2 * TOKENS * W * W,
    "up": 2 * TOKENS * W * 4 * W,
}
ELEMENTS = {
    "norm1": (NORM, TOKENS * W + 2 * TOKENS),
    "norm2": (NORM, TOKENS * W + 2 * TOKENS),
    "middle": ("aten.add", TOKENS * W),
    "gelu": ("aten.gelu", 4 * TOKENS * W),
}
# Each policy's choice; the third takes what it chooses to the host.
GPT: dict[str, tuple[Any, set[str]]] = {
    "save_nothing": (policies.save_nothing, set()),
    "save_everything": (policies.save_everything, NEEDED | {"out"}),
    "save_dots": (policies.save_dots, {"qkv", "attention", "out", "up"}),
    "save_dots_with_no_batch_dims": (policies.save_dots_with_no_batch_dims, {"qkv", "out", "up"}),
    "save_names": (policies.save_names("stream"), {"middle"}),
    "save_all_but_names": (
        policies.save_all_but_names("stream"),
        (NEEDED | {"out"}) - {"middle"},
    ),
    "offload_names": (policies.offload_names("stream"), {"middle"}),
}


def closure(chosen: set[str]) -> tuple[set[str], set[str]]:
    """What is read of the forward, and what is made again: the least that gives what is needed."""
    read, again, wanted = set[str](), set[str](), [*NEEDED]
    while wanted:
        value = wanted.pop()
        if value in chosen:
            read.add(value)
        elif value not in again:
            again.add(value)
            wanted += OPERANDS.get(value, [])
    return read, again


def gpt_residuals(policy: str, chosen: set[str]) -> list[Row]:
    """Blocks as their policy says; the embedding, the head and the loss keep all they need.

    Weights are read for the inputs' gradients and in what is made again, biases only there (but a
    norm's, which its backward asks for). The tied embedding is the head's weight.
    """
    read, again = closure(chosen)
    sizes = {"down": 4 * W * W, "out": W * W, "qkv": 3 * W * W, "up": 4 * W * W}
    biases = {"qkv": 3 * W, "out": W, "up": 4 * W}
    found = []
    for i in range(SIZE.layers):
        at = f"args[0]['blocks'][{i}]"
        for part in ("down", "norm1", "norm2", "out", "qkv", "up"):
            if "norm" in part or part in again:
                found.append(
                    argument(f"{at}[{part!r}]['b']", W if "norm" in part else biases[part])
                )
            found.append(argument(f"{at}[{part!r}]['w']", sizes.get(part, W)))
    found.append(argument("args[0]['embedding']", 256 * W))
    found += [argument(f"args[0]['norm'][{part!r}]", W) for part in ("b", "w")]
    found.append(("argument", "args[1]", None, 8 * BATCH * (SIZE.context + 1), "", "an argument"))
    start = "input of block/0"
    found.append(tensor("aten.add", "stream", TOKENS * W, "embedding", start))
    for i in range(SIZE.layers):
        at = f"block/{i}"
        for value, op, label, elements in MADE:
            if value in read and policy.startswith("offload"):
                found.append(
                    tensor("torchard.offload", label, elements, at, f"{policy} offloads it")
                )
            elif value in read:
                found.append(tensor(op, label, elements, at, f"{policy} keeps it"))
        found.append(tensor("aten.add", "stream", TOKENS * W, at, f"output of {at}"))
    outside = "not in a checkpoint"
    found += [tensor(NORM, None, n, "head", outside) for n in (TOKENS * W, TOKENS, TOKENS)]
    found.append(("value", "aten.clone", None, 8 * TOKENS, "loss", outside))  # the targets
    found.append(tensor("aten._log_softmax", None, TOKENS * 256, "loss", outside))
    found.append(tensor("aten.nll_loss_forward", None, 1, "loss", outside))  # how many count
    return found


PARAMS = train_gpt.init(SIZE, random.key(0))
DATA = torch.randint(0, 256, (BATCH, SIZE.context + 1))


LOSS = functools.partial(train_gpt.loss, SIZE)


@functools.cache
def plain() -> Program:
    return jit(LOSS, backend="eager").lower_joint(PARAMS, DATA)


@functools.cache
def gpt(kind: str) -> Program:
    """The checkpointed loss and its gradient; one trace serves all policies."""
    return lower(plain(), checkpoint(LOSS, policy=GPT[kind][0], where="block/*").rewrites)


@pytest.mark.parametrize("kind", GPT)
def test_a_gpt_keeps_what_its_policy_says(kind: str) -> None:
    policy, chosen = GPT[kind]
    found = gpt(kind).residuals
    want = gpt_residuals(str(policy), chosen)
    assert rows(found) == want
    assert found.bytes == sum(row[3] for row in want if row[0] != "argument")
    assert all(one.device == "cpu" and "train_gpt.py:" in one.source for one in found[-6:])


@pytest.mark.parametrize("kind", GPT)
def test_a_gpt_makes_again_the_rest(kind: str) -> None:
    _, again = closure(GPT[kind][1])
    products, elements = made_again(gpt(kind))
    assert products == SIZE.layers * sum(CONTRACTIONS.get(value, 0) for value in again)
    expected = dict[str, int]()
    for op, count in (ELEMENTS[value] for value in again if value in ELEMENTS):
        expected[op] = expected.get(op, 0) + SIZE.layers * count
    if kind == "offload_names":
        expected["torchard.reload"] = SIZE.layers * TOKENS * W
    assert elements == expected


def test_a_gpt_traced_for_its_policy_is_the_same() -> None:
    made = checkpoint(LOSS, where="block/*")
    assert rows(saved_residuals(made, PARAMS, DATA)) == rows(gpt("save_nothing").residuals)
