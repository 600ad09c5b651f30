"""The table of `make matrix`."""

from __future__ import annotations

from matrix import HEAD, PART, Verdict, files_of_part, with_row


def _verdict(torch: str, failures: tuple[str, ...] = (), commit: str = "a1") -> Verdict:
    return Verdict(torch, "3.11.2", 10, failures, 1, 120.0, "", commit)


def test_a_row_takes_the_place_of_the_versions_last_one() -> None:
    text = with_row(HEAD, _verdict("2.13.0+cpu", ("test_a::test_b",)))
    assert "| 2.13.0+cpu | 3.11.2 | a1 | 8 | 1 | 1 | 2 | none |\n| | | | | `test_a::test_b`" in text
    text = with_row(text, _verdict("2.9.0"))
    assert text.index("2.9.0") < text.index("2.13.0")
    text = with_row(text, _verdict("2.13.0+cpu", commit="b2"))
    assert "test_a" not in text and text.count("2.13.0") == 1 and "| b2 | 9 | 0 |" in text


def test_every_file_of_the_part_is_there() -> None:
    assert len(files_of_part()) == len(set(PART)) == len(PART)
