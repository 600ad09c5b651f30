"""save and load: any mesh and specs to any other and to plain DCP, bit for bit."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchard import (
    Mesh,
    MeshTensor,
    P,
    ShapeDtype,
    StorageWarning,
    functionalize,
    initialize,
    jit,
    load,
    optim,
    place,
    random,
    save,
    shard,
)
from torchard.sharding.checkpointing import dcp_chunks as boxes
from torchard.sharding.lowering.plan_consistency import checksum
from torchard.sharding.testing import layouts, meshes, shard_at, specs
from torchard.sharding.values.spec import spec_of

SHAPES = [(), (1,), (7,), (0, 3), (4, 6), (12, 5), (2, 3, 8), (24, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
HERE = Mesh({"dp": 2, "tp": 3}, virtual=True)
OTHER = Mesh({"x": 4}, virtual=True)

# DCP says so whenever there is no process group, which is what these tests are about.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    bits = random.normal(random.key(seed), shape) * 100
    return bits > 0 if dtype is torch.bool else bits.to(dtype)


def check(value: Any, whole: Tensor, spec: P, mesh: Mesh) -> None:
    """Every shard is the part of the whole that its coordinate owns, to the last bit."""
    assert isinstance(value, MeshTensor) and value.mesh == mesh
    want = place(whole, mesh, spec)
    assert (value.layout, value.dtype) == (want.layout, whole.dtype)
    for part, at in zip(value.parts, value._held.places, strict=True):
        assert torch.equal(part, shard_at(whole, want.layout, at, mesh))


def index_of(path: pathlib.Path) -> dcp.Metadata:
    return dcp.FileSystemReader(path).read_metadata()


def check_written_once(path: pathlib.Path, key: str, value: MeshTensor) -> None:
    """Boxes neither overlap nor leave anything out, and none is larger than a shard."""
    saved = index_of(path).state_dict_metadata[key]
    times = torch.zeros(saved.size, dtype=torch.int64)
    for box in saved.chunks:
        view = times
        for d, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            view = view.narrow(d, start, length)
        view += 1
        assert 0 < view.numel() <= max(part.numel() for part in value.parts)
    assert bool((times == 1).all())


def any_specs(shape: tuple[int, ...], mesh: Mesh) -> st.SearchStrategy[P]:
    """Of plain dims, and of dims with factors that are split, whose shards lie apart."""
    return st.one_of(specs(shape, mesh), layouts(shape, mesh).map(spec_of))


@given(st.data())
@settings(max_examples=100)
def test_runs_are_the_indices_of_a_shard(data: st.DataObject) -> None:
    mesh, n = data.draw(meshes()), data.draw(st.sampled_from([0, 1, 7, 12, 24, 48]))
    layout = data.draw(layouts((n,), mesh))
    for at in mesh.all_coords():
        found = boxes.runs(layout.dims[0], at, mesh.shape)
        owned = shard_at(torch.arange(n), layout, at, mesh).tolist()
        assert [i for run in found for i in range(run.start, run.start + run.length)] == owned
        assert [owned[run.local] for run in found] == [run.start for run in found]
        ends = {run.start + run.length for run in found}
        assert not ends & {run.start for run in found}, "neighbours are one run"


@given(st.data())
@settings(max_examples=30)
def test_any_mesh_and_specs_to_any_other(data: st.DataObject) -> None:
    here, there = data.draw(meshes()), data.draw(meshes())
    wholes, placed, likes, wanted = {}, {}, {}, {}
    for name in "abcd":
        shape = data.draw(st.sampled_from(SHAPES))
        dtype = data.draw(st.sampled_from(DTYPES))
        wholes[name] = values(shape, dtype, ord(name))
        placed[name] = place(wholes[name], here, data.draw(any_specs(shape, here)))
        likes[name] = ShapeDtype(shape, dtype)
        wanted[name] = data.draw(any_specs(shape, there))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "saved")
        save(path, placed)
        loaded = load(path, likes, there, wanted)
        for name, whole in wholes.items():
            check(loaded[name], whole, wanted[name], there)
            check_written_once(path, name, placed[name])


@alone
@given(st.data())
@settings(max_examples=15)
def test_plain_dcp_reads_ours_and_we_read_its(data: st.DataObject) -> None:
    mesh, shape = data.draw(meshes()), data.draw(st.sampled_from(SHAPES))
    spec = data.draw(any_specs(shape, mesh))
    whole = values(shape, torch.float32)
    theirs = {"model": {"w": torch.zeros(shape), "b": [torch.zeros(2)]}, "step": 0}
    with tempfile.TemporaryDirectory() as folder:
        ours = {"model": {"w": place(whole, mesh, spec), "b": [torch.ones(2)]}, "step": 3}
        save(f"{folder}/ours", ours)
        dcp.load(theirs, checkpoint_id=f"{folder}/ours")
        assert torch.equal(theirs["model"]["w"], whole)
        assert torch.equal(theirs["model"]["b"][0], torch.ones(2)) and theirs["step"] == 3
        dcp.save(theirs, checkpoint_id=f"{folder}/theirs")
        with pytest.warns(StorageWarning, match="theirs has no checksums"):
            loaded = load(f"{folder}/theirs", ours)
        check(loaded["model"]["w"], whole, spec, mesh)
        assert torch.equal(loaded["model"]["b"][0], torch.ones(2)) and loaded["step"] == 3


@alone
def test_what_was_saved_comes_apart_into_a_tree(tmp_path: pathlib.Path) -> None:
    """With DCP's own converter, which knows keys only: fields and ints are where they were."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    params = {"w.x": place(torch.arange(6.0), HERE, P("dp")), "layers": [torch.ones(2)]}
    save(tmp_path / "saved", (params, optim.adamw(1e-3).init(params), {"step": 7}))
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    assert torch.equal(whole["0"]["w.x"], torch.arange(6.0))
    assert torch.equal(whole["1"]["mean"]["layers"][0], torch.zeros(2))
    assert whole["2"]["step"] == 7


