"""Addresses of servers, and the secrets that open them."""

from __future__ import annotations

import ipaddress
import os

import httpx


def address(value: str, example: str) -> str:
    """An http(s) address without a slash at its end; anything else -> ValueError that shows one."""
    try:
        url = httpx.URL(value)
    except httpx.InvalidURL as error:
        raise ValueError(f"{error}; write {example}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"write {example}")
    return value.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether an address stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def fits_a_header(secret: str) -> bool:
    return secret.isascii() and secret.isprintable() and " " not in secret


def token_of(variable: str) -> str:
    """The token in an environment variable; none, or one that no header can hold -> ValueError."""
    token = os.environ.get(variable, "")
    if not token or not fits_a_header(token):
        what = "holds spaces or characters outside ASCII" if token else "is empty or not set"
        raise ValueError(
            f"token_env={variable}: this environment variable {what}; put the server's token there"
        )
    return token
