"""Checks of the arguments that constructors of plans have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from flowrl.samplers import sde


def check_sigmas(s: Tensor) -> None:
    """ValueError unless s (T+1,) is a schedule: it falls and lies in [0, 1]."""
    if s.ndim != 1 or len(s) < 2 or not bool((s.diff() < 0).all()) or s[0] > 1 or s[-1] < 0:
        raise ValueError(
            "sigmas must fall strictly from at most 1 to at least 0 and hold two or more values;"
            f" got {s.tolist()}"
        )


def check_noise(eta: float, sde_name: str) -> None:
    """ValueError unless eta is a noise level that the SDE step can have."""
    if not 0 <= eta < math.inf:
        raise ValueError(f"eta={eta} must be a finite number >= 0")
    sde.find(sde_name)
    if sde_name in ("cps", "ddim") and eta > 1:
        raise ValueError(
            f"eta={eta} is too much for {sde_name}: it is the share of noise that is fresh, in 0..1"
        )


def check_counts(**counts: int) -> None:
    """ValueError that names the first count below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def steps_before_last(name: str, steps: Iterable[int], last: int) -> list[int]:
    """Sorted distinct step numbers in 0..last-1; step `last` must stay ODE."""
    out = sorted(set(steps))
    if not out or out[0] < 0 or out[-1] >= last:
        raise ValueError(
            f"{name}={out} must be one or more steps in 0..{last - 1}: step {last} is the last of"
            " the schedule and stays ODE"
        )
    return out
