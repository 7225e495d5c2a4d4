"""The base class of a config's sections, and types that they share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field

from flowrl.runtime.filled import Filled
from flowrl.runtime.paths import expanded

Guidance = float | Literal["none", "pipeline"]
Place = Annotated[str, AfterValidator(expanded)]  # path of a file or folder
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class NotNamed(ValueError):
    """A config names no prompts, or no reward."""


class Section(Filled):
    """Base of all sections: unknown keys are errors, values cannot change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )
