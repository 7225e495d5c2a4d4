"""What replaying costs: our rollout engine against the pipeline's own __call__, per network call.

    python scripts/bench/sampler.py         # a small SD3 with random weights, on this machine
    python scripts/bench/sampler.py --source stabilityai/stable-diffusion-3.5-medium \\
        --dtype bfloat16 --height 512 --width 512

The engine runs an ODE plan; the pipeline gives output_type="latent". Both are timed at N and 2N
steps and the difference is divided by N, so prompt encoding and set-up drop out of both. Runs are
paired: the two take turns, in alternating order, and the ratio reported is the median over pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel

from flowrl.policy import Policy, load_policy
from flowrl.policy.replay.items import items_of
from flowrl.rollouts import generation

PROMPTS = [
    "a red circle",
    "two blue squares",
    "a green triangle left of a red square",
    "three yellow circles",
]
MOST = 1.02
Call = Callable[..., None]
Pair = dict[Call, float]  # seconds a network call


def random_sd3(blocks: int) -> DiffusionPipeline:
    """shapes-sd3 without its training, with this many blocks: 64 image tokens of width 128, and
    2.3 M parameters for four blocks."""
    from flowrl.shapes import build

    tok = build.tokenizer()
    config = {**build.transformer().config, "num_layers": blocks}
    parts = {
        "vae": build.vae(),
        "transformer": SD3Transformer2DModel.from_config(config),
        "text_encoder": build.text_encoder(tok),
        "text_encoder_2": build.text_encoder(tok),
    }
    return build.pipeline(parts, tok)


def ours(policy: Policy, steps: int, prompts: list[str]) -> None:
    """What `flowrl generate` and evaluation run: encode, then the rollout engine on an ODE plan."""
    generation.sample(policy, prompts, torch.arange(len(prompts)), steps=steps, guidance="pipeline")


def theirs(policy: Policy, steps: int, prompts: list[str]) -> None:
    policy.pipe(**policy.prober.runner.arguments(items_of(prompts), steps, "latent"))


def seconds(fn: Call, *args: Any) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def timed_pairs(policy: Policy, steps: int, prompts: list[str], pairs: int) -> list[Pair]:
    """Seconds a network call of both ways; the first pair warms up and is left out."""
    out = []
    for k in range(pairs + 1):
        cost = {ours: 0.0, theirs: 0.0}
        first, second = (ours, theirs) if k % 2 else (theirs, ours)
        # in this order a steady drift of the machine's speed drops out
        for fn, times in ((first, 2), (second, 2), (second, 1), (first, 1)):
            took = seconds(fn, policy, times * steps, prompts)
            cost[fn] += (2 * times - 3) * took / steps  # that of 2N less that of N
        out.append(cost)
    return out[1:]


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    out = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = out.add_argument
    add("--source", help="path, hub id or model name; default: a small SD3 with random weights")
    add("--blocks", type=int, default=4, help="of that SD3")
    add("--dtype", choices=["float32", "bfloat16", "float16"])
    add("--height", type=int)
    add("--width", type=int)
    add("--steps", type=int, default=10)
    add("--pairs", type=int, default=61)
    add("--prompts", type=int, default=16)
    add("--threads", type=int, help="CPU threads (default: torch's)")
    return out


def main() -> None:
    args = parser().parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    options = {k: v for k, v in (("height", args.height), ("width", args.width)) if v}
    if not args.source:
        options = {"max_sequence_length": 12, **options}
    policy = load_policy(args.source or random_sd3(args.blocks), dtype=args.dtype, **options)
    policy.pipe.set_progress_bar_config(disable=True)
    prompts = (PROMPTS * args.prompts)[: args.prompts]
    # one machine, one moment: the ratio of a pair does not see how fast it is
    pairs = timed_pairs(policy, args.steps, prompts, args.pairs)
    ratio = statistics.median(c[ours] / c[theirs] for c in pairs)
    result = {
        "ratio": round(ratio, 4),
        "ours_ms": round(1e3 * statistics.median(c[ours] for c in pairs), 3),
        "pipeline_ms": round(1e3 * statistics.median(c[theirs] for c in pairs), 3),
        "pairs": args.pairs,
        "steps": args.steps,
        "prompts": args.prompts,
        "blocks": args.blocks,
        "pipeline": type(policy.pipe).__name__,
        "device": str(policy.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(
        f"our sampler costs {ratio:.3f}x the pipeline's own loop per network call (median of"
        f" {args.pairs} pairs; must be <= {MOST})"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
