"""The main job: it trains like one device, and it ends in one message whatever happens to a rank."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from paths import EXAMPLES

# Seconds in which nothing gets on: then the job hangs, and is ended.
PATIENCE = 120
# Seconds that a rank waits for the others: longer, or, where one of them hangs, as short as may be.
LONG, SHORT = 2 * PATIENCE, 15
SIZES = ["--steps", "8", "--batch", "64", "--hidden", "32", "--validate", "128", "--sample", "16"]
SMALL = [*SIZES, "--timeout", str(LONG)]


def script(out: Path, *options: str, ranks: int) -> list[str]:
    """The job's command, but for the name of Python."""
    launcher = [str(EXAMPLES / "_torchrun.py"), "--nproc-per-node", str(ranks)] if ranks else []
    return [*launcher, str(EXAMPLES / "train_bytes.py"), *SMALL, "--out", str(out), *options]


def run(out: Path, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run the example to its end, with what it prints on stdout and stderr together."""
    return forked.run(script(out, *options, ranks=ranks), out, PATIENCE)


def typed(out: Path, *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """The same, as who types the command runs it: the process loads torch itself."""
    return subprocess.run(
        [sys.executable, *script(out, *options, ranks=ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=out,
        text=True,
        check=False,
    )


def started(out: Path, *options: str, ranks: int) -> forked.Job:
    return forked.Job(script(out, *options, ranks=ranks), out, PATIENCE)


def read_until(job: forked.Job, sign: str) -> str:
    """What the job prints until it has printed `sign`."""
    seen = ""
    while sign not in seen:
        seen += job.stdout.read(1) or pytest.fail(f"ended without {sign!r}: {seen}")
    return seen


def to_the_end(job: forked.Job) -> str:
    """The rest of what the job prints."""
    text = job.stdout.read()
    job.wait()
    return text


def last_words(text: str, out: Path) -> str:
    """The one message that a job ended with; checks that it is alone and that nothing is left."""
    assert "Traceback" not in text, text
    found = re.findall(r"^train_bytes: .*(?:\n.*)*", text, re.M)
    assert text.count("train_bytes: ") == 1 and len(found) == 1, text
    assert not forked.survivors(out)
    return str(found[0])


@pytest.mark.parametrize(
    ("options", "ranks", "axes", "moved"),
    [
        ("--mesh tp=2", 2, "tp2", "all_reduce  tp"),
        ("--mesh dp=2,tp=1", 2, "dp2-tp1", "all_reduce  dp"),
        ("--virtual dp=2,tp=4", 0, "virtual-dp2-tp4", "all_reduce  dp·tp"),
    ],
)
def test_trains_like_one_device(
    tmp_path: Path, options: str, ranks: int, axes: str, moved: str
) -> None:
    kept = ["--save", str(tmp_path / "kept"), "--save-every", "5"]
    done = (run if ranks else typed)(tmp_path, *options.split(), *kept, ranks=ranks)
    text = done.stdout
    assert done.returncode == 0, text
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-5", "step-8"]
    plan, _, rest = text.partition("bytes per rank\n")
    assert plan.startswith("What one step sends over Mesh(") and moved in plan
    assert re.search(r"held-out text: loss \d\.\d{4}, \d\.\d{3} bits per byte", rest)
    assert re.search(r"8/8 .*loss \d\.\d+, [\d,]+ bytes/s", rest), rest
    compared = re.search(
        r"loss after 8 steps: sharded (\S+), one device (\S+) \(dif\w+ (\S+)\)", rest
    )
    assert compared, rest
    sharded, alone, difference = map(float, compared.groups())
    assert difference < 1e-4 and abs(sharded - alone) < 1e-4
    assert sharded < 5.4  # ln 256 is 5.55: it has learnt something
    assert (tmp_path / f"loss-{axes}.png").stat().st_size > 10_000
    if options == "--mesh tp=2":
        goes_on_to_the_same_bits(tmp_path, *options.split(), *kept)


def goes_on_to_the_same_bits(out: Path, *options: str) -> None:
    """Resumed from what it would have left if it had been killed after step 5."""
    kept = out / "kept"
    want = {path.name: path.read_bytes() for path in (kept / "step-8").glob("*.distcp")}
    (kept / "step-8").rename(kept / "step-8.0123abcd-0123456789abcdef.unfinished")
    done = run(out, *options, "--resume", str(kept))
    assert done.returncode == 0 and re.search(r"Mesh\(.*\): *62%.* 5/8", done.stdout), done.stdout
    have = {path.name: path.read_bytes() for path in (kept / "step-8").glob("*.distcp")}
    assert have == want and len(want) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "kill",
            # torchrun's signal or the collective's error, whichever comes first.
            r"rank 1 \(process \d+\) is gone .*rank 0 was in step 4 of 8, waiting for "
            r"(its part of a step's collectives \(\d+ all_.* over tp\)|all_\w+ over tp, \w+ward)",
        ),
        (
            "stop",
            r"no answer from rank 1 \(process \d+\) within 15 s: rank 0 was in step 4 of 8, waiting for "
            r"all_\w+ over tp, \w+ward",
        ),
        ("raise", r"ValueError \(rank 1, step 4 of 8, _fail.py:\d+\): asked to fail"),
        (
            "replan",
            r"PlanMismatch \(rank [01], .*: rank 0 has .*, where rank 1 has .*\n.*\n"
            r"Rank 0 planned step\(",
        ),
    ],
)
def test_one_rank_fails(tmp_path: Path, how: str, message: str) -> None:
    # Only the rank that hangs may need the transport's timeout.
    seconds = str(SHORT if how == "stop" else LONG)
    kept = ["--save", str(tmp_path / "kept"), "--save-every", "2"]
    options = ["--mesh", "tp=2", "--fail", how, "--fail-at", "3", "--timeout", seconds, *kept]
    with started(tmp_path, *options, ranks=2) as job:
        text = read_until(job, "train_bytes: ") + to_the_end(job)
    assert job.wait() > 0
    assert re.search(message, last_words(text, tmp_path)), text
    if how != "replan":
        assert (tmp_path / "kept" / "step-2" / ".metadata").exists()


@pytest.mark.parametrize(("options", "ranks"), [("--mesh tp=2", 2), ("--virtual tp=2", 0)])
def test_interrupted(tmp_path: Path, options: str, ranks: int) -> None:
    with started(tmp_path, *options.split(), "--steps", "100000", ranks=ranks) as job:
        text = read_until(job, "bytes/s")
        job.send_signal(signal.SIGINT)
        text += to_the_end(job)
    assert job.wait() == 128 + signal.SIGINT
    assert re.search(r"interrupted in step \d+ of 100000; stopped", last_words(text, tmp_path))


def test_without_torchrun(tmp_path: Path) -> None:
    done = run(tmp_path, "--mesh", "tp=2", ranks=0)
    assert done.returncode == 1
    assert re.search(
        r"MeshError .*no process group.*torchrun", last_words(done.stdout, tmp_path), re.S
    )
