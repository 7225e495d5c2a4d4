"""A modular pipeline of diffusers in the form of a classic one.

A modular pipeline runs blocks over a state, and takes any keyword. The copy made here has a call
whose parameters are the blocks' own inputs. It shares the components and the blocks, so that
recording, probing and replay work as for any other pipeline.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from flowrl.policy.replaced import replaced


def is_modular(pipe: Any) -> bool:
    """Whether `pipe` is a modular pipeline of diffusers, which is already imported then."""
    return hasattr(pipe, "blocks") and hasattr(pipe, "update_components")


def as_pipeline(pipe: Any) -> Any:
    """Copy a modular pipeline into the form of a classic one; ValueError if components are missing.

    The copy's class is named after the blocks. Its call takes their inputs and returns their
    outputs as a tuple.
    """
    blocks = pipe.blocks
    outputs = [output.name for output in blocks.outputs]
    given = {p.name: p.default for p in blocks.inputs if p.name is not None}

    def call(self: Any, **given: Any) -> tuple[Any, ...]:
        found = type(pipe).__call__(self, **given)
        return tuple(found.get(name) for name in outputs)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    call.__signature__ = inspect.Signature(
        [own, *(inspect.Parameter(k, keyword, default=v) for k, v in given.items())]
    )
    made = copy.copy(pipe)
    made.__class__ = type(type(blocks).__name__, (type(pipe),), {"__call__": call})
    return made