class State(NamedTuple):
    step: int
    mean: Any


def test_keys(tmp_path: pathlib.Path) -> None:
    w = place(torch.arange(6.0), HERE, P("dp"))
    save(tmp_path / "a", {"params": [{"l.0.w": w}, (w,)], "state": State(3, {5: w})})
    keys = ["params.0.l.0.w", "params.1.0", "state.mean.5", "state.step"]
    assert sorted(index_of(tmp_path / "a").state_dict_metadata) == keys
    save(tmp_path / "b", w)
    assert list(index_of(tmp_path / "b").state_dict_metadata) == [""]
    check(load(tmp_path / "b", w), torch.arange(6.0), P("dp"), HERE)


def test_every_kind_of_leaf(tmp_path: pathlib.Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.int8, torch.int16, torch.uint8, torch.complex64]
    tree: dict[str, Any] = {str(d): values((5, 3), d) for d in [*DTYPES, *dtypes]}
    tree["fp8"] = torch.arange(8.0).to(torch.float8_e4m3fn)
    tree |= {"placed": {k: place(v, HERE, P(None, "tp")) for k, v in tree.items() if k != "fp8"}}
    tree |= {"turned": torch.arange(6.0).reshape(2, 3).t(), "nan": torch.tensor([float("nan")])}
    tree |= {"wants": torch.ones(2, requires_grad=True), "param": nn.Parameter(torch.ones(3))}
    scalars = [1, 2.5, float("inf"), True, 1 + 2j, "text", None, 10**30]
    save(tmp_path / "saved", {"tree": tree, "scalars": scalars})
    loaded = load(tmp_path / "saved", {"tree": tree, "scalars": scalars})
    assert loaded["scalars"] == scalars
    assert list(map(type, loaded["scalars"])) == list(map(type, scalars))
    for name in tree["placed"]:
        check(loaded["tree"]["placed"][name], tree[name], P(None, "tp"), HERE)
    for name in tree.keys() - {"placed"}:
        have, want = loaded["tree"][name], tree[name]
        assert type(have) is Tensor and not have.requires_grad
        assert (have.dtype, have.shape, checksum(have)) == (want.dtype, want.shape, checksum(want))


