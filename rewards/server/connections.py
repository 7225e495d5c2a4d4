"""Open connections of a server: how many there may be, and how long each may take.

uvicorn limits the time of idle connections only. Here a request's head has a time limit, too, and
so has a client that does not read its answer; room.py limits bodies. Where there are too many
connections, those whose turn it is to speak are compared, and the one that has been silent longest
is closed.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD = 20.0  # seconds for the head of a request, or to read an answer
REST = 80.0  # seconds between an answer and the next request; uvicorn closes sooner
PIECE = 2**16  # most bytes that are read at once, and that stay in memory while a request waits
SWEEP = 1.0  # seconds between two looks at all connections
FILES = 64  # file descriptors that are left for everything else


class Door:
    """The open connections of a server. most: largest number of them."""

    def __init__(self, most: int):
        self.most = max(1, min(most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - FILES))
        self.open: dict[Connection, None] = {}
        self.sweeping = False

    def enter(self, connection: Connection) -> None:
        self.open[connection] = None
        if len(self.open) > self.most:
            # the newest connection is one of them
            speakers = [one for one in self.open if one.speaks]
            min(speakers, key=lambda one: one.heard).close()
        if not self.sweeping:
            self.sweeping = True
            connection.loop.call_later(SWEEP, self.sweep, connection.loop)

    def leave(self, connection: Connection) -> None:
        self.open.pop(connection, None)

    def sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close overdue connections, and come back while any connection is open."""
        now = loop.time()
        for connection in [one for one in self.open if min(one.due, one.stuck) < now]:
            connection.close()
        self.sweeping = bool(self.open)
        if self.sweeping:
            loop.call_later(SWEEP, self.sweep, loop)


class Connection(H11Protocol):
    """One connection, with loop times. due: when it ends if nothing happens. stuck: the same, while
    its client reads no answer. heard: when its last byte came."""

    def __init__(self, *args: Any, door: Door, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.door, self.rests = door, False
        self.heard = self.due = self.stuck = math.inf

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def speaks(self) -> bool:
        """Whether it is the client's turn."""
        return not self.busy or (self.cycle.more_body and not self.flow.read_paused)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.max_size = PIECE  # type: ignore[attr-defined]
        super().connection_made(transport)
        self.heard = self.loop.time()
        self.due = self.heard + HEAD
        self.door.enter(self)

    def close(self) -> None:
        """Close at once, even if something was not sent."""
        self.door.leave(self)
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.door.leave(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        if self.rests:  # the next head begins; later bytes do not prolong its time
            self.rests, self.due = False, self.heard + HEAD
        super().data_received(data)
        if self.busy:
            self.due = math.inf

    def on_response_complete(self) -> None:
        self.rests = self.conn.their_state is not h11.SEND_BODY
        self.due = self.loop.time() + (REST if self.rests else HEAD)
        super().on_response_complete()
        if self.busy:  # busy with a request that came before the answer was sent
            self.due = math.inf

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.time() + HEAD

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stuck = math.inf


def protocol(most: int) -> Callable[..., Connection]:
    """The function with which uvicorn makes a connection; most: largest number open at once."""
    return partial(Connection, door=Door(most))
