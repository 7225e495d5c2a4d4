"""Servers of the same reward: a request goes to the one that has the least to do.

A server that did not answer, or said that it is busy, is passed over for a while; where all are
passed over, the one that failed first is asked again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from flowrl.rewards.server.http_client import Client

PAUSE = 10.0  # seconds that a server is passed over


@dataclass(slots=True)
class Place:
    """One of several servers, and how busy it is."""

    client: Client  # sends requests to it
    asked: int = 0  # requests so far
    open: int = 0  # requests under way
    until: float = 0.0  # time.monotonic() at which it is asked again
    away: bool = False  # whether the user was told that it does not answer


class Pool:
    """The servers at one or more addresses; their requests may come from several threads."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self.places = [Place(client) for client in clients]
        self.lock = threading.Lock()

    @property
    def where(self) -> str:
        """All addresses, without secrets."""
        return ", ".join(place.client.url for place in self.places)

    @contextmanager
    def least_busy(self) -> Iterator[Place]:
        """The server for a request, which counts as under way inside the context."""
        with self.lock:
            now = time.monotonic()
            place = min(self.places, key=lambda p: (max(p.until - now, 0.0), p.open, p.asked))
            place.open += 1
            place.asked += 1
        try:
            yield place
        finally:
            with self.lock:
                place.open -= 1

    def pass_over(self, place: Place, after: float = 0.0) -> None:
        """Ask a server again after PAUSE seconds only, or after `after` seconds if it wants
        longer."""
        with self.lock:
            place.until = time.monotonic() + max(after, PAUSE)

    def answered(self, place: Place) -> bool:
        """Mark that a server answered -> whether the user was told that it is away."""
        with self.lock:
            first, place.away, place.until = place.away, False, 0.0
        return first
