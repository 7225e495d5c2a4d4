"""One call of a reward: within its time, and never the end of the process."""

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
    """What a reward, or its `parts`, says of samples, copies of which it may write into;
    RewardUnavailable after `seconds`.

    seconds: None: any time. A limit ends a call in the main thread where it is; one from another
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
    """The call itself; what would end the process, such as sys.exit, is an error like others."""
    try:
        with torch.no_grad(), torch.cuda.device_of(media):  # both are a thread's own
            return function(media, *others)
    except (Exception, KeyboardInterrupt, Aborted, Overdue):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}({error}) was raised") from error
