"""Jobs that torchrun starts again: the same bits as a job that nothing happened to."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked
import pytest
from paths import EXAMPLES, ROOT

# Seconds for one job; it takes a few, and more beside other work.
PATIENCE = 150
# What kills rank 1, where the guide's script draws the batch of these steps, in attempts 0 and 1.
KILLER = """
import os, signal, torchard
fold_in, deadly = torchard.random.fold_in, {("0", 7), ("1", 13)}
def killing(key, i):
    if os.environ["RANK"] == "1" and (os.environ["TORCHELASTIC_RESTART_COUNT"], i) in deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return fold_in(key, i)
torchard.random.fold_in = killing
"""

SHAPE = "--layers 1 --width 8 --context 4 --heads 2 --batch 4 --validate 4 --sample 2"
OPTIONS = f"{SHAPE} --mesh dp=2 --plan fsdp --steps 6 --save-every 2 --timeout 60".split()

pytestmark = pytest.mark.timeout(4 * PATIENCE)


def torchrun(folder: Path, *script: str, restarts: int = 2) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    folder.mkdir()
    command = str(Path(sys.executable).with_name("torchrun"))
    group = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    done = forked.run([command, *group, *script], folder, PATIENCE, stderr=folder / "stderr")
    return done.returncode, done.stdout + (done.stderr or "")


def recipe() -> str:
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs" / "hosts.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "TORCHELASTIC_RESTART_COUNT" in block]
    return str(text)


def test_the_guide_s_script_killed_twice(tmp_path: Path) -> None:
    script, killed = tmp_path / "elastic.py", tmp_path / "killed.py"
    script.write_text(recipe())
    killed.write_text(KILLER + recipe())
    code, undisturbed = torchrun(tmp_path / "undisturbed", str(script))
    assert code == 0, undisturbed
    code, text = torchrun(tmp_path / "disturbed", str(killed))
    assert code == 0, text
    begun = re.findall(r"attempt (\d) begins at step (\d+)", text)
    assert sorted(begun) == [(a, s) for a, s in (("0", "0"), ("1", "5"), ("2", "10")) for _ in "ab"]
    have, want = (re.findall("w: (.*)", found) for found in (text, undisturbed))
    assert have == want and len(have) == 1, (have, want)


def test_an_example_killed_twice(tmp_path: Path) -> None:
    """Each attempt says what happened to it; one that starts after the last step has nothing to train."""
    example, kept = [str(EXAMPLES / "train_gpt.py"), *OPTIONS], str(tmp_path / "kept")
    code, text = torchrun(tmp_path / "one", *example, "--save", str(tmp_path / "undisturbed"))
    assert code == 0, text
    failing = ["--fail", "kill", "--fail-at", "3", "--fail-attempts", "2"]
    elastic = [*example, "--save", kept, "--resume", kept, *failing]
    code, text = torchrun(tmp_path / "two", *elastic)
    assert code == 0, text
    assert len(re.findall(r"train_gpt: rank 1 \(process \d+\) is gone.* step 4 of 6", text)) == 2, text
    have, want = (
        {path.name: path.read_bytes() for path in Path(folder, "step-6").glob("*.distcp")}
        for folder in (kept, tmp_path / "undisturbed")
    )
    assert have == want and len(want) == 2
    code, text = torchrun(tmp_path / "three", *elastic)
    assert code == 0 and "loss after 6 steps: done before" in text, text
