"""A reward server at an address: `flowrl serve jpeg` on one side, reward=remote on the other."""

from __future__ import annotations

import socket
import threading
from typing import Any

from flowrl.rewards import load_set
from flowrl.rewards.server.addresses import is_loopback, token_of
from flowrl.rewards.server.service import Service
from flowrl.runtime.install import install_line


class Server:
    """Rewards at an address. Every mistake of a user is a ValueError before the server answers.

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
        max_connections: int = 1000,
        device: str | None = None,
    ):
        """rewards: as load_set takes them. port: 0 takes any free one. device: None takes a GPU if
        there is one.

        max_mb: most megabytes of a request, as JSON or unpacked. max_batch: most samples scored at
        once. max_connections: most connections that are open at once.
        """
        uvicorn, create_app, protocol = _server_packages()
        token = token_for(host, token_env)
        self.socket = _bind(host, port)
        self.service = Service(load_set(rewards), max_mb=max_mb, max_batch=max_batch, device=device)
        self.socket.listen(1024)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"
        app = create_app(self.service, token=token, local=is_loopback(host))
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol(max_connections),
                ws="none",
                loop="asyncio",  # connections.py knows how much this loop reads at once
                log_level="error",  # anyone could fill a log of warnings
                access_log=False,
                timeout_keep_alive=75,
            )
        )

    def describe(self) -> str:
        """Say which rewards are served, and how a run uses them."""
        about = self.service.about
        lines = [
            f"{label} (weight {served.weight:g}): {served.scale}"
            for label, served in about.rewards.items()
        ]
        use = f"train with: reward=remote reward.remote.url={self.url}"
        return "\n".join([*lines, f"{self.url} on {self.service.device}; {use}"])

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


def _server_packages() -> tuple[Any, Any, Any]:
    """uvicorn, create_app and protocol, which need the extra "server"."""
    try:
        import uvicorn

        from flowrl.rewards.server.connections import protocol
        from flowrl.rewards.server.routes import create_app
    except ImportError as error:
        raise ValueError(
            f'serving needs the extra "server": {install_line("server")} ({error})'
        ) from None
    return uvicorn, create_app, protocol


def token_for(host: str, variable: str | None) -> str | None:
    """The token that clients must send; an address that others reach without one -> ValueError."""
    if variable is not None:
        return token_of(variable)
    if is_loopback(host):
        return None
    raise ValueError(
        f"host={host} can be reached from other machines; put a secret in an environment"
        " variable and name it: token_env"
    )


def _bind(host: str, port: int) -> socket.socket:
    """A socket at an address, not listening yet; an address that cannot be had -> ValueError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        return sock
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"host={host}, port={port} cannot be served: {error}; choose another port, or 0 for any"
        ) from None
