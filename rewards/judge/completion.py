"""Answers of an OpenAI-compatible server: a chat completion as a Reply, its words on an error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A judge's answer to one question."""

    text: str  # text that the model wrote; "" if it wrote nothing
    tokens: int | None  # tokens of question and reply; None: the server did not count
    first: dict[str, float] = field(default_factory=dict)  # likely first token -> log-probability
    cut: bool = False  # whether the reply ended because of max_tokens

    @property
    def finished(self) -> str:
        """The text; a reply that was cut loses its last line ("Final Score: 1" may begin 10)."""
        return self.text.rpartition("\n")[0] if self.cut else self.text


def read_reply(data: Any) -> Reply:
    """The first choice of a chat completion; KeyError, TypeError or the like: it is not one."""
    choice = data["choices"][0]
    content = choice["message"].get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if not isinstance(content, str | None):
        raise TypeError("content is not text")
    total = (data.get("usage") or {}).get("total_tokens")
    return Reply(
        text=content or "",
        tokens=None if total is None else int(total),
        cut=choice.get("finish_reason") == "length",
        first=_first_token(choice),
    )


def _first_token(choice: Any) -> dict[str, float]:
    """Log-probability of each likely first token; {}: the server did not send any."""
    positions = (choice.get("logprobs") or {}).get("content") or [{}]
    first: dict[str, float] = {}
    for item in positions[0].get("top_logprobs", ()):
        token, logprob = item["token"], float(item["logprob"])
        # several tokens may have one text, as two spellings of the same bytes: probabilities add up
        if not math.isnan(logprob):
            first[token] = float(np.logaddexp(first.get(token, -math.inf), logprob))
    return first


def detail(response: httpx.Response) -> str:
    """The server's own words about an error, at most a line."""
    try:
        data = response.json()
        words = data.get("error", data) if isinstance(data, dict) else data
        words = words.get("message", words) if isinstance(words, dict) else words
    except ValueError:
        words = response.text
    return " ".join(str(words).split())[:200]
