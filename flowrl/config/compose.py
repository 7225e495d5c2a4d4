"""How a config is put together: Hydra composes the option files of configs/, an experiment, a YAML
file and the command line.

The result is a plain tree that flowrl/config/schema.py judges. Rewards are merged here rather than by
Hydra: `reward.jpeg=0.5` is short for `reward.jpeg.weight=0.5`, and so the weight and the settings
of one reward never overwrite each other, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flowrl.runtime import registry

GROUPS = ("model", "data", "reward", "algorithm", "experiment")
DELETE = object()
CHOOSES = {
    "model": "source",
    "data": "train",
    "reward": None,
    "algorithm": "name",
}  # the key by which a section makes its own choice


class ConfigError(ValueError):
    """The user's settings are wrong; the message lists every problem found."""


@dataclass
class Overrides:
    """The command line, sorted: for Hydra, options chosen for groups, and (key below reward, value
    or DELETE) in their order."""

    known: list[str] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)
    rewards: list[tuple[str, Any]] = field(default_factory=list)
    no_reward: bool = False  # ~reward


def config_folder() -> Path:
    """configs/ of the checkout, or of the installed wheel."""
    import flowrl.configs

    return Path(next(iter(flowrl.configs.__path__)))


def options(group: str) -> list[str]:
    """Names that `group=` accepts, sorted."""
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping; anything else -> ConfigError that names it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: a config is a mapping of keys to values, this is a {type(tree).__name__}"
        )
    for group in CHOOSES:
        if not isinstance(tree.get(group, {}), dict | None):
            value = tree[group]
            hint = (
                f'; to choose a file of configs/{group}, write "defaults: [{{override /{group}:'
                f' {value}}}]"' * isinstance(value, str)
            )
            raise ConfigError(
                f"{path}: {group}={value!r} should be a mapping of keys to values{hint}"
            )
    return tree


