"""Data for the supervised runs of algorithms.py, drawn from the embedded model itself.

    python scripts/bench/own_data.py        best/, pairs.jsonl, scenes/ ... in build/bench

16 samples of each of 256 training prompts are scored by the shapes verifier. best/ holds the best
tenth of all samples with their prompts, for algorithm=sft; pairs.jsonl has of each prompt a sample
that is right in every clause and one that is not, for algorithm=dpo. The samples are a function of
the seed, so the folder is not committed. They cost PROMPTS * EACH * STEPS network rows. scenes/
holds rendered pictures of the same prompts, such as the model was trained on, for a data anchor.
first.jsonl and second.jsonl have the training prompts of three tasks each, for two specialists.
edits/ holds the instructions of shapes_edit, each with its source and its one right result.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torchvision.io import write_png

import flowrl
from flowrl.data.prompts import load_prompts, select
from flowrl.scenes.shapes import EDITS
from flowrl.shapes.prompts import scene
from flowrl.shapes.scenes import render
from flowrl.types import MediaContext

FOLDER = Path(__file__).resolve().parents[2] / "build" / "bench"
PROMPTS, EACH, STEPS, SEED = 256, 16, 8, 7
BEST = 0.1  # share of all samples
TASKS = {
    "first": ("single_object", "colors", "counting"),
    "second": ("two_object", "position", "color_attr"),
}


def main() -> None:
    (FOLDER / "best").mkdir(parents=True, exist_ok=True)
    found = load_prompts("shapes:train")
    every = torch.arange(0, len(found), len(found) // PROMPTS)[:PROMPTS]
    rows = [found[i] for i in every.repeat_interleave(EACH)]
    policy = flowrl.load_policy("shapes-sd3")
    media = flowrl.generate(
        policy, rows, steps=STEPS, guidance="none", seed=SEED, solver="dpm2", micro=128, decode=128
    )
    batch = select(rows, torch.arange(len(rows)))
    context = MediaContext(meta=batch.meta)
    strict, share = (
        flowrl.score(media, batch.text, {"shapes": {"weight": 1.0, **how}}, context=context).total
        for how in ({"reading": "strict"}, {})
    )
    files = [f"{i:05d}.png" for i in range(len(rows))]
    # a third is right in every clause: chance decides which of them, so that no prompt is preferred
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))
    ranked = order[share[order].argsort(descending=True, stable=True)]
    best = ranked[: int(BEST * len(rows))].sort().values
    pairs, needed = [], set(best.tolist())
    for first in range(0, len(rows), EACH):
        right = strict[first : first + EACH]
        if 0 < right.sum() < EACH:
            good, bad = first + int(right.argmax()), first + int(right.argmin())
            needed |= {good, bad}
            names = {"chosen": f"best/{files[good]}", "rejected": f"best/{files[bad]}"}
            pairs.append(rows[first] | names)
    for i in sorted(needed):
        write_png((media[i] * 255).round().byte(), str(FOLDER / "best" / files[i]), 6)
    listed = [rows[i] | {"file_name": files[i]} for i in best.tolist()]
    write(FOLDER / "best" / "metadata.jsonl", listed)
    draw_scenes([found[i] for i in every.tolist()])
    draw_edits()
    for name, tasks in TASKS.items():
        write(FOLDER / f"{name}.jsonl", [row for row in found if row["task"] in tasks])
    write(FOLDER / "pairs.jsonl", pairs)
    print(f"strict {strict.mean():.3f} of {len(rows)} samples, {strict[best].mean():.3f} of the")
    print(f"{len(best)} best; {len(pairs)} pairs; {PROMPTS * EACH * STEPS:,} network rows")


def draw_scenes(prompts: list[dict]) -> None:
    """Render a scene of each prompt."""
    (FOLDER / "scenes").mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(SEED)
    listed = []
    for i, prompt in enumerate(prompts):
        name = f"{i:05d}.png"
        picture = render(scene(prompt, generator))
        write_png((picture * 255).round().byte(), str(FOLDER / "scenes" / name), 6)
        listed.append(prompt | {"file_name": name})
    write(FOLDER / "scenes" / "metadata.jsonl", listed)


def draw_edits() -> None:
    """Draw source and result of each edit, those of training and the held-out ones."""
    (FOLDER / "edits").mkdir(parents=True, exist_ok=True)
    parts = {"train": (EDITS.train_prompts(), 0), "eval": (EDITS.eval_prompts(), 256)}
    for part, (rows, seed) in parts.items():
        listed = []
        for i, row in enumerate(rows, seed):  # seeds of the pairs, as in the lists themselves
            names = {"image": f"{i:03d}_source.png", "ground_truth": f"{i:03d}_result.png"}
            source, result = map(EDITS.picture, EDITS.pair(row["prompt"], i))
            assert source == row["image"]
            row["image"].save(FOLDER / "edits" / names["image"])
            result.save(FOLDER / "edits" / names["ground_truth"])
            listed.append(row | names)
        write(FOLDER / "edits" / f"{part}.jsonl", listed)


def write(path: Path, entries: list[dict]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


if __name__ == "__main__":
    main()
