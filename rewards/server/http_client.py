"""Client of one HTTP server, for judges and remote rewards: it reads whole answers and tries again.

httpx limits the time of each read, so that a server that sends a byte now and then could take for
ever; here the limit holds for the whole answer, and so does one of its size. While the server is
busy or away it is asked again, with tenacity's count of tries and pauses.
"""

from __future__ import annotations

import email.utils
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import httpx
import tenacity

from flowrl.rewards.server.addresses import is_loopback, located
from flowrl.rewards.server.json_weight import values_of
from flowrl.runtime.text import printable

T = TypeVar("T")
# seconds that a start waits for a server, whatever its settings say of a run
AT_START = 8.0
GLANCE = 0.1  # seconds after which a request under way looks again whether the call has ended
HEADERS = {"Accept-Encoding": "identity"}  # a compressed answer could unpack to any size
# bytes of the largest answer for each value that it may hold: more values would take many times its
# size when parsed
BYTES_A_VALUE = 16
KEPT_HEADERS = ("Content-Type", "Retry-After")  # headers of an answer that are kept


class Again(Exception):
    """A try failed, and the next one may not. after: seconds that the server asks to wait."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class TooLong(Again):
    """The answer has more bytes than the client takes."""


class Ended(Exception):
    """The call that asked has ended."""


class Client:
    """Requests to one server. timeout: seconds from a request to the last byte of its answer."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        largest: int,
        token: str | None = None,
        connect: float = math.inf,
    ):
        """largest: most bytes of an answer. connect: most seconds until there is a connection."""
        where = located(url, "http://HOST:PORT")
        if where.login and token is not None:
            raise ValueError(
                "the address holds a user and a password, and a token is set too; only one of them"
                " can be sent"
            )
        if where.query:  # httpx logs addresses with their queries, which may hold a key
            logging.getLogger("httpx").setLevel(logging.WARNING)
        self.url, self.query = where.shown, where.query
        self.timeout, self.largest = timeout, largest
        self.session = partial(
            httpx.Client,
            auth=where.login,
            headers=HEADERS if token is None else {**HEADERS, "Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout, connect=min(timeout, connect)),
            # proxies of the environment do not lead to this machine's own ports
            trust_env=not is_loopback(httpx.URL(self.url).host),
            verify=httpx.create_ssl_context(),
        )
        self.idle: deque[httpx.Client] = deque()  # each session is one connection

    def fetch(
        self,
        method: str,
        path: str,
        body: str | bytes | None = None,
        over: threading.Event | None = None,
    ) -> httpx.Response:
        """The whole answer, whatever its status; no answer -> Again.

        body: JSON as text; bytes are sent as application/octet-stream.
        over: when it is set, the request is left alone, and Ended is raised.
        """
        deadline = time.monotonic() + self.timeout
        try:
            session = self.idle.pop()
        except IndexError:
            session = self.session()
        reply: Future[httpx.Response] = Future()
        read = partial(self._read, session, method, path, body, deadline)
        # a thread of its own: neither a silent server nor the end of the program waits for it
        threading.Thread(target=_settle, args=(reply, read), name="request", daemon=True).start()
        try:
            answer = self._awaited(reply, deadline, over)
        except BaseException as error:
            session.close()  # this ends the thread, whatever the server still sends
            if isinstance(error, httpx.LocalProtocolError):  # its words may hold a header
                raise Again("LocalProtocolError") from None
            if isinstance(error, httpx.RequestError):
                raise Again(printable(f"{type(error).__name__}: {error}")) from error
            raise
        self.idle.append(session)
        return answer

    def _awaited(
        self, reply: Future[httpx.Response], deadline: float, over: threading.Event | None
    ) -> httpx.Response:
        while over is None or not over.is_set():
            wait([reply], min(GLANCE, deadline - time.monotonic()))
            if reply.done():
                return reply.result()
            if time.monotonic() >= deadline:
                raise self._late()
        raise Ended

    def _read(
        self,
        session: httpx.Client,
        method: str,
        path: str,
        body: str | bytes | None,
        deadline: float,
    ) -> httpx.Response:
        content = bytearray()
        url = f"{self.url}{path}?{self.query}" if self.query else self.url + path
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        headers = {"Content-Type": kind}
        with session.stream(method, url, content=body, headers=headers) as answer:
            for piece in answer.iter_raw():
                content += piece
                if len(content) > self.largest:
                    raise TooLong(f"its answer is longer than {self.largest:,} bytes")
                if time.monotonic() > deadline:
                    raise self._late()
        session.cookies.clear()
        if values_of(content) > self.largest / BYTES_A_VALUE:
            raise TooLong(f"its answer of {len(content):,} bytes holds too many values")
        headers = {name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers}
        return httpx.Response(answer.status_code, headers=headers, content=bytes(content))

    def _late(self) -> httpx.ReadTimeout:
        return httpx.ReadTimeout(f"no answer within timeout={self.timeout:g} seconds")


def persist(
    attempt: Callable[[], T],
    over: threading.Event,
    *,
    pauses: tuple[float, float],
    tries: int = sys.maxsize,
    seconds: float = math.inf,
    failed: Callable[[Again], None] = lambda failure: None,
) -> T:
    """Call `attempt` until it does not raise Again -> its result; the last Again is raised.

    over: when it is set, nothing more is tried or waited for, and Ended is raised. pauses: seconds
    of the first and of the longest pause, which double in between; a server may ask for longer
    ones. tries: most tries in all. seconds: most seconds from the first failure on. failed: called
    after a failure that another try follows.
    """

    def once() -> T:
        if over.is_set():
            raise Ended
        return attempt()

    # The pause waits on `over`, so that the end of a call interrupts it.
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Again),
        stop=tenacity.stop_after_attempt(tries) | tenacity.stop_after_delay(seconds),
        wait=partial(_pause, tenacity.wait_exponential(pauses[0], pauses[1]), seconds),
        sleep=tenacity.sleep_using_event(over),
        after=_count_from_the_first_failure,
        before_sleep=lambda state: failed(_failure(state)),
        reraise=True,
    )(once)


@contextmanager
def ending(seconds: float) -> Iterator[threading.Event]:
    """An event that is set after so many seconds, which ends what looks at it; inside, Ended is
    raised as an Again that says so."""
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.daemon = True
    timer.start()
    try:
        yield over
    except Ended:
        raise Again(f"no answer within {seconds:g} seconds") from None
    finally:
        timer.cancel()


def busy(status: int) -> bool:
    """Whether a status says that the same request may succeed later."""
    return status in (408, 429) or status >= 500


def retry_after(response: httpx.Response) -> float:
    """Seconds of a Retry-After header, given as such or as a date; 0: there is none."""
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value)
        return max(0.0, seconds) if math.isfinite(seconds) else 0.0
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 0.0


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:  # the waiting thread raises it
        future.set_exception(error)


def _failure(state: tenacity.RetryCallState) -> Again:
    return state.outcome.exception()


def _pause(
    doubled: tenacity.wait_exponential, seconds: float, state: tenacity.RetryCallState
) -> float:
    """Seconds before the next try: longer if the server asks for it, within the time that is
    left."""
    left = seconds - state.seconds_since_start
    return min(max(doubled(state), _failure(state).after), left)


def _count_from_the_first_failure(state: tenacity.RetryCallState) -> None:
    """Count from the first failure: a try may take long itself, and the time that counts is how
    long the server has been away."""
    if state.attempt_number == 1:
        state.start_time = state.outcome_timestamp
