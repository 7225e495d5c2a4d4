"""A warning, once for each reward, about prompts longer than its text tower holds: they are cut."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger("flowrl")
_told: set[str] = set()


def warn_cut(reward: str, lengths: Sequence[int], limit: int, *, known: bool = False) -> int:
    """Warn, once in a process, how many of these prompts exceed the limit (lengths and limit in
    tokens) -> that count.

    known: whether these are all prompts of the data (`Reward.expect`). If not, they are the first
    chunk that holds a long one, and the warning says so.
    """
    cut = sum(length > limit for length in lengths)
    if cut and reward not in _told:
        _told.add(reward)
        first = "" if known else "the first "
        logger.warning(
            f"{reward} reads {limit} tokens of a prompt: {cut} of {first}{len(lengths)} are longer"
            f" (up to {max(lengths)}); the rest does not count (said once)"
        )
    return cut
