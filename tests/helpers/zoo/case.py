"""What a case of the zoo is, and how it is tried without flowrl."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

PROMPTS = ("two red circles", "a blue square left of a green triangle")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipeline and how it is called."""

    make: Callable[[], Any]  # a fresh pipeline with redrawn weights
    # arguments of its own call, the same for every prompt
    call: dict[str, Any] = field(default_factory=dict)
    # arguments of each of PROMPTS, as {"image": a picture}; empty for text alone
    conditions: tuple[dict[str, Any], ...] = ()
    prompts: bool = True  # False: the pipeline takes none
    refused: str = ""  # why it cannot be replayed, where that is known


def picture(seed: int, size: int = 16) -> Image.Image:
    """A picture of smooth random colours."""
    noise = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((size, size), Image.BICUBIC)


@torch.no_grad()
def run(case: Case, row: int, steps: int = 4, **extra: Any) -> torch.Tensor:
    """What the pipeline itself makes for one of PROMPTS, noise of seed 0."""
    pipe = case.make()
    pipe.set_progress_bar_config(disable=True)
    given = {**case.call, **(case.conditions[row] if case.conditions else {}), **extra}
    if case.prompts:
        given["prompt"] = PROMPTS[row]
    generator = torch.Generator().manual_seed(0)
    made = pipe(num_inference_steps=steps, generator=generator, output_type="pt", **given)
    return torch.as_tensor(made[0] if isinstance(made[0], torch.Tensor) else made[0][0])
