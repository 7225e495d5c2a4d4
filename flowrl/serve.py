"""Rewards behind HTTP: `flowrl serve jpeg` on one side, reward=remote on the other.

GET /health (open to all), GET /version and POST /score; the records are in rewards/_wire.py. One
thread scores, because rewards need not be safe in several. Requests that wait together, with media
of one size and without a column "group", are scored as one batch of at most `max_batch` samples:
batch mates do not change a score, but for the last bits of a network's sums, and max_batch=1 keeps
every request to itself. What fails in one request fails there alone.

This file imports neither diffusers nor transformers, so that an environment with other versions of
them, or none, can serve.
"""

# Without `from __future__ import annotations`: FastAPI reads what a handler takes from its
# annotations.

import asyncio
import hmac
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pydantic
import torch
from torch import Tensor

from flowrl import __version__
from flowrl.registry import did_you_mean
from flowrl.rewards import RewardSet, RewardUnavailable, _wire, load_set, score
from flowrl.rewards._base import check_columns
from flowrl.rewards._score import check_kind, check_media
from flowrl.types import MediaContext

ARRIVAL = 120.0  # seconds in which a body must have come: meanwhile it takes room from others


class Server:
    """Rewards at an address. Everything a user can get wrong is a ValueError before it answers.

    `run` serves until SIGINT or SIGTERM; as a context manager it serves from a thread.
    """

    def __init__(
        self,
        rewards: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 8321,
        token_env: str | None = None,
        max_mb: float = 512.0,
        max_batch: int = 64,
        device: str | None = None,
    ):
        """rewards: what load_set takes. port: 0 for any. max_mb: of a request, as JSON or unpacked.
        device: None: a GPU if any."""
        try:
            import uvicorn
        except ImportError as error:
            raise ValueError(
                f"serving needs the extra \"server\": pip install 'flowrl[server]' ({error})"
            ) from None
        if token_env is None and not _wire.is_loopback(host):
            raise ValueError(
                f"host={host} can be reached from other machines; put a secret in an environment"
                " variable and name it: token_env"
            )
        token = None if token_env is None else _wire.token_of(token_env)
        self.socket = _bind(host, port)
        self.service = Service(load_set(rewards), max_mb=max_mb, max_batch=max_batch, device=device)
        self.socket.listen(1024)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"
        app = create_app(self.service, token=token)
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=75)
        )

    def describe(self) -> str:
        """What is served, and how a run uses it."""
        about = self.service.about
        lines = [
            f"{label} (weight {served.weight:g}): {served.scale}"
            for label, served in about.rewards.items()
        ]
        return "\n".join(
            [
                *lines,
                (
                    f"{self.url} on {self.service.device}; train with: reward=remote"
                    f" reward.remote.url={self.url}"
                ),
            ]
        )

    def run(self) -> None:
        try:
            self.uvicorn.run(sockets=[self.socket])
        except KeyboardInterrupt:  # uvicorn has shut down in order, and passes the signal on
            pass
        finally:
            self.socket.close()
            self.service.close()

    def __enter__(self) -> "Server":
        self.thread = threading.Thread(target=self.run, name="server", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.uvicorn.should_exit = True
        self.thread.join()


# ---------------------------------------------------------------------------
# HTTP


def create_app(service: "Service", *, token: str | None = None) -> Any:
    """The FastAPI app; every refusal is {"detail": one sentence}. token: what /version and /score
    want as a bearer token."""
    from fastapi import Depends, FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from starlette.requests import ClientDisconnect

    def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(
            given.encode(), f"Bearer {token}".encode()
        ):
            raise HTTPException(
                401,
                "send the server's token: Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )

    def length_of(request: Request) -> int:
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise HTTPException(415, "send JSON, with Content-Type: application/json")
        if "content-length" not in request.headers or "transfer-encoding" in request.headers:
            raise HTTPException(
                411, "send the length of the body, as Content-Length, and no Transfer-Encoding"
            )
        length = int(request.headers["content-length"])  # the HTTP layer refuses what is no number
        service.check_size(length, "as JSON")
        return length

    async def body_of(request: Request, length: int) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(ARRIVAL):
                async for part in request.stream():
                    body += part
                    if len(body) > length:
                        raise ValueError(
                            f"the body is longer than the {length} bytes of its Content-Length"
                        )
        except TimeoutError:
            said = (
                f"the body did not come within {ARRIVAL:g} seconds ({len(body)} of {length} bytes"
                " did); send fewer samples at once"
            )
            raise HTTPException(408, said, {"Connection": "close"}) from None
        return bytes(body)

    async def arrive(request: Request, stack: AsyncExitStack) -> Job:
        length = length_of(request)
        async with service.arriving.hold(length):
            question = await asyncio.to_thread(service.read, await body_of(request, length))
            await stack.enter_async_context(service.unpacked.hold(question.nbytes))
            return await asyncio.to_thread(service.job, question)

    app = FastAPI(
        title="flowrl rewards", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "scored": service.scored}

    @app.get("/version", dependencies=[Depends(authorize)])
    async def version() -> _wire.About:
        return service.about

    @app.post("/score", dependencies=[Depends(authorize)])
    async def score_(request: Request) -> _wire.Answer:
        async with AsyncExitStack() as stack:
            job = await arrive(request, stack)
            future = asyncio.wrap_future(service.submit(job))
            gone = asyncio.ensure_future(
                request.receive()
            )  # after the body: only that the client has gone
            await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not future.done():
                future.cancel()  # a job that still waits is not scored
                raise ClientDisconnect
            return await future

    def said(status: int) -> Any:
        async def handler(request: Request, error: Exception) -> JSONResponse:
            return JSONResponse(
                {"detail": f"{type(error).__name__}: {error}" if status == 500 else str(error)},
                status,
            )

        return handler

    kinds = {
        ValueError: 422,
        _wire.TooLarge: 413,
        RewardUnavailable: 503,
        ClientDisconnect: 400,
        Exception: 500,
    }
    for kind, status in kinds.items():
        app.add_exception_handler(kind, said(status))
    return app


class Gate:
    """Lets bytes in while those inside stay within a limit, or when nothing is inside; others wait
    in the order they came."""

    def __init__(self, limit: float):
        self.limit, self.inside = limit, 0
        self.turn, self.changed = asyncio.Lock(), asyncio.Condition()

    @asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[None]:
        async with self.turn, self.changed:
            await self.changed.wait_for(
                lambda: self.inside == 0 or self.inside + amount <= self.limit
            )
            self.inside += amount
        try:
            yield
        finally:
            async with self.changed:
                self.inside -= amount
                self.changed.notify_all()


# ---------------------------------------------------------------------------
# scoring


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """One request, unpacked. B samples."""

    id: str
    reward: str | None  # None: the weighted total
    media: Tensor  # (B, 3, H, W) or (B, F, 3, H, W) fp32
    prompts: list[str]
    context: MediaContext
    future: "Future[_wire.Answer]" = field(default_factory=Future)

    @property
    def kind(self) -> tuple:
        """Jobs of one kind may share a batch."""
        tensors = [(name, getattr(self.context, name)) for name in _wire.TENSORS]
        shapes = [
            (name, column.dtype, column.shape[1:]) for name, column in tensors if column is not None
        ]
        return self.reward, self.media.shape[1:], self.context.meta is None, *shapes


class Service:
    """What the HTTP handlers call: limits, and one thread that scores. max_mb: of a request, as
    JSON and unpacked."""

    def __init__(
        self, rewards: RewardSet, *, max_mb: float, max_batch: int, device: str | None = None
    ):
        self.device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rewards = rewards.to(self.device)
        self.max_mb, self.max_batch = max_mb, max_batch
        self.about = _wire.about(
            rewards.rewards, rewards.weights, flowrl=__version__, max_mb=max_mb
        )
        self.arriving, self.unpacked = Gate(2e6 * max_mb), Gate(2e6 * max_mb)
        self.scored = 0
        self.jobs: deque[Job] = deque()
        self.changed, self.closed = threading.Condition(), False
        self.thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self.thread.start()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.thread.join()

    def check_size(self, size: int, what: str) -> None:
        if size > self.max_mb * 1e6:
            raise _wire.TooLarge(
                f"a request may have {self.max_mb:g} MB, and this one has {size / 1e6:.1f} MB"
                f" {what}; send fewer samples at once, or serve with a larger --max-mb"
            )

    def read(self, body: bytes) -> _wire.Question:
        """The request in a body, sizes checked, nothing unpacked yet."""
        try:
            question = _wire.Question.model_validate_json(body)
        except pydantic.ValidationError as error:
            raise ValueError(_sentence(error)) from None
        if len(question.prompts) > _wire.MAX_SAMPLES:
            raise _wire.TooLarge(
                f"a request may have {_wire.MAX_SAMPLES} samples, and this one has"
                f" {len(question.prompts)}; send several"
            )
        self.check_size(question.nbytes, "unpacked")
        return question

    def job(self, question: _wire.Question) -> Job:
        """Unpacked, and held to what the rewards take."""
        rewards = self._chosen(question.reward).rewards
        columns: dict[str, Any] = {"meta": question.meta}
        for name in _wire.TENSORS:
            record = getattr(question, name)
            columns[name] = None if record is None else _wire.unpack(record)
        columns["group"] = None if question.group is None else torch.tensor(question.group)
        given = {name: column for name, column in columns.items() if column is not None}
        for name, column in given.items():
            if (
                column.shape[:1] != (len(question.prompts),)
                if isinstance(column, Tensor)
                else len(column) != len(question.prompts)
            ):
                raise ValueError(
                    f'"{name}" should have one row for each of the {len(question.prompts)} prompts'
                )
        media = check_media(_wire.unpack(question.media), question.prompts)
        check_columns(rewards, given)
        check_kind(rewards, media, question.prompts)
        context = MediaContext(**columns)
        return Job(
            id=question.id,
            reward=question.reward,
            media=media,
            prompts=question.prompts,
            context=context,
        )

    def submit(self, job: Job) -> "Future[_wire.Answer]":
        with self.changed:
            self.jobs.append(job)
            self.changed.notify()
        return job.future

    def _chosen(self, label: str | None) -> RewardSet:
        if label is None:
            return self.rewards
        if label not in self.rewards.rewards:
            raise ValueError(
                f'reward "{label}" is not served{did_you_mean(label, self.rewards.rewards)}'
            )
        return RewardSet(rewards={label: self.rewards.rewards[label]}, weights={label: 1.0})

    def _work(self) -> None:
        while batch := self._next():
            self._answer([job for job in batch if job.future.set_running_or_notify_cancel()])

    def _next(self) -> list[Job]:
        """The job that waited longest and others that can share its batch; none: closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.jobs or self.closed)
            if self.closed:
                return []
            first = self.jobs.popleft()
            batch, size = [first], len(first.prompts)
            for job in list(self.jobs) if first.context.group is None else []:
                if (
                    job.context.group is None
                    and size + len(job.prompts) <= self.max_batch
                    and job.kind == first.kind
                ):
                    self.jobs.remove(job)
                    batch.append(job)
                    size += len(job.prompts)
            return batch

    def _answer(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        try:
            answers = self._score(jobs)
        except (
            Exception
        ) as error:  # whatever a reward raises belongs to the requests, and the thread must live
            if len(jobs) == 1:
                jobs[0].future.set_exception(error)
                return
            for job in jobs:
                self._answer([job])
            return
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)

    def _score(self, jobs: list[Job]) -> list[_wire.Answer]:
        rewards = self._chosen(jobs[0].reward)
        media, prompts = (
            torch.cat([job.media for job in jobs]),
            [prompt for job in jobs for prompt in job.prompts],
        )
        context = _joined([job.context for job in jobs])
        whole = score(media.to(self.device), prompts, rewards, context)
        self.scored += len(prompts)
        parts, total = (
            {label: _plain(column) for label, column in whole.raw.items()},
            _plain(whole.total),
        )
        errors: list[str | None] = [None] * len(prompts)
        failed = [
            i for i in range(len(prompts)) if any(column[i] is None for column in parts.values())
        ]
        for i in failed:
            alone = whole
            if context.group is None and len(prompts) > 1:
                try:
                    alone = score(
                        media[i : i + 1].to(self.device),
                        prompts[i : i + 1],
                        rewards,
                        _row(context, i),
                    )
                except (
                    RewardUnavailable
                ):  # what the reward relies on is there if it answered for another sample
                    if len(failed) == len(prompts):
                        raise
            errors[i] = "; ".join(alone.errors) or "it failed once, and not when it was tried again"
        answers, start = [], 0
        for job in jobs:
            rows = slice(start, start := start + len(job.prompts))
            own = {label: column[rows] for label, column in parts.items()}
            answers.append(
                _wire.Answer(
                    id=job.id,
                    version=self.about.version,
                    scores=total[rows],
                    parts=own,
                    errors=errors[rows],
                )
            )
        return answers


def _joined(contexts: list[MediaContext]) -> MediaContext:
    """The columns of jobs of one kind, one after the other."""
    first = contexts[0]
    tensors = {
        name: torch.cat([getattr(c, name) for c in contexts])
        for name in _wire.TENSORS
        if getattr(first, name) is not None
    }
    return MediaContext(
        meta=None if first.meta is None else [row for c in contexts for row in c.meta or []],
        group=first.group,
        **tensors,
    )


def _row(context: MediaContext, i: int) -> MediaContext:
    """Of a context without groups."""
    tensors = {
        name: getattr(context, name)[i : i + 1]
        for name in _wire.TENSORS
        if getattr(context, name) is not None
    }
    return MediaContext(meta=None if context.meta is None else context.meta[i : i + 1], **tensors)


def _plain(column: Tensor) -> list[float | None]:
    """NaN -> None."""
    return [value if value == value else None for value in column.tolist()]


def _sentence(error: pydantic.ValidationError) -> str:
    """The first problem of a request."""
    problem = error.errors(include_url=False)[0]
    place, said = (
        ".".join(str(part) for part in problem["loc"]),
        problem["msg"][:1].lower() + problem["msg"][1:],
    )
    if problem["type"] == "json_invalid":
        return f"the body is no JSON: {said}"
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        return f'unknown key "{place}"{did_you_mean(place, _wire.Question.model_fields)}'
    if problem["loc"][:1] in [(name,) for name in ("media", *_wire.TENSORS)]:
        return (
            f'{problem["loc"][0]} should be {{"png": [...]}} or {{"dtype": ..., "shape": ...,'
            ' "data": ...}, see docs/rewards/serving.md'
        )
    return f"{place or 'the body'}: {said}"


def _device(name: str) -> torch.device:
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={name} cannot be used: {str(error).splitlines()[0]}") from None


def _bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; one that is taken, or not this machine's ->
    ValueError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"host={host}, port={port} cannot be served: {error}; choose another port, or 0 for any"
        ) from None
