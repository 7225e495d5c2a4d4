"""Signs that a run trains nothing: each is reported once, and a run that keeps one is stopped.

All of them are computed from the metrics of an iteration, which are the same on every process.
Honest runs on rewards that are mostly 0 show some of them for a while: guard.stop_after is above
the longest stretch without an optimizer step in docs/results/cells, 58 iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flowrl.config.training import GuardConfig
from flowrl.rewards import RewardSet
from flowrl.rewards.core.failures import KINDS
from flowrl.runtime.log import logger
from flowrl.runtime.store.run_folder import trained_iterations

Metrics = Mapping[str, float]
DATA_ALONE = (
    "no row of the method was trained, because the samples of every prompt score alike; only the"
    " media of anchor.data were: try easier prompts or a reward with partial credit, a larger"
    " batch.group, or draw.mode=refill"
)
WARN_AFTER = 10  # iterations in a row; honest runs on rewards that are mostly 0 have a few


class Dead(RuntimeError):
    """The run has trained nothing for too long. The iteration that showed it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Something that an honest run does not show for long."""

    said_after: int  # number of iterations in a row before a warning
    # number of iterations in a row before the run stops; None: it never does
    stops_after: int | None
    sentence: str  # sentence about this iteration: what happens, why, what to do


class Guards:
    """Counts signs over iterations. A resumed run goes on from `state`."""

    def __init__(self, settings: GuardConfig, rewards: RewardSet) -> None:
        self.settings, self.rewards = settings, rewards
        self.state: dict[str, dict[str, float]] = {"iterations": {}, "before": {}}
        self.said: set[str] = set()

    def __call__(self, metrics: Metrics, iteration: int = 0) -> None:
        """Look at the metrics of an iteration, counted from 0: warn of signs that are due, raise
        Dead if one has lasted too long."""
        rewards = self.rewards.at(iteration)
        found = signs(metrics, self.state["before"], self.settings, rewards)
        counted = self.state["iterations"]
        self.state = {
            "iterations": {name: counted.get(name, 0) + 1 for name in found},
            "before": {name: metrics[name] for name in metrics if _compared(name)},
        }
        for kind in KINDS:
            if count := metrics.get(f"reward/invalid/{kind}"):
                self._say(kind, _invalid(kind, count, self.settings))
        for name, sign in found.items():
            lasted = int(self.state["iterations"][name])
            if sign.stops_after is not None and lasted >= sign.stops_after:
                raise Dead(f"{_for(lasted)}{sign.sentence}")
            if lasted >= sign.said_after:
                more = sign.stops_after
                end = (
                    "" if more is None else f"; the run stops after {more} such iterations in a row"
                )
                self._say(name, f"{_for(lasted)}{sign.sentence}{end}")

    def _say(self, name: str, sentence: str) -> None:
        if name not in self.said:
            self.said.add(name)
            logger.warning(sentence)


def signs(
    metrics: Metrics, before: Metrics, settings: GuardConfig, rewards: RewardSet
) -> dict[str, Sign]:
    """Find the signs of an iteration, by name. before: metrics of the previous iteration, or {}."""
    out: dict[str, Sign] = {}
    if metrics["optimizer/step"] == before.get("optimizer/step", 0):
        out["no step"] = Sign(
            said_after=WARN_AFTER,
            stops_after=settings.stop_after,
            sentence=_no_step(metrics),
        )
    elif metrics["policy/rows"] == 0 and "gradient/reward" not in metrics:
        out["no step"] = Sign(
            said_after=WARN_AFTER, stops_after=settings.stop_after, sentence=DATA_ALONE
        )
    elif metrics["policy/rows"] and metrics["policy/grad_norm"] == 0:
        sentence = _no_gradient(metrics["policy/rows"])
        out["no gradient"] = Sign(said_after=1, stops_after=settings.nonfinite, sentence=sentence)
    for label, weight in rewards.weights.items():
        mean, std = (metrics.get(f"reward/{label}/{what}") for what in ("mean", "std"))
        if mean is None or std is None:  # every sample is invalid
            continue
        if std == 0 and mean == before.get(f"reward/{label}/mean", mean):
            ends = rewards.rewards[label].range or (None, None)
            harmless = not weight or mean == ends[weight > 0]
            last = None if harmless else settings.stop_after
            out[f"constant {label}"] = Sign(
                said_after=WARN_AFTER, stops_after=last, sentence=_constant(label, mean)
            )
        if abs(weight) * (abs(mean) + std) > settings.huge:
            out[f"huge {label}"] = Sign(
                said_after=1,
                stops_after=settings.stop_after,
                sentence=_huge(label, mean, std, settings.huge),
            )
    return out


def _compared(name: str) -> bool:
    """Whether the next iteration is compared with this metric."""
    return name == "optimizer/step" or (name.startswith("reward/") and name.endswith("/mean"))


def _for(iterations: int) -> str:
    return f"for {iterations} iterations in a row, " if iterations > 1 else ""


def _no_step(metrics: Metrics) -> str:
    return (
        f"no optimizer step was taken ({metrics['policy/skipped']:g} updates were skipped: the"
        " samples of every prompt score alike, or the gradient is not finite); likely the reward is"
        " too hard for this model, or solved, or does not look at the pictures: try easier prompts"
        " or a reward with partial credit, a larger batch.group, draw.mode=refill, and flowrl check"
        " --reward"
    )


def _no_gradient(rows: float) -> str:
    return (
        f"the gradient is exactly 0, although {rows:g} rows were trained: the loss does not depend"
        " on the trained weights; likely train.lora.targets name layers that this network does not"
        " use, a model of your own detaches them, or low precision rounds it away: try"
        " train.precision=no, and other targets or train.mode=full"
    )


def _constant(label: str, value: float) -> str:
    return (
        f'reward "{label}" is {value:g} for every sample and so teaches nothing; likely it is too'
        " hard, or solved, or does not look at the pictures: try flowrl check --reward, give it"
        " partial credit, or leave it out"
    )


def _huge(label: str, mean: float, std: float, limit: float) -> str:
    return (
        f'reward "{label}" times its weight is beyond guard.huge={limit:g} (mean {mean:.4g},'
        f" deviation {std:.4g}); likely a value that stands for a failure, which should be NaN, or"
        " a score in the wrong unit: return NaN for failed samples, lower the weight, or raise"
        " guard.huge"
    )


def _invalid(kind: str, count: float, settings: GuardConfig) -> str:
    return (
        f"{count:g} samples have no score, {kind}: {KINDS[kind]}; they teach nothing, and above"
        f" guard.invalid_fraction={settings.invalid_fraction:g} of an iteration the run stops"
        f" (metric reward/invalid/{kind})"
    )


def nothing_trained(metrics: list[dict[str, Any]], stopped: str | None) -> str:
    """Write the sentence about a run that ended before any optimizer step."""
    skipped = sum(line.get("policy/skipped", 0) for line in metrics)
    end = f" (it was stopped: {stopped})" if stopped else ""
    done = max(trained_iterations(metrics), default=0)
    return (
        f"nothing was trained: no optimizer step was taken in {done} iterations{end},"
        f" {skipped:g} updates were skipped because the samples of every prompt score alike or the"
        " gradient is not finite; no LoRA was written"
    )
