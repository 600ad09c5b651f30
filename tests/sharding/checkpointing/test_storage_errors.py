"""What save and load say when they cannot, and what they leave behind then."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from effort import examples
from torch import Tensor

from torchard import Mesh, P, ShapeDtype, SpecError, StorageError, jit, load, place, save, shard
from torchard.sharding.checkpointing import dcp_chunks as boxes
from torchard.sharding.checkpointing import unfinished

HERE = Mesh({"dp": 2, "tp": 3}, virtual=True)
OTHER = Mesh({"x": 4}, virtual=True)
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
    raises("saved is not a checkpoint: it has no file .metadata", load, saved, {"w": X})


def test_missing_and_extra_keys(saved: pathlib.Path) -> None:
    like = {"weight": place(X, HERE, P("dp")), "b": X[0], "n": 3}
    raises(
        "like['weight'] is float32 [4, 3], but ... saved has no key 'weight'; ... saved has keys that "
        "are not in like: 'w'. Add them to like, or pass partial=True",
        *(load, saved, like),
    )
    raises("no key 'weight' ... They may be misnamed", load, saved, like, partial=True)
    raises("not in like: 'b', 'n'. Add", load, saved, {"w": X})
    save(saved.parent / "many", list(range(9)))
    raises("'1', '2', '3', '4', '5' and 3 more", load, saved.parent / "many", [0])


def test_other_shapes_and_dtypes(saved: pathlib.Path) -> None:
    like = {"w": ShapeDtype((3, 4)), "b": X[0].double(), "n": 3}
    raises(
        "like['b'] is float64 [3], but ... has float32 [3]; use that ... and convert ... "
        "like['w'] is float32 [3, 4], but ... has float32 [4, 3]",
        *(load, saved, like),
    )


def test_other_kinds(saved: pathlib.Path) -> None:
    raises("like['n'] is float, but ... has the int 3 there", load, saved, LIKE | {"n": 3.0})
    raises("like['n'] is float32 [], but ... a Python value", load, saved, LIKE | {"n": X[0, 0]})
    raises("like['w'] is int, but ... a tensor there, float32 [4, 3]", load, saved, LIKE | {"w": 1})


def test_specs_that_do_not_fit(saved: pathlib.Path) -> None:
    with pytest.raises(SpecError, match=r"specs but no mesh"):
        load(saved, LIKE, specs=P())
    with pytest.raises(SpecError, match=r"like\['w'\] has spec P\('y'\), but Mesh\(x=4, virtual\)"):
        load(saved, LIKE, OTHER, {"w": P("y"), "b": None, "n": None})
    with pytest.raises(SpecError, match="not a prefix of like"):
        load(saved, LIKE, OTHER, {"w": P("x")})


def test_leaves_that_cannot_be_stored(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "saved"
    raises("tree['a'] is a object; ... tree['b'] is a set; ", save, path, {"a": object(), "b": {1}})
    raises("tree[0] is float32 [4, 3] without values to store (meta", save, path, [X.to("meta")])
    mine = X.as_subclass(type("Mine", (Tensor,), {}))
    raises(
        "tree[0] is a Mine; pass a plain tensor (from_dtensor(x) for a DTensor", save, path, [mine]
    )
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


def test_a_save_that_fails_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(boxes.Writes, "resolve_data", full)
        raises(
            "writing its shards of ... failed with OSError: [Errno 28]",
            save,
            tmp_path / "a",
            {"w": X},
        )
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", full)
        raises("the index of ... failed with OSError", save, tmp_path / "a", {"w": X})
    assert not list(tmp_path.iterdir())


def test_a_save_that_is_interrupted_leaves_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "saved", {"w": X})
    assert not list(tmp_path.iterdir())


def test_directories_of_other_saves(tmp_path: pathlib.Path) -> None:
    """One that another save has locked stays, and so does one of another machine; the rest is removed."""
    path = tmp_path / "saved"
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(unfinished.reserved(path))
        raises("no checkpoint at ... saved; ... belongs to an incomplete save", load, path, X)
        killed = tmp_path / f"{running.name[:15]}{'0123456789abcdef'}.unfinished"
        elsewhere = tmp_path / "saved.01234567-0123456789abcdef.unfinished"
        others = [tmp_path / name for name in ("saved.2.unfinished", f"x{killed.name}")]
        for folder in (killed, elsewhere, *others):
            folder.mkdir()
            (folder / "__0_0.distcp").write_bytes(b"of a larger run")
        save(path, {"w": X + 1})
        assert {*tmp_path.iterdir()} == {path, running, elsewhere, *others}
        assert sorted(p.name for p in path.iterdir()) == [".checksums", ".metadata", "__0_0.distcp"]
        raises("saved exists already", unfinished.publish, running, path)
    assert not running.exists()
    assert torch.equal(load(path, {"w": X})["w"], X + 1)


def test_without_locks_nothing_is_removed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disks and systems that have none."""
    for absent in (
        mock.Mock(flock=mock.Mock(side_effect=OSError(37, "No locks")), LOCK_EX=2, LOCK_NB=4),
        None,
    ):
        monkeypatch.setattr(unfinished, "fcntl", absent)
        path = tmp_path / f"saved-{absent is None}"
        with unfinished.reserved(path) as running:
            save(path, {"w": X})
            assert running.exists()
        assert [p.name for p in tmp_path.glob(f"{path.name}*")] == [path.name]


def test_two_jobs_that_save_to_one_path(tmp_path: pathlib.Path) -> None:
    """At the same moment, and one of them is killed in every second round."""
    args = ("racing_saves.py", "--rounds", examples(ci=12, explore=300))
    found = forked.told(*args, folder=tmp_path, seconds=120)
    assert all(what.endswith(("whole, of job 1", "whole, of job 2")) for what in found), found


def test_a_damaged_checkpoint(saved: pathlib.Path) -> None:
    file = saved / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    raises("saved: its bytes in __0_0.distcp differ from those that were", load, saved, LIKE)
    file.unlink()
    raises(
        "saved lacks the file __0_0.distcp, in which ... at offsets [0...] is according to its "
        "index: the file was deleted, or not copied with the others. Copy it again, or use another "
        "checkpoint",
        *(load, saved, LIKE),
    )


def test_a_checkpoint_without_some_shards(saved: pathlib.Path) -> None:
    index = dcp.FileSystemReader(saved).read_metadata()
    index.state_dict_metadata["w"].chunks.pop()
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    raises("lacks 6 of the elements of like['w'], float32 [4, 3]", load, saved, LIKE)
