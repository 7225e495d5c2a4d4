"""Where the modelled seconds of an image go, for the cases whose speed is a target.

    python scripts/bench/ledger.py [--device h100] [--case sd3.5-medium] [SETTING ...]

Each case is printed as it is and with compiled blocks: milliseconds an image without rewards, the
share of the matmul ceiling, and what the time is made of. Nothing of it is measured. Exit code 1
where one of them misses its target on the h100 (LIMITS) with compiled blocks.
"""

from __future__ import annotations

import argparse

from flowrl.config.load import load_config
from flowrl.training.budget import roofline
from flowrl.training.budget.meter import POINTWISE
from flowrl.training.budget.planner import Budget, Planner

SHARED = ["reward=pickscore", "data=ocr", "sampler.init_noise=sample"]
FLUX = [
    "model=flux.1-dev",
    "algorithm=mix_grpo",
    "algorithm.window.size=3",
    "sampler.steps=10",
    "batch.prompts=4",
]
CASES = {
    # 512 px, 205 text tokens (77 of CLIP, 128 of T5), a window of 3 of 10 steps
    "sd3.5-medium": [
        "model=sd3.5-medium",
        "algorithm=mix_grpo",
        "algorithm.window.size=3",
        "sampler.steps=10",
        "sampler.guidance=none",
        "batch.group=24",
        "batch.micro=24",
    ],
    "flux.1-dev": FLUX,
    "flux.1-dev, 24 GB": [*FLUX, "memory=24gb"],
}
# with compiled blocks: most milliseconds an image, least share of the ceiling, and of the update's
LIMITS = {
    "sd3.5-medium": (110.0, 0.50, 0.45),
    "flux.1-dev": (float("inf"), 0.40, 0.0),
    "flux.1-dev, 24 GB": (float("inf"), 0.40, 0.0),
}
COMPILE = ("none", "blocks")
# kinds of operators by what they are
KINDS = {
    "gemm": ("gemm", "gemm_fp32"),
    "attention": ("attention", "attention_backward", "attention_fp32"),
    "convolution": ("convolution", "convolution_fp32"),
    "pointwise": POINTWISE,
    "weights": ("weights", "upload"),
    "loop": ("loop",),
    "host": ("host",),
}


def an_image(b: Budget, seconds: float) -> float:
    """Seconds of an iteration as milliseconds an image."""
    return 1e3 * seconds / (b.samples / b.gpus)


def reached(b: Budget, phase: str) -> float:
    """What a phase has of the matmul ceiling."""
    cost = b.phases[phase]
    return cost.flops / (cost.seconds * b.device.ceiling)


def show(name: str, b: Budget) -> None:
    """A case: its time, and its ledger by phase, in milliseconds an image."""
    print(
        f"{name}: {an_image(b, b.seconds):.1f} ms an image, {b.utilisation:.1%} of the ceiling,"
        f" {b.needed:.1f} GB"
    )
    print(f"  {'phase':10}{'ms':>8}{'ceiling':>9}" + "".join(f"{kind:>12}" for kind in KINDS))
    for phase, cost in b.phases.items():
        if an_image(b, cost.seconds) < 0.05:
            continue
        parts = [sum(cost.ledger.get(k, 0.0) for k in kinds) for kinds in KINDS.values()]
        print(
            f"  {phase:10}{an_image(b, cost.seconds):8.1f}{reached(b, phase):9.1%}"
            + "".join(f"{an_image(b, part):12.2f}" for part in parts)
        )


def holds(b: Budget, most: float, ceiling: float, update: float) -> bool:
    """Whether a case reaches its targets."""
    fast = an_image(b, b.seconds) <= most
    return fast and b.utilisation >= ceiling and reached(b, "update") >= update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("settings", nargs="*", help="settings of a config, as batch.micro=32")
    given = parser.parse_args()
    missed = []
    for name in given.case or CASES:
        words = [*CASES[name], *SHARED, *given.settings]
        cfg = load_config(None, words)
        planner = Planner(cfg, roofline.device(given.device))
        for how in COMPILE:
            own = cfg.model_copy(update={"train": cfg.train.model_copy(update={"compile": how})})
            found = planner.budget(own)
            show(f"{name}, train.compile={how}", found)
        if given.device == "h100" and not holds(found, *LIMITS[name]):
            missed.append(name)
    if missed:
        raise SystemExit(f"beyond the targets: {', '.join(missed)}")


if __name__ == "__main__":
    main()
