"""Checkpoints that were changed, by accident or by who means harm: what was saved, or a StorageError."""

from __future__ import annotations

import builtins
import functools
import importlib
import io
import os
import pathlib
import pickle
import shutil
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchard import Mesh, P, StorageError, StorageWarning, load, place, save

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
# Damage that nobody can tell is not what these tests are about.
unchecked = pytest.mark.filterwarnings("ignore:.*has no checksums:torchard.StorageWarning")


def tree() -> dict[str, Any]:
    w = torch.arange(24.0).reshape(4, 6)
    return {
        "w": place(w, MESH, P("dp", "tp")),
        "twin": place(w + 1, MESH, P("dp", "tp")),
        "half": place(w.bfloat16(), MESH, P("tp")),
        "plain": torch.arange(5),
        "step": 3,
        "name": "run",
    }


def is_what_was_saved(loaded: dict[str, Any]) -> bool:
    want = tree()
    return all(
        torch.equal(value.full(), want[key].full())
        if hasattr(value, "full")
        else torch.equal(value, want[key])
        if isinstance(value, torch.Tensor)
        else value == want[key]
        for key, value in loaded.items()
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("damage") / "saved"
    save(path, tree())
    return path


class Copy:
    """A copy of a checkpoint to be changed, and a file that harm would make."""

    def __init__(self, saved: pathlib.Path, folder: str) -> None:
        self.path = pathlib.Path(folder) / "saved"
        self.canary = pathlib.Path(folder) / "canary"
        shutil.copytree(saved, self.path)

    def index(self) -> Any:
        return dcp.FileSystemReader(self.path).read_metadata()

    def put(self, index: Any, protocol: int = 4) -> None:
        """Another index, and no checksums: of a stranger's checkpoint they would fit."""
        (self.path / ".metadata").write_bytes(pickle.dumps(index, protocol))
        (self.path / ".checksums").unlink(missing_ok=True)

    def outcome(self) -> str:
        try:
            return "right" if is_what_was_saved(load(self.path, tree())) else "wrong"
        except StorageError as error:
            return f"StorageError: {error}"


@pytest.fixture
def copy(saved: pathlib.Path, tmp_path: pathlib.Path) -> Copy:
    return Copy(saved, str(tmp_path))


# -- accidents --------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=examples(ci=60, explore=5000))
def test_changed_bytes_are_told(saved: pathlib.Path, data: st.DataObject) -> None:
    """Bits flipped, bytes swapped, cut off, added or zeroed, in any file, also in the checksums."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(saved, folder)
        files = sorted(p for p in copy.path.iterdir())
        file = data.draw(st.sampled_from(files))
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.integers(1, 64))
        match data.draw(st.sampled_from(["flip", "zero", "cut", "add", "move"])):
            case "flip":
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "zero":
                content[at : at + length] = bytes(len(content[at : at + length]))
            case "cut":
                del content[at : at + length]
            case "add":
                content[at:at] = bytes(length)
            case "move":
                to = data.draw(st.integers(0, len(content) - 1))
                content[to : to + length] = content[at : at + length]
        file.write_bytes(content)
        assert copy.outcome() != "wrong"


def test_every_byte_of_a_value_is_covered(copy: Copy) -> None:
    """The values themselves, wherever the container has put them."""
    for file in sorted(copy.path.glob("*.distcp")):
        content = file.read_bytes()
        for value in (5.0, 24.0):
            at = content.index(torch.tensor([value]).numpy().tobytes())
            changed = bytearray(content)
            changed[at + 2] ^= 1
            file.write_bytes(changed)
            assert "its bytes in __0_0.distcp differ from those that were written" in copy.outcome()
        file.write_bytes(content)
    assert copy.outcome() == "right"


def test_what_plain_dcp_has_written_over_is_told(copy: Copy) -> None:
    index = copy.index()
    index.version = "another"
    (copy.path / ".metadata").write_bytes(pickle.dumps(index))
    assert "does not match .checksums" in copy.outcome()


def flip_a_bit(copy: Copy) -> None:
    (file,) = copy.path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(torch.tensor([5.0]).numpy().tobytes()) + 2] ^= 1
    file.write_bytes(content)


def leave_out_a_box(copy: Copy) -> None:
    index = copy.index()
    index.state_dict_metadata["w"].chunks.pop()
    copy.put(index)


@unchecked
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("harm", [flip_a_bit, leave_out_a_box])
def test_damage_that_plain_dcp_does_not_tell(copy: Copy, harm: Callable[[Copy], None]) -> None:
    """Why items and the index are read by code of this library: DCP loads what was never saved."""
    harm(copy)
    theirs = {"w": torch.zeros(4, 6), "twin": torch.zeros(4, 6)}
    dcp.load(theirs, checkpoint_id=copy.path, no_dist=True)
    assert not all(torch.equal(x, tree()[key].full()) for key, x in theirs.items())
    assert copy.outcome().startswith("StorageError")


@unchecked
def test_without_checksums_it_loads_and_says_so(copy: Copy) -> None:
    (copy.path / ".checksums").unlink()
    with pytest.warns(StorageWarning, match="saved has no checksums, which torchard's save writes"):
        assert copy.outcome() == "right"


# -- an index that is not what the items are --------------------------------------------------------


def another_dtype(index: Any) -> None:
    """The twin's boxes are where those of the value of another dtype are."""
    places = index.storage_data
    for key in [k for k in places if k.fqn == "plain"]:
        places[key] = next(places[k] for k in places if k.fqn == "half")


def another_shape(index: Any) -> None:
    places = index.storage_data
    wide = next(places[k] for k in places if k.fqn == "half")
    for key in [k for k in places if k.fqn == "w"]:
        places[key] = wide


def a_scalar(index: Any) -> None:
    places = index.storage_data
    for key in [k for k in places if k.fqn == "w"]:
        places[key] = next(places[k] for k in places if k.fqn == "step")


def the_same_box_twice(index: Any) -> None:
    """As many elements as the value has, and a quarter of them nowhere."""
    chunks = index.state_dict_metadata["w"].chunks
    chunks[1] = chunks[0]


def boxes_that_overlap(index: Any) -> None:
    chunks = index.state_dict_metadata["w"].chunks
    chunks[1] = ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([2, 3]))
    places = index.storage_data
    places[MetadataIndex("w", [0, 2])] = next(places[k] for k in places if k.fqn == "w")


