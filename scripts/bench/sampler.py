"""What replaying costs: our rollout engine on an ODE plan against the pipeline's own __call__
(output_type="latent"), per network call.

    python scripts/bench/sampler.py                                   # a small SD3 with random
    weights, on this machine
    python scripts/bench/sampler.py --source stabilityai/stable-diffusion-3.5-medium --dtype
    bfloat16 --height 512 --width 512

Both are timed at N and 2N steps and the difference is divided by N, so prompt encoding and set-up
drop out of both. Runs are paired:
the two take turns, in alternating order, and the ratio reported is the median over pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from flowrl.policy import Policy, load_policy
from flowrl.rollouts import generation

PROMPTS = [
    "a red circle",
    "two blue squares",
    "a green triangle left of a red square",
    "three yellow circles",
]


def small_sd3():
    """shapes-sd3 without its training: 2.3 M parameters, 64 image tokens."""
    from flowrl.shapes import build

    tok = build.tokenizer()
    parts = {
        "vae": build.vae(),
        "transformer": build.transformer(),
        "text_encoder": build.text_encoder(tok),
        "text_encoder_2": build.text_encoder(tok),
    }
    return build.pipeline(parts, tok)


def ours(policy: Policy, steps: int, prompts: list[str]) -> None:
    """What `flowrl generate` and evaluation run: encode, then the rollout engine on an ODE plan."""
    generation.sample(policy, prompts, torch.arange(len(prompts)), steps=steps, guidance="pipeline")


def theirs(policy: Policy, steps: int, prompts: list[str]) -> None:
    policy.pipe(**policy.prober.runner.arguments(prompts, steps, "latent"))


def seconds(fn, *args) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source", help="path, hub id or model name; default: a small SD3 with random weights"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=61)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    size = {k: v for k, v in (("height", args.height), ("width", args.width)) if v}
    policy = load_policy(
        args.source or small_sd3(),
        dtype=args.dtype,
        **(size if args.source else {"max_sequence_length": 12, **size}),
    )
    policy.pipe.set_progress_bar_config(disable=True)
    prompts = (PROMPTS * args.prompts)[: args.prompts]
    pairs = []
    for k in range(args.pairs + 1):
        cost = {ours: 0.0, theirs: 0.0}
        first, second = (ours, theirs) if k % 2 else (theirs, ours)
        for fn, times in (
            (first, 2),
            (second, 2),
            (second, 1),
            (first, 1),
        ):  # a steady drift of the machine's speed drops out
            cost[fn] += (
                (2 * times - 3) * seconds(fn, policy, times * args.steps, prompts) / args.steps
            )
        if k:  # the first pair warms up
            pairs.append(cost)
    ratio = statistics.median(c[ours] / c[theirs] for c in pairs)
    result = {
        "ratio": round(ratio, 4),
        "ours_ms": round(1e3 * statistics.median(c[ours] for c in pairs), 3),
        "pipeline_ms": round(1e3 * statistics.median(c[theirs] for c in pairs), 3),
        "pairs": args.pairs,
        "steps": args.steps,
        "pipeline": type(policy.pipe).__name__,
        "device": str(policy.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(
        f"our sampler costs {ratio:.3f}x the pipeline's own loop per network call (median of"
        f" {args.pairs} pairs; must be <= 1.05)"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
