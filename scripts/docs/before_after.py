"""Draw what an embedded model's run changed: docs/images/before_after.png and its like.

    flowrl train experiment=quickstart output=runs/picture
    python scripts/docs/before_after.py runs/picture
    python scripts/docs/before_after.py runs/video --output docs/images/before_after_video.webp

Eight held-out prompts, each once: the first six that were wrong before training and are right after
it, and the first two that are still wrong, in the order of the list. Where one picture of each
prompt has too few of either, the list is gone through again, from other noise. Nothing is chosen by
its looks. An edit has its source at its left, and videos move.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import to_tensor

import flowrl
from flowrl.data import conditions
from flowrl.data.prompts import load_prompts
from flowrl.report import grids

PAGE = Path(__file__).resolve().parents[2] / "docs" / "images" / "before_after.png"
FIXED, FAILED, ROUNDS = 6, 2, 4
LEGEND = ((grids.ACCEPTED, "right, says the verifier"), (grids.REFUSED, "wrong"))
FRAME, LAST = 160, 1200  # ms that a frame of a video is shown, and its last one


def chosen(before: list[bool], after: list[bool], texts: list[str]) -> list[int] | None:
    """Places of the eight pairs, those that training fixed first; None if there are too few.

    before, after: verdicts, (B,); texts: prompts, (B,), each of which is taken once.
    """
    fixed: dict[str, int] = {}
    failed: dict[str, int] = {}
    wrong = [i for i, was in enumerate(before) if not was]
    for i in wrong:
        if after[i]:
            fixed.setdefault(texts[i], i)
    first = list(fixed.values())[:FIXED]
    taken = {texts[i] for i in first}
    for i in wrong:
        if not after[i] and texts[i] not in taken:
            failed.setdefault(texts[i], i)
    if len(first) < FIXED or len(failed) < FAILED:
        return None
    return first + list(failed.values())[:FAILED]


def loaded(cfg: flowrl.Config, lora: Path | None, rows: list[Any]) -> flowrl.Policy:
    """The run's model, with its LoRA or without one."""
    given = conditions.of(rows[:1])
    call = {**cfg.model.pipeline, "example": given[0] if given else None}
    return flowrl.load_policy(cfg.model.source, lora=lora, **call)


def judged(
    cfg: flowrl.Config, policy: flowrl.Policy, rows: list[Any], seed: int
) -> tuple[Tensor, list[bool]]:
    """A picture or video of each prompt, as the run evaluates without guidance, and whether the
    verifier accepts it."""
    how = {"steps": cfg.eval.steps, "solver": cfg.eval.solver}
    media = flowrl.generate(policy, rows, guidance="none", seed=seed, **how)
    return media, accepted(media, rows, cfg.data.eval.partition(":")[0])


def accepted(media: Tensor, rows: list[Any], world: str) -> list[bool]:
    """Whether the strict verifier of the prompts' world accepts each medium."""
    context, texts = conditions.context_of(rows, media), [row["prompt"] for row in rows]
    scores = flowrl.score(media, texts, {world: {"reading": "strict"}}, context)
    return [score > 0 for score in scores.total.tolist()]


def beside_sources(media: Tensor, rows: list[Any]) -> Tensor:
    """Results of edits (B, 3, H, W) with what they edit at their left; others as they are."""
    if "image" not in rows[0]:
        return media
    sources = torch.stack([to_tensor(row["image"]) for row in rows])
    line = torch.full((*media.shape[:-1], 1), 0.6)
    return torch.cat([sources, line, media], -1)


def with_legend(sheet: Image.Image) -> Image.Image:
    """The sheet with what its edges mean, below."""
    font = ImageFont.load_default(size=14)
    page = Image.new("RGB", (sheet.width, sheet.height + 20), grids.PAPER)
    page.paste(sheet, (0, 0))
    draw, x, y = ImageDraw.Draw(page), grids.GAP, sheet.height - 6
    for colour, words in LEGEND:
        draw.rectangle((x, y, x + 14, y + 14), outline=colour, width=3)
        draw.text((x + 22, y - 1), words, fill=grids.INK, font=font)
        x += 60 + int(font.getlength(words))
    return page


def sheets(
    both: list[tuple[Tensor, list[bool]]], places: list[int], rows: list[Any]
) -> list[Image.Image]:
    """The page of the chosen pairs, one for each frame."""
    sides = [beside_sources(media[places], [rows[i] for i in places]) for media, _ in both]
    frames = [[*side.unbind(1)] if side.ndim == 5 else [side] for side in sides]
    return [
        with_legend(
            grids.before_after(
                before,
                after,
                [rows[i]["prompt"] for i in places],
                verdicts=tuple([verdicts[i] for i in places] for _, verdicts in both),
                columns=2,
                cell=2 * before.shape[-1],
            )
        )
        for before, after in zip(*frames, strict=True)
    ]


def draw(run: Path, path: Path) -> None:
    """Write the picture of a run's folder to a file."""
    cfg = flowrl.load_config(run / "config.yaml")
    rows = [*{row["prompt"]: row for row in load_prompts(cfg.data.eval)}.values()]  # a text once
    sides = [loaded(cfg, lora, rows) for lora in (None, run / "lora")]
    rounds: list[list[tuple[Tensor, list[bool]]]] = [[], []]  # of each side
    places = None
    while places is None and len(rounds[0]) < ROUNDS:
        for policy, own in zip(sides, rounds, strict=True):
            own.append(judged(cfg, policy, rows, seed=len(own)))
        seen = [
            (torch.cat([m for m, _ in own]), [v for _, some in own for v in some]) for own in rounds
        ]
        every = rows * len(rounds[0])
        places = chosen(*(verdicts for _, verdicts in seen), [row["prompt"] for row in every])
    if places is None:
        raise SystemExit("the run has too few pairs of either kind; was it trained to its end?")
    first, *others = sheets(seen, places, every)
    if others:
        times = [FRAME] * len(others) + [LAST]
        how: Any = {"lossless": True, "method": 6, "quality": 100}  # a third of the usual size
        first.save(path, save_all=True, append_images=others, duration=times, loop=0, **how)
    else:
        first.save(path, optimize=True)
    right = [sum(verdicts) for _, verdicts in seen]
    print(f"{path}: right {right[0]} of {len(every)} before, {right[1]} after")


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    draw(given.run, given.output)
