"""Live objects: a policy, rewards, an algorithm or prompts that a script hands to a run, in place
of names in its config.

An object without a name is recorded as "live:FluxPipeline" in the config, where a name would stand,
so that a run's folder says of what it was made, and its next start asks for the object again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from flowrl.algorithms.common.base import Algorithm
from flowrl.algorithms.common.find import checked
from flowrl.config.load import composed, validated
from flowrl.config.sampling import ModelConfig
from flowrl.config.schema import Config, options_of
from flowrl.data.given import records
from flowrl.data.prompts import Prompts, load_prompts
from flowrl.policy import Policy
from flowrl.policy.weights.quantised import BACKENDS, computing_type, kind_of
from flowrl.rewards import Reward, RewardSet, load_set
from flowrl.rewards.core.reward_set import by_label
from flowrl.runtime import registry
from flowrl.runtime.log import logger

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
ARGUMENTS = ("policy", "rewards", "algorithm", "prompts", "features")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Objects that were handed over, ready for use; None: the config names the object."""

    policy: Any = None  # a Policy or a diffusers pipeline
    rewards: RewardSet | None = None  # rewards with their networks, on the CPU
    algorithm: Algorithm | None = None  # instance with its options
    prompts: Prompts | None = None  # prompts to train on; in an evaluation, the held-out prompts
    held_out: Prompts | None = None  # prompts to evaluate on while a run trains
    # media (n, ...) -> features (n, d) by which samples are compared
    features: Callable[[Tensor], Any] | None = None


def with_live_objects(
    cfg: Any = None,
    *,
    policy: Any = None,
    rewards: Any = None,
    algorithm: Any = None,
    prompts: Any = None,
    features: Any = None,
) -> tuple[Config, Live]:
    """Put objects in the place of names, in a config or in an argument of load_config.

    policy: a diffusers pipeline or a Policy. rewards: as load_set takes them. algorithm: a subclass
    of Algorithm, or an instance. prompts: texts or records, or {"train": ..., "eval": ...}, where
    either may be the name of a file. features: a function media (n, ...) -> (n, d), as
    diversity.features. An object that does not fit -> ValueError.
    """
    whole = isinstance(cfg, Config)
    if whole:
        tree, problems = cfg.model_dump(mode="json"), []
        if policy is not None:
            drop_defaults(tree)
    else:  # the usual model's file is left out, because its settings suit that model only
        stated = cfg.get("model") if isinstance(cfg, Mapping) else None
        stated = stated.get("source") if isinstance(stated, Mapping) else stated
        if policy is not None and stated is not None:
            _refuse_both(stated, policy)
        tree, problems = composed(cfg, ["~model"] if policy is not None else ())
    live: dict[str, Any] = {}
    if rewards is not None:
        live["rewards"] = place_rewards(tree, rewards)
    if algorithm is not None:
        live["algorithm"] = place_algorithm(tree, algorithm)
    if prompts is not None:
        live |= place_prompts(tree, prompts)
    if policy is not None:
        place_policy(tree, policy)
        live["policy"] = policy
    if features is not None:
        if not callable(features) or isinstance(features, type):
            raise ValueError(
                f"features is a {type(features).__name__}; give a function of media (n, ...) that"
                " returns (n, d), or a name as diversity.features"
            )
        tree.setdefault("diversity", {})["features"] = registry.live_name(features)
        live["features"] = features
    if whole and not live:
        return cfg, Live()
    return validated(tree, problems), Live(**live)


def held_out_of(*, policy: Any = None, rewards: Any = None, prompts: Any = None) -> Live:
    """Objects that a script hands over to evaluate a run; its prompts are the held-out ones."""
    if policy is not None:
        live_name_of(policy)  # raises ValueError for an object that cannot be a policy
    own = prompts.get("eval") if isinstance(prompts, Mapping) else prompts
    return Live(
        policy=policy,
        rewards=None if rewards is None else load_set(rewards),
        prompts=None if own is None else prompts_of(own, "prompts"),
    )


def prompts_of(given: Any, what: str) -> Prompts:
    """Load prompts of a list of texts or records, or of the source of this name."""
    return load_prompts(given) if isinstance(given, str) else records(given, what)


