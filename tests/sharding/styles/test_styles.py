"""Styles and parallelize: values and gradients are one device's, with the collectives expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchard import (
    Activations,
    Colwise,
    Mesh,
    MeshError,
    P,
    Pairwise,
    Rowwise,
    SequenceParallel,
    SpecError,
    functionalize,
    parallelize,
    place,
    shard,
)

TP = Mesh({"tp": 2}, virtual=True)
TP3 = Mesh({"tp": 3}, virtual=True)
DP_TP = Mesh({"dp": 2, "model": 2}, virtual=True)


def whole(value: Any) -> Tensor:
    return value.full() if hasattr(value, "full") else value


def crossed(program: Any, phase: str = "forward") -> list[tuple[str, str]]:
    records = [r for r in program.collectives if r.phase == phase]
    return [(r.kind, " ".join(r.axes)) for r in records]


def check(
    module: nn.Module, x: Any, mesh: Mesh, plan: Any, x_spec: P | None = None, **how: Any
) -> list[tuple[str, str]]:
    """Values and all gradients against the module's own; the forward's collectives."""
    fn, params = functionalize(module)
    want = torch.func.functional_call(module, dict(module.named_parameters()), (x,))
    weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).reshape(want.shape)
    gradients = torch.autograd.grad((want * weights).sum(), list(module.parameters()))
    specs, pins = parallelize(fn, mesh, plan, **how)
    placed = place(params, mesh, specs)
    data = x if x_spec is None else place(x, mesh, x_spec)

    def loss(p: Any, x: Any) -> tuple[Tensor, Tensor]:
        out = fn(p, x)
        return (out * weights).sum(), out

    got, out = torch.func.grad(shard(loss, mesh, constrain_at=pins), has_aux=True)(placed, data)
    torch.testing.assert_close(whole(out), want.detach())
    for name, gradient in zip(params, gradients, strict=True):
        assert getattr(got[name], "spec", P()).axes == specs[name].axes
        torch.testing.assert_close(whole(got[name]), gradient)
    return crossed(shard(fn, mesh, constrain_at=pins).lower(placed, data))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(10, 32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.l2(F.relu(self.l1(x)))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Toy()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- styles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [TP, TP3], ids=str)
def test_colwise_then_rowwise_is_one_all_reduce(mesh: Mesh) -> None:
    plan = {"*.l1": Colwise(), "*.l2": Rowwise()}
    assert check(Two().double(), data(4, 10), mesh, plan) == [("all_reduce", "tp")]


def test_layouts_give_sequence_parallelism() -> None:
    """The founding sequence-parallel case, said by styles: 32 hidden features over 3 ranks."""
    plan = {
        "*.l1": Colwise(input_layouts=1, output_layouts=2),
        "*.l2": Rowwise(output_layouts=1),
    }
    found = check(Two().double(), data(4, 12, 10), TP3, plan, P(None, "tp"))
    assert found == [("all_gather", "tp"), ("psum_scatter", "tp")]


def test_a_replicated_layout_gathers() -> None:
    plan = {"l1": Colwise(output_layouts=P())}
    assert check(Toy().double(), data(4, 10), TP, plan) == [("all_gather", "tp")]


def test_a_single_style_takes_one_linear() -> None:
    """Split by its outputs alone: nothing is completed, the second contracts what it is given."""
    fn, _ = functionalize(Two())
    specs, pins = parallelize(fn, TP, {"net.l1": Colwise()})
    assert specs == {
        "net.l1.weight": P("tp", None),
        "net.l1.bias": P("tp"),
        "net.l2.weight": P(),
        "net.l2.bias": P(),
    }
    assert pins == {}


def chain(n: int) -> nn.Module:
    return nn.Sequential(*[part for _ in range(n) for part in (nn.Linear(6, 6), nn.Tanh())])


@pytest.mark.parametrize("linears", [2, 4, 5])
def test_pairwise_leaves_an_odd_last_one_alone(linears: int) -> None:
    module = chain(linears).double()
    pairs = linears // 2
    assert check(module, data(4, 6), TP, {"": Pairwise()}) == [("all_reduce", "tp")] * pairs
    specs, _ = parallelize(module, TP, {"": Pairwise()})
    split = [name for name, spec in specs.items() if spec.axes]
    assert split == [
        f"{2 * i}.{part}"
        for i in range(2 * pairs)
        for part in ("weight", "bias")
        if (part, i % 2) != ("bias", 1)
    ]


def test_the_axis_of_a_mesh_is_chosen_by_name() -> None:
    module, x = chain(3).double(), data(4, 6)
    found = check(module, x, DP_TP, {"": Pairwise()}, P("dp"), axis="model")
    assert found == [("all_reduce", "model")]


def test_the_batch_stays_split_where_layouts_are_pinned() -> None:
    plan = {"l1": Colwise(output_layouts=2), "l2": Rowwise(output_layouts=1)}
    module, x = Toy().double(), data(4, 6, 10)
    found = check(module, x, DP_TP, plan, P("dp"), axis="model", batch="dp")
    assert found == [("psum_scatter", "model")]
    _, pins = parallelize(
        module, DP_TP, {"l2": Rowwise(output_layouts=P())}, batch="dp", axis="model"
    )
    assert pins == {"l2/out": P("dp")}
    _, pins = parallelize(
        module, DP_TP, {"l2": Rowwise(output_layouts=0)}, batch="dp", axis="model"
    )
    assert pins == {"l2/out": P(("dp", "model"))}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.out = nn.Embedding(12, 6), nn.LayerNorm(6), nn.Linear(6, 12)
        self.out.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.emb(ids)))


IDS = torch.tensor([[0, 11, 5, 2], [7, 7, 1, 3]])


def test_a_tied_embedding_split_by_rows() -> None:
    """Lookup reduced once; the logits stay split by vocabulary. Either name of it will do."""
    for plan in ({"emb": Rowwise(), "out": Colwise()}, {"emb": Rowwise()}, {"out": Colwise()}):
        found = check(Embedded().double(), IDS, TP, plan)
        assert found[:1] == [("all_reduce", "tp")] and len(found) == 1
        specs, _ = parallelize(Embedded(), TP, plan)
        assert specs["emb.weight"] == P("tp", None)


def test_an_embedding_split_by_features() -> None:
    module = Embedded().double()
    specs, _ = parallelize(module, TP, {"emb": Colwise()})
    assert specs["emb.weight"] == P(None, "tp")
    check(module, IDS, TP, {"emb": Colwise()})


def test_sequence_parallel_norms() -> None:
    """Rows looked up, scattered over positions, normed there, gathered for the logits."""
    plan = {"emb": Rowwise(output_layouts=1), "norm": SequenceParallel(), "out": Colwise()}
    found = check(Embedded().double(), IDS, TP, plan)
    assert found == [("psum_scatter", "tp"), ("all_gather", "tp")]
    plan = {**plan, "out": Colwise(input_layouts=P())}
    assert check(Embedded().double(), IDS, TP, plan) == found


def test_activations_place_what_goes_in_and_out() -> None:
    plan = {"norm": Activations(input_layouts=1, output_layouts=P())}
    assert check(Embedded().double(), IDS, TP, plan) == [("all_gather", "tp")]


class Fused(nn.Module):
    """q, k and v in one projection; heads of four features."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(8, 12 * heads), nn.Linear(4 * heads, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, 4)) for t in (q, k, v))
        return self.out((q * k.sum(-1, keepdim=True) * v).flatten(-2))


