"""Start-up: everything a run is made of, built and checked before anything is written."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl.algorithms.common.base import Algorithm
from flowrl.config import load
from flowrl.config.build import autocast, make_algorithm, make_policy, schedule
from flowrl.config.schema import Config
from flowrl.data import prompts as data_prompts
from flowrl.data import scored_dataset
from flowrl.policy import Policy
from flowrl.rewards import RewardSet, check_needs, load_set
from flowrl.rewards.core import score
from flowrl.runtime import distributed
from flowrl.runtime.ledger import Ledger
from flowrl.runtime.log import logger
from flowrl.training import checks
from flowrl.training.checks import check_files, check_resume, check_signal, warn_distilled
from flowrl.training.ema import Ema
from flowrl.training.unused_options import unread
from flowrl.types import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop works with."""

    cfg: Config
    path: Path
    accelerator: Any
    world: distributed.World
    policy: Policy
    algorithm: Algorithm
    rewards: RewardSet
    prompts: data_prompts.Prompts
    eval_prompts: data_prompts.Prompts
    dataset: scored_dataset.Dataset | None  # what is trained on in place of rollouts
    references: bool  # whether prompts name images that join their groups
    guidance: float | str  # of rollouts
    parameters: dict[str, torch.nn.Parameter]
    raw_optimizer: torch.optim.AdamW
    optimizer: Any  # prepared by accelerate: knows the fp16 scaler
    ema: Ema
    ledger: Ledger
    plan: Plan  # of the first iteration

    def autocast(self) -> Any:
        return autocast(self.cfg.train.precision, self.policy.device)

    def clip(self) -> float:
        """Scale gradients to optimizer.max_grad_norm; their norm before."""
        return float(
            self.accelerator.clip_grad_norm_(
                list(self.parameters.values()), self.cfg.optimizer.max_grad_norm
            )
        )

    def start_trackers(self, iteration: int) -> None:
        """Open the trackers; events after `iteration` of an interrupted run are purged."""
        flat = load.flatten(self.cfg.model_dump(mode="json"))
        flat = {
            k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in flat.items()
        }
        extra = (
            {"tensorboard": {"purge_step": iteration + 1}}
            if "tensorboard" in self.cfg.trackers
            else {}
        )
        self.accelerator.init_trackers("tracker", config=flat, init_kwargs=extra)

    def track(self, metrics: dict[str, float], step: int) -> None:
        self.accelerator.log(metrics, step=step)

    def end_trackers(self) -> None:
        self.accelerator.end_training()


def build(cfg: Config, resume: Path | None = None) -> Parts:
    """Load and check all parts; every mistake of the user -> ValueError, and nothing was
    written."""
    path = resume or Path(
        cfg.output or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg.algorithm['name']}"
    )
    if resume:
        check_resume(cfg, resume)
    elif (path / "metrics.jsonl").exists():
        raise ValueError(
            f"{path} already holds a run; resume it with `flowrl train --resume {path}`, or choose"
            " another output="
        )
    rewards = load_set(cfg.reward)
    for reward in rewards.rewards.values():
        reward.begin(path)
    check_needs(rewards, ("meta", "group"))
    if cfg.data.eval and not rewards.pointwise().rewards:
        raise ValueError(
            "evaluation needs a reward that judges each sample by itself, and all of these compare"
            " the members of a group; add one that is only measured, as reward.clip.weight=0, or"
            " evaluate nothing with data.eval=null"
        )
    dataset = scored_dataset.load(cfg.data.offline) if cfg.data.offline else None
    prompts = dataset.prompts if dataset else data_prompts.load_prompts(cfg.data.train)
    eval_prompts = data_prompts.load_prompts(cfg.data.eval) if cfg.data.eval else []
    score.check_meta(rewards, {"data.train": [] if dataset else prompts, "data.eval": eval_prompts})
    data_prompts.batch(prompts, iteration=0, size=cfg.batch.prompts, seed=cfg.seed)
    algorithm = make_algorithm(cfg)
    accelerator = distributed.start(cfg.train.precision, cfg.trackers, path)
    world = distributed.World(accelerator)
    policy = make_policy(cfg, device=accelerator.device)
    plan = algorithm.plan(schedule(cfg, policy), sampler=cfg.sampler, iteration=0, seed=cfg.seed)
    algorithm.check(plan)
    checks.check_batch(cfg, processes=world.size, leaves=plan.leaves)
    guidance = algorithm.guidance if algorithm.guidance is not None else cfg.sampler.guidance
    for used in (
        guidance,
        cfg.eval.guidance,
        cfg.eval.baseline_guidance or "none",
        reference_guidance(algorithm),
    ):
        policy.branches(used)  # a guidance that the model does not know is refused here
    check_signal(cfg, algorithm, plan, rewards.needs)
    check_files(algorithm, policy, dataset, prompts, rewards, draw=cfg.draw.mode)
    warn_distilled(algorithm, policy, cfg.model.source)
    for sentence in unread(
        cfg, algorithm, plan, spare=(len(prompts) - cfg.batch.prompts) // world.size
    ):
        logger.warning(sentence)
    for view in views(algorithm):
        policy.add_view(view)
    if "reference" in algorithm.needs and cfg.train.mode == "full":
        policy.add_view("reference")  # a frozen copy; with LoRA it is the adapters switched off
    parameters = {name: p for part in policy.parts.values() for name, p in part.items()}
    o = cfg.optimizer
    raw = torch.optim.AdamW(
        parameters.values(), lr=o.lr, betas=o.betas, weight_decay=o.weight_decay, eps=o.eps
    )
    return Parts(
        cfg=cfg,
        path=path,
        accelerator=accelerator,
        world=world,
        policy=policy,
        algorithm=algorithm,
        rewards=rewards.to(policy.device),
        prompts=prompts,
        eval_prompts=eval_prompts,
        dataset=dataset,
        references=not dataset and bool(scored_dataset.references(prompts)),
        guidance=guidance,
        parameters=parameters,
        raw_optimizer=raw,
        optimizer=accelerator.prepare(raw),
        ema=Ema(parameters, decay=cfg.ema.decay, every=cfg.ema.every),
        ledger=Ledger(policy.device),
        plan=plan,
    )


def reference_guidance(algorithm: Algorithm) -> float | str:
    """Guidance of the reference in the loss, where the method has one of its own."""
    return getattr(algorithm.config, "reference_guidance", "none")


def views(algorithm: Algorithm) -> list[str]:
    """Copies of the trained weights that the algorithm keeps beside them."""
    return sorted(algorithm.needs & {"old", "anchor"})
