"""Copies for code that somebody else wrote, such as a user's reward: a change to its arguments
harms nobody else."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

WRITABLE = (np.ndarray, Image.Image, set, bytearray)


def own(value: Any) -> Any:
    """Copy tensors (with their gradient), arrays, pictures, lists, mappings and records, however
    nested; any other object, such as a simulator in the metadata, is handed over as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, WRITABLE):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        out = copy.copy(value)  # copy.copy keeps the class, which may be a subclass of dict
        out.update({key: own(entry) for key, entry in value.items()})
        return out
    if isinstance(value, list):
        return [own(entry) for entry in value]
    if isinstance(value, tuple):
        # a named tuple stays a named tuple
        return getattr(type(value), "_make", tuple)(map(own, value))
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: own(getattr(value, f.name)) for f in fields(value) if f.init}
        return replace(value, **given)
    return value
