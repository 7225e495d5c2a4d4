"""Rules by which rewards depend on each other, stated beside a reward's settings and checked before
any reward is loaded.

weight    a number, or one that changes with the iteration
gate      {label: least raw value of that reward}: below it, this reward counts 0
stratify  label of another reward: this one is scaled within its levels; see counted.py
mode      pg: enters advantages (policy gradient); grad: is climbed by its own gradient beside them
domains   domains of the prompts for which this one is asked; none: it is asked for all; domains.py
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.rewards.core.schedule import WeightSchedule, parse_schedule
from flowrl.runtime.registry import did_you_mean

KEYS = ("weight", "gate", "stratify", "mode", "domains")
MODES = ("pg", "grad")
TEXTS = ("name", "stratify", "mode")  # keys of an entry whose values are texts, whatever the reward
COURSE = "{0: 1, 100: 0.2}"  # example of a number that changes with the iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRule:
    """How much a reward counts, and under which conditions."""

    weight: WeightSchedule  # weight in the sum; with stratify, share of the gap between levels
    gate: dict[str, WeightSchedule] = field(default_factory=dict)  # label -> threshold
    stratify: str | None = None  # label of the reward within whose levels it is scaled
    mode: str = "pg"  # one of MODES
    domains: tuple[str, ...] = ()  # domains for which it is asked; empty: all

    @property
    def plain(self) -> bool:
        """Whether it is one weight and nothing else."""
        ruled = self.gate or self.stratify is not None or self.mode != "pg" or self.domains
        return not ruled and len(self.weight.points) == 1

    @property
    def stated(self) -> dict[str, Any]:
        """The rule as a config states it."""
        out: dict[str, Any] = {"weight": self.weight.stated}
        if self.gate:
            out["gate"] = {label: least.stated for label, least in self.gate.items()}
        if self.stratify is not None:
            out["stratify"] = self.stratify
        out |= {"domains": list(self.domains)} if self.domains else {}
        return out if self.mode == "pg" else out | {"mode": self.mode}


def parse_rules(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, RewardRule]:
    """Read entries {weight, gate, stratify, mode, domains, settings} -> label -> rule; wrong ->
    ValueError."""
    rules = {label: parse_rule(label, entry) for label, entry in entries.items()}
    check_rules(rules)
    return rules


def parse_rule(label: str, entry: Mapping[str, Any]) -> RewardRule:
    """Read the rule of one entry, checked by itself."""
    stratify = entry.get("stratify")
    if stratify is not None and not isinstance(stratify, str):
        raise ValueError(
            f'reward "{label}": stratify={stratify!r} should name a reward; write'
            f" {label}.stratify=shapes"
        )
    mode = "grad" if entry.get("mode") == "grad" else "pg"
    weight, gate = _weight(label, entry.get("weight", 1.0)), _gate(label, entry.get("gate"))
    domains = _domains(label, entry.get("domains"))
    return RewardRule(weight=weight, gate=gate, stratify=stratify, mode=mode, domains=domains)


def settings_of(entry: Mapping[str, Any], own: Container[str] = ("mode",)) -> dict[str, Any]:
    """An entry without its rule: the settings of the reward itself. A mode other than pg and grad
    is a setting, as vr_thinker has one; raises ValueError where the reward has no such setting."""
    mode = entry.get("mode", "pg")
    if mode not in MODES and "mode" not in own:
        raise ValueError(
            f"mode={mode!r} should be pg, which enters advantages, or grad, which is climbed by its"
            " gradient; write mode=grad"
        )
    return {k: v for k, v in entry.items() if k not in KEYS or k == "mode" and v not in MODES}


def _weight(label: str, value: Any) -> WeightSchedule:
    if (weight := parse_schedule(value)) is not None:
        return weight
    if isinstance(value, Mapping):
        raise ValueError(
            f'reward "{label}": weight={dict(value)} should map iterations, counted from 0, to'
            f" finite numbers; write {label}.weight={COURSE}"
        )
    raise ValueError(
        f'reward "{label}": weight={value!r} is not a finite number; write {label}=1.0 or'
        f" {label}.weight=1.0"
    )


def _gate(label: str, value: Any) -> dict[str, WeightSchedule]:
    """The gate of an entry: thresholds by label."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(
            f'reward "{label}": gate={value!r} should name a reward and the least value of it with'
            f" which {label} counts; write {label}.gate.shapes=0.5"
        )
    out = {}
    for other, least in value.items():
        if (threshold := parse_schedule(least)) is None:
            raise ValueError(
                f'reward "{label}": gate.{other}={least!r} is neither a finite number nor one by'
                f" iteration; write {label}.gate.{other}=0.5 or {label}.gate.{other}={COURSE}"
            )
        out[str(other)] = threshold
    return out


