"""Reading a config: composed, validated, and every problem found said in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import BaseModel

from flowrl.config.compose import ConfigError, File, compose, read_file, read_yaml
from flowrl.config.schema import Config, algorithm_schema
from flowrl.runtime import registry
from flowrl.runtime.text import printable, visible

LONGEST_VALUE = 120  # characters of a wrong value in a sentence
# how pydantic names the part of a union in an error's place
UNION_PARTS = ("literal[", "float", "constrained")


def load_config(name: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Compose and validate a config.

    name: an experiment of configs/experiment, a YAML file (a run's config.yaml, or one that states
    what differs), or None.
    overrides: `group=option` or `key.sub=value`, as on the command line. Every problem found -> one
    ConfigError.
    """
    problems: list[str] = []
    file = File()
    if name is not None and (str(name).endswith((".yaml", ".yml")) or Path(name).is_file()):
        file = read_file(Path(name))
    elif name is not None:
        overrides = [f"experiment={name}", *overrides]
    defaults = Config.model_construct().model_dump(mode="json")
    return _validate(compose(defaults, file, overrides, problems), problems)


def read_config(path: str | Path) -> Config:
    """The resolved config.yaml of a run, with nothing composed below it."""
    return _validate(read_yaml(Path(path)), [])


def dump(cfg: Config) -> str:
    """The resolved config as YAML, in the order of the schema, control characters as escapes;
    `read_config` gives an equal Config."""
    tree = cfg.model_dump(mode="json")
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return text if text == visible(text) else yaml.safe_dump(tree, sort_keys=False)


def diff(old: Config, new: Config) -> list[str]:
    """Dotted keys whose values differ, sorted."""
    a, b = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    missing = object()
    return sorted(key for key in a.keys() | b.keys() if a.get(key, missing) != b.get(key, missing))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out


def _validate(values: dict[str, Any], problems: list[str]) -> Config:
    """The Config of a composed tree; problems found before, and all of its own, -> ConfigError."""
    try:
        cfg = Config.model_validate(values)
    except pydantic.ValidationError as error:
        problems = [*problems, *_sentences(error, values.get("algorithm"))]
    if problems:
        raise ConfigError("\n".join(problems))
    return cfg


def _sentences(error: pydantic.ValidationError, algorithm: Any) -> list[str]:
    """One for each key; what the parts of a union ask for is joined by "or"."""
    sentences: dict[str, str] = {}
    for e in error.errors():
        key = ".".join(part for part in map(str, e["loc"]) if not part.startswith(UNION_PARTS))
        text = _sentence(key, e, algorithm)
        if key in sentences:
            text = f"{sentences[key]} or {text.partition(' should be ')[2]}"
        sentences[key] = text
    return list(sentences.values())


def _sentence(key: str, error: Any, algorithm: Any) -> str:
    """One pydantic error as a sentence with the dotted key, the value, and what is allowed."""
    match error["type"]:
        case "extra_forbidden":
            return f'unknown key "{key}"{_nearest_keys(key, algorithm)}'
        case "invalid_key":
            return f'"{key}" is not a key: keys are words'
        case "missing":
            return _missing(key, error["input"])
        case "tuple_type":
            return f"{key}={_given(error)} should be values in brackets, as [1,2]"
        case "too_long":
            most = error["ctx"]["max_length"]
            return f"{key}={_given(error)} should have at most {most} values"
        case "value_error":
            text = str(error["ctx"]["error"])
            return text if key in ("reward", "algorithm") else f"{key}: {text}"
    allowed = error["msg"].removeprefix("Input should be ")
    return f"{key}={_given(error)} should be {allowed}{_nearest_value(error)}"


def _given(error: Any) -> str:
    """The value as Python writes it, cut."""
    return printable(repr(error["input"]), LONGEST_VALUE)


def _missing(key: str, given: Any) -> str:
    """A key, or the last values of a list, that are not there."""
    whole, _, place = key.rpartition(".")
    if place.isdigit():
        return f"{whole}={given} should have {int(place) + 1} values or more"
    return f"{key} is missing"


def _nearest_value(error: Any) -> str:
    """'; did you mean ...' of a misspelled choice."""
    if error["type"] != "literal_error":
        return ""
    choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
    near = registry.did_you_mean(str(error["input"]), choices)
    return near if "mean" in near else ""


def _nearest_keys(key: str, algorithm: Any) -> str:
    valid = list(_keys(Config))
    if key.startswith("algorithm."):
        valid += [f"algorithm.{k}" for k in _keys(algorithm_schema(algorithm["name"]))]
    section, _, last = key.rpartition(".")
    moved = [k for k in valid if k.rpartition(".")[2] == last]
    if moved:  # the right word in the wrong section
        return "; did you mean " + " or ".join(f'"{k}"' for k in moved) + "?"
    siblings = [k for k in valid if k.rpartition(".")[0] == section]
    return registry.did_you_mean(key, siblings if section else valid)


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
