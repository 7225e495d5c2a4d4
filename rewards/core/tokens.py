"""Prompts that a text tower cannot hold are cut by its tokenizer; whoever reads the scores is told
so, once for each reward."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger("flowrl")
_told: set[str] = set()


def warn_cut(reward: str, lengths: Sequence[int], limit: int, *, known: bool = False) -> int:
    """Warn, once in a process, how many of these prompts exceed the limit (lengths and limit in
    tokens) -> that count.

    known: they are all prompts of the data (`Reward.expect`). Else they are a chunk, the first that
    holds a long one, and that is said.
    """
    cut = sum(length > limit for length in lengths)
    if cut and reward not in _told:
        _told.add(reward)
        logger.warning(
            f"{reward} reads {limit} tokens of a prompt: {cut} of"
            f" {'' if known else 'the first '}{len(lengths)} are longer (up to {max(lengths)}); the"
            " rest does not count (said once)"
        )
    return cut
