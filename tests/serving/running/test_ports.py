"""Who holds a port, from this machine's /proc and from made ones."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.serving.running.ports import Listener, listener, reserved


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1")],
)
def test_a_listener_is_found_wherever_it_listens(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as held:
        held.bind((address, 0))
        port = held.getsockname()[1]
        assert listener(port) is None  # bound, but nobody listens
        held.listen()
        found = listener(port)
        # ::1 takes nothing that comes to 127.0.0.1
        assert (None if found is None else found.pid) == (None if address == "::1" else os.getpid())


def test_a_descriptor_that_closes_meanwhile_hides_nobody() -> None:
    gap = os.open(os.devnull, os.O_RDONLY)
    with socket.create_server(("127.0.0.1", 0)) as held:
        os.close(
            gap
        )  # the folder of descriptors is read by the lowest that is free: listed before the socket, then gone
        assert listener(held.getsockname()[1]) == Listener(os.getpid(), Path("/proc/self/comm").read_text().strip())


def test_another_users_process_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    row = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1"
    (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n{row}\n")
    assert listener(8000, proc=tmp_path) == Listener(None, "a process that this user cannot see")
    assert listener(8001, proc=tmp_path) is None


def test_a_reserved_port_is_nobody_elses_and_a_server_may_take_it() -> None:
    with reserved(None) as port, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with pytest.raises(UserError, match=rf"port {port} is held by .+ \(pid {os.getpid()}\)"), reserved(port):
            pass


def test_the_port_that_was_asked_for() -> None:
    with reserved(None) as port:
        pass
    with reserved(port) as again:
        assert again == port
