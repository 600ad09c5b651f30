"""save and load: any mesh and specs to any other and to plain DCP, bit for bit, and every message."""

from __future__ import annotations

import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Iterator
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
    SpecError,
    StorageError,
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
from torchard.sharding import boxes
from torchard.sharding.agree import checksum
from torchard.sharding.spec import spec_of
from torchard.sharding.testing import layouts, meshes, shard_at, specs

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


# -- messages -------------------------------------------------------------------------------------

X = torch.arange(12.0).reshape(4, 3)
LIKE = {"w": X, "b": X[0], "n": 3}


def raises(text: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Says all of this, in this order."""
    with pytest.raises(StorageError) as caught:
        fn(*args, **kwargs)
    said, at = str(caught.value), 0
    for part in text.split("..."):
        assert part.strip() in said[at:], said
        at = said.index(part.strip(), at)


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> pathlib.Path:
    save(tmp_path / "saved", {"w": place(X, HERE, P("dp")), "b": X[0], "n": 3})
    return tmp_path / "saved"


def test_a_path_that_exists(saved: pathlib.Path) -> None:
    before = (saved / ".metadata").read_bytes()
    raises("saved exists already; save to a new path", save, saved, {"w": X})
    assert (saved / ".metadata").read_bytes() == before


def test_no_checkpoint_there(saved: pathlib.Path) -> None:
    raises("there is no checkpoint at ... nowhere", load, saved.parent / "nowhere", {"w": X})
    os.remove(saved / ".metadata")
    raises("saved is no checkpoint: it has no file .metadata", load, saved, {"w": X})


def test_missing_and_extra_keys(saved: pathlib.Path) -> None:
    like = {"weight": place(X, HERE, P("dp")), "b": X[0], "n": 3}
    raises(
        "like['weight'] is float32 [4, 3], but ... saved has no key 'weight'; ... saved has keys that "
        "like has not: 'w'. Add them to like, or pass partial=True",
        *(load, saved, like),
    )
    raises("no key 'weight' ... They may be misnamed", load, saved, like, partial=True)
    raises("like has not: 'b', 'n'. Add", load, saved, {"w": X})
    save(saved.parent / "many", list(range(9)))
    raises("'1', '2', '3', '4', '5' and 3 more", load, saved.parent / "many", [0])


def test_other_shapes_and_dtypes(saved: pathlib.Path) -> None:
    like = {"w": ShapeDtype((3, 4)), "b": X[0].double(), "n": 3}
    raises(
        "like['b'] is float64 [3], but ... has float32 [3]; ask for that ... and convert ... "
        "like['w'] is float32 [3, 4], but ... has float32 [4, 3]",
        *(load, saved, like),
    )


def test_other_kinds(saved: pathlib.Path) -> None:
    raises("like['n'] is float, but ... has the int 3 there", load, saved, LIKE | {"n": 3.0})
    raises("like['n'] is float32 [], but ... a Python value", load, saved, LIKE | {"n": X[0, 0]})
    raises("like['w'] is int, but ... a tensor there, float32 [4, 3]", load, saved, LIKE | {"w": 1})


def test_specs_that_do_not_fit(saved: pathlib.Path) -> None:
    with pytest.raises(SpecError, match=r"specs and no mesh"):
        load(saved, LIKE, specs=P())
    with pytest.raises(SpecError, match=r"like\['w'\] has spec P\('y'\), but Mesh\(x=4, virtual\)"):
        load(saved, LIKE, OTHER, {"w": P("y"), "b": None, "n": None})
    with pytest.raises(SpecError, match="not a prefix of like"):
        load(saved, LIKE, OTHER, {"w": P("x")})


def test_leaves_that_cannot_be_stored(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "saved"
    raises("tree['a'] is a object; ... tree['b'] is a set; ", save, path, {"a": object(), "b": {1}})
    raises("tree[0] is float32 [4, 3] without values to store (meta", save, path, [X.to("meta")])
    raises("without values to store (cpu, torch.sparse_coo)", save, path, [X.to_sparse()])
    raises("tree['a']['b'] and tree['a.b'] would both be", save, path, {"a.b": 1, "a": {"b": 2}})
    donated = place(X, HERE, P("dp"))
    jit(shard(lambda x: x + 1, HERE), backend="eager", donate_argnums=(0,))(donated)
    raises("tree['x'] was donated to a jitted function", save, path, {"x": donated})

    def inside(x: Tensor) -> Tensor:
        save(path, {"x": x})
        return x

    raises("tree['x'] is float32 [3] without values ... outside", torch.func.vmap(inside), X)
    raises("like[0] is a object; a checkpoint has", load, path, [object()])
    assert not list(tmp_path.iterdir())


def test_meshes_of_different_processes(tmp_path: pathlib.Path) -> None:
    """Values on meshes of one process may go together."""
    tree = [place(X, HERE, P("dp")), place(X, OTHER, P("x"))]
    save(tmp_path / "saved", tree)
    loaded = load(tmp_path / "saved", tree)
    check(loaded[0], X, P("dp"), HERE)
    check(loaded[1], X, P("x"), OTHER)


def test_a_save_that_fails_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(boxes.Writes, "resolve_data", full)
        raises(
            "writing its part of ... failed with OSError: [Errno 28]",
            save,
            tmp_path / "a",
            {"w": X},
        )
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        raises("the index of ... failed with OSError", save, tmp_path / "a", {"w": X})
    assert not list(tmp_path.iterdir())


def test_a_save_that_was_killed_is_no_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it ends, no path appears; and the next save starts from nothing."""
    path = tmp_path / "saved"

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            save(path, {"w": X})
    (tmp_path / "saved.unfinished" / "__7_0.distcp").write_bytes(b"of a larger run")
    raises("no checkpoint at ... saved; ... saved.unfinished is what a save left", load, path, X)
    save(path, {"w": X + 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp"]
    assert torch.equal(load(path, {"w": X})["w"], X + 1)


def test_a_damaged_checkpoint(saved: pathlib.Path) -> None:
    file = saved / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    raises("loading ... saved failed with", load, saved, LIKE)
    file.unlink()
    raises("loading ... saved failed with FileNotFoundError", load, saved, LIKE)


def test_a_checkpoint_without_some_shards(saved: pathlib.Path) -> None:
    index = index_of(saved)
    index.state_dict_metadata["w"].chunks.pop()
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    raises("lacks 6 of the elements of like['w'], float32 [4, 3]", load, saved, LIKE)
