"""Choosers decide which prompts an iteration sees, from what earlier iterations showed of them.

uniform  shuffled epochs, see flowrl/data/prompts.py
bayes    each prompt has a Beta posterior of its success; a Thompson draw is made for each, and the
         prompts whose draws are nearest a target are taken (MoPPS, arXiv:2507.04632)
bandit   tags of prompts are arms, drawn by a softmax of the running mean of their gain, which is
         mean |advantage| (SEC, arXiv:2505.14970, eq. 5 and 6)

A choice is a function of the seed, the iteration and the state, which checkpoints hold and which is
equal on all processes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.config.sampling import ChoiceConfig
from flowrl.data import prompts as data
from flowrl.rollouts.help import Helper
from flowrl.runtime.text import printable
from flowrl.samplers import keys
from flowrl.types import PromptBatch

MOST_ARMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Results of an iteration's prompts, from all processes."""

    ids: Tensor  # (P,) int64, place of each prompt among the run's prompts
    samples: Tensor  # (P,) fp64, how many samples of the prompt have a reward
    successes: Tensor  # (P,) fp64, how many of these succeeded; shares of success are added up
    gain: Tensor  # (P,) fp64, mean |advantage| of these samples


class Chooser:
    """Chooses shuffled epochs; the base of choosers that learn."""

    learns = False  # whether later choices depend on what an iteration showed

    def __init__(self, prompts: data.Prompts, config: ChoiceConfig, seed: int) -> None:
        self.prompts, self.config, self.seed = prompts, config, seed
        self.names = _names(prompts)  # name of each prompt in the state
        self.state: dict[str, Any] = {}  # name -> numbers; checkpoints hold it as JSON
        # decides which prompts are helped, with a state of its own; None: no prompt ever is
        self.helper = Helper(config.help, self.names, seed) if config.help.after else None

    def choose(self, iteration: int, size: int) -> PromptBatch:
        """The `size` prompts of an iteration, counted from 0; no prompt is there twice."""
        return data.batch(self.prompts, iteration=iteration, size=size, seed=self.seed)

    def learn_from(
        self,
        iteration: int,
        drawn: Any,
        advantages: Tensor,
        gather: Callable[[Tensor], Tensor],
    ) -> dict[str, float]:
        """Take in what an iteration showed of its prompts -> prompts/* to log.

        drawn: the Drawn of this process. advantages (B,) of its samples. gather: concatenates rows
        of all processes.
        """
        mine = seen_by(
            drawn.batch, drawn.rollout.group, drawn.rewards.total, advantages, self.config
        )
        seen = all_seen(gather(mine))
        found = self.learn(seen)
        if self.helper is not None:
            found |= self.helper.learn(iteration, seen.ids, seen.samples, seen.successes)
        return found

    def learn(self, seen: Seen) -> dict[str, float]:
        """Change the state by what an iteration showed -> prompts/* to log."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint; prompts that are not there any more are forgotten."""
        known = self.known()
        self.state |= {name: value for name, value in state.items() if name in known}

    def known(self) -> set[str]:
        """The names that the state may have."""
        return set(self.names)

    def generator(self, iteration: int) -> np.random.Generator:
        """Random numbers for the choice of an iteration, a function of the seed."""
        return np.random.default_rng(keys.key(self.seed, "choice", iteration) % 2**64)


