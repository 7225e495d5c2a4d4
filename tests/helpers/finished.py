"""The folder of a finished run, as tests of reports write it."""

import json

import numpy as np
from page import Page

from flowrl.report import run_page


def interval(mean, half):
    return {"mean": mean, "ci": [mean - half, mean + half]}


def row(name, strict, **more):
    metrics = {"shapes": interval(strict + 0.3, 0.02), "shapes/strict": interval(strict, 0.03)}
    tasks = {"shapes/strict": {"counting": strict - 0.1, "two_object": strict + 0.1}}
    own = {"name": name, "guidance": "none", "steps": 10, "images": 512, "nfe": 10}
    return {**own, "metrics": metrics, "tasks": tasks, **more}


EVALUATION = {
    "rows": [
        row("before", 0.21),
        row("before, guidance 3", 0.36, guidance=3.0, nfe=20),
        row("after", 0.49),
    ],
    "paired": {
        "shapes": {"difference": 0.28, "ci": [0.26, 0.30], "p": 0.0002},
        "shapes/strict": {"difference": 0.28, "ci": [0.235, 0.325], "p": 0.0002},
    },
}


def keep(samples, count, size, *, judged=()):
    """Keep arrays of pairs as an evaluation does. judged: verdicts before and after."""
    rng = np.random.default_rng(0)
    for k, stem in enumerate(("before", "after")):
        images = rng.integers(0, 256, (count, 3, size, size), np.uint8)
        own = {"verdicts.shapes": np.array(judged[k], np.int8)} if judged else {}
        prompts = np.array([f"a <b>{i}" for i in range(count)])
        np.savez(samples / f"{stem}.npz", images=images, prompts=prompts, **own)


def write(folder):
    """Write a complete run folder -> its path."""
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model:\n  name: shapes-sd3\nalgorithm:\n  name: nft\nreward:\n  shapes: 1.0\nseed: 7\n"
    )
    lines = []
    for i in range(1, 41):
        line = {"iteration": i, "reward/total": 0.4 + i / 100, "policy/kl": i * 1e-5}
        line |= {"policy/ratio": None, "nfe/rollout": 64, "nfe/update": 32}
        line |= {"time/rollout": 2.0, "time/update": 6.0, "time/iteration": 10.0}
        line |= {"time/network_work": 7.0, "time/overhead_fraction": 0.3}
        lines.append(json.dumps(line | ({"eval/shapes/strict": i / 100} if i % 10 == 0 else {})))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "evaluation.json").write_text(json.dumps(EVALUATION))
    keep(folder / "samples", 2, 16)
    (folder / "environment.json").write_text('{"torch": "9.9.9"}')
    return folder


def page_of(run):
    html = run_page.build(run).read_text(encoding="utf-8")
    return html, Page(html)
