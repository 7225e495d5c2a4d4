"""What an OpenAI-compatible server sends: a chat completion as a Reply, its words about an error,
and when it wants to be asked again."""

from __future__ import annotations

import email.utils
import math
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """text: what the model said, "" if nothing. first: log-probability of each likely first token.
    cut: max_tokens ended it."""

    text: str
    tokens: int | None
    first: dict[str, float] = field(default_factory=dict)
    cut: bool = False


def read_reply(data: Any) -> Reply:
    """The first choice of a chat completion; a KeyError, TypeError or the like: it is none."""
    choice = data["choices"][0]
    content = choice["message"].get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(content, str | None):
        raise TypeError("content is no text")
    usage = data.get("usage") or {}
    total = usage.get("total_tokens")
    positions = (choice.get("logprobs") or {}).get("content") or [{}]
    first: dict[str, float] = {}
    for item in positions[0].get("top_logprobs", ()):
        token, logprob = item["token"], float(item["logprob"])
        if not math.isnan(
            logprob
            # several tokens may read alike, as two spellings of the same bytes: their probabilities
            # add
            # up
        ):
            first[token] = float(np.logaddexp(first.get(token, -math.inf), logprob))
    cut = choice.get("finish_reason") == "length"
    return Reply(
        text=content or "", tokens=None if total is None else int(total), cut=cut, first=first
    )


def detail(response: httpx.Response) -> str:
    """The server's own words about an error, at most a line."""
    try:
        data = response.json()
        words = data.get("error", data) if isinstance(data, dict) else data
        words = words.get("message", words) if isinstance(words, dict) else words
    except ValueError:
        words = response.text
    return " ".join(str(words).split())[:200]


def retry_after(response: httpx.Response) -> float | None:
    """Seconds of a Retry-After header, given as such or as a date."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
