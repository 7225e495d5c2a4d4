"""The routes of a reward server. Every refusal is {"detail": one sentence}."""

from __future__ import annotations

import asyncio
import hmac
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from flowrl import __version__
from flowrl.rewards import RewardUnavailable
from flowrl.rewards.server import room, wire
from flowrl.rewards.server.addresses import is_local
from flowrl.rewards.server.room import Full, Late, OpenRequest
from flowrl.rewards.server.service import Job, Service
from flowrl.runtime.text import printable

KINDS = ("application/json", wire.WITH_TENSORS)
STATUS = {
    ValueError: 422,
    wire.TooLarge: 413,
    RewardUnavailable: 503,
    ClientDisconnect: 400,
    Exception: 500,
}


def create_app(service: Service, *, token: str | None = None, local: bool = False) -> FastAPI:
    """The FastAPI app. token: bearer token that /version and /score want. local: only requests to
    an address of this machine are answered."""
    app = FastAPI(
        title="flowrl rewards", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.service, app.state.token, app.state.local = service, token, local
    app.include_router(open_to_all)
    app.include_router(for_clients)
    for kind in STATUS:
        app.add_exception_handler(kind, refusal)
    app.add_exception_handler(Late, late)
    app.add_exception_handler(Full, full)
    return app


def service_of(request: Request) -> Service:
    return request.app.state.service


def authorize(request: Request) -> None:
    given, token = request.headers.get("authorization", ""), request.app.state.token
    if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise HTTPException(
            401,
            "send the server's token: Authorization: Bearer TOKEN",
            {"WWW-Authenticate": "Bearer"},
        )


def addressed(request: Request) -> None:
    """Refuse another Host than this machine: a web page can lead a name of its own here (DNS
    rebinding) and ask in its visitor's place, and the browser then sends that name."""
    host = request.headers.get("host", "")
    if request.app.state.local and not is_local(host):
        raise HTTPException(
            421, f"this server answers to localhost and 127.0.0.1, not to {printable(host, 60)!r}"
        )


open_to_all = APIRouter(dependencies=[Depends(addressed)])
for_clients = APIRouter(dependencies=[Depends(addressed), Depends(authorize)])
Served = Annotated[Service, Depends(service_of)]


@open_to_all.get("/health")
async def health(service: Served) -> dict[str, Any]:
    return {"status": "ok", "scored": service.scored}


@for_clients.get("/version")
async def version(service: Served) -> wire.About:
    return service.about


@for_clients.post("/score")
async def score(request: Request, service: Served) -> wire.Answer:
    length = length_of(request)
    service.check_size(length, "in its body")
    async with service.room.guest() as guest:
        job = await arrived(request, length, service, guest)
        future = asyncio.wrap_future(service.submit(job))
        # after the body, the only further message says that the client has gone
        gone = asyncio.ensure_future(request.receive())
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not future.done():
            future.cancel()  # a job that still waits is not scored
            raise ClientDisconnect
        return await future


async def arrived(request: Request, length: int, service: Service, guest: OpenRequest) -> Job:
    """The job that a request asks for; room for its memory is awaited before the memory is used."""
    run = partial(asyncio.get_running_loop().run_in_executor, service.readers)
    body = await body_of(request, length, guest)
    text, file = wire.split(body) if kind_of(request) == wire.WITH_TENSORS else (body, b"")
    del body
    weight = await run(service.weigh, text, file)
    await guest.add(weight - length)
    question = await run(service.read, text, file, weight)
    del text, file
    guest.hold(weight)
    await guest.add(question.nbytes + question.scratch)
    job = await run(service.job, question)
    guest.hold(weight + question.nbytes)
    return job


def kind_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip()


def length_of(request: Request) -> int:
    """Bytes of the body that a request announces."""
    if kind_of(request) not in KINDS:
        raise HTTPException(
            415,
            "send JSON, with Content-Type: application/json; or JSON and tensors, with"
            f" {wire.WITH_TENSORS}",
        )
    if "content-length" not in request.headers or "transfer-encoding" in request.headers:
        raise HTTPException(
            411, "send the length of the body, as Content-Length, and no Transfer-Encoding"
        )
    # the HTTP layer refuses a length that is not a number
    return int(request.headers["content-length"])


async def body_of(request: Request, length: int, guest: OpenRequest) -> bytes:
    """Receive a body; it is then counted twice, because joining its parts copies it."""
    parts, came = [], 0
    guest.listen()
    async for part in request.stream():
        await guest.take(part)
        parts.append(part)
        came += len(part)
        if came > length:
            raise ValueError(f"the body is longer than the {length} bytes of its Content-Length")
        guest.listen()
    guest.arrived()
    await guest.add(came)
    return b"".join(parts)


async def refusal(request: Request, error: Exception) -> JSONResponse:
    """Answer an exception with its status and its sentence."""
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    sentence = f"{type(error).__name__}: {error}" if status == 500 else str(error)
    return JSONResponse({"detail": sentence}, status)


async def late(request: Request, error: Late) -> JSONResponse:
    said = (
        f"the body came too slowly: {room.PACE:,} bytes, or the rest, should come within"
        f" {room.IDLE:g} seconds; send fewer samples at once"
    )
    return JSONResponse({"detail": said}, 408, {"Connection": "close"})


async def full(request: Request, error: Full) -> JSONResponse:
    said = "the server has no room for this request among the others; send it again"
    return JSONResponse({"detail": said}, 503, {"Connection": "close", "Retry-After": "1"})