def a_box_outside(index: Any) -> None:
    index.state_dict_metadata["w"].chunks[0] = ChunkStorageMetadata(
        torch.Size([3, 4]), torch.Size([2, 3])
    )


def nowhere(index: Any) -> None:
    index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != "w"}


def beyond_the_end(index: Any) -> None:
    for place_ in index.storage_data.values():
        place_.offset += 1 << 40


def negative(index: Any) -> None:
    for place_ in index.storage_data.values():
        place_.offset = -1


def no_list(index: Any) -> None:
    index.state_dict_metadata["w"].chunks = 3


def no_index(index: Any) -> None:
    index.storage_data = None


def no_size(index: Any) -> None:
    index.state_dict_metadata["w"].size = ("four", 6)


def no_shape(index: Any) -> None:
    index.state_dict_metadata["w"].size = 24


def no_dtype(index: Any) -> None:
    object.__setattr__(index.state_dict_metadata["w"].properties, "dtype", "float32")


def no_properties(index: Any) -> None:
    index.state_dict_metadata["w"].properties = torch.float32


def a_tensor_for_a_box(index: Any) -> None:
    index.state_dict_metadata["w"].chunks[0] = index.state_dict_metadata["half"]


def a_box_without_fields(index: Any) -> None:
    index.state_dict_metadata["w"].chunks[0] = Calls(ChunkStorageMetadata, state=[3])


def a_box_of_other_dims(index: Any) -> None:
    index.state_dict_metadata["w"].chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))


def no_transforms(index: Any) -> None:
    for place_ in index.storage_data.values():
        place_.transform_descriptors = 3


LIES: list[Callable[[Any], None]] = [
    *(another_dtype, another_shape, a_scalar, the_same_box_twice, boxes_that_overlap),
    *(a_box_outside, nowhere, beyond_the_end, negative, no_list, no_index, no_size),
    *(no_shape, no_dtype, no_properties, a_tensor_for_a_box, a_box_without_fields),
    *(a_box_of_other_dims, no_transforms),
]


@unchecked
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_an_index_that_does_not_fit_its_items(copy: Copy, lie: Callable[[Any], None]) -> None:
    index = copy.index()
    lie(index)
    copy.put(index)
    assert copy.outcome().startswith("StorageError: ")


@unchecked
def test_boxes_whose_cells_would_fill_memory(copy: Copy) -> None:
    """Few boxes, but many cells between their edges, in which overlaps are counted."""
    n, one, index = 4000, torch.Size([1, 1]), copy.index()
    boxes = [ChunkStorageMetadata(torch.Size([i, i]), one) for i in range(n)]
    byte = TensorProperties(dtype=torch.int8)
    index.state_dict_metadata["wide"] = TensorStorageMetadata(byte, torch.Size([n, n]), boxes)
    copy.put(index)
    with pytest.raises(StorageError, match="divide it into more than 10,000,000 cells"):
        load(copy.path, {"wide": torch.zeros(n, n, dtype=torch.int8)}, partial=True)


