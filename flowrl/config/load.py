"""Reading a config: composed, validated, and every problem found said in a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic import BaseModel

from flowrl.config.compose import ConfigError, compose, read_yaml, sort_overrides
from flowrl.config.schema import Config, algorithm_schema
from flowrl.runtime import registry


def load_config(name: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Compose and validate a config.

    name: an experiment of configs/experiment, a YAML file (a run's config.yaml, or one that states
    what differs), or None.
    overrides: `group=option` or `key.sub=value`, as on the command line. Every problem found -> one
    ConfigError.
    """
    problems: list[str] = []
    overrides = list(overrides)
    extra: dict[str, Any] = {}
    if name is not None and (str(name).endswith((".yaml", ".yml")) or Path(name).is_file()):
        extra = read_yaml(Path(name))
    elif name is not None:
        overrides.insert(0, f"experiment={name}")
    values = compose(
        Config.model_construct().model_dump(mode="json"),
        sort_overrides(overrides, problems),
        extra,
        problems,
    )
    return _validate(values, problems)


def read_config(path: str | Path) -> Config:
    """The resolved config.yaml of a run, with nothing composed below it."""
    return _validate(read_yaml(Path(path)), [])


def dump(cfg: Config) -> str:
    """The resolved config as YAML, in the order of the schema; `read_config` gives an equal
    Config."""
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


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
    try:
        cfg = Config.model_validate(values)
    except pydantic.ValidationError as error:
        sentences: dict[str, str] = {}
        for e in error.errors():
            key = ".".join(
                str(part)
                for part in e["loc"]
                if not str(part).startswith(("literal[", "float", "constrained"))
            )
            text = _sentence(key, e, values.get("algorithm"))
            sentences[key] = (
                f"{sentences[key]} or {text.partition(' should be ')[2]}"
                if key in sentences
                else text
            )  # parts of a union
        problems = [*problems, *sentences.values()]
    if problems:
        raise ConfigError("\n".join(problems))
    return cfg


def _sentence(key: str, error: Any, algorithm: Any) -> str:
    """One pydantic error as a sentence with the dotted key, the value, and what is allowed."""
    if error["type"] == "extra_forbidden":
        return f'unknown key "{key}"{_nearest_keys(key, algorithm)}'
    if error["type"] == "invalid_key":
        return f'"{key}" is no key: keys are words'
    if error["type"] == "missing":
        whole, _, place = key.rpartition(".")
        return (
            f"{whole}={error['input']} should have {int(place) + 1} values or more"
            if place.isdigit()
            else f"{key} is missing"
        )
    if error["type"] == "tuple_type":
        return f"{key}={error['input']!r} should be values in brackets, as [1,2]"
    if error["type"] == "too_long":
        return f"{key}={error['input']!r} should have at most {error['ctx']['max_length']} values"
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if key in ("reward", "algorithm") else f"{key}: {text}"
    hint = ""
    if error["type"] == "literal_error":
        near = registry.did_you_mean(
            str(error["input"]),
            error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "),
        )
        hint = near if "mean" in near else ""
    return (
        f"{key}={error['input']!r} should be {error['msg'].removeprefix('Input should be ')}{hint}"
    )


def _nearest_keys(key: str, algorithm: Any) -> str:
    valid = list(_keys(Config))
    if key.startswith("algorithm."):
        valid += [f"algorithm.{k}" for k in _keys(algorithm_schema(algorithm["name"]))]
    section, _, last = key.rpartition(".")
    moved = [
        k for k in valid if k.rpartition(".")[2] == last
    ]  # the right word in the wrong section
    if moved:
        return "; did you mean " + " or ".join(f'"{k}"' for k in moved) + "?"
    siblings = [k for k in valid if k.rpartition(".")[0] == section]
    return registry.did_you_mean(key, siblings if section else valid)


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