@pytest.mark.parametrize(("heads", "mesh"), [(4, TP), (3, TP), (4, TP3)], ids=str)
def test_fused_projections_split_between_heads(heads: int, mesh: Mesh) -> None:
    plan = {"qkv": Colwise(parts=3, unit=4), "out": Rowwise(unit=4)}
    assert check(Fused(heads).double(), data(5, 8), mesh, plan) == [("all_reduce", "tp")]


def test_params_in_dicts_do_as_well() -> None:
    params = {
        "block": {"up": {"weight": data(8, 6), "bias": data(8)}, "down": {"weight": data(6, 8)}}
    }
    specs, _ = parallelize(params, TP, {"*.up": Colwise(), "*.down": Rowwise()})
    assert specs == {
        "block": {
            "up": {"weight": P("tp", None), "bias": P("tp")},
            "down": {"weight": P(None, "tp")},
        }
    }
    specs, _ = parallelize(params, TP, {"block": Pairwise()})
    assert specs["block"]["down"] == {"weight": P(None, "tp")}
    specs, _ = parallelize(params, TP, {"*.up": Colwise(transposed=True)})
    assert specs["block"]["up"]["weight"] == P(None, "tp")
    place(params, TP, specs)


# -- what is wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"*.l3": Colwise()}, [r"plan['*.l3']", "matches no module", "net.l1"]),
        ({"net": Colwise()}, ["plan['net']", "Colwise splits linears", "'net' is a Toy"]),
        ({"net.*": Rowwise}, ["Rowwise is a class; write Rowwise()"]),
        ({"net.l1": "col"}, ["'col' is not a style", "Colwise()"]),
        ({"net.l1": Pairwise()}, ["Pairwise", "'net.l1' is a Linear with 0 inside"]),
        ({"net.l1": Colwise(parts=3)}, ["net.l1.weight", "parts", "multiply to the dim's 32"]),
        ({"net.l1": Colwise(heads=5)}, ["net.l1.weight", "units", "multiply to the dim's 32"]),
        (
            {"*.l1": Colwise(), "net.*": Rowwise()},
            ["plan['net.*']", "net.l1.weight", "P(None, 'tp')", "plan['*.l1']", "P('tp', None)"],
        ),
        ({"a": Colwise(), "b": Rowwise()}, ["plan['a']", "plan['b']"]),
    ],
    ids=str,
)
def test_a_wrong_plan(plan: Any, says: list[str]) -> None:
    with pytest.raises(SpecError) as e:
        parallelize(Two(), TP, plan)
    for part in says:
        assert part in str(e.value), f"{part!r} is not in: {e.value}"


