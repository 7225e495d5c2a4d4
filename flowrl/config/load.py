"""A config is read: composed, validated, and every problem found becomes a sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pydantic
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from flowrl.config.compose import (
    GROUPS,
    ConfigError,
    File,
    Tree,
    compose,
    file_of,
    is_embedded,
    read_file,
    read_yaml,
)
from flowrl.config.overrides import as_loop
from flowrl.config.schema import Config, algorithm_schema
from flowrl.config.section import NotNamed
from flowrl.rewards.core.find import setting_kinds
from flowrl.runtime import registry
from flowrl.runtime.text import printable, visible
from flowrl.runtime.typed_text import PLAIN, TEXT, Kinds, kinds_at, kinds_of_argument
from flowrl.runtime.yaml_text import flatten

Given = str | Path | Mapping[str, Any] | None
# section that a config must fill -> what is missing, the words to add, and a script's argument
TO_NAME = {
    "data": ("no prompts", "data=everyday (or data.train=prompts.txt)", 'prompts="everyday:train"'),
    "reward": ("no reward", "reward=pickscore", 'rewards="pickscore"'),
}
# file: names of TRL, kohya's scripts, SimpleTuner, diffusers' examples and Hydra -> our names
FILE_OF_SYNONYMS = Path(__file__).with_name("synonyms.yaml")
LONGEST_VALUE = 120  # most characters of a wrong value in a sentence
ONE_VALUE = {"int_type", "float_type", "bool_type", "string_type", "literal_error"}
# beginnings of the names that pydantic adds to an error's location for a part of a union
UNION_PARTS = ("literal[", "bool", "float", "constrained")


def load_config(name: Given = None, overrides: Sequence[str] = (), **values: Any) -> Config:
    """Compose and validate a config.

    name: an experiment of configs/experiment, a YAML file (a run's config.yaml, or one that states
    what differs), a mapping of such values, or None.
    overrides: `group=option` or `key.sub=value`, as on the command line.
    values: sections and keys as a mapping has them, laid over it: iterations=2,
    batch={"prompts": 4}, model="sd1.5". A key of a mapping may be dotted, {"batch.prompts": 4}.
    One ConfigError says every problem found.
    """
    tree, problems = composed(name, overrides, **values)
    return validated(tree, problems)


def composed(
    name: Given = None, overrides: Sequence[str] = (), **values: Any
) -> tuple[dict[str, Any], list[str]]:
    """Return the tree that `load_config` validates, and the problems found in making it."""
    problems: list[str] = []
    files = []
    if isinstance(overrides, str):
        raise ConfigError(f'overrides="{overrides}" should be a list of words: ["{overrides}"]')
    if isinstance(name, Mapping):
        values = {**name, **values}
    elif name is not None and not isinstance(name, str | Path):
        raise ConfigError(
            f"a config is an experiment's name, a YAML file or a mapping, not a"
            f" {type(name).__name__}"
        )
    elif name is not None and (str(name).endswith((".yaml", ".yml")) or Path(name).is_file()):
        files.append(read_file(Path(name)))
    elif name is not None:
        files.append(File(chosen={"experiment": str(name)}))
    if values:
        chosen, tree = _sorted_out(values)
        files.append(replace(file_of(tree, "the config"), chosen=chosen))
    defaults = Config.model_construct().model_dump(mode="json")
    return compose(defaults, files, overrides, problems, _kinds_of, algorithm_schema), problems


def _kinds_of(key: str, tree: Any) -> Kinds:
    """Types that the setting of a key takes, in a tree that names its algorithm and its rewards."""
    match key.split("."):
        case ["model", "pipeline", argument]:
            return kinds_of_argument(argument)
        case ["reward", label, setting, *path]:
            name = str(OmegaConf.select(tree, f"reward.{label}.name") or label)
            return setting_kinds(name, [setting, *path])
        case ["algorithm", "name" | "label"]:
            return TEXT
        case path:
            return kinds_at(Config, path)


def _sorted_out(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the values of a script: (choices as `model="sd1.5"`, the tree of all others)."""
    chosen = {k: v for k, v in values.items() if k in GROUPS and not isinstance(v, Mapping)}
    tree = OmegaConf.create({})
    try:
        for key, value in values.items():
            if key not in chosen:
                OmegaConf.update(tree, str(key), _plain(value), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the config: {printable(error)}") from error
    return chosen, OmegaConf.to_container(tree)  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    """Turn mappings, tuples and paths into what YAML would give."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def read_config(path: str | Path) -> Config:
    """Read the resolved config.yaml of a run; nothing is composed below it."""
    return validated(read_yaml(Path(path)), [])


def read_for_sampling(path: str | Path) -> Config:
    """Read the config.yaml of a run whose own rewards and algorithm may be gone, as where the run
    was moved: only training needs these, unless the algorithm brings small networks."""
    try:
        return read_config(path)
    except ConfigError:
        tree = read_yaml(Path(path))
        kept: Tree = {name: tree[name] for name in ("seed", "model", "train") if name in tree}
        usual: Tree = {"algorithm": {"name": "nft"}, "reward": {"jpeg": {}}}
        usual["data"] = {"train": "everyday:train"}
        if not set(flatten(kept).get("train.parts", ())) <= {"denoiser", "text_encoder"}:
            raise
        return validated(usual | kept, [])


def dump(cfg: Config, encoding: str = "utf-8") -> str:
    """Write the resolved config as YAML, in the order of the schema; control characters, and
    characters that the encoding lacks, become escapes. `read_config` gives an equal Config."""
    written = partial(yaml.dump, cfg.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)
    text = written(allow_unicode=True)
    return text if text == visible(text, encoding) else written()


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes the texts that OmegaConf would read as numbers and YAML 1.1 would not,
    such as 1e-4."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.][0-9._]*([eE][-+]?[0-9]+)?"), "-+.0123456789"
)


def diff(old: Config, new: Config) -> list[str]:
    """Dotted keys whose values differ, sorted."""
    a, b = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    missing = object()
    return sorted(key for key in a.keys() | b.keys() if a.get(key, missing) != b.get(key, missing))


def validated(values: dict[str, Any], problems: list[str]) -> Config:
    """Validate a composed tree; raise one ConfigError with earlier problems and its own."""
    try:
        cfg = Config.model_validate(values)
    except pydantic.ValidationError as error:
        errors = error.errors()
        lacking = {e["loc"] for e in errors if isinstance(e.get("ctx", {}).get("error"), NotNamed)}
        names = sorted(str(loc[0]) for loc in lacking)
        # where a wrong name was given, that was said already
        if names := [n for n in names if not any(p.startswith(f"unknown {n} ") for p in problems)]:
            problems = [*problems, _not_named(names, values)]
        own = [e for e in errors if e["loc"] not in lacking]
        problems = [*problems, *_sentences(own, values.get("algorithm"))]
    if problems:
        raise ConfigError("\n".join(problems))
    return cfg


def _not_named(sections: list[str], values: Mapping[str, Any]) -> str:
    """Say which words to add. Only the embedded models have defaults for them."""
    model = values.get("model")  # a text in a damaged file
    source = str(model.get("source") if isinstance(model, Mapping) else model)
    columns = zip(*(TO_NAME[section] for section in sections), strict=True)
    what, words, arguments = (" and ".join(column) for column in columns)
    none = f"{what} {'is' if sections == ['reward'] else 'are'} named"
    if registry.is_live(source) or not is_embedded(source):
        none += f" for {registry.label_of(source)}, and only the embedded models have defaults"
    add = arguments if registry.is_live(source) else words
    return f"{none}; add {add}, for example"


def _sentences(errors: list[Any], algorithm: Any) -> list[str]:
    """Write one sentence for each key; what the parts of a union ask for is joined by "or"."""
    sentences: dict[str, str] = {}
    loops: dict[str, str] = {}
    for e in errors:
        key = ".".join(part for part in map(str, e["loc"]) if not part.startswith(UNION_PARTS))
        text = _sentence(key, e, algorithm)
        if key in sentences:
            text = f"{sentences[key]} or {text.partition(' should be ')[2]}"
        sentences[key] = text
        if e["type"] in ONE_VALUE and len(several := _several(e["input"])) > 1:
            loops[key] = as_loop(key, several)
    return [sentence + loops.get(key, "") for key, sentence in sentences.items()]


def _sentence(key: str, error: Any, algorithm: Any) -> str:
    """One pydantic error as a sentence with the dotted key, the value, and what is allowed."""
    match error["type"]:
        case "extra_forbidden":
            return f'unknown key "{key}"{_nearest_keys(key, algorithm)}'
        case "invalid_key":
            return f'"{key}" is not a key: keys are words'
        case "missing":
            return _missing(key, error["input"])
        case "tuple_type" | "list_type":
            given = error["input"]
            example = printable(given, LONGEST_VALUE) if isinstance(given, str) else "1,2"
            return f"{key}={_given(error)} should be values in brackets, as [{example}]"
        case "too_long":
            most = error["ctx"]["max_length"]
            return f"{key}={_given(error)} should have at most {most} values"
        case "value_error":
            text = str(error["ctx"]["error"])
            return text if key in ("reward", "algorithm") else f"{key}: {text}"
    plain = PLAIN.get(error["type"].partition("_")[0])
    allowed = plain or error["msg"].removeprefix("Input should be ")
    more = synonym(key, "values") or _nearest_value(error)
    return f"{key}={_given(error)} should be {allowed}{more}"


def _several(value: Any) -> list[Any]:
    """Values that stand where one is taken: [0, 1], or a text of them, "[lora,full]"."""
    if isinstance(value, str):
        return value.strip("[]").split(",")
    return value if isinstance(value, list) else []


def _given(error: Any) -> str:
    """Write the value as Python does, cut where it is long."""
    return printable(repr(error["input"]), LONGEST_VALUE)


def _missing(key: str, given: Any) -> str:
    """Say that a key, or the last values of a list, are not there."""
    whole, _, place = key.rpartition(".")
    if place.isdigit():
        return f"{whole}={given} should have {int(place) + 1} values or more"
    return f"{key} is missing"


def _nearest_value(error: Any) -> str:
    """Return '; did you mean ...' for a misspelled choice."""
    if error["type"] != "literal_error" or len(_several(error["input"])) > 1:
        return ""
    choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
    near = registry.did_you_mean(str(error["input"]), choices)
    return near if "mean" in near else ""


def _nearest_keys(key: str, algorithm: Any) -> str:
    place = re.search(r"\.(\d+)\.", key)
    valid = list(keys(Config, place=place[1] if place else None))
    if key.startswith("algorithm."):
        valid += [f"algorithm.{k}" for k in keys(algorithm_schema(algorithm["name"]))]
    section, _, last = key.rpartition(".")
    moved = [k for k in valid if k.rpartition(".")[2] == last]
    siblings = [k for k in valid if k.rpartition(".")[0] == section]
    # a slip of the pen in one of our names is nearer than another trainer's name
    slip = difflib.get_close_matches(key, siblings, n=1, cutoff=0.9)
    if not slip and (known := synonym(last)):
        return f"; here it is {known}"
    if moved:  # the key exists in another section
        return "; did you mean " + " or ".join(f'"{k}"' for k in moved) + "?"
    return registry.did_you_mean(key, siblings if section else valid)


def synonym(name: str, table: str = "settings") -> str | None:
    """flowrl's name for a name of other trainers; None: not known. table: settings, values, or
    options of commands that take none. Options count, too: --learning-rate as learning_rate."""
    known = yaml.safe_load(FILE_OF_SYNONYMS.read_text(encoding="utf-8"))[table]
    found: str | None = known.get(name.strip("-").replace("-", "_").lower())
    return found


def keys(
    schema: type[BaseModel], prefix: str = "", *, sections: bool = True, place: str | None = None
) -> Iterator[str]:
    """Dotted names of all settings.

    sections: those of the sections, too. place: the keys of a record at this place in a list, too.
    """
    for name, field in schema.model_fields.items():
        below = field.annotation
        if isinstance(below, type) and issubclass(below, BaseModel):
            yield from [prefix + name] * sections
            yield from keys(below, f"{prefix}{name}.", sections=sections, place=place)
            continue
        yield prefix + name
        for record in get_args(below) if place else ():
            if isinstance(record, type) and issubclass(record, BaseModel):
                yield from keys(record, f"{prefix}{name}.{place}.", sections=sections)
