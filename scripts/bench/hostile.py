"""The reward server among hostile clients: nothing lost or wrong, half the pace, bounded memory.

    python scripts/bench/hostile.py                    # 64 clients x 200 pictures, 500 sockets
    python scripts/bench/hostile.py --clients 8 --images 20 --sockets 50 --fuzz 200

The load of server.py runs on one server twice: alone, then beside sockets that another process
keeps busy with what ATTACKS names, each opened again when the server closes it. Then the server
gets requests that are wrong somewhere, and none may be answered with a 5xx or not at all. memory:
what the server's resident set (VmHWM of /proc/PID/status, reset between) rose above its size before
the hostile sockets, as a multiple of --max-mb. Exit code 1 where a goal is missed. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import contextlib
import functools
import json
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import server as bench
import torch
from PIL import Image

from flowrl.data.media import encoded
from flowrl.rewards.server import wire

GOALS = {"pace": 0.5, "memory": 2.0}
PATIENCE = 30.0  # seconds that an attack lasts if the server does not end it

# --- attacks


class Enemy:
    """One hostile socket. claim: bytes that its requests announce."""

    def __init__(self, number: int, claim: int, seed: int):
        self.random, self.claim = random.Random(f"{seed} {number}"), claim
        self.attack = ATTACKS[number % len(ATTACKS)]

    async def fight(self, port: int, counts: collections.Counter[str]) -> None:
        await asyncio.sleep(self.random.random() * 2)
        while True:
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
                counts[self.attack.__name__] += 1
                try:
                    async with asyncio.timeout(PATIENCE):
                        await self.attack(self)
                        await self.reader.read()
                finally:
                    self.writer.transport.abort()
            await asyncio.sleep(1 + self.random.random() * 3)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, length: int | None = None) -> None:
        await self.send(head(self.claim if length is None else length))

    async def drip(self) -> None:
        while not self.reader.at_eof():
            await self.send(b" ")
            await asyncio.sleep(1)


def head(
    length: int | str,
    *more: str,
    start: str = "POST /score HTTP/1.1",
    kind: str = "application/json",
) -> bytes:
    lines = [start, "Host: localhost", f"Content-Type: {kind}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more, "", ""]).encode()


async def silent(enemy: Enemy) -> None:
    """A connection, and nothing more."""


async def slow_head(enemy: Enemy) -> None:
    await enemy.send(b"POST /score HTTP/1.1\r\nX-Slow: ")
    await enemy.drip()


async def endless_head(enemy: Enemy) -> None:
    await enemy.send(b"GET /health HTTP/1.1\r\n")
    while not enemy.reader.at_eof():
        await enemy.send(b"X-Header: " + b"x" * 500 + b"\r\n")
        await asyncio.sleep(0.1)


async def claim(enemy: Enemy) -> None:
    await enemy.head()


async def huge_claim(enemy: Enemy) -> None:
    await enemy.head(512_000_000)


async def half_body(enemy: Enemy) -> None:
    await enemy.head()
    await enemy.send(b" " * min(2**20, enemy.claim // 2))


async def drip_body(enemy: Enemy) -> None:
    await enemy.head()
    await enemy.drip()


async def garbage(enemy: Enemy) -> None:
    await enemy.send(enemy.random.randbytes(2000))


async def tls_hello(enemy: Enemy) -> None:
    await enemy.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + enemy.random.randbytes(500))


async def reset(enemy: Enemy) -> None:
    """Half a body, and a reset in place of an end."""
    await enemy.head(100_000)
    await enemy.send(b" " * 50_000)
    sock = enemy.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    enemy.writer.transport.abort()


async def many_values(enemy: Enemy) -> None:
    body = b"[" + b"{}," * min(500_000, enemy.claim // 3 - 1) + b"0]"
    await enemy.head(len(body))
    await enemy.send(body)


async def inflating(enemy: Enemy) -> None:
    """A picture of kilobytes that is larger than a request may be."""
    side = int((enemy.claim / 12) ** 0.5) + 100
    body = json.dumps({"prompts": ["a"], "media": {"png": [png(side)]}}).encode()
    await enemy.head(len(body))
    await enemy.send(body)


async def endless_tensor(enemy: Enemy) -> None:
    """JSON and tensors whose lengths have no end."""
    body = bytes([255] * 8) if enemy.random.random() < 0.5 else bytes(8) + bytes([255] * 8)
    await enemy.send(head(len(body), kind=wire.WITH_TENSORS) + body)


async def deaf(enemy: Enemy) -> None:
    """Asks again and again, and reads no answer."""
    enemy.reader._transport.pause_reading()  # type: ignore[attr-defined]
    while True:
        await enemy.send(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        await asyncio.sleep(5)


ATTACKS: list[Callable[[Enemy], Awaitable[None]]] = [
    silent, slow_head, endless_head, claim, huge_claim, half_body, drip_body, garbage, tls_hello,
    reset, many_values, inflating, endless_tensor, deaf,
]  # fmt: skip


async def attack(port: int, sockets: int, claim: int, seed: int) -> None:
    """Until this process ends; prints how often each attack began, once a second."""
    counts: collections.Counter[str] = collections.Counter()
    enemies = [Enemy(number, claim, seed) for number in range(sockets)]
    fights = [asyncio.ensure_future(enemy.fight(port, counts)) for enemy in enemies]
    while not any(fight.done() for fight in fights):
        await asyncio.sleep(1)
        print(json.dumps(counts), flush=True)


@contextlib.contextmanager
def attacking(port: int, args: argparse.Namespace) -> Iterator[Callable[[], dict[str, int]]]:
    """Hostile sockets in a process of their own; what is yielded ends them, and counts."""
    words = [str(word) for word in (port, args.sockets, int(args.max_mb * 1e6), args.seed)]
    process = subprocess.Popen(
        [sys.executable, __file__, "--attack", *words], stdout=subprocess.PIPE, text=True
    )

    def end() -> dict[str, int]:
        process.terminate()
        lines = (process.communicate()[0] or "{}").splitlines()
        return json.loads(lines[-1])

    try:
        for _ in range(5):  # seconds, until all are there
            process.stdout.readline()
        yield end
    finally:
        process.kill()
        process.wait()


# --- wrong requests


def fuzzed(number: int, seed: int) -> bytes:
    """A request to /score that is wrong somewhere, most of the time."""
    chance = random.Random(f"{seed} fuzz {number}")
    question, tensors = good(chance)
    kind = chance.randrange(4)
    if kind == 0:  # another value somewhere
        replace(question, chance)
    body = wire.pack(question, tensors) if tensors else json.dumps(question).encode()
    form = wire.WITH_TENSORS if tensors else "application/json"
    if kind == 1:  # other bytes somewhere
        body = bytearray(body)
        for _ in range(chance.randint(1, 20)):
            body[chance.randrange(len(body))] = chance.randrange(256)
    if kind == 2:  # cut, doubled, or other bytes
        cut = chance.randrange(len(body))
        body = chance.choice([body[:cut], body + body, body[cut:], chance.randbytes(300), b""])
    if kind == 3:
        return strange_head(len(body), chance, form) + body
    return head(len(body), "Connection: close", kind=form) + bytes(body)


def good(chance: random.Random) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """JSON of a request, and tensors behind it; {}: its pictures are in the JSON."""
    torch.manual_seed(chance.randrange(2**31))
    media = torch.rand(2, 3, 8, 8)
    more = {"meta": [{"n": 1, "of": {"it": [1.5]}}, {}], "group": [0, 1], "reward": "jpeg"}
    kept = {name: value for name, value in more.items() if chance.random() < 0.4}
    question = {"id": "q", "prompts": ["a cat", "a dog"], **kept}
    if chance.random() < 0.5:
        return question | {"media": {"png": [png(8), png(8)]}}, {}
    tensors = {"media": wire.as_bytes(media, rounds=chance.random() < 0.5)}
    columns = {"source": torch.rand(2, 3, 8, 8), "actions": torch.randn(2, 3)}
    return question, tensors | {n: x for n, x in columns.items() if chance.random() < 0.4}


@functools.cache
def png(side: int) -> str:
    """base64 of a black picture."""
    return base64.b64encode(encoded(Image.new("RGB", (side, side)))).decode()


ODD = [
    None, True, -1, 0, 1.5, 2**31, 2**63, 10**30, 10**400, 1e308, float("nan"), float("inf"), "",
    "x", "\x00", "\ud83d\ude00", "a" * 5000, "=", "AAAA", "eJw=", [], [[]], [None], {}, {"": {}},
    {"png": []}, {"png": ["x"]}, [[[[[[[[]]]]]]]], {"dtype": "uint8", "shape": [], "data": ""},
]  # fmt: skip


def replace(value: Any, chance: random.Random) -> None:
    """Put something odd at a random place of a JSON value, or take something away."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = chance.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.7:
            value = inner
            continue
        if chance.random() < 0.1:
            del value[key]
        elif isinstance(inner, str) and inner and chance.random() < 0.3:
            value[key] = inner[: chance.randrange(len(inner))]
        else:
            value[key] = chance.choice(ODD)
        return


