"""Evaluation suites: a prompt file, rewards and a rule of aggregation in one YAML of configs/suite.

`load` reads one, `prepare` loads and checks what it names, `run_suite` samples base and tuned model
from the same noise and scores them. flowrl/evaluation/suites/runs.py does this for run folders and writes what
came out; the statistics are in flowrl/evaluation/suites/statistics.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic

from flowrl.config.compose import config_folder, options, read_yaml
from flowrl.config.schema import Guidance
from flowrl.data import prompts as data_prompts
from flowrl.evaluation.held_out import Sampling
from flowrl.evaluation.suites import prompt_files
from flowrl.evaluation.suites.measure import Journal, Measured, by_dimension, measure
from flowrl.evaluation.suites.prompt_files import Form
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, check_needs, load_set, parse_words
from flowrl.rewards.core import score
from flowrl.rewards.core.reward import Settings, parse
from flowrl.runtime.registry import did_you_mean
from flowrl.types import replace

BY_QUESTION = "checklist"  # as a category: the dimension of each question


class Suite(Settings):
    """What a suite's YAML may say."""

    title: str = pydantic.Field(description="What is measured, in one line.")
    prompts: str | None = pydantic.Field(
        None,
        description=(
            "shapes:eval and the like, a file, or hf:owner/repo/file; null: given by the user."
        ),
    )
    origin: str = pydantic.Field(
        "", description="Where the prompt file is found; said where it is missing."
    )
    form: Form = pydantic.Field(
        "table",
        description=(
            "What a .csv or .tsv file holds: a table, dpg's questions, unigenbench's test points."
        ),
    )
    columns: dict[str, str] = pydantic.Field(
        {"prompt": "prompt"}, description="Of a table: what is kept of a line -> its column."
    )
    count: pydantic.PositiveInt | None = pydantic.Field(
        None, description="Only so many prompts, spread evenly over the file; null: all."
    )
    images: pydantic.PositiveInt = pydantic.Field(4, description="Images a prompt.")
    rewards: dict[str, Any] = pydantic.Field(
        min_length=1, description="What scores, as in a config."
    )
    held_out: dict[str, dict[str, Any] | None] = pydantic.Field(
        {}, description="Rewards read as side effects; a run trained on one is told so."
    )
    metric: str | None = pydantic.Field(
        None,
        description="The headline: a reward or a part of one (geneval/official); null: the first.",
    )
    category: str | None = pydantic.Field(
        None, description="Key of each prompt by which scores are split; checklist: by question."
    )
    aggregate: Literal["mean", "category_mean"] = pydantic.Field(
        "mean", description="Over all images, or over the categories' means."
    )
    scale: float = pydantic.Field(
        1.0, gt=0, description="What the suite's own scores are multiplied by; DPG prints percent."
    )
    steps: pydantic.PositiveInt | None = pydantic.Field(
        None, description="ODE steps; null: as the run evaluates."
    )
    guidance: Guidance | None = pydantic.Field(
        None, description="A scale, none or pipeline; null: as the run evaluates."
    )
    solver: Literal["euler", "dpm2"] | None = pydantic.Field(
        None, description="ODE solver; null: as the run evaluates."
    )

    @property
    def headline(self) -> str:
        return self.metric or next(iter(self.rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A suite with its prompts and rewards loaded and checked."""

    name: str
    suite: Suite
    prompts: data_prompts.Prompts
    rewards: RewardSet

    @property
    def categories(self) -> list[str] | None:
        """Each prompt's category, (P,); None where prompts have none."""
        key = self.suite.category
        return (
            None
            if key in (None, BY_QUESTION) or key not in self.prompts[0]
            else [str(prompt[key]) for prompt in self.prompts]
        )


def load(name: str, **changes: Any) -> Suite:
    """The suite of configs/suite/<name>.yaml, or of a YAML file. changes: fields that are not None
    replace the file's."""
    path = (
        Path(name).expanduser()
        if name.endswith((".yaml", ".yml"))
        else config_folder() / "suite" / f"{name}.yaml"
    )
    if not path.is_file():
        there = (
            "; there is no such file"
            if path.parent.name != "suite"
            else did_you_mean(name, options("suite"))
        )
        raise ValueError(f'unknown suite "{name}"{there}')
    return parse(
        Suite,
        read_yaml(path) | {k: v for k, v in changes.items() if v is not None},
        what=f'suite "{name}"',
    )  # type: ignore[return-value]


def with_rewards(suite: Suite, settings: Sequence[str], held_out: Sequence[str]) -> Suite:
    """The suite with settings of its rewards (words NAME.SETTING=VALUE) and rewards to hold out
    (NAME, NAME.SETTING=VALUE) added.

    Settings join those that the file gives, key by key.
    """
    own, more = {**suite.rewards}, {**suite.held_out}
    for label, entry in _entries("--reward", settings).items():
        section = own if label in own else more
        if label not in section:
            there = did_you_mean(label, [*own, *more])
            raise ValueError(
                f"--reward {label}: the suite reads no reward of that name (--held-out adds"
                f" one){there}"
            )
        if not entry:
            raise ValueError(
                f"--reward {label} sets nothing; give NAME.SETTING=VALUE, such as"
                " geneval.weights=/path/to/the/file"
            )
        section[label] = _joined(section[label], entry)
    for label, entry in _entries("--held-out", held_out).items():
        more[label] = _joined(more.get(label), entry)
    return suite.model_copy(update={"rewards": own, "held_out": more})


def _entries(option: str, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Label -> settings, without a weight."""
    out = parse_words(words)
    for label, entry in out.items():
        if (weight := entry.pop("weight")) != 1:
            raise ValueError(
                f"{option} {label}={weight}: a suite reads each reward by itself, so its weight"
                " says nothing; leave it out"
            )
    return out


def _joined(entry: Any, new: dict[str, Any]) -> dict[str, Any]:
    """An entry of a reward (settings, a weight or nothing), with the values of `new` in place of
    its own."""
    old = entry if isinstance(entry, dict) else {} if entry is None else {"weight": entry}
    return old | {
        key: _joined(old.get(key, {}), value) if isinstance(value, dict) else value
        for key, value in new.items()
    }


def prepare(name: str, suite: Suite) -> Task:
    """Load prompts and rewards, and check that they fit; all that is wrong with a suite ->
    ValueError, before a model is loaded."""
    if twice := sorted(suite.rewards.keys() & suite.held_out.keys()):
        raise ValueError(
            f'suite "{name}" names {twice[0]} among rewards and among held_out; keep one of the two'
        )
    if suite.headline.partition("/")[0] not in suite.rewards:
        raise ValueError(
            f'suite "{name}": metric={suite.metric} is no reward of'
            f" it{did_you_mean(suite.headline, suite.rewards)}"
        )
    prompts = prompt_files.load(
        suite.prompts, suite=name, origin=suite.origin, form=suite.form, columns=suite.columns
    )
    if suite.count is not None and suite.count < len(prompts):
        prompts = [prompts[i * len(prompts) // suite.count] for i in range(suite.count)]
    rewards = load_set(
        {
            **suite.rewards,
            **{label: {**(entry or {}), "weight": 0.0} for label, entry in suite.held_out.items()},
        }
    )
    if groupwise := sorted(rewards.rewards.keys() - rewards.pointwise().rewards.keys()):
        raise ValueError(
            f'suite "{name}": {groupwise[0]} compares the members of a group, and a suite judges'
            " each image by itself"
        )
    check_needs(rewards, ("meta", "group"))
    score.check_meta(rewards, {suite.prompts or "": prompts})
    _check_categories(name, suite, prompts)
    rewards = by_dimension(rewards) if suite.category == BY_QUESTION else rewards
    return Task(name=name, suite=suite, prompts=prompts, rewards=rewards)


def _check_categories(name: str, suite: Suite, prompts: data_prompts.Prompts) -> None:
    """A key that every prompt carries, or, where nothing is averaged over categories, none."""
    key = suite.category
    if key is None and suite.aggregate == "category_mean":
        raise ValueError(
            f'suite "{name}": aggregate=category_mean needs a category, the key of each prompt that'
            " names it"
        )
    if key == BY_QUESTION:
        bare = [
            p
            for p in prompts
            for q in p.get("checklist", [{}])
            if not isinstance(q, dict) or not isinstance(q.get("dimension"), str)
        ]
        if bare:
            raise ValueError(
                f'suite "{name}": "{bare[0]["prompt"]}" has no checklist whose every question names'
                ' its "dimension"'
            )
    elif key is not None:
        without = [prompt for prompt in prompts if key not in prompt]
        if without and (suite.aggregate == "category_mean" or len(without) < len(prompts)):
            what = (
                f'"{without[0]["prompt"]}" of {suite.prompts} carries no "{key}", by which suite'
                f' "{name}" splits its scores'
            )
            raise ValueError(
                f"{what}; add it to that line, or set category: to a key that every prompt has"
            )


def run_suite(
    policy: Policy,
    task: Task,
    sampling: Sampling,
    *,
    baseline: float | str | None = None,
    journal: Journal | None = None,
    known: dict[str, Measured] | None = None,
) -> dict[str, Measured]:
    """Measure the reference view ("base") and the current weights ("tuned") from the same noise
    with the same solver.

    baseline: guidance of one more row, "base, guided". known: rows of the base model that were
    measured before with this sampling; new ones are added.
    """
    rows = {"base": ("reference", sampling.guidance), "tuned": ("default", sampling.guidance)}
    if baseline not in (None, sampling.guidance):
        rows = {
            "base": rows["base"],
            "base, guided": ("reference", baseline),
            "tuned": rows["tuned"],
        }
    known, rewards, images = (
        {} if known is None else known,
        task.rewards.to(policy.device),
        task.suite.images,
    )
    out: dict[str, Measured] = {}
    for name, (view, guidance) in rows.items():
        if name in known:
            out[name] = known[name]
            continue
        how = replace(sampling, guidance=guidance)
        with policy.view(view):
            out[name] = measure(
                policy, task.prompts, rewards, how, images=images, journal=journal, setting=name
            )
        if view == "reference":
            known[name] = out[name]
        if (metric := task.suite.headline) not in out[name].values:
            raise ValueError(
                f'suite "{task.name}": metric={metric} was not'
                f" measured{did_you_mean(metric, out[name].values)}"
            )
    return out
