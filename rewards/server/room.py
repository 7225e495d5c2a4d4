"""Memory that all requests of a server share: what they hold is counted as it comes.

A request that announces much and sends little holds little. When the room is full, requests wait in
turn; one that keeps bytes and has stopped sending is the first that has to go. The first of all can
always go on, so that there is an end to every wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PACE = 4096  # bytes of a body that count as a sign of life
IDLE = 20.0  # seconds without one, after which a body is given up
SILENT = 1.0  # seconds without one, after which it gives way to a request that needs room
WAIT = 120.0  # seconds that a request waits for room
GLANCE = 0.5  # seconds: how often one that waits looks whether others have fallen silent


class Late(Exception):
    """A body came too slowly."""


class Full(Exception):
    """There was no room for a request in time, or it had to give way to another."""


class OpenRequest:
    """One request. held: bytes that it keeps in memory. arriving: its body still comes. heard: loop
    time at which its client had sent PACE bytes more."""

    def __init__(self, room: Room, clock: asyncio.Timeout):
        self.room, self.clock = room, clock
        self.held = self.fresh = 0
        self.heard = _now()
        self.arriving, self.waiting, self.leaving = True, False, False

    def listen(self) -> None:
        """From now on the next piece of the body has to come in time."""
        self.clock.reschedule(self.heard + IDLE)

    async def take(self, piece: bytes) -> None:
        """Wait until there is room for a piece that came."""
        await self.add(len(piece))
        self.fresh += len(piece)
        if self.fresh >= PACE:
            self.heard, self.fresh = _now(), 0

    def arrived(self) -> None:
        """The body is whole, and the client has no more to do."""
        self.arriving = False
        self.clock.reschedule(None)

    async def add(self, amount: int) -> None:
        """Wait until there is room for so many bytes more."""
        if not self.room.fits(self, amount):
            await self._wait(amount)
        if self.leaving:
            raise Full
        self.hold(self.held + amount)

    async def _wait(self, amount: int) -> None:
        self.waiting = True
        self.clock.reschedule(_now() + WAIT)
        while not (self.leaving or self.room.fits(self, amount)):
            self.room.make_way(self)
            await self.room.change()
        self.waiting = False
        self.heard = _now()
        self.clock.reschedule(None)

    def hold(self, amount: int) -> None:
        """From now on it keeps so many bytes."""
        less = amount < self.held
        self.room.held += amount - self.held
        self.held = amount
        if less:
            self.room.wake()

    def leave(self) -> None:
        """Give way: what it waits for ends with Full."""
        self.leaving = True
        self.clock.reschedule(_now())


class Room:
    """limit: bytes that all guests keep together; one that is alone may keep more."""

    def __init__(self, limit: float):
        self.limit, self.held = limit, 0
        self.guests: dict[OpenRequest, None] = {}  # in the order they came
        self.waiters: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def guest(self) -> AsyncIterator[OpenRequest]:
        """A request, from its body to its answer. Late and Full end it."""
        async with asyncio.timeout(IDLE) as clock:
            guest = OpenRequest(self, clock)
            self.guests[guest] = None
            try:
                yield guest
            except asyncio.CancelledError:
                if not clock.expired():
                    raise
                raise (Full if guest.leaving or guest.waiting else Late) from None
            finally:
                del self.guests[guest]
                guest.hold(0)

    def fits(self, guest: OpenRequest, amount: int) -> bool:
        """Bodies that still come fill no more than half, but for the first."""
        half = guest.arriving and guest is not self._first()
        alone = self.held == guest.held
        return alone or self.held + amount <= self.limit * (0.5 if half else 1)

    def make_way(self, guest: OpenRequest) -> None:
        """Let a silent guest leave; where all wait for each other, the last, for the first."""
        keepers = [one for one in self.guests if one is not guest and one.held]
        if any(one.leaving for one in keepers):
            return
        silent = [one for one in keepers if one.arriving and not one.waiting]
        silent = [one for one in silent if _now() - one.heard > SILENT]
        if silent:
            min(silent, key=lambda one: one.heard).leave()
        elif keepers and guest is self._first() and all(one.waiting for one in keepers):
            keepers[-1].leave()

    def _first(self) -> OpenRequest | None:
        """The first of those who keep or want something, and not only their answer."""
        unserved = (one for one in self.guests if one.waiting or (one.arriving and one.held))
        return next(unserved, None)

    async def change(self) -> None:
        """Wait until a guest keeps less, or for a glance."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await asyncio.wait([waiter], timeout=GLANCE)

    def wake(self) -> None:
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()