def test_a_norm_is_not_split() -> None:
    with pytest.raises(SpecError, match=r"'norm' is a LayerNorm with weight \[6\], bias \[6\]"):
        parallelize(Embedded(), TP, {"norm": Rowwise()})


def test_tied_weights_have_one_spec() -> None:
    with pytest.raises(
        SpecError, match=r"emb\.weight would get .* one spec, even if it is tied"
    ):
        parallelize(Embedded(), TP, {"emb": Rowwise(), "out": Rowwise()})


@pytest.mark.parametrize("layout", [-1, "tp", True, 1.5])
def test_a_wrong_layout(layout: Any) -> None:
    with pytest.raises(SpecError, match=r"Colwise\(output_layouts="):
        Colwise(output_layouts=layout)


def test_heads_are_said_once() -> None:
    with pytest.raises(SpecError, match=r"Colwise\(unit=4, heads=2\).* give one of them"):
        Colwise(unit=4, heads=2)
    with pytest.raises(SpecError, match=r"Rowwise\(heads=0\): it must be a positive int"):
        Rowwise(heads=0)


def test_fully_sharded_parameters() -> None:
    """The first dim that is whole; what has no such dim stays as it is."""
    module = nn.Sequential(Embedded(), Fused(3))
    plan = {"0.emb": Rowwise(), "1.qkv": Colwise(parts=3, heads=3), "1.out": Rowwise(heads=3)}
    specs, _ = parallelize(module, DP_TP, plan, axis="model", fsdp="dp")
    units = {"parts": 3, "units": (3, "model")}
    assert specs == {
        "0.emb.weight": P("model", "dp"),
        **dict.fromkeys(["0.norm.weight", "0.norm.bias", "0.out.bias"], P("dp")),
        "1.qkv.weight": P.factors("(parts units unit) other", **units, other="dp"),
        "1.qkv.bias": P.factors("(parts units unit)", **units),
        "1.out.weight": P.factors("other (parts units unit)", **{**units, "parts": 1}, other="dp"),
    }
    specs, _ = parallelize(module, DP_TP, {}, fsdp=("dp", "model"))
    assert {spec.entries[0] for spec in specs.values()} == {("dp", "model")}
    with pytest.raises(MeshError, match="no axis 'z'"):
        parallelize(module, DP_TP, {}, fsdp="z")


