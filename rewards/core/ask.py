"""One call of a reward, which keeps to its time limit and never ends the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl.rewards.core.failures import RewardUnavailable
from flowrl.runtime.copies import own
from flowrl.runtime.signals import Aborted
from flowrl.runtime.timed import Overdue, within
from flowrl.types import MediaContext


def ask(
    label: str,
    seconds: float | None,
    function: Callable[..., Any],
    media: Tensor,
    prompts: list[str],
    context: MediaContext | None,
) -> Any:
    """Call a reward, or its `parts`, with copies of samples, into which it may write; raise
    RewardUnavailable after `seconds`.

    seconds: None sets no limit. A limit interrupts a call in the main thread; a call from another
    thread is left behind in a thread of its own, the same for all rewards.
    """
    call = partial(_without_exit, function, *own((media, prompts, context)))
    if seconds is None:
        return call()
    try:
        return within(seconds, call)
    except Overdue:
        raise RewardUnavailable(
            f'reward "{label}" did not return within {seconds:g} seconds'
            f" (guard.reward_seconds), asked for {len(prompts)} samples; look at what it waits for,"
            " or raise guard.reward_seconds if it needs more (null: no limit)"
        ) from None


def _without_exit(function: Callable[..., Any], media: Tensor, *others: Any) -> Any:
    """Call the function; an attempt to end the process, such as sys.exit, is an error like
    others."""
    try:
        # each thread has its own gradient mode and device
        with torch.no_grad(), torch.cuda.device_of(media):
            return function(media, *others)
    except (Exception, KeyboardInterrupt, Aborted, Overdue):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}({error}) was raised") from error
