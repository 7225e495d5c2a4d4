"""The HTTP side of a reward server: routes, sockets, answers."""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
import socket
import threading
from contextlib import AsyncExitStack
from typing import Any

from flowrl.rewards import RewardUnavailable, load_set
from flowrl.rewards.server import wire
from flowrl.rewards.server.service import Job, Service

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
        if token_env is None and not wire.is_loopback(host):
            raise ValueError(
                f"host={host} can be reached from other machines; put a secret in an environment"
                " variable and name it: token_env"
            )
        token = None if token_env is None else wire.token_of(token_env)
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

    def __enter__(self) -> Server:
        self.thread = threading.Thread(target=self.run, name="server", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.uvicorn.should_exit = True
        self.thread.join()


def create_app(service: Service, *, token: str | None = None) -> Any:
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
        title="flowrl rewards",
        version=importlib.metadata.version("flowrl"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "scored": service.scored}

    @app.get("/version", dependencies=[Depends(authorize)])
    async def version() -> wire.About:
        return service.about

    @app.post("/score", dependencies=[Depends(authorize)])
    async def score_(request: Request) -> wire.Answer:
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
        wire.TooLarge: 413,
        RewardUnavailable: 503,
        ClientDisconnect: 400,
        Exception: 500,
    }
    for kind, status in kinds.items():
        app.add_exception_handler(kind, said(status))
    return app


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
