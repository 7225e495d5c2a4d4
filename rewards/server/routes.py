"""The routes of a reward server. Every refusal is {"detail": one sentence}."""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from flowrl.rewards import RewardUnavailable
from flowrl.rewards.server import wire
from flowrl.rewards.server.service import Job, Service

ARRIVAL = 120.0  # seconds in which a body must have come: meanwhile it takes room from others
STATUS = {
    ValueError: 422,
    wire.TooLarge: 413,
    RewardUnavailable: 503,
    ClientDisconnect: 400,
    Exception: 500,
}


def create_app(service: Service, *, token: str | None = None) -> FastAPI:
    """The FastAPI app. token: what /version and /score want as a bearer token."""
    version = importlib.metadata.version("flowrl")
    app = FastAPI(
        title="flowrl rewards", version=version, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.service, app.state.token = service, token
    app.include_router(open_to_all)
    app.include_router(for_clients)
    for kind in STATUS:
        app.add_exception_handler(kind, refusal)
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


open_to_all = APIRouter()
for_clients = APIRouter(dependencies=[Depends(authorize)])
Served = Annotated[Service, Depends(service_of)]


@open_to_all.get("/health")
async def health(service: Served) -> dict[str, Any]:
    return {"status": "ok", "scored": service.scored}


@for_clients.get("/version")
async def version(service: Served) -> wire.About:
    return service.about


@for_clients.post("/score")
async def score(request: Request, service: Served) -> wire.Answer:
    async with AsyncExitStack() as stack:
        job = await arrived(request, service, stack)
        future = asyncio.wrap_future(service.submit(job))
        # after the body, all that can still come is that the client has gone
        gone = asyncio.ensure_future(request.receive())
        await asyncio.wait({future, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not future.done():
            future.cancel()  # a job that still waits is not scored
            raise ClientDisconnect
        return await future


async def arrived(request: Request, service: Service, stack: AsyncExitStack) -> Job:
    """The job that a request asks for; its bytes leave the gate of the unpacked with `stack`."""
    length = length_of(request)
    service.check_size(length, "as JSON")
    async with service.arriving.hold(length):
        question = await asyncio.to_thread(service.read, await body_of(request, length))
        await stack.enter_async_context(service.unpacked.hold(question.nbytes))
        return await asyncio.to_thread(service.job, question)


def length_of(request: Request) -> int:
    """Bytes of the JSON body that a request announces."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON, with Content-Type: application/json")
    if "content-length" not in request.headers or "transfer-encoding" in request.headers:
        raise HTTPException(
            411, "send the length of the body, as Content-Length, and no Transfer-Encoding"
        )
    return int(request.headers["content-length"])  # the HTTP layer refuses what is not a number


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
        late = (
            f"the body did not come within {ARRIVAL:g} seconds ({len(body)} of {length} bytes"
            " did); send fewer samples at once"
        )
        raise HTTPException(408, late, {"Connection": "close"}) from None
    return bytes(body)


async def refusal(request: Request, error: Exception) -> JSONResponse:
    """An exception as its status and its sentence."""
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    sentence = f"{type(error).__name__}: {error}" if status == 500 else str(error)
    return JSONResponse({"detail": sentence}, status)