def place_rewards(tree: dict[str, Any], given: Any) -> RewardSet:
    """Write the section of rewards: those that are named keep their names and settings."""
    spec: Mapping[str, Any] = given.rewards if isinstance(given, RewardSet) else by_label(given)
    chosen = load_set(given)
    section: dict[str, dict[str, Any]] = {}
    for label in chosen.rewards:
        entry = spec[label]
        thing = entry.get("reward") if isinstance(entry, Mapping) else entry
        if callable(thing) or isinstance(thing, Reward):
            section[label] = {"name": registry.live_name(thing)}
        else:
            section[label] = dict(entry) if isinstance(entry, Mapping) else {}
        section[label] |= chosen.stated(label)
    tree["reward"] = section
    return chosen


def place_algorithm(tree: dict[str, Any], given: Any) -> Algorithm:
    """Write the section of the algorithm. A class has the options of the config where that names
    the same class, as when a run is resumed; else its defaults."""
    made = given if isinstance(given, Algorithm) else None
    cls = checked(given if made is None else type(given), "algorithm")
    package, _, module = cls.__module__.rpartition(".")
    shipped = package == "flowrl.algorithms" and module in registry.shipped(package)
    name = module if shipped else registry.live_name(cls)
    if made is None:
        known = tree.get("algorithm") or {}
        options = options_of(known) if known.get("name") == name else {}
        made = cls(cls.Config.model_validate(options))
    tree["algorithm"] = {"name": name, **made.config.model_dump(mode="json")}
    return made


def place_prompts(tree: dict[str, Any], given: Any) -> dict[str, Prompts]:
    """Write the section of the data: held-out prompts are those that are given with the prompts to
    train on, or none."""
    data = tree.setdefault("data", {})
    if data.get("offline"):
        raise ValueError(
            f"data.offline={data['offline']} brings its own prompts; leave prompts= out"
        )
    parts = given if isinstance(given, Mapping) else {"train": given}
    if parts.keys() - {"train", "eval"} or "train" not in parts:
        raise ValueError(
            f"prompts has the keys {sorted(map(str, parts))}; give a list, or"
            ' {"train": ..., "eval": ...}'
        )
    out = {}
    data["eval"] = None
    for part, target in (("train", "prompts"), ("eval", "held_out")):
        if (value := parts.get(part)) is None:
            continue
        what = f"prompts[{part!r}]" if isinstance(given, Mapping) else "prompts"
        out[target] = prompts_of(value, what)
        number = len(out[target])
        count = f"{registry.LIVE}{number} prompt{'s' * (number != 1)}"
        data[part] = value if isinstance(value, str) else count
    return out


def drop_defaults(tree: dict[str, Any]) -> None:
    """Take the usual prompts and rewards out of a config in which nobody chose a model: they are
    those of the usual one, and a live policy is another."""
    usual = composed()[0]
    if tree["model"]["source"] != usual["model"]["source"]:
        return
    if tree["data"]["train"] == usual["data"]["train"] and not tree["data"]["offline"]:
        tree["data"] |= {"train": "", "eval": None}
    if tree["reward"] == usual["reward"]:
        tree["reward"] = {}


def place_policy(tree: dict[str, Any], given: Any) -> None:
    """Write the section of the model, and what is trained where a Policy says it."""
    name = live_name_of(given)
    model, train = tree.setdefault("model", {}), tree.setdefault("train", {})
    usual, before = composed()[0]["model"], model.get("source")
    if before == usual["source"]:  # nobody chose this model or its arguments
        stated = model.get("pipeline", {})
        model["pipeline"] = {k: v for k, v in stated.items() if usual["pipeline"].get(k) != v}
        if dropped := sorted(stated.keys() - model["pipeline"].keys()):
            logger.info(
                f"model.pipeline: {', '.join(dropped)} are those of the usual model;"
                f" {registry.label_of(name)} is called with its own"
            )
    elif before != ModelConfig.model_fields["source"].default and not registry.is_live(before):
        _refuse_both(before, given)
    model["source"] = name
    networks, quantized = _networks(given), model.get("quantize", "none")
    kinds = {kind_of(network) for network in networks}
    kind = next((kind for kind in BACKENDS if kind in kinds), "none")
    if isinstance(given, Policy):  # a Policy is used as it is
        _check_loaded(model, kind)
        train["mode"] = "full" if given.trainable.lora is None else "lora"
        if given.trainable.lora is not None:
            train["lora"] = dict(given.trainable.options)
    if quantized == "none" and kind != "none":
        model["quantize"] = kind
    # a generator has no networks, and computes in fp32
    dtype = computing_type(networks[0]) if networks else torch.float32
    model |= {"dtype": DTYPES[dtype]} if dtype in DTYPES else {}