def test_where_to_put_what_is_loaded(tmp_path: pathlib.Path) -> None:
    """A spec decides; without one it comes as what like has there."""
    x = torch.arange(24.0).reshape(4, 6)
    save(tmp_path / "saved", {"a": x, "b": place(x, HERE, P("dp", "tp")), "c": x, "n": 1})
    like = {
        "a": x.to("meta"),
        "b": place(x, HERE, P("tp")),
        "c": ShapeDtype((4, 6)),
        "n": 5,
    }
    loaded = load(tmp_path / "saved", like)
    assert torch.equal(loaded["a"], x) and torch.equal(loaded["c"], x) and loaded["n"] == 1
    check(loaded["b"], x, P("tp"), HERE)
    moved = load(
        tmp_path / "saved", like, OTHER, {"a": P("x"), "b": P(None, "x"), "c": None, "n": P()}
    )
    check(moved["a"], x, P("x"), OTHER)
    check(moved["b"], x, P(None, "x"), OTHER)
    assert torch.equal(moved["c"], x) and moved["n"] == 1
    check(load(tmp_path / "saved", {"c": like["b"]}, partial=True)["c"], x, P("tp"), HERE)
    named = load(tmp_path / "saved", {"a": x}, OTHER, P(None, "e"), rules={"e": "x"}, partial=True)
    check(named["a"], x, P(None, "x"), OTHER)


def test_values_on_several_meshes(tmp_path: pathlib.Path) -> None:
    x = torch.arange(12.0).reshape(4, 3)
    tree = [place(x, HERE, P("dp")), place(x, OTHER, P("x"))]
    save(tmp_path / "saved", tree)
    loaded = load(tmp_path / "saved", tree)
    check(loaded[0], x, P("dp"), HERE)
    check(loaded[1], x, P("x"), OTHER)


def test_a_model_on_meta_is_never_made_whole(tmp_path: pathlib.Path) -> None:
    with torch.device("meta"):
        _, shapes = functionalize(nn.Linear(6, 12))
    where = {"weight": P("tp"), "bias": P("tp")}
    params = initialize(
        lambda n, k, s, d: random.normal(k, s, d), shapes, HERE, where, random.key(1)
    )
    save(tmp_path / "saved", params)
    again = load(tmp_path / "saved", shapes, OTHER, {"weight": P(None, "x"), "bias": P()})
    check(again["weight"], params["weight"].full(), P(None, "x"), OTHER)
    check(again["bias"], params["bias"].full(), P(), OTHER)


def test_each_box_is_read_once_for_all_shards() -> None:
    """Though every shard overlaps every box."""
    x = torch.arange(48.0).reshape(8, 6)
    heads = P.factors("(two h d) e", two=2, h=2, d=2, e="tp")
    reads = boxes.Reads()
    missing = reads.add_tensor("x", place(x, HERE, heads), boxes.entry(place(x, OTHER, P("x"))))
    assert missing == 0
    assert [(tuple(i.storage_index.offset or ()), tuple(i.lengths)) for i in reads.items] == [
        ((2 * n, 0), (2, 6)) for n in range(4)
    ]


# -- training goes on as if nothing had been ------------------------------------------------------


def test_resumed_training_is_the_same_to_the_last_bit(tmp_path: pathlib.Path) -> None:
    shapes = {"up": (32, 8), "down": (8, 32)}
    where = {"up": P("tp"), "down": P(None, "tp")}
    optimizer = optim.adamw(1e-2)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ params["up"].T) @ params["down"].T - x).square().mean()

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, x)
        return *optimizer.update(grads, state, params), value

    run = jit(
        shard(step, HERE, out_specs=(where, None, P())), backend="eager", donate_argnums=(0, 1)
    )

    def batches(first: int, last: int) -> Iterator[MeshTensor]:
        for number in range(first, last):
            yield place(
                random.normal(random.fold_in(random.key(2), number), (16, 8)), HERE, P("dp")
            )

    def train(params: Any, state: Any, first: int, last: int) -> Any:
        losses = []
        for batch in batches(first, last):
            params, state, value = run(params, state, batch)
            losses.append(float(value))
        return params, state, losses

    def fresh() -> Any:
        params = {k: random.normal(random.key(i), s) for i, (k, s) in enumerate(shapes.items())}
        params = place(params, HERE, where)
        return params, optimizer.init(params)

    *_, want = train(*fresh(), 0, 6)
    params, state, first = train(*fresh(), 0, 3)
    save(tmp_path / "saved", {"params": params, "state": state, "step": 3})
    params, state = fresh()
    found = load(tmp_path / "saved", {"params": params, "state": state, "step": 0})
    *_, second = train(found["params"], found["state"], found["step"], 6)
    assert first + second == want and len(set(want)) == 6
