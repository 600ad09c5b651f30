"""What is derived of patterns is kept on disk; it is what would be derived, and fuse works without it."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
from kernel_cases import Case, inputs_of, names_of, plain

from torchard import Kernel, trace
from torchard.kernels import KERNELS
from torchard.kernels.patterns import gradient, pattern
from torchard.kernels.patterns.derivations import Derivations
from torchard.kernels.patterns.match import Finder
from torchard.kernels.patterns.skeleton import same_form
from torchard.kernels.terms.reading import Reading

SOME = ("bias_gelu", "rms_norm", "softmax", "linear_cross_entropy_capped", "group_norm", "swiglu")


def use(kept: Derivations, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradient, pattern):
        monkeypatch.setattr(module, "DERIVATIONS", kept)


def fresh(name: str) -> list[Kernel]:
    """A kernel and its gradient, of which nothing is known in this process."""
    kernel = dataclasses.replace(KERNELS[name])
    assert kernel.gradient is not None
    return [kernel, kernel.gradient]


@pytest.mark.parametrize("name", SOME)
def test_what_is_read_is_what_was_derived(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Derivations(None), monkeypatch)
    derived = [p for kernel in fresh(name) for p in kernel.patterns]
    alternatives = [p._alternatives()[0] for p in derived]
    halves = [its.half is None for its in alternatives]
    first = Derivations(tmp_path)
    use(first, monkeypatch)
    for kernel in fresh(name):
        assert [p.alternatives for p in kernel.patterns]
    first.save()
    use(Derivations(tmp_path), monkeypatch)
    monkeypatch.setattr(pattern.Pattern, "_alternatives", lambda self: pytest.fail("derived again"))
    read = [p for kernel in fresh(name) for p in kernel.patterns]
    for one, other, its, whole in zip(read, derived, alternatives, halves, strict=True):
        assert (one.name, one.inputs, one.literals) == (other.name, other.inputs, other.literals)
        mine = one.alternatives[0]
        assert same_form(mine.skeleton, its.skeleton) and mine.skeleton.markers == its.skeleton.markers
        assert (mine.half is None) == whole
    case = Case(dict.fromkeys(names_of(read[0]), 5), (2,), pattern.torch.float64, ("plain",), 1)
    reading = Reading(trace(plain(read[0]))(*inputs_of(KERNELS[name], read[0], case)))
    assert len(Finder(reading).find(read[0])) == 1


def test_a_file_that_was_cut_short_is_derived_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Derivations(tmp_path)
    assert one.get("a", lambda: 1) == 1 and one.get("a", lambda: 2) == 1
    one.save()
    (file,) = tmp_path.iterdir()
    assert Derivations(tmp_path).get("a", lambda: 2) == 1
    file.write_bytes(file.read_bytes()[:7])
    with caplog.at_level(logging.WARNING):
        assert Derivations(tmp_path).get("a", lambda: 2) == 2
    assert "it is derived again" in caplog.text


def test_a_value_that_was_cut_short_is_derived_again(tmp_path: Path) -> None:
    one = Derivations(tmp_path)
    assert one.get("a", lambda: 1) == 1
    one._known["a"] = one._known["a"][:3]
    assert one.get("a", lambda: 2) == 2


def test_a_kernel_with_a_references_other_dims_is_derived_by_itself() -> None:
    known = KERNELS["rms_norm"]
    assert all(p.key for p in fresh("rms_norm")[0].patterns)
    other = dataclasses.replace(known, dims=None)
    assert not any(p.key for p in other.patterns)


def test_without_a_folder_or_a_key_nothing_is_kept(tmp_path: Path) -> None:
    for kept, key in ((Derivations(None), "a"), (Derivations(tmp_path), None)):
        assert [kept.get(key, lambda: 1), kept.get(key, lambda: 2)] == [1, 2]
        kept.save()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Derivations(tmp_path / "file")
    assert kept.get("a", lambda: 1) == 1
    kept.save()
