"""Does a reader call right what the verifier calls right? 200 samples of an embedded model.

    python scripts/docs/contact_sheet.py draw shapes-edit   # the sheet, and the verdicts apart
    python scripts/docs/contact_sheet.py read shapes-edit   # how often both agree

`draw` writes docs/contact/NAME.webp, numbered samples with their prompts: the first half without
guidance, the second with the model's own. Of an edit the source stands left of the result, and of a
video the frames follow each other from left to right and down. The verdicts go to NAME.json. A
reader who has not seen them writes the numbers of the samples that are right to NAME.txt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from before_after import accepted, beside_sources
from torch import Tensor

import flowrl
from flowrl.data import conditions
from flowrl.data.prompts import load_prompts
from flowrl.report import grids

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "contact"
WORLDS = {
    "shapes-sd3": "shapes",
    "shapes-sd": "shapes",
    "shapes-edit": "shapes_edit",
    "shapes-masked": "shapes",
    "shapes-wan": "shapes_motion",
}
SAMPLES, STEPS = 200, 10
GUIDANCE = ("none", "pipeline")


def sampled(name: str) -> tuple[Tensor, list[str], list[bool]]:
    """Media, prompts and strict verdicts of SAMPLES samples, the first half without guidance."""
    world = WORLDS[name]
    known = load_prompts(f"{world}:eval")
    policy = flowrl.load_policy(name, example=(conditions.of(known[:1]) or [None])[0])
    half = SAMPLES // len(GUIDANCE)
    media, texts, verdicts = [], [], []
    for place, guidance in enumerate(GUIDANCE):
        rows = [known[i % len(known)] for i in range(place * half, (place + 1) * half)]
        made = flowrl.generate(policy, rows, steps=STEPS, guidance=guidance, seed=place)
        media.append(torch.stack([shown(*pair) for pair in zip(made, rows, strict=True)]))
        texts += [row["prompt"] for row in rows]
        verdicts += accepted(made, rows, world)
    return torch.cat(media), texts, verdicts


def shown(sample: Tensor, row: dict[str, Any]) -> Tensor:
    """A sample as one picture (3, H, W): with its source, or nine frames as a square."""
    if sample.ndim == 4:
        framed = F.pad(sample, (0, 1, 0, 1), value=0.6)
        rows = [torch.cat([*framed[first : first + 3]], -1) for first in (0, 3, 6)]
        return torch.cat(rows, -2)
    return beside_sources(sample[None], [row])[0]


def draw(name: str) -> None:
    media, texts, verdicts = sampled(name)
    numbered = [f"{i} {text}" for i, text in enumerate(texts)]
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.webp"
    side = max(media.shape[-2:])
    cell = max(180, side if side > 150 else 2 * side)  # captions are whole
    grids.grid(media, numbered, columns=10, cell=cell).save(path, quality=92)
    marks = "".join(str(int(right)) for right in verdicts)
    path.with_suffix(".json").write_text(json.dumps({"strict": marks}) + "\n")
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def agreement(marks: str, numbers: set[int]) -> tuple[list[int], list[int]]:
    """(numbers that only the verifier calls right, numbers that only the reader does). marks: 1 for
    each sample that the verifier calls right; numbers: those that the reader does."""
    unknown = numbers - set(range(len(marks)))
    if unknown:
        raise SystemExit(f"there are samples 0 to {len(marks) - 1}, and none {min(unknown)}")
    verified = {i for i, mark in enumerate(marks) if mark == "1"}
    return sorted(verified - numbers), sorted(numbers - verified)


def read(name: str) -> None:
    path = FOLDER / f"{name}.json"
    marks = json.loads(path.read_text())["strict"]
    text = path.with_suffix(".txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    only = agreement(marks, {int(number) for number in " ".join(lines).split()})
    half = len(marks) // len(GUIDANCE)
    right = [marks[:half].count("1"), marks[half:].count("1")]
    same = 1 - sum(map(len, only)) / len(marks)
    print(
        f"{name}: the verifier accepts {right[0]} of {half} without and {right[1]} of {half} with"
        f" guidance; the reader agrees on {same:.3f} of {len(marks)}"
    )
    print(f"right for the verifier alone {only[0]}, for the reader alone {only[1]}")


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("what", choices=["draw", "read"])
    parser.add_argument("model", choices=list(WORLDS))
    given = parser.parse_args()
    {"draw": draw, "read": read}[given.what](given.model)
