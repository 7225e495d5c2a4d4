"""Prompts, and the conditions that belong to them.

A condition is an argument of the pipeline's call that may differ from prompt to prompt: a picture
to edit, a first frame, a mask, a negative prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

PICTURE = re.compile(r"(?!num_|ip_adapter)(?!.*attention)(\w+_)?(image|mask|video)s?(_\d+)?")


@dataclass(frozen=True, eq=False)
class PromptItem:
    """A prompt (None if the pipeline takes none) and its own arguments of the call."""

    prompt: str | None  # text of the prompt; None if the pipeline takes none
    # name -> the prompt's own argument of the call
    conditions: Mapping[str, Any] = field(default_factory=dict)


def is_media(value: Any) -> bool:
    """Whether a value is a picture, an array, or a list of them (frames of a video, references)."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_media(entry) for entry in value)
    return isinstance(value, Image.Image | np.ndarray | Tensor)


def is_text(name: str) -> bool:
    """Whether every pipeline takes this text argument as a list, with one entry for each prompt."""
    return name.startswith(("negative_prompt", "prompt_")) and "embeds" not in name


def is_picture(name: str) -> bool:
    """Whether an argument of that name is a prompt's own picture, mask or video."""
    return PICTURE.fullmatch(name) is not None


def is_own(name: str) -> bool:
    """Whether an argument's name belongs to pictures or to a negative prompt."""
    return is_picture(name) or name.startswith("negative_prompt")


def altered(value: Any) -> Any:
    """Make another condition of the same kind and size: pictures turned around, colours
    inverted."""
    if isinstance(value, list | tuple):
        return type(value)(altered(entry) for entry in value)
    if isinstance(value, Image.Image):
        turned = ImageOps.mirror(value)
        return ImageOps.invert(turned) if value.mode in ("L", "RGB") else turned
    if isinstance(value, Tensor):
        return value.flip(-1)
    if isinstance(value, np.ndarray):
        # axes (..., H, W, C): mirror W
        return value[..., ::-1, :].copy() if value.ndim > 2 else value[..., ::-1].copy()
    return value


def items_of(
    prompts: Sequence[str], conditions: Sequence[Mapping[str, Any]] | None = None
) -> list[PromptItem]:
    """Make items from P prompts, with their conditions if they have some."""
    if conditions is None:
        return [PromptItem(prompt) for prompt in prompts]
    if len(conditions) != len(prompts):
        raise ValueError(f"{len(conditions)} conditions for {len(prompts)} prompts")
    return [PromptItem(prompt, dict(own)) for prompt, own in zip(prompts, conditions, strict=True)]
