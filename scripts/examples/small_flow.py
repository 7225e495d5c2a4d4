"""What the examples of own modules share: a small flow network, its pretraining, and runs before
and after which trained and untrained conditions are judged."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowrl

STEPS = 10  # of sampling
METHODS: dict[str, dict[str, Any]] = {
    "ddpo": {"algorithm": "ddpo"},
    "nft": {"algorithm": "nft", "algorithm.kl_weight": 0.1},
    "reinflow": {"algorithm": "reinflow", "algorithm.clip": [1e-2, 1e-2], "sampler.steps": 4},
    "dsrl": {"algorithm": "dsrl", "algorithm.clip": [1e-2, 1e-2], "optimizer.lr": 3e-3},
}
USUAL = ("ddpo", "nft")  # what is compared where no methods are named
SETTINGS: dict[str, Any] = {
    "batch": {"group": 24, "updates": 1, "micro": 4096, "decode": 512},
    "optimizer": {"lr": 1e-4},
    "sampler": {"steps": STEPS},
    "eval": {"every": 0, "steps": 20, "guidance": "none"},
    "checkpoint": {"every": 1000},
    "trackers": [],
}


class Flow(nn.Module):
    """v (n, T, D) of x (n, T, D), t (n,), cond (n, C): one hidden state for the whole sequence."""

    def __init__(self, length: int, size: int, cond: int, width: int = 192) -> None:
        super().__init__()
        self.into = nn.Linear(length * size + cond + 16, width)
        self.middle = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, length * size)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        waves = t[:, None] * torch.arange(1, 9, dtype=t.dtype) * torch.pi
        h = self.into(torch.cat([x.flatten(1), waves.sin(), waves.cos(), cond], 1))
        for layer in self.middle:
            h = h + layer(nn.functional.silu(h))
        return self.out(nn.functional.silu(h)).view_as(x)


def pretrain(
    module: nn.Module, data: Callable[[int], tuple[Tensor, Tensor]], *, updates: int
) -> None:
    """Flow matching: at x = (1 - t) x0 + t noise the velocity is noise - x0. data: n -> x0 (n, T,
    D), cond (n, C)."""
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for step in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / updates)
        x0, cond = data(256)
        noise, t = torch.randn_like(x0), torch.rand(len(x0))
        x = x0 + t[:, None, None] * (noise - x0)
        loss = (module(x, t, cond) - (noise - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Example:
    """A module of one's own, and what it is aligned with."""

    pretrained: Callable[[int], nn.Module]  # by seed
    policy: Callable[[nn.Module], flowrl.Policy]  # of a pretrained module
    rewards: dict[str, Any]  # by label, as flowrl.train takes them
    prompts: list[dict[str, Any]]  # records whose "task" is "trained" or "others"
    shown: list[str]  # labels of the rewards that are printed
    images: int = 32  # of each prompt in an evaluation


def run(
    example: Example, module: nn.Module, method: str, *, seed: int, iterations: int, output: Path
) -> flowrl.Run:
    """Train a copy of a module on the trained prompts, judged on all of them before and after."""
    train = [prompt for prompt in example.prompts if prompt["task"] == "trained"]
    settings = {
        **SETTINGS,
        **METHODS[method],
        "batch": {**SETTINGS["batch"], "prompts": len(train)},
        "eval": {**SETTINGS["eval"], "images": example.images * len(example.prompts)},
        "iterations": iterations,
        "seed": seed,
        "output": str(output),
    }
    return flowrl.train(
        settings,
        policy=example.policy(copy.deepcopy(module)),
        rewards=example.rewards,
        prompts={"train": train, "eval": example.prompts},
    )


def means(result: flowrl.Run, label: str) -> dict[str, tuple[float, float]]:
    """Task -> a reward's mean (before, after)."""
    rows = {row["name"]: row["tasks"][label] for row in result.evaluation["rows"]}
    return {task: (rows["before"][task], rows["after"][task]) for task in rows["before"]}


def compare(example: Example, *, seeds: int = 3, iterations: int = 60) -> None:
    """Print, for each seed and method, every shown reward before and after. The words of the
    command line name other methods than the usual."""
    torch.set_num_threads(1)
    methods = sys.argv[1:] or USUAL
    if unknown := [method for method in methods if method not in METHODS]:
        raise SystemExit(f"no method {unknown[0]}; there are {', '.join(METHODS)}")
    print(f"{'method':8} {'seed':>4}  {'reward':16} {'trained':>15} {'not trained':>15}")
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            module = example.pretrained(seed)
            for method in methods:
                output = Path(folder) / f"{method}-{seed}"
                result = run(
                    example, module, method, seed=seed, iterations=iterations, output=output
                )
                for label in example.shown:
                    found = means(result, label)
                    pairs = [found[task] for task in ("trained", "others")]
                    cells = " ".join(f"{f'{a:.2f} -> {b:.2f}':>15}" for a, b in pairs)
                    print(f"{method:8} {seed:4}  {label:16} {cells}", flush=True)
