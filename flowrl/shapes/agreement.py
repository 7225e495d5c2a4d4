"""How far the verifier can be trusted.

It should accept what a prompt was drawn from, and reject the same scene with one planted error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from flowrl.shapes import verify
from flowrl.shapes.prompts import Prompt, all_prompts, scene
from flowrl.shapes.scenes import COLORS, SHAPES, Object, place, render

ERRORS = ("colour", "count", "shape", "order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Verdicts on true scenes and on scenes with one planted error."""

    scenes: int  # number of true scenes that were judged
    accepted: float  # share of true scenes judged right
    rejected: dict[str, float]  # planted error -> share judged wrong
    planted: dict[str, int]  # planted error -> number of scenes drawn with it

    def __str__(self) -> str:
        errors = ", ".join(
            f"{error} {self.rejected[error]:.2%} of {self.planted[error]}" for error in ERRORS
        )
        right = f"{self.scenes} scenes: {self.accepted:.2%} accepted"
        return f"{right}; with one error, rejected: {errors}"


def plant(
    prompt: Prompt, objects: list[Object], error: str, generator: torch.Generator
) -> list[Object] | None:
    """Plant one error that the prompt excludes into a scene; None where the prompt leaves that open
    (colour of "a circle", order of "and")."""
    first, rest = objects[0], objects[1:]
    if error == "order":
        return _exchanged(objects) if prompt["task"] == "position" else None
    if error == "count":
        if int(torch.randint(2, (), generator=generator)):
            return rest
        return place([(o.shape, o.color) for o in [*objects, first]], generator)
    if error == "shape":
        return [replace(first, shape=_other(SHAPES, {o.shape for o in objects}, generator)), *rest]
    if prompt["include"][0]["color"] is None:
        return None
    return [replace(first, color=_other(COLORS, {o.color for o in objects}, generator)), *rest]


def _exchanged(objects: list[Object]) -> list[Object]:
    """Put two objects in each other's places."""
    a, b = objects[:2]
    return [replace(a, x=b.x, y=b.y, size=b.size), replace(b, x=a.x, y=a.y, size=a.size)]


def _other(names: Iterable[str], used: set[str], generator: torch.Generator) -> str:
    """Draw a name that is not used."""
    free = [name for name in names if name not in used]
    return free[int(torch.randint(len(free), (), generator=generator))]


def measure(count: int, *, seed: int = 0, blur: bool = False) -> Agreement:
    """Judge `count` scenes of random prompts, tasks in equal shares, each also with every error
    that applies.

    blur: pictures go through a 3x3 box filter first, softer than a VAE makes them.
    """
    verdicts: dict[str, list[bool]] = defaultdict(list)
    drawn = _draw(count, torch.Generator().manual_seed(seed))
    for start in range(0, len(drawn), 256):
        part = drawn[start : start + 256]
        pictures = torch.stack([render(objects) for _, _, objects in part])
        found = verify.detect(box(pictures) if blur else pictures)
        for (error, prompt, _), objects in zip(part, found, strict=True):
            verdicts[error].append(verify.strict(objects, prompt["include"]))
    return Agreement(
        scenes=count,
        accepted=sum(verdicts[""]) / count,
        rejected={error: 1 - sum(verdicts[error]) / len(verdicts[error]) for error in ERRORS},
        planted={error: len(verdicts[error]) for error in ERRORS},
    )


def _draw(count: int, generator: torch.Generator) -> list[tuple[str, Prompt, list[Object]]]:
    """Draw `count` true scenes, each with its wrong ones -> (planted error or "", prompt,
    scene)."""
    tasks: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in all_prompts():
        tasks[prompt["task"]].append(prompt)
    drawn: list[tuple[str, Prompt, list[Object]]] = []
    for number in range(count):
        members = list(tasks.values())[number % len(tasks)]
        prompt = members[int(torch.randint(len(members), (), generator=generator))]
        truth = scene(prompt, generator)
        drawn.append(("", prompt, truth))
        for error in ERRORS:
            wrong = plant(prompt, truth, error, generator)
            drawn += [] if wrong is None else [(error, prompt, wrong)]
    return drawn


def box(pictures: Tensor) -> Tensor:
    """Filter (B, 3, H, W) by the mean of 3x3 pixels."""
    return F.avg_pool2d(pictures, 3, stride=1, padding=1, count_include_pad=False)