def _domains(label: str, value: Any) -> tuple[str, ...]:
    """The domains of an entry, each once."""
    names = [value] if isinstance(value, str | int) else value
    if names is None:
        return ()
    if not isinstance(names, list | tuple) or not names or not all(map(_is_name, names)):
        raise ValueError(
            f'reward "{label}": domains={value!r} should be names of domains; write'
            f" {label}.domains=[photo,poster], or leave it out to ask for all"
        )
    return tuple(dict.fromkeys(map(str, names)))


def _is_name(value: Any) -> bool:
    """Whether a value names a domain: a text that is not empty, or a whole number."""
    return isinstance(value, str | int) and not isinstance(value, bool) and bool(str(value).strip())


def check_rules(rules: Mapping[str, RewardRule]) -> None:
    """Raise ValueError where a rule names no other reward, or levels could be reordered."""
    for label, rule in rules.items():
        for other in rule.gate:
            _check_other(label, other, "gate", rules)
        if rule.stratify is not None:
            _check_other(label, rule.stratify, "stratify", rules)
            _check_stratified(label, rule, rules)
    for primary in {rule.stratify for rule in rules.values()} - {None}:
        _check_shares(primary, rules)


def _check_other(label: str, other: str, key: str, rules: Mapping[str, RewardRule]) -> None:
    others = rules.keys() - {label}
    if other == label:
        raise ValueError(f'reward "{label}": {key} names {label} itself; name another reward')
    if other not in others:
        near = did_you_mean(other, others) or "; add it to the rewards"
        raise ValueError(f'reward "{label}": {key} names "{other}", which is not here{near}')
    own, its = (rules[name].domains for name in (label, other))
    if its and not set(own or ("",)) <= set(its):
        raise ValueError(
            f'reward "{label}": {key} names "{other}", which is asked for domains'
            f" [{', '.join(its)}] alone, and {label} for {', '.join(own) or 'all'}; write"
            f" {label}.domains=[{','.join(its)}], or give {other} the domains of {label}"
        )


def _check_stratified(label: str, rule: RewardRule, rules: Mapping[str, RewardRule]) -> None:
    """Raise ValueError unless its weight is a share, and the other reward has a weight."""
    assert rule.stratify is not None
    shares, primary = rule.weight.values, rules[rule.stratify]
    if "grad" in (rule.mode, primary.mode):
        climbed = label if rule.mode == "grad" else rule.stratify
        raise ValueError(
            f'reward "{label}": stratify={rule.stratify} orders samples within levels, and'
            f" {climbed}.mode=grad has a gradient in their place; write"
            f" {label}.gate.{rule.stratify}=0.5 for stratify, or leave {climbed}.mode out"
        )
    if min(shares) < 0 or max(shares) >= 1 or not any(shares):
        raise ValueError(
            f'reward "{label}": with stratify the weight is a share of the gap between two levels,'
            f" above 0 and below 1, and it is {rule.weight.stated}; write {label}.weight=0.5"
        )
    if primary.stratify is not None:
        raise ValueError(
            f'reward "{label}": stratify={rule.stratify}, which has stratify itself; write'
            f" {label}.stratify={primary.stratify}"
        )
    if min(primary.weight.values) <= 0:
        raise ValueError(
            f'reward "{label}": stratify={rule.stratify} needs its weight above 0, and it is'
            f" {primary.weight.stated}; write {rule.stratify}.weight=1.0"
        )


def _check_shares(primary: str, rules: Mapping[str, RewardRule]) -> None:
    """Raise ValueError where the rewards within the levels of one fill the gap. Sums of schedules
    are highest at a bend of one of them."""
    inside = {label: rule for label, rule in rules.items() if rule.stratify == primary}
    bends = {iteration for rule in inside.values() for iteration, _ in rule.weight.points}
    most = max(sum(rule.weight.at(bend) for rule in inside.values()) for bend in bends)
    if most >= 1:
        raise ValueError(
            f"the rewards with stratify={primary} ({', '.join(inside)}) have weights of {most:g}"
            " together, which are shares of one gap; lower them to less than 1"
        )
