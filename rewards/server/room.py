"""Memory that all requests of a server share: their bytes are counted as they come.

A request that announces much and sends little holds little. When the room is full, requests wait in
turn; one that keeps bytes and has stopped sending is the first that has to go. The first of all can
always go on, so that there is an end to every wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PACE = 4096  # bytes of a body that count as a sign of life
IDLE = 20.0  # seconds without a sign of life after which a body is given up
# seconds without a sign of life after which a body gives way to a request that needs room
SILENT = 1.0
WAIT = 120.0  # seconds that a request waits for room
GLANCE = 0.5  # seconds after which a waiting request looks again whether others have fallen silent


class Late(Exception):
    """A body came too slowly."""


class Full(Exception):
    """There was no room for a request in time, or it had to give way to another."""


class OpenRequest:
    """One request, and the memory that it takes while it is read and waits for its scores."""

    def __init__(self, room: Room, clock: asyncio.Timeout):
        self.room, self.clock = room, clock
        self.held = 0  # bytes that it keeps in memory
        self.fresh = 0  # bytes that came since `heard`
        self.heard = _now()  # loop time at which its client had sent PACE bytes more
        self.arriving = True  # whether its body still comes
        self.waiting = self.leaving = False  # whether it waits for room; whether it has to give way

    def listen(self) -> None:
        """Start the clock: the next piece of the body has to come in time."""
        self.clock.reschedule(self.heard + IDLE)

    async def take(self, piece: bytes) -> None:
        """Wait until there is room for a piece that came."""
        await self.add(len(piece))
        self.fresh += len(piece)
        if self.fresh >= PACE:
            self.heard, self.fresh = _now(), 0

    def arrived(self) -> None:
        """Stop the clock: the body is whole, and the client has no more to do."""
        self.arriving = False
        self.clock.reschedule(None)

    async def add(self, amount: int) -> None:
        """Wait until there is room for `amount` more bytes."""
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
        """Count `amount` bytes for this request from now on."""
        less = amount < self.held
        self.room.held += amount - self.held
        self.held = amount
        if less:
            self.room.wake()

    def leave(self) -> None:
        """Give way: its wait ends with Full."""
        self.leaving = True
        self.clock.reschedule(_now())


class Room:
    """The requests of a server, and how many bytes they keep together, at most `limit`; a single
    request may keep more."""

    def __init__(self, limit: float):
        self.limit, self.held = limit, 0
        self.guests: dict[OpenRequest, None] = {}  # requests in the order in which they came
        self.waiters: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def guest(self) -> AsyncIterator[OpenRequest]:
        """Admit a request, from its body to its answer; Late and Full end it."""
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
        """Whether there is room; bodies that still come, but for the first, may fill half of it."""
        half = guest.arriving and guest is not self._first()
        alone = self.held == guest.held
        return alone or self.held + amount <= self.limit * (0.5 if half else 1)

    def make_way(self, guest: OpenRequest) -> None:
        """Let a silent guest leave; if all wait for each other, the last one leaves for the
        first."""
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
        """The oldest request that still sends or waits for room."""
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
