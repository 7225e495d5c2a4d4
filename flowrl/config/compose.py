"""How a config is put together from layers, later wins: the schema's defaults, the chosen files of
configs/ (model, memory, data, reward, algorithm), an experiment, a YAML file, values of a script,
the command line.

The result is a plain tree that flowrl/config/schema.py judges. `reward.jpeg=0.5` is short for
`reward.jpeg.weight=0.5` in every layer, and so the weight and the settings of one reward never
overwrite each other, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigIndexError, OmegaConfBaseException
from pydantic import BaseModel

from flowrl.config.device import on_this_device, say
from flowrl.config.gone import without_gone
from flowrl.config.overrides import Override, as_loop, parse_override
from flowrl.runtime import registry, yaml_text
from flowrl.runtime.log import logger
from flowrl.runtime.paths import located, nearby
from flowrl.runtime.text import printable
from flowrl.runtime.typed_text import Kinds

Tree = dict[str, Any]
Options = dict[str, str | None]  # group -> chosen file of configs/; None: no file is chosen
LAYERS = ("model", "memory", "data", "reward", "algorithm")
NAMED = ("data", "reward")  # sections whose defaults suit the embedded models alone
GROUPS = (*LAYERS, "experiment")
SELF = "_self_"  # stands for the file itself in its list of defaults; it comes last anyway
TOO_DEEP = "the config nests too many lists and mappings, or a ${...} stands for itself"
# group -> key by which a section of a file makes its own choice; None: any key does
CHOOSES = {"model": "source", "data": "train", "reward": None, "algorithm": "name"}
# source of an embedded model -> the prompts of flowrl/data/prompts.py that it draws; others: shapes
DRAWS = {"package:flowrl.shapes/edit": "shapes_edit", "package:flowrl.shapes/wan": "shapes_motion"}
# group -> entry-point group through which installed packages add choices
INSTALLED = {"model": "flowrl.models", "algorithm": "flowrl.algorithms"}


class ConfigError(ValueError):
    """The user's settings are wrong; the message lists every problem found."""


@dataclass(frozen=True, slots=True)
class File:
    """An experiment, a user's YAML file, or a mapping of a script's."""

    tree: Tree = field(default_factory=dict)  # settings that it states, by section
    options: Options = field(default_factory=dict)  # the files of configs/ that it chooses
    # group -> choice that a mapping makes beside its sections, as `GROUP=...` on the command line
    chosen: Tree = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The words of a command line, sorted by what becomes of them."""

    options: Options = field(default_factory=dict)  # the files of configs/ that they choose
    own: Tree = field(default_factory=dict)  # sections of choices that need no file of configs/
    values: list[Override] = field(default_factory=list)  # everything else, in its order

    def overrules(self, group: str) -> bool:
        """Whether the words choose for a group, so that sections of files do not count."""
        if group == "algorithm" and group in self.own:
            return True
        return bool(self.options.get(group)) or group == "reward" and group in self.options


def compose(
    defaults: Tree,
    given: Sequence[File],
    overrides: Sequence[str],
    problems: list[str],
    kinds_of: Callable[[str, Any], Kinds],
    schema_of: Callable[[str], type[BaseModel]],
) -> Tree:
    """Lay all layers over each other in one tree; problems of the command line are added to those
    given. kinds_of: (key, tree so far) -> types that the setting takes. schema_of: a method's."""
    chosen_by = dict(pick for file in given for pick in file.chosen.items())
    line = read_command_line(overrides, problems, chosen_by)
    try:
        named = line.options | dict(pick for file in given for pick in file.options.items())
        files = [read_experiment(named), *given]
        picks = [*(file.options for file in files), line.options]
        picked = {group: option for chosen in picks for group, option in chosen.items()}
        chosen = read_yaml(config_folder() / "config.yaml") | picked
        source = source_of(files, line)
        unnamed = on_this_device(None if chosen["model"] else source)
        model = option_layer("model", chosen["model"]) if chosen["model"] else {"model": {}}
        if not is_embedded(source or model["model"].get("source", "")):
            chosen |= {group: None for group in NAMED if group not in picked}
            defaults = defaults | {"data": defaults["data"] | {"train": "", "eval": None}}
        merged = OmegaConf.merge(
            in_full(defaults),
            unnamed,
            model,
            *(option_layer(group, chosen[group]) for group in LAYERS[1:] if chosen[group]),
            *(in_full(without_overruled(layer, line)) for layer in files),
            line.own,
        )
        start_over(merged, line, picked.get("algorithm"), schema_of)
        # names come first: what a setting takes may depend on the name of its reward
        for override in sorted(line.values, key=lambda o: not o.key.endswith(".name")):
            apply_override(merged, override, kinds_of(override.key, merged), problems)
        say(source, unnamed, merged)
        return OmegaConf.to_container(merged, resolve=True)  # type: ignore[return-value]
    except RecursionError:
        raise ConfigError("\n".join([*problems, TOO_DEEP])) from None
    except ConfigError as error:  # an error about a file, whose name it says
        raise ConfigError("\n".join([*problems, str(error)])) from error
    except ConfigIndexError as error:
        whole = str(error.full_key).rpartition("[")[0]
        short = f"{error.full_key}: the list is shorter; write it whole, as {whole}=[...]"
        raise ConfigError("\n".join([*problems, short])) from error
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError("\n".join([*problems, printable(error)])) from error


