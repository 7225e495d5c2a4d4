"""Bodies: what they may take of memory and time, and that they keep no others out."""

import asyncio
import contextlib
import json
import socket
import time

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl.rewards import load_set
from flowrl.rewards.server import json_weight, room
from flowrl.rewards.server.app import Server
from flowrl.rewards.server.routes import create_app
from flowrl.rewards.server.service import Service

JSON = {"Content-Type": "application/json"}
PNG = (  # 1 x 1, black
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)
BODY = json.dumps({"prompts": ["a cat"], "media": {"png": [PNG]}})


def begun(server, *headers, start=b""):
    """A connection on which a request to /score has begun."""
    sock = socket.create_connection(("127.0.0.1", server.socket.getsockname()[1]), timeout=10)
    lines = [
        "POST /score HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *headers,
        "",
        "",
    ]
    sock.sendall("\r\n".join(lines).encode() + start)
    return sock


def answer(sock, most=600):
    with sock, sock.makefile("rb") as file:
        return file.read(most).decode()


def soon(condition):
    """Wait until something holds, for some seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_transfer_encoding_is_refused_also_beside_a_content_length():
    """The HTTP layer believes the encoding and not the length, which is the one that is checked."""
    with Server({"jpeg": 1.0}, port=0, max_mb=1.0, device="cpu") as server:
        sock = begun(
            server,
            "Content-Length: 10",
            "Transfer-Encoding: chunked",
            "Connection: close",
            start=b"3\r\n   \r\n0\r\n\r\n",
        )
        assert answer(sock).startswith("HTTP/1.1 411") and server.service.room.held == 0


def test_a_body_that_is_longer_than_was_said_is_refused_while_it_comes():
    service = Service(load_set({"jpeg": 1.0}), max_mb=1.0, max_batch=1, device="cpu")
    read, service.read = [], lambda *body: read.append(body)

    async def ask():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(service)), base_url="http://x"
        ) as client:
            return await client.post(
                "/score", content=b" " * 100, headers={**JSON, "Content-Length": "10"}
            )

    reply = asyncio.run(ask())
    service.close()
    assert reply.status_code == 422
    assert "longer than the 10 bytes of its Content-Length" in reply.json()["detail"]
    assert not read


def test_what_is_announced_takes_no_room_from_others():
    """Six announce 0.9 MB each and send a byte; there is room for 1.9 MB."""
    with Server({"jpeg": 1.0}, port=0, max_mb=1.0, device="cpu") as server:
        slow = [begun(server, "Content-Length: 900000", start=b"{") for _ in range(6)]
        soon(lambda: server.service.room.held == 6)
        sent = httpx.post(f"{server.url}/score", content=BODY + " " * 100_000, headers=JSON)
        assert sent.status_code == 200
        soon(lambda: server.service.room.held == 6)
        for sock in slow:
            sock.close()
        soon(lambda: server.service.room.held == 0)


@pytest.mark.parametrize("drips", [False, True])
def test_a_body_that_pauses_or_drips_is_given_up(monkeypatch, drips):
    monkeypatch.setattr(room, "IDLE", 0.3)
    with Server({"jpeg": 1.0}, port=0, max_mb=1.0, device="cpu") as server:
        sock = begun(server, "Content-Length: 900000", start=b"{")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while drips and time.monotonic() < began + 2 and server.service.room.guests:
                sock.sendall(b" ")
                time.sleep(0.05)
        said = answer(sock)
    assert said.startswith("HTTP/1.1 408") and "the body came too slowly" in said
    assert time.monotonic() - began < 2


def test_a_silent_body_gives_way_to_one_that_needs_its_room(monkeypatch):
    monkeypatch.setattr(room, "SILENT", 0.2)
    monkeypatch.setattr(room, "GLANCE", 0.05)
    with Server({"jpeg": 1.0}, port=0, max_mb=1.0, device="cpu") as server:
        half = b" " * 450_000
        first = begun(server, "Content-Length: 900000", start=half)
        soon(lambda: server.service.room.held == 450_000)
        second = begun(server, "Content-Length: 900000", start=half)
        soon(lambda: server.service.room.held == 900_000)
        sent = httpx.post(f"{server.url}/score", content=BODY + " " * 100_000, headers=JSON)
        assert sent.status_code == 200
        assert answer(first).startswith("HTTP/1.1 503")
        second.close()


def test_a_token_is_asked_for_before_a_body_is_read(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "a-secret-of-20-chars")
    with Server({"jpeg": 1.0}, port=0, token_env="MY_TOKEN", device="cpu") as server:
        sock = begun(server, "Content-Length: 400000000", "Expect: 100-continue")
        assert answer(sock, 12) == "HTTP/1.1 401"
        assert not server.service.room.guests


# --- memory that requests share


def test_bodies_fill_half_the_room_and_the_first_or_a_whole_one_the_rest():
    async def fill():
        shared = room.Room(100)
        async with shared.guest() as first, shared.guest() as second, shared.guest() as third:
            await first.take(b" " * 30)
            await second.take(b" " * 20)
            assert not shared.fits(third, 1) and not shared.fits(second, 1)
            assert shared.fits(first, 50) and not shared.fits(first, 51)
            second.arrived()
            assert shared.fits(second, 50) and not shared.fits(second, 51)
        assert shared.held == 0

    asyncio.run(fill())


def test_the_first_guest_sends_the_last_one_away_where_there_is_no_room():
    async def crowd():
        shared, outcomes = room.Room(100), {}

        async def guest(name, amounts):
            try:
                async with shared.guest() as guest:
                    for amount in amounts:
                        await guest.take(b" " * amount)
                        await asyncio.sleep(0.01)
                    outcomes[name] = shared.held <= 100
            except room.Full:
                outcomes[name] = "full"

        await asyncio.gather(*(guest(name, [25, 70]) for name in "ab"))
        return outcomes, shared.held

    assert asyncio.run(crowd()) == ({"a": True, "b": "full"}, 0)


def test_a_guest_that_is_alone_may_take_more_than_there_is():
    async def alone():
        shared = room.Room(10)
        async with shared.guest() as guest:
            await guest.take(b" " * 25)
            return shared.held

    assert asyncio.run(alone()) == 25


@pytest.mark.parametrize(
    ("body", "weight"),
    [
        (b"{},{}", 5 * 2 + 3 * 200),
        (b'["' + b"A" * 4096 + b'=="]', 4102 * 2 + 200),
        (b'"' + b"A" * 4096 + b"\\ud83d" + b'"', 4104 * 6),
        (b'"\xf0\x9f\x98\x80' + b"A" * 4096 + b'"', 4102 * 6),  # one emoji
    ],
)
def test_json_weighs_what_it_may_become(body, weight):
    assert json_weight.weigh(body) == weight
