"""Several rewards and their weights, from what a config or a script states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl.rewards.core.reward import FunctionReward, Reward, load, network_bytes, networks
from flowrl.rewards.core.rules import RewardRule, parse_rules, settings_of
from flowrl.runtime.registry import is_live, label_of, live_name
from flowrl.types import brief, weighted


class SampleReader(Protocol):
    """Reads numbers off samples that nothing is trained on."""

    whole_groups: bool  # whether it must see all members of a group at once

    def __call__(self, media: Tensor, group: Tensor) -> dict[str, Tensor]: ...

    def check(self, shape: tuple[int, ...]) -> None: ...


Labelled = Mapping[str, "float | Mapping[str, Any] | Reward | Callable[..., Tensor]"]
Spec = Labelled | Sequence[Any] | Reward | Callable[..., Tensor]  # see load_set


@dataclass(frozen=True, kw_only=True)
class RewardSet:
    """Loaded rewards and their weights, by label.

    A reward of weight 0 is measured and logged, and its failures invalidate nothing, unless it is
    the gate of another.
    """

    rewards: dict[str, Reward]  # label -> reward
    weights: dict[str, float]  # label -> weight in the sum
    seconds: float | None = None  # most that one call of a reward may take; None: any time
    # label -> rule, for rewards that depend on others, or whose weight changes
    rules: dict[str, RewardRule] = field(default_factory=dict)
    # iteration whose weights and thresholds hold; None: those at the end of their schedules
    iteration: int | None = None
    # Features of core/features.py that compare the members of a group; None: they are not compared
    features: Any = None
    # reads further numbers off a run's samples; see flowrl/rollouts/detectors.py
    detectors: SampleReader | None = None
    # labels that are no part of the total, but whose failure invalidates a sample; see credited
    apart: frozenset[str] = frozenset()
    # label -> domains of the prompts for which it is asked; a label that is not here: all
    domains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    domain_field: str = "domain"  # the fact of a prompt that names its domain (data.domain)
    # brings networks that wait in host memory to their device (model.offload=all); None: no network
    # waits
    ready: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return brief(self, weighted(self.weights), f"needs {sorted(self.needs)}")

    @property
    def needs(self) -> frozenset[str]:
        own = frozenset().union(*(reward.needs for reward in self.rewards.values()))
        own |= {"meta"} if self.domains else set()
        return own | {"group"} if self.strata else own

    @property
    def strata(self) -> dict[str, str]:
        """Rewards that are scaled within the levels of another: label -> label of the other."""
        return {k: rule.stratify for k, rule in self.rules.items() if rule.stratify is not None}

    def gates(self, label: str) -> dict[str, float]:
        """Label of another reward -> its least value with which this reward counts."""
        gate = self.rules[label].gate if label in self.rules else {}
        return {other: least.at(self.iteration) for other, least in gate.items()}

    @property
    def weighted(self) -> frozenset[str]:
        """Labels of the rewards that count in some iteration."""
        changing = {label for label, rule in self.rules.items() if any(rule.weight.values)}
        return frozenset(changing | {label for label, weight in self.weights.items() if weight})

    @property
    def decisive(self) -> frozenset[str]:
        """Labels of the rewards whose failure invalidates a sample: those that count in this
        iteration, and their gates."""
        counting = {label for label, weight in self.weights.items() if weight} | self.apart
        return frozenset(counting.union(*(self.gates(label) for label in counting)))

    def at(self, iteration: int) -> RewardSet:
        """The same set with the weights and thresholds of an iteration, counted from 0."""
        now = {label: rule.weight.at(iteration) for label, rule in self.rules.items()}
        return replace(self, weights=self.weights | now, iteration=iteration)

    @property
    def climbers(self) -> frozenset[str]:
        """Labels of rewards with mode=grad: their gradient is climbed beside a method's own
        loss."""
        return frozenset(label for label, rule in self.rules.items() if rule.mode == "grad")

    def credited(self) -> RewardSet:
        """The set that gives advantages: rewards of mode=grad are no part of its total."""
        if not (climbers := self.climbers):
            return self
        return replace(
            self,
            weights={k: 0.0 if k in climbers else weight for k, weight in self.weights.items()},
            rules={k: rule for k, rule in self.rules.items() if k not in climbers},
            apart=frozenset(label for label in climbers if self.weights[label]),
        )

    def climbed(self) -> RewardSet:
        """The rewards of mode=grad alone, and the gates of these, which have weight 0."""
        climbers = self.climbers
        gates = {other for label in climbers for other in self.rules[label].gate}
        return replace(
            self,
            rewards={k: r for k, r in self.rewards.items() if k in climbers | gates},
            weights={k: self.weights[k] if k in climbers else 0.0 for k in climbers | gates},
            rules={k: self.rules[k] for k in climbers},
        )

    def stated(self, label: str) -> dict[str, Any]:
        """Weight, gate, stratify, mode and domains of a reward, as a config has them."""
        rule = self.rules.get(label)
        return {"weight": self.weights[label]} if rule is None else rule.stated

    def pointwise(self) -> RewardSet:
        """The set without rewards that compare the members of a group: the others can judge samples
        of different models alike. Rewards that are scaled within levels, or whose gate is left out,
        are measured only."""
        rewards = {k: reward for k, reward in self.rewards.items() if "group" not in reward.needs}
        rules = {k: rule for k, rule in self.rules.items() if k in rewards}
        alone = {k for k, rule in rules.items() if rule.stratify or rule.gate.keys() - rewards}
        return replace(
            self,
            rewards=rewards,
            weights={k: 0.0 if k in alone else self.weights[k] for k in rewards},
            rules={k: rule for k, rule in rules.items() if k not in alone},
            features=None,
        )

    def beside(self, policy: Any) -> RewardSet:
        """Put the set on a policy's device; with model.offload=all, networks wait in host memory
        until samples are scored."""
        turns = policy.turns
        if self.ready is not None or not turns.takes_scorers:
            return self.to(policy.device)
        # features stay on the device: they compare samples after scoring
        if self.features is not None:
            self.features.to(policy.device)
        return replace(self, ready=turns.send_scorers(networks(self.rewards)))

    def to(self, device: torch.device | str) -> RewardSet:
        if self.ready is not None:  # networks that wait come to their device by themselves
            return self
        for reward in self.rewards.values():
            reward.to(device)
        if self.features is not None:
            self.features.to(device)
        return self


def load_set(spec: Spec | RewardSet) -> RewardSet:
    """Load the rewards that a config states.

    {"clip": 1.0} gives a weight; {"clip": {"weight": 0.5, "model": "ViT-B-16"}} gives settings too;
    {"strict": {"name": "shapes", "weight": 0, ...}} gives the reward another label; a Reward or a
    function counts with weight 1, or as {"reward": it, "weight": 0.5}. Beside "weight", "gate" and
    "stratify" name other labels, "mode" says how a reward is climbed, and "domains" for which
    prompts it is asked (rules.py). Without labels, a name, a Reward, a function, or a list of them:
    each has its own name and weight 1.
    """
    if isinstance(spec, RewardSet):
        return spec
    spec = by_label(spec)
    if not isinstance(spec, Mapping) or not spec:
        raise ValueError(
            f'rewards={spec!r}: give at least one reward and its weight, for example {{"jpeg":'
            " 1.0}"
        )
    entries = {label: _options(entry) for label, entry in spec.items()}
    rules = parse_rules(entries)
    return RewardSet(
        rewards=_load_all(entries),
        weights={label: rule.weight.at(None) for label, rule in rules.items()},
        rules={label: rule for label, rule in rules.items() if not rule.plain},
        domains={label: rule.domains for label, rule in rules.items() if rule.domains},
    )


def sizes(spec: Labelled) -> dict[str, float | None]:
    """Label of a reward -> bytes that its networks take on a device, computed without loading any;
    None: not known, for example for objects that Python hands over."""
    return {label: _size(label, _options(entry)) for label, entry in spec.items()}


def _size(label: str, entry: Mapping[str, Any]) -> float | None:
    options = settings_of(entry)
    name = options.pop("name", label)
    if is_live(name) or callable(options.get("reward")):
        return None
    return network_bytes(name, **options)


def by_label(spec: Any) -> Any:
    """One reward, or a list of them, as a mapping by label; a mapping stays as it is."""
    if isinstance(spec, str) or callable(spec):
        spec = [spec]
    if not isinstance(spec, list | tuple):
        return spec
    found: dict[str, Any] = {}
    for entry in spec:
        label = _label(entry)
        if label in found:
            raise ValueError(
                f'two rewards are called "{label}"; give labels: {{"{label}": ..., "other": ...}}'
            )
        found[label] = {"name": entry} if isinstance(entry, str) else entry
    return found


def _label(entry: Any) -> str:
    """The label of a reward that has none."""
    if isinstance(entry, str):
        return label_of(entry)
    cls = entry if isinstance(entry, type) else type(entry)
    own = entry.name if issubclass(cls, Reward) else ""
    return own or label_of(live_name(entry))


def _load_all(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Reward]:
    """Load the reward of each entry; the ValueError has the sentences of all that fail, such as
    missing downloads."""
    found, wrong = {}, list[str]()
    for label, entry in entries.items():
        try:
            found[label] = _load_entry(label, entry)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return found


def _load_entry(label: str, entry: Mapping[str, Any]) -> Reward:
    """The reward of an entry, whose rule is known."""
    options = settings_of(entry)
    # A text under "reward" is a setting of the reward, as `rank` has one.
    given = None if isinstance(options.get("reward"), str) else options.pop("reward", None)
    if given is None:
        return load(options.pop("name", label), **options)
    if options:
        raise ValueError(
            f'reward "{label}" is already loaded, so {sorted(options)} cannot be set; only'
            ' "weight", "gate", "stratify", "mode" and "domains" can'
        )
    return _as_reward(label, given)


def _options(entry: Any) -> dict[str, Any]:
    """A config's entry for a reward, as a mapping."""
    if isinstance(entry, Mapping):
        return dict(entry)
    return {"reward": entry} if callable(entry) else {"weight": entry}


def _as_reward(label: str, given: Any) -> Reward:
    """A reward, a function under @flowrl.reward, or any other function, as a reward."""
    cls = getattr(given, "REWARD", given)
    if isinstance(cls, type) and issubclass(cls, Reward):
        return cls()
    return given if isinstance(given, Reward) else FunctionReward(given, label)
