"""Messages between processes of one host through sockets: in order, whole, or an error."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchard.sharding.values import host_links
from torchard.sharding.values.host_links import HostLink, Listener, linked


@pytest.fixture
def ends() -> tuple[HostLink, HostLink]:
    """The sending and the receiving end of a link."""
    listener = Listener()
    out = linked(Listener().address, listener.address)
    assert out is not None
    return out, listener.accept()


def test_messages_keep_their_order_and_bounds(ends: tuple[HostLink, HostLink]) -> None:
    out, arriving = ends
    sent = [b"a", b"bc" * 500, b"\0" * 3, b"d"]
    for message in sent:  # none is received yet
        out.send(message)
    assert [arriving.receive(1032, 5) for _ in sent] == sent


def test_a_silent_process_is_waited_for_no_longer_than_told(ends: tuple[HostLink, HostLink]) -> None:
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0\.05 s"):
        ends[1].receive(8, 0.05)


def test_a_sender_waits_for_a_slow_process_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link is made within a time limit, which is not one of its messages."""
    monkeypatch.setattr(host_links, "_AT_ONCE", 0.05)
    listener = Listener()
    out = linked(listener.address, listener.address)
    assert out is not None
    arriving, sent = listener.accept(), [bytes([i]) * 1000 for i in range(250)] * 4
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [out.send(message) for message in sent])
        with pytest.raises(TimeoutError):  # more than the kernel keeps
            sending.result(timeout=0.5)
        assert [arriving.receive(1000, 5) for _ in sent] == sent
        sending.result()


def test_a_process_that_ends_is_noticed_at_once() -> None:
    listener = Listener()
    pid = os.fork()
    if pid == 0:
        out = linked(listener.address, listener.address)
        assert out is not None
        out.send(b"last words")
        os.kill(os.getpid(), signal.SIGKILL)
    link = listener.accept()
    os.waitpid(pid, 0)
    assert link.receive(32, 5) == b"last words"
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        link.receive(32, 60)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        link.send(b"more")


def test_processes_of_other_hosts_are_not_linked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = Listener()
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(host_links, "_BOOT", tmp_path / "boot")
    there = Listener()
    assert there.address and linked(here.address, there.address) is None
    monkeypatch.setattr(host_links, "_BOOT", tmp_path / "none")
    unknown = Listener()
    assert unknown.address == b""
    assert linked(unknown.address, here.address) is linked(here.address, unknown.address) is None


def test_nobody_listens_any_more() -> None:
    listener = Listener()
    listener.close()
    assert linked(listener.address, listener.address) is None