def _networks(given: Any) -> list[nn.Module]:
    """The networks of a policy or pipeline, the one that denoises first."""
    parts = given.networks if isinstance(given, Policy) else given.components
    names = sorted(parts, key=lambda name: name not in ("transformer", "unet"))
    return [parts[name] for name in names if isinstance(parts[name], nn.Module)]


def _check_loaded(model: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError for settings that only loading reads, because a Policy, quantised as `kind`,
    is loaded already."""
    if model.get("pipeline") or model.get("hints"):
        raise ValueError(
            "model.pipeline and model.hints are read when a pipeline is loaded, and the policy"
            " is loaded already; give them to flowrl.load_policy"
        )
    stated = model.get("quantize", "none")
    if stated not in ("none", kind):
        raise ValueError(
            f"model.quantize={stated} is read when a pipeline is loaded, and the policy is loaded"
            f" already (quantize={kind}); give it to flowrl.load_policy"
        )


def _refuse_both(stated: str, given: Any) -> NoReturn:
    name = registry.label_of(live_name_of(given))
    raise ValueError(
        f"model={stated} and a live policy, {name}, are both given; leave one of them out"
    )


def live_name_of(given: Any) -> str:
    """Name of a policy or pipeline in the config; raises ValueError if it cannot be a policy."""
    if isinstance(given, Policy):
        networks = [getattr(given, "pipe", None), *given.modules.values(), given]
        return registry.live_name(next(one for one in networks if one is not None))
    kind = type(given).__name__
    if isinstance(given, str | Path):
        wrong = (
            f'="{given}" is a name: give it to the config, as model={given}; policy= takes a'
            " pipeline or what flowrl.load_policy returns"
        )
    elif isinstance(given, nn.Module):
        wrong = (
            f" is a plain {kind}, whose latents have any shape: pass"
            " flowrl.load_policy(module, shape=(...)) instead"
        )
    elif isinstance(given, type):
        wrong = (
            f" is {given.__name__}, a class; give an object of it, such as what from_pretrained"
            " returns"
        )
    elif not hasattr(given, "components"):
        wrong = f" is a {kind}; give a diffusers pipeline, or what flowrl.load_policy returns"
    else:
        return registry.live_name(given)
    raise ValueError(f"policy{wrong}")


# ---------------------------------------------------------------------- asked for again


def named(cfg: Config) -> dict[str, str]:
    """Which arguments were live objects in a config, and what they were: {"policy": "FluxPipeline",
    "rewards": "red, blue"}."""
    names = {
        "policy": [cfg.model.source],
        "rewards": [str(entry.get("name")) for entry in cfg.reward.values()],
        "algorithm": [cfg.algorithm["name"]],
        "prompts": [cfg.data.train, cfg.data.eval],
        "features": [cfg.diversity.features],
    }
    out = {}
    for argument, found in names.items():
        if live := [registry.label_of(name) for name in found if registry.is_live(name)]:
            out[argument] = ", ".join(live)
    return out


def check_given(
    cfg: Config, live: Live, *, call: str = "flowrl.train", needed: Sequence[str] = ARGUMENTS
) -> None:
    """Raise ValueError that asks for live objects which a config names and which were not
    passed."""
    found = named(cfg)
    missing = [a for a in needed if a in found and getattr(live, a) is None]
    if missing:
        *first, last = (f"{argument} ({found[argument]})" for argument in missing)
        had = f"{', '.join(first)} and {last}" if first else last
        one = len(missing) == 1
        was = "was a live object" if one else "were live objects"
        again = ", ".join(f"{argument}=..." for argument in missing)
        raise ValueError(
            f"this run's {had} {was}; pass {'it' if one else 'them'}: {call}(..., {again})"
        )
