"""Bytes, error and reward over a quantised base, on this machine.

    python scripts/bench/quantised.py [--iterations 8]

For each model.quantize: the bytes that the denoiser's weights take beside fp32, how far a velocity
of the embedded model moves by quantisation alone, and how far the reward (the verifier, mean of an
iteration) goes in a short run of NFT.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import flowrl
from flowrl.policy.weights.quantised import KINDS, held_bytes

SETTINGS = [
    "model=shapes-sd3",
    "algorithm=nft",
    "reward=shapes",
    "batch.prompts=4",
    "batch.group=8",
    "batch.updates=1",
    "sampler.steps=6",
    "eval.at_start=false",
    "data.eval=null",
    "guard.check_rewards=false",
    "trackers=[]",
    "optimizer.lr=1e-3",
]


def velocity(kind: str) -> tuple[torch.Tensor, int]:
    """(velocity of two prompts, bytes of the denoiser's weights)."""
    policy = flowrl.load_policy("shapes-sd3", quantize=kind)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    cond = policy.encode(["a red circle", "two blue squares"])
    with torch.no_grad():
        v = policy.velocity(x, 0.6, cond, torch.arange(2))
    return v, sum(map(held_bytes, policy.networks.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args()
    plain, whole = velocity("none")
    print("| model.quantize | MB | share of fp32 | velocity moves | reward, first | last two |")
    print("|---|---|---|---|---|---|")
    for kind in KINDS:
        v, held = velocity(kind)
        moved = ((v - plain).norm() / plain.norm()).item()
        with tempfile.TemporaryDirectory() as folder:
            words = [f"model.quantize={kind}", f"iterations={args.iterations}"]
            words.append(f"output={Path(folder) / 'run'}")
            run = flowrl.train(flowrl.load_config(None, [*SETTINGS, *words]))
        rewards = [line["reward/total"] for line in run.metrics]
        last = sum(rewards[-2:]) / 2
        print(
            f"| {kind} | {held / 1e6:.2f} | {held / whole:.3f} | {moved:.2%} | {rewards[0]:.3f} |"
            f" {last:.3f} |"
        )


if __name__ == "__main__":
    main()