class Bayes(Chooser):
    """Chooses prompts whose chance of success is likely near data.sampler.target."""

    learns = True

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Parameters (N,), (N,) of each prompt's Beta distribution; 1, 1 where it was never
        seen."""
        counts = np.array([self.state.get(name, (0.0, 0.0)) for name in self.names])
        return 1 + counts[:, 0], 1 + counts[:, 1]

    def choose(self, iteration: int, size: int) -> PromptBatch:
        drawn = self.generator(iteration).beta(*self.posterior())
        nearest = np.abs(drawn - self.config.target).argsort(kind="stable")[:size]
        return data.select(self.prompts, torch.from_numpy(nearest))

    def learn(self, seen: Seen) -> dict[str, float]:
        good, bad = self.posterior()
        expected = (good / (good + bad))[seen.ids.numpy()]
        shares = seen.successes / seen.samples.clamp(min=1)
        columns = (seen.ids.tolist(), seen.samples.tolist(), seen.successes.tolist())
        for i, n, s in zip(*columns, strict=True):
            before = self.state.get(self.names[i], [0.0, 0.0])
            kept = [self.config.forgetting * count for count in before]
            self.state[self.names[i]] = [kept[0] + s, kept[1] + n - s]
        return {
            "prompts/expected": float(expected.mean()),
            "prompts/success": float(shares.mean()),
            "prompts/seen": len(self.state) / len(self.prompts),
        }


class Bandit(Chooser):
    """Chooses tags whose prompts have shown much gain, and prompts of these tags at random."""

    learns = True

    def __init__(self, prompts: data.Prompts, config: ChoiceConfig, seed: int) -> None:
        super().__init__(prompts, config, seed)
        arms = defaultdict(list)
        for place, prompt in enumerate(prompts):
            arms[_tag(prompt, config.tag)].append(place)
        if not 2 <= len(arms) <= MOST_ARMS:
            raise ValueError(
                f'data.sampler.mode=bandit has an arm for each value of "{config.tag}", and the'
                f" prompts have {len(arms)}; it takes 2 to {MOST_ARMS}"
            )
        self.arms = {tag: arms[tag] for tag in sorted(arms)}
        self.state = dict.fromkeys(self.arms, 0.0)

    def known(self) -> set[str]:
        return set(self.arms)

    def shares(self) -> np.ndarray:
        """The probability of each arm."""
        gain = np.array([self.state[tag] for tag in self.arms]) / self.config.temperature
        weights = np.exp(gain - gain.max())
        return weights / weights.sum()

    def choose(self, iteration: int, size: int) -> PromptBatch:
        random, p = self.generator(iteration), self.shares()
        left = [list(random.permutation(places)) for places in self.arms.values()]
        chosen: list[int] = []
        while len(chosen) < size:
            # an arm that has no prompts left cannot be drawn
            p = np.where([bool(places) for places in left], p, 0.0)
            p = p / p.sum()
            chosen.append(int(left[random.choice(len(p), p=p)].pop()))
        return data.select(self.prompts, torch.tensor(chosen))

    def learn(self, seen: Seen) -> dict[str, float]:
        gains = defaultdict(list)
        for place, gain in zip(seen.ids.tolist(), seen.gain.tolist(), strict=True):
            gains[_tag(self.prompts[place], self.config.tag)].append(gain)
        out = {}
        for tag in self.arms:
            if tag in gains:
                found = sum(gains[tag]) / len(gains[tag])
                self.state[tag] += self.config.rate * (found - self.state[tag])
            out[f"prompts/share/{tag}"] = len(gains[tag]) / len(seen.ids)
            out[f"prompts/gain/{tag}"] = self.state[tag]
        return out


CHOOSERS = {"uniform": Chooser, "bayes": Bayes, "bandit": Bandit}


def chooser(prompts: data.Prompts, config: ChoiceConfig, *, size: int, seed: int) -> Chooser:
    """Make the chooser of section data.sampler; ValueError where there are too few prompts for a
    batch of `size`, or prompts without a tag."""
    # raises ValueError where there are too few prompts
    data.batch(prompts, iteration=0, size=size, seed=seed)
    return CHOOSERS[config.mode](prompts, config, seed)


def seen_by(
    batch: PromptBatch, group: Tensor, totals: Tensor, advantages: Tensor, config: ChoiceConfig
) -> Tensor:
    """Count what samples show of the prompts of a batch -> (P, 4) fp64: place, number of samples,
    number of successes, and gain.

    group, totals, advantages (B,): a sample whose total is NaN does not count. Raises ValueError
    where totals are no shares of success and config.success says no threshold.
    """
    # A reward in [0, 1] is a share of success, unless a threshold says what success is.
    r, usable = totals.double(), ~totals.isnan()
    known = r[usable]
    if config.success is not None:
        success = (r >= config.success).double()
    elif (config.mode == "bayes" or config.help.after) and not bool(
        ((known >= 0) & (known <= 1)).all()
    ):
        who = "mode=bayes" if config.mode == "bayes" else f"help.after={config.help.after}"
        raise ValueError(
            f"data.sampler.{who} takes rewards in [0, 1] as shares of success, and they are"
            f" {known.min():.4g} to {known.max():.4g}; set data.sampler.success to the reward from"
            " which a sample is a success"
        )
    else:
        success = r
    zeros = torch.zeros(len(batch), dtype=torch.float64, device=r.device)
    count = zeros.index_add(0, group[usable], torch.ones_like(known))
    good = zeros.index_add(0, group[usable], success[usable])
    gain = zeros.index_add(0, group[usable], advantages.double().abs()[usable])
    ids = batch.ids.to(r.device, torch.float64)
    return torch.stack([ids, count, good, gain / count.clamp(min=1)], 1)


def all_seen(table: Tensor) -> Seen:
    """Make one record of the rows of `seen_by` from all processes."""
    ids, samples, successes, gain = table.cpu().unbind(1)
    return Seen(ids=ids.long(), samples=samples, successes=successes, gain=gain)


def _names(prompts: data.Prompts) -> list[str]:
    """A name for each prompt: a hash of its text, and how many equal ones come before it."""
    count: Counter[str] = Counter()
    names = []
    for prompt in prompts:
        text = prompt["prompt"]
        names.append(f"{keys.digest(text) % 2**64:016x}.{count[text]}")
        count[text] += 1
    return names


def _tag(prompt: dict[str, Any], name: str) -> str:
    tag = prompt.get(name)
    if not isinstance(tag, str | int) or not str(tag):
        raise ValueError(
            f'data.sampler.mode=bandit reads the column "{name}" of each prompt, and prompt'
            f' "{printable(prompt["prompt"], 60)}" has'
            f" {'none' if tag is None else printable(repr(tag), 60)}; name the column by"
            " data.sampler.tag"
        )
    return printable(str(tag), 60)
