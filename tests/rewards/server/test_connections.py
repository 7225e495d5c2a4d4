"""Connections of a reward server: how many, for how long, and to which name."""

import contextlib
import socket
import time

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl.rewards.server import connections
from flowrl.rewards.server.addresses import is_local
from flowrl.rewards.server.app import Server

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    before = connections.HEAD, connections.SWEEP
    connections.HEAD, connections.SWEEP = 0.4, 0.05
    served = Server({"jpeg": 1.0}, port=0, device="cpu", max_connections=3)
    served.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that it soon is full
    with served as server:
        yield server
    connections.HEAD, connections.SWEEP = before


def connected(server, start=b""):
    sock = socket.create_connection(("127.0.0.1", server.socket.getsockname()[1]), timeout=10)
    sock.sendall(start)
    return sock


def answered(sock):
    """Whether the whole answer to HEALTH comes."""
    text = b""
    while not text.endswith(b"}"):
        text += sock.recv(4096)
    return text.startswith(b"HTTP/1.1 200")


def closed(sock):
    """Whether the server has closed it; waits for that."""
    try:
        return sock.recv(4096) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nX: "], ids=["silent", "begun"])
def test_a_head_that_does_not_come_ends_the_connection_also_if_it_drips(server, start):
    with connected(server, start) as sock:
        began = time.monotonic()
        sock.setblocking(False)
        over = False
        while not over and time.monotonic() < began + 3:
            time.sleep(0.05)
            with contextlib.suppress(BlockingIOError):
                over = closed(sock)
            with contextlib.suppress(OSError):
                sock.send(b"x" if start else b"")
    assert 0.3 < time.monotonic() - began < 2


def test_the_next_head_on_a_connection_has_the_same_time(server):
    with connected(server, HEALTH) as sock:
        assert answered(sock)
        time.sleep(0.6)  # between requests there is more
        sock.sendall(HEALTH)
        assert answered(sock)
        sock.sendall(b"GET")
        assert closed(sock)


def test_where_there_are_too_many_the_one_that_was_silent_longest_goes(server):
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(connected(server))
        for _ in range(2):
            time.sleep(0.02)
            stack.enter_context(connected(server))
        with connected(server, HEALTH) as new:
            assert answered(new)
        old.settimeout(0.1)
        assert closed(old)


def test_a_client_that_reads_no_answer_is_closed(server):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", server.socket.getsockname()[1]))
        began = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() < began + 8:
                sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
                time.sleep(0.01)


def test_a_name_that_is_not_of_this_machine_is_refused(server):
    """A web page may have its name lead here; a browser then sends that name."""
    for host in ("evil.com", "localhost.evil.com", "", "127.0.0.1.evil.com", "10.0.0.1"):
        for path in ("health", "version"):
            answer = httpx.get(f"{server.url}/{path}", headers={"Host": host})
            assert answer.status_code == 421 and "not to" in answer.json()["detail"]
    assert httpx.get(f"{server.url}/version", headers={"Host": "LOCALHOST:9"}).status_code == 200
    assert all(map(is_local, ("127.0.0.1:8321", "[::1]:1", "[::1]", "127.0.0.2", "a.localhost:80")))
    assert not any(map(is_local, ("[::1].evil.com", "localhost:80:80", "[::2]:1", ":80")))
