"""README shows only what runs."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_examples_run(capsys: object) -> None:
    """One after the other: the second goes on where the first ended."""
    text = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert float(names["value"]) > 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out  # type: ignore[attr-defined]
    assert printed.count("collectives") == 3


def test_the_commands_exist() -> None:
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)", text)) - {"nothing"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_public_name_is_documented() -> None:
    import torchard

    text = (ROOT / "README.md").read_text()
    errors = {n for n in torchard.__all__ if n.endswith(("Error", "Mismatch", "Warning"))}
    for name in set(torchard.__all__) - errors - {"__version__", "ShapeDtype"}:
        assert name in text, name