def source_of(files: Sequence[File], line: CommandLine) -> str | None:
    """Return model.source as files, a script or the command line state it; the last one counts."""
    trees = [*(file.tree for file in files), line.own]
    found = [(tree.get("model") or {}).get("source") for tree in trees]
    found += [o.value() for o in line.values if o.key == "model.source"]
    stated = [source for source in found if isinstance(source, str)]
    return stated[-1] if stated else None


def is_embedded(model: str) -> bool:
    """Whether a model (its name in configs/model, or its source) comes with flowrl; also true for
    unknown names, which are refused elsewhere."""
    model = _source_of(model)
    return model.startswith("package:flowrl.") or not section_of("model", model)


def drawn_by(model: str) -> str | None:
    """Name the world that an embedded model draws, as data=NAME has it; None of other models."""
    source = _source_of(model)
    return DRAWS.get(source, "shapes") if source.startswith("package:flowrl.") else None


def unseen_words(model: str, texts: Iterable[str]) -> str | None:
    """Write a sentence about words of these prompts that an embedded model never saw; None of other
    models, or where it saw them all."""
    from flowrl.data.prompts import lists_of  # imported here, because it takes seconds to load
    from flowrl.shapes.prompts import vocabulary, words

    world = drawn_by(model)
    if world is None:
        return None
    known = vocabulary(lists_of(world).all_prompts())
    new = [word for word in dict.fromkeys(words(" ".join(texts))) if word not in known]
    if not new:
        return None
    listed = ", ".join(new[:5]) + ", ..." * (len(new) > 5)
    return (
        f"the embedded model never saw these words: {listed}; all that it knows are"
        f" {', '.join(sorted(known))}"
    )


def _source_of(model: str) -> str:
    """The source that a name of configs/model stands for; another source as it is."""
    listed = model in options("model")
    return option_layer("model", model)["model"]["source"] if listed else model


# ---------------------------------------------------------------------- the command line


def read_command_line(
    overrides: Sequence[str], problems: list[str], chosen_by: Mapping[str, Any] = {}
) -> CommandLine:
    """Sort the words of a command line by what becomes of them; what a script chooses comes
    first."""
    line, said, left_out = CommandLine(), {}, set()
    for group, value in chosen_by.items():
        if value is None:
            line.options[group] = None
        else:
            choose(line, group, value, problems)
    for text in overrides:
        try:
            override = parse_override(text)
        except ValueError as error:
            problems.append(str(error))
            continue
        # groups are chosen before any value is set, wherever their words stand
        if override.key not in GROUPS:
            line.values.append(override)
        elif override.sign == "~":
            left_out.add(override.key)
        else:
            choose(line, override.key, override.value(), problems)
            said[override.key] = text
    for group in sorted(left_out):
        if group in line.options:
            problems.append(
                f'"~{group}" leaves out what {said.get(group, group)} chooses; give one of the two'
            )
        line.options[group] = None
    return line


def choose(line: CommandLine, group: str, value: Any, problems: list[str]) -> None:
    """Take `group=value`, which names a file of configs/ or something that needs none."""
    file = str(value).rpartition(":")[0] if group in ("reward", "algorithm") else "."
    if value in options(group):
        line.options[group] = value
        line.own.pop(group, None)
    elif str(value).endswith(".py"):
        problems.append(f"{group}={value}: a file needs a name in it: {group}={value}:NAME")
    elif registry.is_place(value) and not located(file).exists():
        problems.append(f"{group}={value}: there is no file {file}{nearby(file)}")
    elif own := section_of(group, str(value)):
        line.options[group], line.own[group] = None, own
    else:
        near = registry.did_you_mean(str(value), names(group))
        several = str(value).split(",")
        near = as_loop(group, several) if len(several) > 1 else near
        near = '; did you mean "flow_grpo"?' if value == "grpo" else near
        problems.append(f'unknown {group} "{value}"{near}')