def strange_head(length: int, chance: random.Random, kind: str) -> bytes:
    number = chance.choice([0, -1, length + 1, length - 1, 10**9, 10**30, "x", "1, 1", "", "0x10"])
    more = [
        "Transfer-Encoding: chunked", "Transfer-Encoding: x", "Content-Length: 5", "Expect: x",
        "Authorization: Bearer \xff", "Upgrade: websocket", "Connection: upgrade", "Host: evil.com",
        "Content-Encoding: gzip", "Range: bytes=0-", "X: " + "x" * 9000, "Expect: 100-continue",
    ]  # fmt: skip
    target = chance.choice(
        ["/score", "/", "/version", "/health", "/%00", "/../etc", "*", "/score?x"]
    )
    verb = chance.choice(["POST", "GET", "PUT", "HEAD", "OPTIONS", "TRACE", "DELETE", "\x01", ""])
    start = f"{verb} {target} HTTP/{chance.choice(['1.1', '1.0', '2.0', '9'])}"
    chosen = chance.sample(more, chance.randrange(4))
    return head(chance.choice([length, number]), *chosen, start=start, kind=kind)


def status_of(port: int, request: bytes) -> str:
    """Its status; "none" where the connection ends without; "hangs": not even then.

    A request that says that it goes on is ended after 3 seconds.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=3) as sock:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(request)
            answer = sock.recv(4096)
        except TimeoutError:
            sock.shutdown(socket.SHUT_WR)
            try:
                answer = sock.recv(4096)
            except TimeoutError:
                return "hangs"
        except OSError:
            return "none"
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "none"


def fuzz(port: int, args: argparse.Namespace) -> collections.Counter[str]:
    """How many of the wrong requests had which status."""
    with ThreadPoolExecutor(8) as pool:
        requests = (fuzzed(number, args.seed) for number in range(args.fuzz))
        return collections.Counter(pool.map(lambda request: status_of(port, request), requests))


# --- the measurement


def resident(pid: int, field: str) -> float:
    """A field of /proc/PID/status, VmRSS or VmHWM, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def measured(url: str, args: argparse.Namespace, expected: torch.Tensor) -> tuple[float, int, int]:
    """Samples a second, lost, wrong."""
    began = time.perf_counter()
    totals = bench.ask_all(url, args)
    seconds = time.perf_counter() - began
    return totals.numel() / seconds, int(totals.isnan().sum()), int((totals != expected).sum())


