"""Limits for what hangs: a busy machine is not a reason to stop a test, one that gets nowhere is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from paths import ROOT
from progress import Watch, computed


class Machine:
    """What a clock shows, and what processes have used of a processor."""

    def __init__(self, seconds: float, **options: float) -> None:
        self.now = self.used = 0.0
        self.watch = Watch(seconds, lambda: self.used, clock=lambda: self.now, **options)

    def passes(self, seconds: float, share: float) -> str:
        """Time passes; the processes get this share of it."""
        said = ""
        for _ in range(20):
            self.now += seconds / 20
            self.used += seconds / 20 * share
            said = said or self.watch.hangs()
        return said


def test_what_gets_a_little_done_does_not_hang() -> None:
    assert Machine(100).passes(1000, 0.09) == ""


def test_what_only_looks_after_others_hangs() -> None:
    machine = Machine(100)
    assert machine.passes(60, 1.0) == ""
    assert machine.passes(200, 0.01).startswith("has computed next to nothing for ")


def test_what_computes_without_end_hangs() -> None:
    assert Machine(100).passes(200, 1.0).startswith("has used ")
    assert Machine(100, busy=1000).passes(200, 1.0) == ""


def test_a_process_that_ends_takes_its_time_with_it() -> None:
    machine = Machine(100)
    machine.used = 50.0
    machine.passes(60, 0.0)
    machine.used = 0.0
    assert machine.passes(60, 0.0) == ""


def test_processes_that_others_start_count() -> None:
    burn = "import os, time\nwhile sum(os.times()[:4]) < 0.5: pass\nprint('ready', flush=True)\ninput()"
    outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert computed(process.pid) >= 0.5
        process.communicate("\n")
    assert computed(os.getpid()) >= 0.5


def test_a_job_that_waits_for_ever_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("print('begun', flush=True)\nimport threading\nthreading.Event().wait()")
    with pytest.raises(AssertionError, match=r"next to nothing for [1-9]\d* seconds\nbegun") as told:
        forked.run([str(script)], tmp_path, 1.0)
    assert 'waits.py", line 3 in <module>' in str(told.value)  # where it waits


HANGS = """
import threading, time

def test_waits():
    threading.Event().wait()

def test_computes():
    while True:
        pass

def test_gets_on():
    ends = time.monotonic() + 4.5
    while time.monotonic() < ends:
        time.sleep(0.02)
        sum(range(100_000))
"""


def test_a_test_that_hangs_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ["-p", "hang_limits", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--timeout", "3", *plugins, "-q", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
        capture_output=True,
        text=True,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "has computed next to nothing" in done.stdout and "has used" in done.stdout