def section_of(group: str, value: str) -> Tree:
    """Return the section of a choice that has no file in configs/: a reward's name, a hub id or
    folder of a model, an entry point, "path/to/file.py:NAME"; {} for anything else."""
    here = registry.is_place(value)
    if group == "reward" and (here or value in registry.choices("flowrl.rewards")):
        label = registry.label_of(value)
        return {label: {"weight": 1.0} | ({} if label == value else {"name": value})}
    if group == "model":
        placed = here or "/" in value or Path(value).exists()
        return {"source": value} if placed or value in installed(group) else {}
    if group == "algorithm" and (here or value in installed(group)):
        return {"name": value}
    named = here or value.startswith("hf:")  # a function in a file, or a dataset on the hub
    return {"train": value, "eval": None} if group == "data" and named else {}


def names(group: str) -> list[str]:
    """Names that `group=` takes: files of configs/, rewards, and those of installed packages."""
    rewards = registry.choices("flowrl.rewards") if group == "reward" else []
    return sorted({*options(group), *rewards, *installed(group)})


def installed(group: str) -> list[str]:
    """Names that installed packages bring for `group=`."""
    return list(registry.installed(INSTALLED[group])) if group in INSTALLED else []


def start_over(tree: Any, line: CommandLine, chosen: str | None, schema_of: Any) -> None:
    """Drop the file's options where `algorithm.name=` names another method, as a section of a YAML
    file does. A method of one's own beside a file that was chosen keeps the options it knows."""
    named = [o.value() for o in line.values if o.key == "algorithm.name" and o.sign != "~"]
    if named and named[-1] in set(options("algorithm")) - {*registry.choices("flowrl.algorithms")}:
        raise ConfigError(f"{named[-1]} is a set of options: write algorithm={named[-1]}")
    if not named or named[-1] == tree.algorithm.get("name"):
        return
    name, given = named[-1], tree.algorithm
    variant = chosen and registry.is_outside(INSTALLED["algorithm"], name)
    known = schema_of(name).model_fields if variant else {}
    tree.algorithm = {"name": name} | {key: given[key] for key in given if key in known}
    left = [str(key) for key in given if key not in {*known, "name", "label"}]
    if chosen and left:
        logger.warning(f"{name} takes no {', '.join(left)} from algorithm={chosen}")


def apply_override(tree: Any, override: Override, kinds: Kinds, problems: list[str]) -> None:
    """Set, add or leave out one key of the merged tree, which takes these kinds."""
    try:
        key, value = override.key, override.value(kinds)
    except ValueError as error:
        problems.append(str(error))
        return
    if override.sign == "~":
        leave_out(tree, override, value, problems)
        return
    grows = key.startswith("reward.") or isinstance(value, dict | list)
    if override.sign == "+" and not grows and OmegaConf.select(tree, key) is not None:
        problems.append(f'"{override.text}": {key} is there already; leave out the +')
        return
    if key.startswith("reward.") and key.count(".") == 1 and not isinstance(value, dict):
        value = {"weight": value}
    if key == "data.sampler" and isinstance(value, str):
        value = {"mode": value}
    OmegaConf.update(tree, key, value, merge=not is_course(key), force_add=True)


def is_course(key: str) -> bool:
    """Whether a key may hold numbers by iteration, {0: 1, 100: 0.2}; such a mapping replaces an
    earlier one as a whole."""
    match key.split("."):
        case ["reward", _, "weight"] | ["reward", _, "gate", _]:
            return True
    return False


def leave_out(tree: Any, override: Override, value: Any, problems: list[str]) -> None:
    """Take out the key of `~key`, or of `~key=value` where it has that value."""
    parent, _, last = override.key.rpartition(".")
    holder = OmegaConf.select(tree, parent) if parent else tree
    if not OmegaConf.is_dict(holder) or last not in holder:
        near = registry.did_you_mean(last, map(str, holder or ()))
        problems.append(f'"{override.text}": no such reward or setting was chosen{near}')
    elif value is not None and value != holder[last]:
        problems.append(f'"{override.text}": the value is {holder[last]}')
    else:
        del holder[last]


# ---------------------------------------------------------------------- files


def config_folder() -> Path:
    """configs/ of the checkout, or of the installed wheel."""
    import flowrl.configs

    return Path(next(iter(flowrl.configs.__path__)))


def options(group: str) -> list[str]:
    """Names that `group=` accepts, sorted."""
    return sorted(p.stem for p in (config_folder() / group).glob("*.yaml"))


