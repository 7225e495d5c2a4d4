"""Bodies that come slowly or in another length than was said.

They neither pass the limits nor keep others out.
"""

import asyncio
import json
import socket
import time

import httpx
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl.rewards import load_set
from flowrl.rewards.server import routes, wire
from flowrl.rewards.server.app import Server
from flowrl.rewards.server.routes import create_app
from flowrl.rewards.server.service import Service

JSON = {"Content-Type": "application/json"}
BODY = json.dumps({"prompts": ["a cat"], "media": wire.pack_media(torch.zeros(1, 3, 8, 8))})


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


def answer(sock):
    with sock, sock.makefile("rb") as file:
        return file.read(600).decode()


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
        assert answer(sock).startswith("HTTP/1.1 411") and server.service.arriving.inside == 0


def test_a_body_that_is_longer_than_was_said_is_refused_while_it_comes():
    service = Service(load_set({"jpeg": 1.0}), max_mb=1.0, max_batch=1, device="cpu")
    read, service.read = [], lambda body: read.append(body)

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


def test_clients_that_never_send_their_bodies_keep_others_out_for_a_while_only(monkeypatch):
    """Two announce 0.9 MB each and send a byte.

    With the third, of 0.3 MB, more than the 2 MB of the gate would be arriving.
    """
    monkeypatch.setattr(routes, "ARRIVAL", 0.3)
    with Server({"jpeg": 1.0}, port=0, max_mb=1.0, device="cpu") as server:
        slow = [begun(server, "Content-Length: 900000", start=b"{") for _ in range(2)]
        deadline = time.monotonic() + 10
        while server.service.arriving.inside < 1_800_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (
            httpx.post(
                f"{server.url}/score", content=BODY + " " * 300_000, headers=JSON
            ).status_code
            == 200
        )
        for said in map(answer, slow):
            assert said.startswith("HTTP/1.1 408")
            assert "did not come within 0.3 seconds (1 of 900000 bytes did)" in said
