"""What search and guidance by the reference buy at inference, at equal network calls.

    python scripts/bench/inference.py                        # searches with the embedded model
    python scripts/bench/inference.py --run runs/quickstart  # a run of it, by weights of RLG

A search keeps one picture of each prompt by the chooser's score, and another reward, which chose
nothing, says what it is worth: a search climbs its chooser in any case. Means over prompts and
seeds, and the difference to one plain sample of the same model with its 95% interval over prompts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl import generate, load_policy, score
from flowrl.config.build import trained
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, load_set, parse_words
from flowrl.rollouts.search import Search
from flowrl.runtime.statistics import mean_interval
from flowrl.shapes.prompts import eval_prompts
from flowrl.types import MediaContext

Prompt = dict[str, Any]
WEIGHTS = (0.0, 0.5, 1.5, 2.0, 3.0)


def ways(steps: int, samples: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arguments of flowrl.generate): one plain sample, then what `samples` of them cost."""
    calls = steps * samples
    yield "plain", {"steps": steps}
    yield f"plain, {calls} steps", {"steps": calls}
    search = partial(Search, calls=calls)
    yield "random (best of N)", {"steps": steps, "search": search(how="random")}
    for radius in (0.3, 0.8):
        near = search(how="zero_order", radius=radius)
        yield f"zero_order, radius {radius}", {"steps": steps, "search": near}
    yield "tree", {"steps": steps, "search": search(how="tree")}
    halfway = search(how="tree", forks=[steps // 2])
    yield "tree, one fork halfway", {"steps": steps, "search": halfway}


def weights(steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same of a run: one plain sample, what RLG costs spent on steps, and RLG."""
    yield "plain (rlg 1)", {"steps": steps}
    yield f"plain, {2 * steps} steps", {"steps": 2 * steps}
    for w in WEIGHTS:
        yield f"rlg {w:g}", {"steps": steps, "rlg": w}


def measured(
    policy: Policy,
    prompts: list[Prompt],
    judges: dict[str, RewardSet],
    how: dict[str, Any],
    seeds: int,
) -> tuple[dict[str, Tensor], float, float]:
    """Scores (seeds * P,) by each judge, network calls a picture, seconds a picture."""
    chooser = {"reward": judges["chooser"]} if "search" in how else {}
    before, began, media = policy.calls, time.perf_counter(), []
    for seed in range(seeds):
        media.append(generate(policy, prompts, guidance="none", seed=seed, **how, **chooser))
    count, took = seeds * len(prompts), time.perf_counter() - began
    context = MediaContext(meta=prompts * seeds)
    texts = [prompt["prompt"] for prompt in prompts] * seeds
    pictures = torch.cat(media)
    values = {name: score(pictures, texts, own, context).total for name, own in judges.items()}
    return values, (policy.calls - before) / count, took / count


def row(
    name: str,
    cost: tuple[float, float],
    values: dict[str, Tensor],
    plain: dict[str, Tensor],
    groups: Any,
) -> str:
    """A line of the table."""
    cells = [name, f"{cost[0]:g}", f"{cost[1]:.2f}"]
    for judge, value in values.items():
        gain = mean_interval(value - plain[judge], groups=groups, resamples=2000)
        change = f"{gain.mean:+.3f} [{gain.ci[0]:+.3f}, {gain.ci[1]:+.3f}]"
        cells += [f"{float(value.mean()):.3f}", "" if value is plain[judge] else change]
    return f"| {' | '.join(cells)} |"


def table(policy: Policy, rows: list[tuple[str, dict[str, Any]]], args: argparse.Namespace) -> None:
    """Print the rows, the first of which the others are compared with."""
    judges = {"chooser": load_set(parse_words(args.chooser))}
    judges["held out"] = load_set(parse_words(args.held_out))
    every = eval_prompts()
    prompts = [dict(every[i * len(every) // args.prompts]) for i in range(args.prompts)]
    groups = [prompt["prompt"] for prompt in prompts] * args.seeds
    heads = ["", "calls", "seconds", "chooser", "change", "held out", "change"]
    print(f"| {' | '.join(heads)} |\n|{'-|' * len(heads)}")
    plain: dict[str, Tensor] = {}
    for name, how in rows:
        values, *cost = measured(policy, prompts, judges, how, args.seeds)
        plain = plain or values
        print(row(name, (cost[0], cost[1]), values, plain, groups), flush=True)


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    out.add_argument("--run", type=Path, help="a run of the embedded model")
    out.add_argument("--steps", type=int, default=8, help="denoising steps of a sample")
    out.add_argument("--samples", type=int, default=8, help="samples whose calls a search may use")
    out.add_argument("--prompts", type=int, default=32, help="held-out prompts")
    out.add_argument("--seeds", type=int, default=2)
    out.add_argument("--chooser", nargs="+", default=["clip.preset=shapes"])
    out.add_argument("--held-out", nargs="+", default=["shapes.reading=strict"])
    out.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    return out


def main() -> None:
    args = parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.run:
        table(trained(args.run, {}), list(weights(args.steps)), args)
    else:
        table(load_policy("shapes-sd3"), list(ways(args.steps, args.samples)), args)


if __name__ == "__main__":
    main()
