"""Draw docs/images/before_after.png from a run of the quickstart.

    flowrl train experiment=quickstart output=runs/picture
    python scripts/docs/before_after.py runs/picture

Eight prompts, each once: the first six that were wrong before training and are right after it, and
the first two that are still wrong, in the order of `shapes:eval`. Nothing is chosen by its looks.
The picture in the repository is of a run that was stopped after 28 of its 50 iterations: 17 of the
87 texts were right before, 61 after.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

import flowrl
from flowrl.data.prompts import load_prompts
from flowrl.report import grids
from flowrl.types import MediaContext

PAGE = Path(__file__).resolve().parents[2] / "docs" / "images" / "before_after.png"
FIXED, FAILED = 6, 2
LEGEND = ((grids.ACCEPTED, "right, says the verifier"), (grids.REFUSED, "wrong"))


def chosen(before: list[bool], after: list[bool]) -> list[int]:
    """Places of the eight pairs, those that training fixed first. before, after: verdicts, (B,)."""
    fixed = [i for i, was in enumerate(before) if not was and after[i]]
    failed = [i for i, was in enumerate(before) if not was and not after[i]]
    if len(fixed) < FIXED or len(failed) < FAILED:
        raise SystemExit("the run has too few pairs of either kind; was it trained to its end?")
    return fixed[:FIXED] + failed[:FAILED]


def judged(policy: flowrl.Policy, rows: list[dict]) -> tuple[Tensor, list[bool]]:
    """A picture of each prompt, (B, 3, 64, 64), and whether the verifier accepts it."""
    pictures = flowrl.generate(policy, rows, steps=8, guidance="none", seed=0)
    strict = {"shapes": {"reading": "strict"}}
    context = MediaContext(meta=rows)
    scores = flowrl.score(pictures, [row["prompt"] for row in rows], strict, context)
    return pictures, [score > 0 for score in scores.total.tolist()]


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


def draw(run: Path, path: Path) -> None:
    """Write the picture of a run's folder to a file."""
    rows = [*{row["prompt"]: row for row in load_prompts("shapes:eval")}.values()]  # a text once
    loras = (None, run / "lora")
    both = [judged(flowrl.load_policy("shapes-sd3", lora=lora), rows) for lora in loras]
    places = chosen(*(verdicts for _, verdicts in both))
    sheet = grids.before_after(
        *(pictures[places] for pictures, _ in both),
        [rows[i]["prompt"] for i in places],
        verdicts=tuple([verdicts[i] for i in places] for _, verdicts in both),
        columns=2,
    )
    with_legend(sheet).save(path, optimize=True)
    right = [sum(verdicts) for _, verdicts in both]
    print(f"{path}: right {right[0]} of {len(rows)} before, {right[1]} after")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    draw(given.run, given.output)
