"""Addresses of servers, and the secrets that open them."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field

import httpx

FROM_ENV = "env:"  # beginning of a setting that names an environment variable with an address
SHORTEST = 16  # fewest characters of a token
HOST_PORT = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")


@dataclass(frozen=True, slots=True)
class Location:
    """Address of a server, with its secrets apart."""

    shown: str  # address without secrets
    login: tuple[str, str] | None = field(repr=False)  # user and password
    query: str = field(repr=False)  # text after "?", which may hold a key


def address(value: str, example: str) -> str:
    """An http(s) address without a slash at its end, or env:NAME; anything else -> ValueError.

    Settings are written to files, so an address with a password or a query is refused: the
    environment variable NAME may hold the whole address.
    """
    found = located(value, example)
    if (found.login or found.query) and not value.startswith(FROM_ENV):
        raise ValueError(
            "an address in a config may hold no password and no ?query; put all of it in an"
            " environment variable, and its name here, as env:SERVER_URL"
        )
    return value.rstrip("/")


def located(value: str, example: str) -> Location:
    """Split an address, or the one that an environment variable holds, into a Location."""
    variable = value.removeprefix(FROM_ENV)
    if variable != value:
        value = os.environ.get(variable, "").strip()
        if not value:
            raise ValueError(
                f"the environment variable {variable} is empty or not set; put the server's"
                f" address there, as {example}"
            )
    try:
        url = httpx.URL(value)
    except httpx.InvalidURL:
        raise ValueError(f"this is no address; write {example}") from None
    if url.scheme not in ("http", "https") or not url.host or (url.port or 1) > 65535:
        raise ValueError(f"write {example}")
    login = (url.username, url.password) if url.userinfo else None
    shown = url.copy_with(userinfo=b"", query=None, fragment=None)
    return Location(shown=str(shown).rstrip("/"), login=login, query=url.query.decode())


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_local(header: str) -> bool:
    """Whether a Host header names this machine, whatever the port."""
    match = HOST_PORT.fullmatch(header.strip().lower())
    return match is not None and is_loopback(match[1])


def fits_a_header(secret: str) -> bool:
    return secret.isascii() and secret.isprintable() and " " not in secret


def token_of(variable: str) -> str:
    """The token in an environment variable; no token, a short one, or one that no header can hold
    -> ValueError."""
    token = os.environ.get(variable, "")
    what = None
    if not token:
        what = "is empty or not set"
    elif not fits_a_header(token):
        what = "holds spaces or characters outside ASCII"
    elif len(token) < SHORTEST:
        what = f"holds {len(token)} characters, and a token has at least {SHORTEST}"
    if what is not None:
        raise ValueError(
            f"token_env={variable}: this environment variable {what}; put the server's token there"
            " (`openssl rand -hex 32` makes one)"
        )
    return token