@unchecked
def test_an_index_of_ordered_dicts(copy: Copy) -> None:
    index = copy.index()
    index.state_dict_metadata = OrderedDict(index.state_dict_metadata)
    copy.put(index)
    assert copy.outcome() == "right"


# -- harm -------------------------------------------------------------------------------------------


class Calls:
    """Pickled, it is a call of a function."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.called = function, args, state

    def __reduce__(self) -> Any:
        return self.called


def harms(canary: pathlib.Path) -> dict[str, Any]:
    """What makes the canary when it is unpickled."""
    touch, write = f"touch {canary}", f"open({str(canary)!r}, 'w').close()"
    nested = pickle.dumps(Calls(os.system, touch))
    return {
        "os.system": Calls(os.system, touch),
        "posix": Calls(importlib.import_module("posix").system, touch),
        "subprocess": Calls(subprocess.check_call, ["touch", str(canary)]),
        "eval": Calls(builtins.eval, write),
        "exec": Calls(builtins.exec, write),
        "open": Calls(builtins.open, str(canary), "w"),
        "getattr": Calls(builtins.getattr, Calls(importlib.import_module, "os"), "system"),
        "partial": Calls(functools.partial(os.system, touch)),
        "pathlib": Calls(pathlib.Path.touch, canary),
        "nested pickle": Calls(pickle.loads, nested),
        "torch storage": Calls(torch.storage._load_from_bytes, nested),
        "torch.load": Calls(torch.load, str(canary)),
        "a function of DCP's": Calls(dcp.FileSystemReader, str(canary)),
        "a tensor": torch.ones(2),
        "a device": torch.device("cpu"),
        "a method of a record": Raw("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        "globals of a record": Raw(
            "torch.distributed.checkpoint.metadata", "TensorProperties.__setstate__.__globals__"
        ),
    }


class Raw:
    """A name in a module, dotted or not, as protocol 4 has it."""

    def __init__(self, module: str, name: str) -> None:
        self.names = module, name

    def __reduce__(self) -> Any:
        raise AssertionError("put as bytes")


NAMES = list(harms(pathlib.Path()))
# Where it is put into an index that is otherwise right.
SPOTS: dict[str, Callable[[Any, Any], Any]] = {
    "instead": lambda index, harm: harm,
    "planner data": lambda index, harm: setattr(index, "planner_data", harm),
    "in planner data": lambda index, harm: index.planner_data.update(w=("w", harm)),
    "version": lambda index, harm: setattr(index, "version", harm),
    "storage meta": lambda index, harm: setattr(index.storage_meta, "modules", [harm]),
    "an entry": lambda index, harm: index.state_dict_metadata.update(w=harm),
    "a box": lambda index, harm: index.state_dict_metadata["w"].chunks.append(harm),
    "a size": lambda index, harm: setattr(index.state_dict_metadata["w"], "size", (harm, 6)),
    "a place": lambda index, harm: index.storage_data.update({MetadataIndex("w", [0, 0]): harm}),
    "a file": lambda index, harm: setattr(
        next(iter(index.storage_data.values())), "relative_path", harm
    ),
    "a transform": lambda index, harm: setattr(
        next(iter(index.storage_data.values())), "transform_descriptors", [harm]
    ),
}


def pickled(value: Any, protocol: int) -> bytes:
    """With what `Raw` stands for; of which there is a mark, to be replaced by its bytes."""

    class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
        def save(self, obj: Any, save_persistent_id: bool = True) -> None:
            if isinstance(obj, Raw):
                for text in obj.names:
                    super().save(text)
                self.write(pickle.STACK_GLOBAL)
            else:
                super().save(obj, save_persistent_id)

    stream = io.BytesIO()
    Pickler(stream, protocol).dump(value)
    return stream.getvalue()


@pytest.mark.filterwarnings("ignore")
@given(st.sampled_from(NAMES), st.sampled_from([*SPOTS]), st.sampled_from([2, 4, 5]))
@settings(max_examples=examples(ci=60, explore=2000))
def test_nothing_in_an_index_is_run(
    saved: pathlib.Path, name: str, spot: str, protocol: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(saved, folder)
        index, harm = copy.index(), harms(copy.canary)[name]
        instead = SPOTS[spot](index, harm)
        changed = index if instead is None else instead
        copy.put(None)
        (copy.path / ".metadata").write_bytes(
            pickled(changed, max(protocol, 4 if "record" in name else 2))
        )
        assert "which does not belong in DCP's index" in copy.outcome()
        assert not copy.canary.exists()


@pytest.mark.filterwarnings("ignore")
def test_harm_would_be_done_by_plain_pickle(tmp_path: pathlib.Path) -> None:
    """Or the test above would show nothing."""
    done = 0
    for number, name in enumerate(NAMES):
        canary = tmp_path / str(number)
        try:
            pickle.loads(pickled(harms(canary)[name], 4))
        except Exception:
            continue
        finally:
            done += canary.exists()
    assert done >= 9


def test_opcodes_that_name_nothing_do_no_harm_either(copy: Copy) -> None:
    """Persistent ids, extension codes, old ways to name a class, attributes set on what is admitted."""
    metadata = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    contents = [
        b"Pharm\n.",
        b"\x82\x01.",
        b"(S'touch'\nios\nsystem\n.",
        b"cos\nsystem\n(S'touch'\ntR.",
        metadata + b"N}X\x0c\x00\x00\x00__setstate__K\x01s\x86b.",
        b"ctorch\nfloat32\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
        b"ctorch\nSize\nN}X\x01\x00\x00\x00aK\x01s\x86b.",
        b"",
        b".",
        bytes(range(256)),
    ]
    for content in contents:
        copy.put(None)
        (copy.path / ".metadata").write_bytes(content)
        assert copy.outcome().startswith("StorageError: "), content


@unchecked
@given(st.data())
@settings(max_examples=examples(ci=30, explore=5000))
def test_a_broken_index_is_a_message(saved: pathlib.Path, data: st.DataObject) -> None:
    """Whatever bytes are changed, nothing but StorageError is raised; without checksums, too."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(saved, folder)
        (copy.path / ".checksums").unlink()
        content = bytearray((copy.path / ".metadata").read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] = data.draw(st.integers(0, 255))
        (copy.path / ".metadata").write_bytes(content)
        copy.outcome()