def read_yaml(path: Path) -> Tree:
    """Read a YAML file that holds a mapping; anything else -> ConfigError that names it."""
    if not path.exists():
        raise ConfigError(f"there is no file {path}{nearby(path)}")
    try:
        tree = without_gone(yaml_text.load(yaml_text.read(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {printable(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: a config is a mapping of keys to values, this is a {type(tree).__name__}"
        )
    return tree


def read_file(path: Path) -> File:
    """Read an experiment or a user's file: what it states, and which options it chooses."""
    return file_of(read_yaml(path), path)


def file_of(tree: Tree, where: Path | str) -> File:
    """Make a layer of a tree. where: name of the layer in errors."""
    for group in LAYERS:
        check_section(where, group, tree.get(group))
    listed = [entry for entry in listed_defaults(where, tree) if entry != SELF]
    chosen = dict(option_of(where, entry) for entry in listed)
    for group, key in CHOOSES.items():  # a section with its own choice builds on no option file
        if group in tree and (key is None or key in (tree[group] or {})):
            chosen.setdefault(group, None)
    return File(tree, chosen)


def check_section(where: Path | str, group: str, section: Any) -> None:
    """Raise ConfigError for `model: sd1.5`, which is how the command line chooses."""
    if not isinstance(section, dict | None):
        advice = f'write "defaults: [{{override /{group}: {section}}}]"'
        hint = f"; to choose a file of configs/{group}, {advice}" * isinstance(section, str)
        raise ConfigError(
            f"{where}: {group}={section!r} should be a mapping of keys to values{hint}"
        )


def listed_defaults(where: Path | str, tree: Tree) -> list[Any]:
    """Take the list `defaults` out of the tree of a file."""
    listed = tree.pop("defaults", [])
    if not isinstance(listed, list):
        raise ConfigError(
            f"{where}: defaults={listed!r} should be a list of the files of configs/ that this one"
            ' builds on, as "defaults: [{override /algorithm: nft}]"'
        )
    return listed


def option_of(where: Path | str, entry: Any) -> tuple[str, str | None]:
    """Read an entry of a file's defaults: {"override /algorithm": "nft"} -> ("algorithm",
    "nft")."""
    word, option = next(iter(entry.items())) if isinstance(entry, dict) else (entry, None)
    group = str(word).removeprefix("override /")
    if group not in GROUPS or group == word:
        raise ConfigError(
            f"{where}: defaults: {entry!r} should be {{override /GROUP: NAME}}, which chooses a"
            f" file of configs/GROUP, or null for none; GROUP is {', '.join(GROUPS)}"
        )
    if option is not None and option not in options(group):
        near = registry.did_you_mean(str(option), options(group))
        raise ConfigError(f'{where}: unknown {group} "{option}"{near}')
    return group, option


def read_experiment(chosen: Options) -> File:
    name = chosen.get("experiment")
    return read_file(config_folder() / "experiment" / f"{name}.yaml") if name else File()


def option_layer(group: str, name: str) -> Tree:
    """Read a file of configs/GROUP as a tree of all sections, on top of those that its defaults
    name.

    A file states the keys of its own section, or, below "# @package _global_", those of all.
    """
    path = config_folder() / group / f"{name}.yaml"
    tree = read_yaml(path)
    below = [option_layer(group, base) for base in listed_defaults(path, tree) if base != SELF]
    everywhere = path.read_text(encoding="utf-8").startswith("# @package _global_")
    layers = [*below, in_full(tree if everywhere else {group: tree})]
    if group == "algorithm":  # a label tells the files apart that set up one algorithm
        layers.append({group: {"label": name}})
    return OmegaConf.to_container(OmegaConf.merge(*layers))  # type: ignore[return-value]


def without_overruled(file: File, line: CommandLine) -> Tree:
    """Return a file's tree without the sections for which the command line, or another mapping,
    made its own choice."""

    def overruled(key: str) -> bool:
        return key in LAYERS and key not in file.chosen and line.overrules(key)

    return {key: value for key, value in file.tree.items() if not overruled(key)}


def in_full(tree: Tree) -> Tree:
    """Write every reward's weight, and the mode of data.sampler, under its key."""
    out = tree | {"reward": one_form(tree.get("reward") or {})}
    if isinstance(data := tree.get("data"), dict) and isinstance(data.get("sampler"), str):
        out["data"] = data | {"sampler": {"mode": data["sampler"]}}
    return out


def one_form(rewards: Tree) -> Tree:
    """Write every weight of a section under its key: {"jpeg": 0.5} -> {"jpeg": {"weight": 0.5}}.

    >>> one_form({"jpeg": 0.5, "shapes": {"reading": "strict"}})
    {'jpeg': {'weight': 0.5}, 'shapes': {'reading': 'strict'}}
    """
    return {
        label: entry if isinstance(entry, dict) else {"weight": entry}
        for label, entry in rewards.items()
    }
