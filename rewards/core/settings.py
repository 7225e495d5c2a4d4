"""Settings of a reward: their base classes, and the sentences about wrong ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import pydantic

from flowrl.runtime.filled import Filled
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.typed_text import PLAIN

SECRET = re.compile(r"(?<=//)[^/\s]*(?=@)|(?<=\?).+(?=['\"])")  # password and query of an address

# setting of rewards that see pictures: without rounding they are differentiable
Rounding = Annotated[
    bool,
    pydantic.Field(
        description=(
            "Score the bytes that a saved file would hold; false lets the gradient through."
        )
    ),
]


class Settings(Filled):
    """Base of every reward's settings: unknown keys are errors, and values stay as loaded."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class PictureSettings(Settings):
    """Settings of a reward whose network sees pictures."""

    rounding: Rounding = True
    chunk: int = pydantic.Field(64, ge=1, description="Most pictures in one forward.")


def parse(
    schema: type[Settings], settings: Mapping[str, Any], *, what: str, prefix: str = ""
) -> Settings:
    """Validate settings against schema; all problems are reported together, as one ValueError.

    prefix: text that a user puts before a key.
    """
    try:
        return schema.model_validate(dict(settings))
    except pydantic.ValidationError as error:
        problems = "; ".join(_sentence(problem, schema, prefix) for problem in error.errors())
        raise ValueError(f"{what}: {problems}") from None


def _sentence(problem: Mapping[str, Any], schema: type[Settings], prefix: str) -> str:
    key = ".".join(map(str, problem["loc"])) or "settings"
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(key, schema.model_fields) or "; it has no settings"
        return f'unknown setting "{key}"{hint}'
    if problem["type"] == "missing":
        field = schema.model_fields.get(key)
        about = f" ({field.description.rstrip('.')})" if field and field.description else ""
        return f'the setting "{key}" is missing; give {prefix}{key}=VALUE{about}'
    value = SECRET.sub("***", repr(problem["input"]))
    if plain := PLAIN.get(problem["type"].partition("_")[0]):
        return f"{key}={value} should be {plain}"
    return f"{key}={value}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