def test_an_axis_that_the_mesh_has_not() -> None:
    with pytest.raises(MeshError, match=r"no axis 'tp'; its axes are dp, model"):
        parallelize(Two(), DP_TP, {"net": Pairwise()})
    with pytest.raises(MeshError, match="no axis 'data'"):
        parallelize(Two(), TP, {"net": Pairwise()}, batch="data")


def test_the_model_itself_has_no_layouts() -> None:
    with pytest.raises(SpecError, match="in_specs and out_specs"):
        parallelize(Two(), TP, {"": Activations(output_layouts=1)})


def test_what_is_no_model() -> None:
    with pytest.raises(SpecError, match="model is a Tensor"):
        parallelize(torch.ones(2), TP, {"": Pairwise()})


# -- whole transformers -----------------------------------------------------------------------------


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 1, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**size, **heads, max_position_embeddings=16))


GPT2 = {
    "transformer.wte": Rowwise(),  # the head is tied to it
    "*.attn.c_attn": Colwise(parts=3, unit=4),
    "*.attn.c_proj": Rowwise(unit=4),
    "*.mlp.c_fc": Colwise(),
    "*.mlp.c_proj": Rowwise(),
}
LLAMA = {
    "model.embed_tokens": Rowwise(),
    "*.[qkv]_proj": Colwise(unit=4),
    "*.o_proj": Rowwise(unit=4),
    "*.gate_proj": Colwise(),
    "*.up_proj": Colwise(),
    "*.down_proj": Rowwise(),
    "lm_head": Colwise(),
}


@pytest.mark.parametrize(("make", "plan"), [(gpt2, GPT2), (llama, LLAMA)], ids=["gpt2", "llama"])
def test_a_transformer_of_huggingface(make: Any, plan: Any) -> None:
    """Loss, logits and all gradients, first as they are, then split over two ranks."""
    pytest.importorskip("transformers")
    module = make().double().eval()
    ids = torch.randint(32, (2, 8))
    want = module(ids, labels=ids)
    want.loss.backward()
    fn, params = functionalize(module)

    def loss(p: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        out = fn(p, ids, labels=ids, use_cache=False)
        return out.loss, out.logits

    def compare(gradients: Any, logits: Any) -> None:
        torch.testing.assert_close(whole(logits), want.logits)
        # The library takes the loss in float32 whatever the model is in.
        for name, parameter in module.named_parameters():
            got = whole(gradients[name])
            torch.testing.assert_close(got, parameter.grad, rtol=1e-5, atol=1e-7)

    compare(*torch.func.grad(loss, has_aux=True)(params, ids))
    specs, pins = parallelize(fn, TP, plan)
    placed, run = place(params, TP, specs), shard(loss, TP, constrain_at=pins)
    compare(*torch.func.grad(run, has_aux=True)(placed, ids))
    whole_model = shard(fn, TP, constrain_at=pins)(placed, ids, labels=ids, use_cache=False)
    torch.testing.assert_close(whole_model.loss, want.loss)
    assert {k: v.axes for k, v in specs.items() if v.axes}.keys() == {
        k for k, v in params.items() if v.ndim == 2 and "wpe" not in k
    } | {k for k in params if k.endswith(("c_attn.bias", "c_fc.bias"))}
