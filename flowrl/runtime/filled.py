"""Base of settings in which an empty text is a mistake, not another way to say none."""

from __future__ import annotations

from typing import Any, get_args

import pydantic


class Filled(pydantic.BaseModel):
    """Settings that refuse an empty text where they allow None: it often comes from a variable of
    the environment that is not set."""

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def check_filled(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        kinds = get_args(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, str) and not value.strip() and type(None) in kinds:
            raise ValueError("an empty text names nothing; give a value, or null for none")
        return value