# -- files outside ----------------------------------------------------------------------------------


def absolute(copy: Copy, other: pathlib.Path, index: Any) -> str:
    return str(other)


def upwards(copy: Copy, other: pathlib.Path, index: Any) -> str:
    return f"../{other.parent.name}/{other.name}"


def down_and_up(copy: Copy, other: pathlib.Path, index: Any) -> str:
    (copy.path / "deep").mkdir()
    return f"deep/../../{other.parent.name}/{other.name}"


def a_link(copy: Copy, other: pathlib.Path, index: Any) -> str:
    (copy.path / "link").symlink_to(other)
    return "link"


def a_linked_folder(copy: Copy, other: pathlib.Path, index: Any) -> str:
    (copy.path / "link").symlink_to(other.parent)
    return f"link/{other.name}"


def a_link_to_a_link(copy: Copy, other: pathlib.Path, index: Any) -> str:
    (copy.path / "first").symlink_to("second")
    (copy.path / "second").symlink_to(other)
    return "first"


def windows(copy: Copy, other: pathlib.Path, index: Any) -> str:
    return f"..\\{other.parent.name}\\{other.name}"


def a_pipe(copy: Copy, other: pathlib.Path, index: Any) -> str:
    os.mkfifo(copy.path / "pipe")
    return "pipe"


def a_folder(copy: Copy, other: pathlib.Path, index: Any) -> str:
    (copy.path / "folder").mkdir()
    return "folder"


@unchecked
@pytest.mark.parametrize(
    "lead",
    [
        *(absolute, upwards, down_and_up, a_link, a_linked_folder, a_link_to_a_link),
        *(windows, a_pipe, a_folder),
    ],
    ids=lambda lead: lead.__name__,
)  # fmt: skip
def test_files_outside_are_not_read(copy: Copy, lead: Any) -> None:
    other = copy.path.parent / "other" / "__0_0.distcp"
    shutil.copytree(copy.path, other.parent)
    index = copy.index()
    name = lead(copy, other, index)
    for place_ in index.storage_data.values():
        place_.relative_path = name
    copy.put(index)
    said = copy.outcome()
    assert "which is outside of its directory, or a link" in said or "not a regular file" in said


@pytest.mark.parametrize("name", [".metadata", ".checksums"])
def test_links_out_of_the_directory_are_not_followed(copy: Copy, name: str) -> None:
    other = copy.path.parent / "other"
    shutil.copy(copy.path / name, other)
    (copy.path / name).unlink()
    (copy.path / name).symlink_to(other)
    assert "which is outside of its directory, or a link" in copy.outcome()


@unchecked
def test_links_within_and_to_the_directory_are_followed(copy: Copy) -> None:
    (copy.path / "deep").mkdir()
    (copy.path / "__0_0.distcp").rename(copy.path / "deep" / "data")
    (copy.path / "__0_0.distcp").symlink_to("deep/data")
    assert copy.outcome() == "right"
    moved = copy.path.rename(copy.path.with_name("moved"))
    copy.path.symlink_to(moved)
    assert copy.outcome() == "right"
