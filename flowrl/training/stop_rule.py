"""When a run ends before its last iteration, by its own settings."""

from __future__ import annotations

from flowrl.config.schema import StopConfig


def stop_rule(stop: StopConfig, metrics: dict[str, float], hours: float) -> str | None:
    """Why the run ends after an iteration with these metrics; None: it goes on."""
    reward, kl = metrics["reward/total"], metrics.get("policy/kl", 0.0)
    if stop.kl is not None and kl > stop.kl:
        return f"policy/kl {kl:.4g} exceeds stop.kl={stop.kl}"
    if stop.reward is not None and reward >= stop.reward:
        return f"reward/total {reward:.4g} reached stop.reward={stop.reward}"
    if stop.hours is not None and hours >= stop.hours:
        return f"stop.hours={stop.hours} are over"
    return None
