"""Evaluation suites: a prompt file, rewards and a rule of aggregation in one YAML of configs/suite.

`load` reads one, `prepare` loads and checks what it names, `run_suite` samples base and tuned model
from the same noise and scores them. runs.py does this for run folders and writes the results;
scores.py holds the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from flowrl.config.compose import config_folder, options, read_yaml
from flowrl.config.section import Guidance
from flowrl.data.conditions import has_source
from flowrl.data.prompts import Prompts
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.suites import prompt_files
from flowrl.evaluation.suites.measure import Measured, MeasureJournal, by_dimension, measure
from flowrl.evaluation.suites.prompt_files import Form
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, check_needs, load_set, parse_words
from flowrl.rewards.core.score import check_meta
from flowrl.rewards.core.settings import Settings, parse
from flowrl.runtime.paths import located, nearby
from flowrl.runtime.registry import did_you_mean
from flowrl.types import Solver

BY_QUESTION = "checklist"  # as `category`: scores are split by the dimension of each question


class Suite(Settings):
    """The settings of a suite's YAML."""

    title: str = pydantic.Field(description="The quantity that is measured, in one line.")
    prompts: str | None = pydantic.Field(
        None,
        description=(
            "Source of the prompts: generated ones (shapes:eval), a file, or hf:owner/repo/file;"
            " null: the user gives it."
        ),
    )
    origin: str = pydantic.Field(
        "",
        description=(
            "Where the prompt file can be found, for the error that says that it is missing."
        ),
    )
    form: Form = pydantic.Field(
        "table",
        description=(
            "Form of a .csv or .tsv file: a table, dpg's questions, or unigenbench's test points."
        ),
    )
    columns: dict[str, str] = pydantic.Field(
        {"prompt": "prompt"},
        description="Columns of a table that are kept: name in the prompt -> column.",
    )
    count: pydantic.PositiveInt | None = pydantic.Field(
        None, description="Only so many prompts, spread evenly over the file; null: all."
    )
    images: pydantic.PositiveInt = pydantic.Field(4, description="Images of each prompt.")
    rewards: dict[str, Any] = pydantic.Field(
        min_length=1, description="Rewards that score, as in a config."
    )
    held_out: dict[str, dict[str, Any] | None] = pydantic.Field(
        {},
        description=(
            "Rewards that are read as side effects; a run that trained on one gets a warning."
        ),
    )
    metric: str | None = pydantic.Field(
        None,
        description="The headline: a reward or a part of one (geneval/official); null: the first.",
    )
    category: str | None = pydantic.Field(
        None, description="Key of each prompt by which scores are split; checklist: by question."
    )
    aggregate: Literal["mean", "category_mean"] = pydantic.Field(
        "mean",
        description="Whether a score is the mean over all images, or over the means of categories.",
    )
    scale: float = pydantic.Field(
        1.0, gt=0, description="Factor of the suite's own scores; DPG prints percent."
    )
    steps: pydantic.PositiveInt | None = pydantic.Field(
        None, description="ODE steps; null: as the run evaluates."
    )
    guidance: Guidance | None = pydantic.Field(
        None, description="Guidance: a scale, none or pipeline; null: as the run evaluates."
    )
    solver: Solver | None = pydantic.Field(
        None, description="ODE solver; null: as the run evaluates."
    )

    @property
    def headline(self) -> str:
        return self.metric or next(iter(self.rewards))

    @property
    def leading(self) -> str | None:
        """The reward that the headline is, or is a part of; None: none of the suite's."""
        return next((k for k in self.rewards if f"{self.headline}/".startswith(f"{k}/")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A suite with its prompts and rewards loaded and checked."""

    name: str  # name of its YAML file, without the ending
    suite: Suite  # settings of its YAML and of the command line
    prompts: Prompts  # (P,) prompts, thinned out to the suite's count
    rewards: RewardSet  # rewards of the suite, and held-out rewards with weight 0

    @property
    def categories(self) -> list[str] | None:
        """Each prompt's category, (P,); None where prompts have none."""
        key = self.suite.category
        if key is None or key == BY_QUESTION or key not in self.prompts[0]:
            return None
        return [str(prompt[key]) for prompt in self.prompts]


def load(name: str, **changes: Any) -> Suite:
    """Load the suite of configs/suite/<name>.yaml, or of a YAML file.

    changes: fields that are not None replace the file's.
    """
    settings = read_yaml(suite_file(name)) | {k: v for k, v in changes.items() if v is not None}
    return parse(Suite, settings, what=f'suite "{name}"')  # type: ignore[return-value]


def suite_file(name: str) -> Path:
    """Find the YAML file of a suite; ValueError where there is none."""
    own_file = name.endswith((".yaml", ".yml"))
    path = located(name) if own_file else config_folder() / "suite" / f"{name}.yaml"
    if not path.is_file():
        there = nearby(path) if own_file else did_you_mean(name, options("suite"))
        raise ValueError(f'unknown suite "{name}"{there or "; there is no such file"}')
    return path


def with_rewards(suite: Suite, settings: Sequence[str], held_out: Sequence[str]) -> Suite:
    """Add settings of its rewards, and rewards to hold out, to a suite.

    settings: words NAME.SETTING=VALUE; held_out: NAME or NAME.SETTING=VALUE. They join those that
    the file gives, key by key.
    """
    own, more = {**suite.rewards}, {**suite.held_out}
    for label, entry in _entries("--reward", settings).items():
        _check_setting(label, entry, [*own, *more])
        section = own if label in own else more
        section[label] = _joined(section[label], entry)
    for label, entry in _entries("--held-out", held_out).items():
        more[label] = _joined(more.get(label), entry)
    return suite.model_copy(update={"rewards": own, "held_out": more})


def _check_setting(label: str, entry: dict[str, Any], known: Sequence[str]) -> None:
    if label not in known:
        raise ValueError(
            f"--reward {label}: the suite reads no reward of that name (--held-out adds"
            f" one){did_you_mean(label, known)}"
        )
    if not entry:
        raise ValueError(
            f"--reward {label} sets nothing; give NAME.SETTING=VALUE, such as"
            " geneval.weights=/path/to/the/file"
        )


def _entries(option: str, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Read words -> label -> settings, without a weight."""
    out = parse_words(words)
    for label, entry in out.items():
        if (weight := entry.pop("weight")) != 1:
            raise ValueError(
                f"{option} {label}={weight}: a suite reads each reward by itself, so its weight"
                " says nothing; leave it out"
            )
    return out


def _joined(entry: Any, new: dict[str, Any]) -> dict[str, Any]:
    """Replace values of a reward's entry (settings, a weight or nothing) by those of `new`."""
    if isinstance(entry, dict):
        out = dict(entry)
    else:
        out = {} if entry is None else {"weight": entry}
    for key, value in new.items():
        out[key] = _joined(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def prepare(name: str, suite: Suite) -> Task:
    """Load prompts and rewards, and check that they fit.

    Every fault of a suite raises ValueError here, before a model is loaded.
    """
    _check_names(name, suite)
    prompts = _prompts(name, suite)
    rewards = _rewards(name, suite)
    check_needs(rewards, ("meta", "group", *["source"] * has_source(prompts)))
    check_meta(rewards, {suite.prompts or "": prompts})
    _check_categories(name, suite, prompts)
    rewards = by_dimension(rewards) if suite.category == BY_QUESTION else rewards
    return Task(name=name, suite=suite, prompts=prompts, rewards=rewards)


def _check_names(name: str, suite: Suite) -> None:
    if twice := sorted(suite.rewards.keys() & suite.held_out.keys()):
        raise ValueError(
            f'suite "{name}" names {twice[0]} among rewards and among held_out; keep one of the two'
        )
    if suite.leading is None:
        raise ValueError(
            f'suite "{name}": metric={suite.metric} is not one of its'
            f" rewards{did_you_mean(suite.headline, suite.rewards)}"
        )


def _prompts(name: str, suite: Suite) -> Prompts:
    """Load the suite's prompts, thinned out evenly to its count."""
    prompts = prompt_files.load(
        suite.prompts, suite=name, origin=suite.origin, form=suite.form, columns=suite.columns
    )
    if suite.count is None or suite.count >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // suite.count] for i in range(suite.count)]


def _rewards(name: str, suite: Suite) -> RewardSet:
    """Load the suite's rewards, and those held out with weight 0."""
    held_out = {label: {**(entry or {}), "weight": 0.0} for label, entry in suite.held_out.items()}
    rewards = load_set({**suite.rewards, **held_out})
    if groupwise := sorted(rewards.rewards.keys() - rewards.pointwise().rewards.keys()):
        raise ValueError(
            f'suite "{name}": {groupwise[0]} compares the members of a group, and a suite judges'
            " each image by itself"
        )
    return rewards


def _check_categories(name: str, suite: Suite, prompts: Prompts) -> None:
    """Check that every prompt has the category's key, or, where nothing is averaged over it, that
    none has."""
    key, averaged = suite.category, suite.aggregate == "category_mean"
    if key is None and averaged:
        raise ValueError(
            f'suite "{name}": aggregate=category_mean needs a category, the key of each prompt that'
            " names it"
        )
    if key is None:
        return
    if key == BY_QUESTION:
        _check_dimensions(name, prompts)
        return
    without = [prompt for prompt in prompts if key not in prompt]
    if without and (averaged or len(without) < len(prompts)):
        raise ValueError(
            f'"{without[0]["prompt"]}" of {suite.prompts} carries no "{key}", by which suite'
            f' "{name}" splits its scores; add it to that line, or set category: to a key that'
            " every prompt has"
        )


def _check_dimensions(name: str, prompts: Prompts) -> None:
    """Check that every question of every prompt's checklist names its dimension."""

    def named(question: Any) -> bool:
        return isinstance(question, dict) and isinstance(question.get("dimension"), str)

    for prompt in prompts:
        if not all(map(named, prompt.get("checklist", [None]))):
            raise ValueError(
                f'suite "{name}": "{prompt["prompt"]}" has no checklist whose every question names'
                ' its "dimension"'
            )


def run_suite(
    policy: Policy,
    task: Task,
    sampling: Sampling,
    *,
    baseline: float | str | None = None,
    journal: MeasureJournal | None = None,
    known: dict[str, Measured] | None = None,
) -> dict[str, Measured]:
    """Measure the reference view ("base") and the current weights ("tuned") from the same noise.

    baseline: guidance of one more row, "base, guided". known: rows of the base model that were
    measured before with this sampling; new ones are added.
    """
    rewards, images = task.rewards.beside(policy), task.suite.images
    known = {} if known is None else known
    out: dict[str, Measured] = {}
    for name, view, guidance in _settings(sampling.guidance, baseline):
        if name in known:
            out[name] = known[name]
            continue
        # RLG extrapolates from the reference, which is therefore sampled without it
        rlg = 1.0 if view == "reference" else sampling.rlg
        how = replace(sampling, guidance=guidance, rlg=rlg)
        with policy.view(view):
            out[name] = measure(
                policy, task.prompts, rewards, how, images=images, journal=journal, setting=name
            )
        # other runs of this base model use its row again
        if view == "reference":
            known[name] = out[name]
        _check_headline(task, out[name])
    return out


def _settings(
    guidance: float | str, baseline: float | str | None
) -> list[tuple[str, str, float | str]]:
    """(name, view of the policy, guidance) of each row of a record."""
    guided = baseline is not None and baseline != guidance
    return [
        ("base", "reference", guidance),
        *([("base, guided", "reference", baseline)] if guided else []),
        ("tuned", "default", guidance),
    ]


def _check_headline(task: Task, measured: Measured) -> None:
    if (metric := task.suite.headline) not in measured.values:
        label = task.suite.leading
        if label in measured.values and np.isnan(measured.values[label]).all():
            raise ValueError(
                f'suite "{task.name}": reward "{label}" scored none of the samples; the warning'
                " says why"
            )
        raise ValueError(
            f'suite "{task.name}": metric={metric} was not'
            f" measured{did_you_mean(metric, measured.values)}"
        )
