"""Short declarations for pipelines whose inference is not unique.

Every key overrides one inference; the self-check still judges the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

_HINTS: dict[str, dict[str, Any]] = {}


def register(
    pipeline: str,
    *,
    denoisers: list[str] | None = None,
    guidance: Literal["linear", "norm", "pipeline"] | None = None,
    boundary: float | None = None,
    decode: Callable[..., Any] | None = None,
    apart: bool | None = None,
) -> None:
    """Declare hints for a pipeline class by name.

    denoisers: components that are networks (default: those named transformer* or unet*). guidance:
    the rule that combines outputs. boundary: model time at which the second set of networks takes
    over from the first. decode: fn(pipe, latents) -> media in [0, 1], differentiable. apart: True
    if a network mixes the rows of its batch, so that no two prompts may share a call.
    """
    given = {
        "denoisers": denoisers,
        "guidance": guidance,
        "boundary": boundary,
        "decode": decode,
        "apart": apart,
    }
    if guidance not in (None, "linear", "norm", "pipeline"):
        raise ValueError(f"hint guidance={guidance!r}; allowed are 'linear', 'norm' and 'pipeline'")
    _HINTS[pipeline] = {k: v for k, v in given.items() if v is not None}


def hints_for(pipe: Any) -> dict[str, Any]:
    """Return hints of the pipeline's class or of the nearest base class that has some."""
    for cls in type(pipe).__mro__:
        if cls.__name__ in _HINTS:
            return dict(_HINTS[cls.__name__])
    return {}


# apart: its rotary embedding takes the positions of the batch's first row for all rows
register("OmniGenPipeline", apart=True)
