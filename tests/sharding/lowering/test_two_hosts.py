"""Training on two hosts: one dies and the job goes on from its checkpoint; the cable between them is cut.

The hosts are network namespaces of this machine, so what is between them is TCP that really breaks.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import namespaces
import optree
import pytest
import torch
from namespaces import Host
from paths import EXAMPLES

from torchard import load, optim, random

PORT = 29400
STEPS = 6
# Heads of two, so that nothing is trivially whole.
SHAPE = "--layers 1 --width 16 --context 8 --heads 2 --batch 8 --lr 0.01"
# Seconds in which nothing gets on: then a job hangs, and is ended.
PATIENCE = 100
# Seconds that ranks wait for one another: longer; as short as may be, where that ends the job.
LONG, TIMEOUT = 3 * PATIENCE, 15
STEPPING = f"--steps {STEPS} --save-every 2 --timeout {LONG}"
OPTIONS = f"{SHAPE} --validate 8 --sample 4 --plan fsdp {STEPPING}".split()
# What messages call a collective of this plan.
SENT = (
    r"(all_gather|psum_scatter|all_reduce) over dp, "
    r"(embedding|block/0|head|loss)( \+ \d more)? (forward|backward)\."
)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(namespaces.two_hosts())
        except namespaces.Unavailable as why:
            pytest.skip(f"two hosts need namespaces: {why}")
        yield made


def environment(host: Host, **more: str) -> dict[str, str]:
    unbuffered = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {"GLOO_SOCKET_IFNAME": host.interface, **unbuffered, **more}


def script(*options: str) -> list[str]:
    return [str(EXAMPLES / "train_gpt.py"), "--mesh", "dp=2", *OPTIONS, *options]


def torchrun(host: Host, leader: Host, *options: str) -> list[str]:
    """One rank on each host; they meet at the leader's."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{leader.address}:{PORT}"]
    group = ["--nnodes", "2", "--nproc-per-node", "1", "--local-addr", host.address]
    command = str(Path(sys.executable).with_name("torchrun"))
    return [command, *group, *meeting, *script(*options)]


def started(host: Host, folder: Path, args: list[str], **more: str) -> forked.Job:
    """A script on a host, forked from a process that has torch loaded."""
    own = folder / host.name
    own.mkdir(exist_ok=True)
    return forked.Job(args, own, PATIENCE, environment(host, **more), host=host)


def ran(hosts: tuple[Host, Host], folder: Path, *options: str) -> tuple[list[int], list[str]]:
    """A job under torchrun, run to its end: exit codes, and what was printed."""
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(started(host, folder, torchrun(host, hosts[0], *options)))
            for host in hosts
        ]
        texts = [job.stdout.read() for job in jobs]
        return [job.wait() for job in jobs], texts


def test_a_host_dies_and_the_job_goes_on(
    hosts: tuple[Host, Host],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = str(tmp_path / "kept")
    saving = ["--out", str(tmp_path), "--save", kept]
    # Halfway through the backward of the fourth step.
    failing = ["--fail", "kill", "--fail-at", "3", "--fail-after", "7"]
    codes, texts = ran(hosts, tmp_path, *saving, *failing)
    assert codes[0] > 0 and codes[1] > 0, texts
    assert re.search(rf"lost the others: rank 0 was in step 4 of 6, waiting for {SENT}", texts[0])
    assert texts[0].count("train_gpt: ") == 1 and "SIGKILL" in texts[1]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["step-2"]

    codes, texts = ran(hosts, tmp_path, *saving, "--resume", kept)
    assert codes == [0, 0], texts
    assert re.search(rf"Mesh\(dp=2, tp=1\): *33%.* 2/{STEPS}", texts[0]), texts[0]
    on_two_hosts = compared(texts[0])

    load_example(monkeypatch).main(["--virtual", "dp=2", *OPTIONS, *saving[:3], kept + "-virtual"])
    assert on_two_hosts == compared(capsys.readouterr().out)
    have, want = (stored(tmp_path / name / f"step-{STEPS}") for name in ("kept", "kept-virtual"))
    assert len(have) == len(want) > 40
    assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


def compared(text: str) -> list[str]:
    """Losses of the last batch and of held-out text; sharded and on one device they are close."""
    found = re.findall(r"sharded (\S+), one device (\S+) \(difference (\S+)\)", text)
    assert len(found) == 2, text
    assert all(float(difference) < 1e-4 for _, _, difference in found)
    return [sharded for sharded, _, _ in found]


def load_example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, without the signals and exits of a process of its own, and without its picture."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = signal.getsignal(signal.SIGINT)
    jobs, train, example = map(importlib.import_module, ("_job", "_train", "train_gpt"))
    signal.signal(signal.SIGINT, before)
    monkeypatch.setattr(jobs, "job", lambda *args: contextlib.nullcontext(jobs.Job(*args)))
    monkeypatch.setattr(train, "draw", lambda *args: None)
    return example


def stored(path: Path) -> list[torch.Tensor]:
    """All tensors of a checkpoint, whole."""
    example = importlib.import_module("train_gpt")
    params = example.init(example.Size(8, 16, 2, 1), random.key(0))
    like = {"params": params, "state": optim.adamw(0.1).init(params), "step": 0}
    tree = load(path, like)
    assert tree.pop("step") == STEPS
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def test_the_cable_is_cut(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Both ranks are in the middle of a step, and neither hears of the other again."""
    pausing = ["--fail", "pause", "--fail-at", "3", "--fail-after", "7"]
    args = script(*pausing, "--timeout", str(TIMEOUT), "--out", str(tmp_path))
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(started(host, tmp_path, args, RANK=str(i), **meeting))
            for i, host in enumerate(hosts)
        ]
        seen = ""
        while "paused" not in seen:
            seen += ranks[1].stdout.readline() or pytest.fail(f"ended without a pause: {seen}")
        hosts[1].cut_off()
        print("go on", file=ranks[1].stdin, flush=True)
        texts = [rank.stdout.read() for rank in reversed(ranks)]
        assert [rank.wait() for rank in ranks] == [1, 1], texts
    for rank, text in zip((1, 0), texts, strict=True):
        said = rf"no answer from the others within {TIMEOUT} s: rank {rank} was in step 4 of 6, "
        assert re.search(f"{said}waiting for {SENT}", text), text
        assert text.count("train_gpt: ") == 1 and "Traceback" not in text


def test_nothing_is_left_of_the_hosts(hosts: tuple[Host, Host]) -> None:
    with contextlib.suppress(KeyboardInterrupt), namespaces.two_hosts() as others:
        names = [host.name for host in (*hosts, *others)]
        assert len({*names}) == 4 and all(name in listed() for name in names)
        with others[0].running(["sleep", "1000"], {}, subprocess.DEVNULL) as sleeper:
            raise KeyboardInterrupt
    assert sleeper.returncode == -signal.SIGKILL
    assert [name in listed() for name in names] == [True, True, False, False]


def listed() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_a_machine_without_the_tools_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(namespaces.Unavailable, match=r"ip and unshare .* not found"):
        namespaces.two_hosts().__enter__()