def sort_overrides(overrides: Sequence[str], problems: list[str]) -> Overrides:
    """Overrides by what becomes of them; keys that Hydra gets are forced in, because pydantic
    judges them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, out, itself = OverridesParser.create(), Overrides(), None
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
        except HydraException as error:
            problems.append(f'"{text}" is not key=value: {str(error).splitlines()[0]}')
            continue
        key, value = parsed.key_or_group, parsed.value()
        if parsed.is_sweep_override():
            problems.append(
                f'"{text}" gives several values; a run takes one, and a list is written {key}=[...]'
            )
        elif key.startswith("reward."):
            out.rewards.append(
                (key.removeprefix("reward."), DELETE if parsed.is_delete() else _weight(key, value))
            )
        elif key == "reward" and parsed.is_delete():
            out.no_reward = True
        elif key not in GROUPS or text.startswith(("~", "+")):
            out.known.append(text if text.startswith(("~", "+")) else f"++{text}")
        elif value in options(key):
            out.chosen[key] = str(value)
            itself = None if key == "reward" else itself
        elif key == "reward" and is_reward(value):  # a reward needs no file in configs/reward
            out.chosen["reward"] = ""
            itself = (
                label_of(value),
                {"weight": 1.0} | ({"name": value} if label_of(value) != value else {}),
            )
        elif key == "model" and "/" in str(
            value
        ):  # a hub id or a folder needs no file in configs/model
            out.known += ["~model", f"++model.source={text.partition('=')[2]}"]
            out.chosen[key] = ""
        else:
            valid = {
                *options(key),
                *(registry.choices("flowrl.rewards") if key == "reward" else []),
            }
            problems.append(f'unknown {key} "{value}"{registry.did_you_mean(str(value), valid)}')
            out.chosen[key] = ""
    if out.no_reward and (itself or out.chosen.get("reward")):
        problems.append(
            f'"~reward" leaves out what reward={itself[0] if itself else out.chosen["reward"]}'
            " chooses; give one of the two"
        )
    if itself is not None:
        out.no_reward = True
        out.rewards.insert(0, itself)
    return out


def is_reward(value: Any) -> bool:
    """Whether `reward=value` names a reward itself: a file of rewards/, or a function in a user's
    own file."""
    return ".py:" in str(value) or value in registry.choices("flowrl.rewards")


def label_of(name: str) -> str:
    """What a reward is called in the log unless a label is given: "my/file.py:red" -> "red"."""
    return name.rpartition(":")[2] if ".py:" in name else name


def compose(
    defaults: dict[str, Any], overrides: Overrides, extra: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Schema defaults <- model <- data <- reward <- algorithm <- experiment <- file <- overrides.
    extra: the file's tree."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    chosen = overrides.chosen
    picks = [
        f"{group}={option}" for group, option in chosen.items() if option and group != "experiment"
    ]
    drop, rewards = set(), []
    sources = {"experiment": {}, "file": extra}
    if chosen.get("experiment"):
        sources["experiment"] = read_yaml(
            config_folder() / "experiment" / f"{chosen['experiment']}.yaml"
        )
    store = ConfigStore.instance()
    store.store(name="schema", node=OmegaConf.create(defaults))
    for source, tree in sources.items():
        tree = {
            key: value for key, value in tree.items() if not (key in CHOOSES and chosen.get(key))
        }  # the command line's choice wins
        drop |= {
            group
            for group, key in CHOOSES.items()
            if _own_choice(tree, group, key) and group not in chosen
        }
        rewards.append(one_form(tree.pop("reward", None) or {}))
        if tree:
            store.store(
                name="_composed", node=OmegaConf.create(tree), group=source, package="_global_"
            )
            picks.append(f"{source}=_composed")
    rewards = [] if overrides.no_reward else rewards
    drop |= {"reward"} if overrides.no_reward and not chosen.get("reward") else set()
    try:
        with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
            composed = hydra_compose(
                "config", [*picks, *(f"~{group}" for group in sorted(drop)), *overrides.known]
            )
        OmegaConf.set_struct(composed, False)
        chosen_rewards = OmegaConf.to_container(composed.reward) if "reward" in composed else {}
        composed.reward = _merge_rewards(
            [one_form(chosen_rewards), *rewards], overrides.rewards, problems
        )
        return OmegaConf.to_container(composed, resolve=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError("\n".join([*problems, " ".join(str(error).split())])) from error


def one_form(rewards: dict[str, Any]) -> dict[str, Any]:
    """A reward section with every weight under its key: {"jpeg": 0.5} -> {"jpeg": {"weight": 0.5}}.

    >>> one_form({"jpeg": 0.5, "shapes": {"reading": "strict"}})
    {'jpeg': {'weight': 0.5}, 'shapes': {'reading': 'strict'}}
    """
    return {
        label: entry if isinstance(entry, dict) else {"weight": entry}
        for label, entry in rewards.items()
    }


def _weight(key: str, value: Any) -> Any:
    """The value of reward.LABEL is a weight."""
    return {"weight": value} if key.count(".") == 1 and not isinstance(value, dict) else value


def _own_choice(tree: dict[str, Any], group: str, key: str | None) -> bool:
    """Whether a file's section chooses for itself, so that the default option of the group must not
    shine through."""
    return (
        group in tree
        and (key is None or key in (tree[group] or {}))
        and f"/{group}" not in str(tree.get("defaults", ""))
    )


def _merge_rewards(
    sections: list[dict[str, Any]], overrides: list[tuple[str, Any]], problems: list[str]
) -> Any:
    """Sections, later wins key by key, then the command line's values."""
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(*sections)
    for key, value in overrides:
        if value is not DELETE:
            OmegaConf.update(merged, key, value, merge=True, force_add=True)
            continue
        parent, _, last = key.rpartition(".")
        holder = OmegaConf.select(merged, parent) if parent else merged
        if not OmegaConf.is_dict(holder) or last not in holder:
            problems.append(
                f'"~reward.{key}": no such reward or setting was'
                f" chosen{registry.did_you_mean(last, map(str, holder or ()))}"
            )
        else:
            del holder[last]
    return merged