def measure(args: argparse.Namespace) -> list[str]:
    """Prints the figures; the goals that were missed."""
    expected, port = bench.local_totals(args), bench.free_port()
    url = f"http://127.0.0.1:{port}"
    with bench.serving(port, max_mb=args.max_mb) as process:
        bench.scored(url)
        alone, lost, wrong = measured(url, args, expected)
        print(f"alone: {alone:.0f} samples/s, {lost} lost, {wrong} wrong", flush=True)
        before = resident(process.pid, "VmRSS")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # VmHWM begins anew
        with attacking(port, args) as end:
            beside, *bad = measured(url, args, expected)
            counts = end()
        growth = (resident(process.pid, "VmHWM") - before) / args.max_mb
        print(
            f"beside {args.sockets} hostile sockets: {beside:.0f} samples/s ({beside / alone:.2f})"
        )
        print(f"  {bad[0]} lost, {bad[1]} wrong, {sum(counts.values())} attacks: {counts}")
        print(f"  memory: {before:.0f} MB, then {growth:+.2f} x {args.max_mb:g} MB", flush=True)
        statuses = fuzz(port, args)
        print(f"{args.fuzz} wrong requests: {dict(statuses)}")
        scored = bench.scored(url)
        missed = {
            "a sample is lost or wrong": lost or wrong or any(bad),
            f"the pace is below {GOALS['pace']}": beside < GOALS["pace"] * alone,
            f"memory grew by more than {GOALS['memory']}": growth > GOALS["memory"],
            "a wrong request is answered with 5xx, or not at all": any(
                status == "hangs" or status.startswith("5") for status in statuses
            ),
            "the server counts too few samples": scored < 2 * expected.numel(),
        }
    return [goal for goal, is_missed in missed.items() if is_missed]


def main() -> None:
    parser = bench.parser(__doc__)
    parser.add_argument("--sockets", type=int, default=500, help="hostile ones")
    parser.add_argument("--fuzz", type=int, default=2000, help="wrong requests")
    parser.add_argument("--max-mb", type=float, default=64, help="of the server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attack", nargs=4, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attack:
        asyncio.run(attack(*args.attack))
        return
    bench.quiet()
    if missed := measure(args):
        sys.exit("missed: " + "; ".join(missed))
    print("all goals are reached")


if __name__ == "__main__":
    main()
