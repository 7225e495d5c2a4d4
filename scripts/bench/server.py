"""The reward server under load: is every score there, once, and exact?

    python scripts/bench/server.py                     # 64 clients x 200 pictures
    python scripts/bench/server.py --clients 16 --images 20

Many clients on loopback, each asking for one picture at a time; once the server is left alone, and
once it is killed half way. The server is a process of its own and serves `jpeg` and `light` below,
which reads every bit of the floats. lost: samples without a score. wrong: scores that differ from
the local ones. scored: what the server counted; more than were asked for would be duplicates.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
from torch import Tensor

from flowrl import reward, rewards

SERVED = {"jpeg": 1.0, "light": {"name": f"{__file__}:light", "weight": 1.0}}


@reward(scale="mean of the pixels, 0 to 1")
def light(media: Tensor, prompts: list[str], context=None) -> Tensor:
    return media.flatten(1).mean(1)


def picture(client: int, number: int, side: int) -> Tensor:
    """(1, 3, side, side), another one for each client and number."""
    generator = torch.Generator().manual_seed(client * 1_000_003 + number)
    return torch.rand(1, 3, side, side, generator=generator)


@contextlib.contextmanager
def serving(port: int, max_mb: float = 512.0) -> Iterator[subprocess.Popen]:
    code = (
        "import torch; torch.set_num_threads(1); from flowrl.rewards.server.app import Server;"
        f" Server({SERVED!r}, port={port}, device='cpu', max_mb={max_mb}).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def scored(url: str) -> int:
    """What the server has counted; waits until it answers."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").json()["scored"]
        time.sleep(0.1)


def ask(url: str, client: int, images: int, side: int) -> Tensor:
    """(images,) totals of one client, one request a picture."""
    remote = rewards.load("remote", url=url, batch=1, concurrency=1, wait=120)
    return torch.cat(
        [remote(picture(client, i, side), [f"picture {client} {i}"]) for i in range(images)]
    )


def supervise(url: str, port: int, kill_at: int | None, done: threading.Event) -> None:
    """Serve until done; with kill_at, SIGKILL at so many samples, a second later another server."""
    if kill_at is not None:
        with serving(port):
            while scored(url) < kill_at:
                time.sleep(0.05)
        time.sleep(1)
    with serving(port):
        done.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def load(args: argparse.Namespace, expected: Tensor, *, kill: bool) -> str:
    """One row of the table."""
    port, done = free_port(), threading.Event()
    url, kill_at = f"http://127.0.0.1:{port}", expected.numel() // 2 if kill else None
    supervisor = threading.Thread(target=supervise, args=(url, port, kill_at, done), daemon=True)
    supervisor.start()
    try:
        scored(url)
        began = time.perf_counter()
        totals = ask_all(url, args)
        seconds = time.perf_counter() - began
        counted = "-" if kill else str(scored(url))
    finally:
        done.set()
        supervisor.join()
    return row("killed half way" if kill else "left alone", totals, expected, seconds, counted)


def ask_all(url: str, args: argparse.Namespace) -> Tensor:
    """(clients, images) totals, all clients at once."""

    def one(client: int) -> Tensor:
        return ask(url, client, args.images, args.side)

    with ThreadPoolExecutor(args.clients) as pool:
        return torch.stack(list(pool.map(one, range(args.clients))))


HEAD = f"{'server':16}{'samples':>9}{'samples/s':>12}{'lost':>6}{'wrong':>7}{'scored':>8}"


def row(name: str, totals: Tensor, expected: Tensor, seconds: float, counted: str) -> str:
    lost, wrong = int(totals.isnan().sum()), int((totals != expected).sum())
    rate, worst = totals.numel() / seconds, float((totals - expected).abs().max())
    counts = f"{totals.numel():9}{rate:12.0f}{lost:6}{wrong:7}{counted:>8}"
    return f"{name:16}{counts}{worst:16.1e}"


def local_totals(args: argparse.Namespace) -> Tensor:
    """(clients, images): what the served rewards give in this process."""
    local, totals = rewards.load_set(SERVED), []
    for client in range(args.clients):
        pictures = torch.cat([picture(client, i, args.side) for i in range(args.images)])
        totals.append(rewards.score(pictures, [""] * args.images, local).total)
    return torch.stack(totals)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a load."""
    out = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--clients", type=int, default=64)
    out.add_argument("--images", type=int, default=200, help="of each client")
    out.add_argument("--side", type=int, default=32, help="of a picture, in pixels")
    return out


def quiet() -> None:
    """One thread, and no line of each client that says that the server is away."""
    torch.set_num_threads(1)
    logging.getLogger("flowrl").setLevel("ERROR")


def main() -> None:
    args = parser(__doc__).parse_args()
    quiet()
    expected = local_totals(args)
    print(f"{HEAD}{'max difference':>16}", flush=True)
    for kill in (False, True):
        print(load(args, expected, kill=kill), flush=True)


if __name__ == "__main__":
    main()
