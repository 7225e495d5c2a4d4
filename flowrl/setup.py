"""Start-up: everything a run is made of, built and checked before anything is written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl import checkpoint, config, data, distributed, offline, registry
from flowrl.algorithms._base import Algorithm
from flowrl.algorithms._transitions import FORKING, OWN_STATISTICS
from flowrl.algorithms.raft import RAFTConfig
from flowrl.config import Config
from flowrl.ema import Ema
from flowrl.ledger import Ledger
from flowrl.log import logger
from flowrl.policy import Policy, load_policy
from flowrl.policy.lora import SETTINGS as LORA_SETTINGS
from flowrl.rewards import RewardSet, check_needs, load_set
from flowrl.samplers import flow_sde, sigmas
from flowrl.types import Plan
from flowrl.unread import unread

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RESUMABLE = (
    "iterations",
    "stop.",
    "checkpoint.",
    "guard.",
    "trackers",
)  # may differ in a resumed run: they change no number


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
    prompts: data.Prompts
    eval_prompts: data.Prompts
    dataset: offline.Dataset | None  # what is trained on in place of rollouts
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
        flat = config.flatten(self.cfg.model_dump(mode="json"))
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
    dataset = offline.load(cfg.data.offline) if cfg.data.offline else None
    prompts = dataset.prompts if dataset else data.load_prompts(cfg.data.train)
    eval_prompts = data.load_prompts(cfg.data.eval) if cfg.data.eval else []
    data.check_meta(rewards, {"data.train": [] if dataset else prompts, "data.eval": eval_prompts})
    data.batch(prompts, iteration=0, size=cfg.batch.prompts, seed=cfg.seed)
    algorithm = make_algorithm(cfg)
    accelerator = distributed.start(cfg.train.precision, cfg.trackers, path)
    world = distributed.World(accelerator)
    policy = make_policy(cfg, device=accelerator.device)
    plan = algorithm.plan(schedule(cfg, policy), sampler=cfg.sampler, iteration=0, seed=cfg.seed)
    algorithm.check(plan)
    config.check_batch(cfg, processes=world.size, leaves=plan.leaves)
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
        references=not dataset and bool(offline.references(prompts)),
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


def check_signal(cfg: Config, algorithm: Algorithm, plan: Plan, needs: frozenset[str]) -> None:
    """Settings with which a run would go on without doing what it says -> ValueError, or a warning
    where the run still trains.

    needs: columns that the rewards declare.
    """
    if cfg.batch.group == 1:
        raise ValueError(
            "batch.group=1: an advantage is a reward minus its group's mean, which is 0 for a"
            " single sample; use at least 2"
        )
    if not cfg.data.offline:
        check_samples(cfg, algorithm, plan)
    if cfg.draw.mode == "balance":
        check_balance(cfg, needs)
    if cfg.stop.kl is not None and not getattr(algorithm.config, "kl_weight", 0):
        raise ValueError(
            f"stop.kl={cfg.stop.kl} needs policy/kl, which is measured only with"
            " algorithm.kl_weight above 0"
        )
    steps = cfg.iterations * cfg.batch.updates
    if cfg.ema.decay and cfg.ema.every > steps:
        logger.warning(
            f"ema.every={cfg.ema.every} exceeds the run's {steps} optimizer steps: the averaged"
            " weights, which are evaluated and exported, will be those before training"
        )


def check_samples(cfg: Config, algorithm: Algorithm, plan: Plan) -> None:
    """Samples that all score 0, that are all equal within a prompt, or all trained whatever their
    rewards -> ValueError."""
    if not any(entry["weight"] for entry in cfg.reward.values()):
        raise ValueError(
            f"every reward has weight 0 ({', '.join(cfg.reward)}), so nothing would be trained;"
            " give one another weight"
        )
    if plan.init != "sample" and not bool(plan.kind.any()):
        raise ValueError(
            f"sampler.init_noise={plan.init} starts all samples of a prompt from one noise, and"
            " this method's sampler adds none, so that they would be equal; use"
            " sampler.init_noise=sample"
        )
    c = algorithm.config
    if isinstance(c, RAFTConfig) and c.select == "best" and c.top >= cfg.batch.group:
        raise ValueError(
            f"algorithm.top={c.top} of batch.group={cfg.batch.group} trains every sample, whatever"
            " its reward; lower it, or raise the group"
        )


def check_balance(cfg: Config, needs: frozenset[str]) -> None:
    """draw.mode=balance trains a part of the draws with a baseline of all -> ValueError where a
    method needs its groups whole."""
    a, instead = cfg.algorithm, "use draw.mode=refill or once"
    if a.get("plan") in FORKING:
        raise ValueError(
            f"draw.mode=balance chooses whole samples, and plan={a['plan']} forks; {instead}"
        )
    if a.get("credit") in OWN_STATISTICS:
        raise ValueError(
            f"draw.mode=balance has a baseline of all draws, and credit={a['credit']} one of the"
            f" samples kept; {instead}"
        )
    if "group" in needs:
        raise ValueError(
            "draw.mode=balance compares rewards of several draws, and a reward that compares a"
            f" group judges one; {instead}"
        )
    if a.get("keep") is not None:
        raise ValueError(
            f"draw.mode=balance and algorithm.keep={a['keep']} both choose what is trained; drop"
            " one of them"
        )
    if a["name"] == "dgpo":
        raise ValueError(
            "dgpo needs advantages that add up to 0 over a group, which draw.mode=balance trains a"
            f" part of; {instead}"
        )


def check_files(
    algorithm: Algorithm,
    policy: Policy,
    dataset: offline.Dataset | None,
    prompts: data.Prompts,
    rewards: RewardSet,
    *,
    draw: str,
) -> None:
    """Media from files serve methods that read leaves alone; wrong files or another method ->
    ValueError."""
    files = dataset.paths if dataset else offline.references(prompts)
    if not files:
        return
    what = (
        "data.offline trains on media from files"
        if dataset
        else 'a prompt with a "reference" adds an image from a file'
    )
    if "log_prob" in algorithm.needs:
        raise ValueError(
            f"{what}, which have no denoising steps to train; use a method on the forward process,"
            " as algorithm=nft or dpo"
        )
    if dataset and draw != "once":
        raise ValueError(
            f"draw.mode={draw} samples again, and data.offline samples nothing; use draw.mode=once"
        )
    if draw == "balance":
        raise ValueError(
            "draw.mode=balance chooses among samples, and a reference image is none; use"
            " draw.mode=refill or once"
        )
    if not dataset and "group" in rewards.needs:
        raise ValueError(
            f"{what}, which a reward that compares the members of a group cannot judge alone; drop"
            " one of the two"
        )
    offline.check(policy, files)
    if dataset and dataset.singles == len(prompts):
        raise ValueError(
            "data.offline holds a single image of every prompt, whose advantage is 0; score several"
            " of each, or keep more of them"
        )
    if dataset and dataset.singles:
        logger.warning(
            f"{dataset.singles} of {len(prompts)} prompts have a single image in data.offline: its"
            " advantage is always 0"
        )


def warn_distilled(algorithm: Algorithm, policy: Policy, source: str) -> None:
    """Forward-process losses take v as that of a flow-matching model, which few-step distilled
    models are not."""
    scheduler = type(getattr(getattr(policy, "pipe", None), "scheduler", None)).__name__
    words = ("turbo", "lightning", "schnell", "lcm", "tcd", "hyper", "distill", "dmd")
    if "leaves" in algorithm.needs and any(
        word in f"{source} {scheduler}".lower() for word in words
    ):
        logger.warning(
            f"{source} with {scheduler} looks like a few-step distilled model: methods on the"
            " forward process tend to blur it or make it collapse; use its base model, or a method"
            " on denoising steps"
        )


def precision(cfg: Config) -> str:
    """The lowest precision that network outputs went through: "no" (fp32), "bf16" or "fp16"."""
    return (
        cfg.train.precision
        if cfg.train.precision != "no" or cfg.model.dtype == "fp32"
        else cfg.model.dtype
    )


def autocast(precision: str, device: torch.device) -> Any:
    """The context in which networks run at train.precision."""
    return (
        nullcontext() if precision == "no" else torch.autocast(device.type, dtype=DTYPES[precision])
    )


def make_algorithm(cfg: Config) -> Algorithm:
    cls = registry.find("flowrl.algorithms", cfg.algorithm["name"], what="algorithm").ALGORITHM
    return cls(cls.Config.model_validate({k: v for k, v in cfg.algorithm.items() if k != "name"}))


def make_policy(cfg: Config, *, device: torch.device | str | None = None) -> Policy:
    """The policy that a config trains, with fresh adapters or those of train.init_lora."""
    lora = cfg.train.lora.model_dump() if cfg.train.mode == "lora" else None
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)  # of the adapters' first values
        policy: Any = load_policy(
            cfg.model.source,
            lora=lora,
            dtype=DTYPES[cfg.model.dtype],
            device=device,
            **cfg.model.pipeline,
        )
    if cfg.model.self_check:
        policy.self_check()
    if cfg.train.init_lora:
        policy.load_lora(Path(cfg.train.init_lora))
    if cfg.train.gradient_checkpointing:
        policy.gradient_checkpointing(True)
    return policy


def schedule(cfg: Config, policy: Policy) -> Tensor:
    """Sigmas (T+1,) fp64 of rollouts."""
    own = policy.schedule(cfg.sampler.steps).sigmas
    if cfg.sampler.schedule == "pipeline":
        return own
    if own[0] <= flow_sde.AT_ONE:
        raise ValueError(
            "sampler.schedule=linear starts at sigma 1, but this model knows noise up to"
            f" {own[0]:.4f} only; use sampler.schedule=pipeline"
        )
    return sigmas.linear(cfg.sampler.steps)


def check_resume(cfg: Config, run: Path) -> None:
    """A run resumes with the config it was started with, apart from keys that change no number;
    else ValueError naming the keys."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    old = config.read_config(run / "config.yaml")
    changed = [key for key in config.diff(old, cfg) if not key.startswith(RESUMABLE)]
    if "output" in changed and Path(cfg.output or "") == run:  # the folder was moved
        changed.remove("output")
    if cfg.optimizer.schedule != "constant" and old.iterations != cfg.iterations:
        changed.append("iterations (the learning rate's schedule depends on it)")
    if changed:
        raise ValueError(
            f"{run} was started with another config: {', '.join(changed)}; resume without"
            " overrides, or start a new run"
        )
    checkpoint.latest(run)


def learning_rate(cfg: Config, step: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, or cosine or linear to
    0 at the end of the run."""
    o, total = cfg.optimizer, cfg.iterations * cfg.batch.updates
    if step < o.warmup:
        return o.lr * (step + 1) / (o.warmup + 1)
    done = min(1.0, (step - o.warmup) / max(1, total - o.warmup))
    return (
        o.lr
        * {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
            o.schedule
        ]
    )


def load_run(run: Path) -> tuple[Config, Policy, RewardSet, data.Prompts]:
    """Config, policy with the averaged weights of the newest checkpoint, rewards and held-out
    prompts of a run."""
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run folder: it has no config.yaml")
    cfg = config.read_config(run / "config.yaml")
    if not cfg.data.eval:
        raise ValueError(
            f"{run} was trained without held-out prompts (data.eval); there is nothing to"
            " evaluate on"
        )
    policy = load_tuned(cfg, checkpoint.latest(run))
    rewards, prompts = load_set(cfg.reward), data.load_prompts(cfg.data.eval)
    data.check_meta(rewards, {"data.eval": prompts})
    return cfg, policy, rewards.to(policy.device), prompts


def load_tuned(cfg: Config, folder: Path) -> Policy:
    """The policy of a run with the averaged weights of a checkpoint of it; the view "reference" is
    the base model."""
    tensors, _ = checkpoint.load(folder)
    policy = make_policy(cfg)
    if cfg.train.mode == "full":
        policy.add_view("reference")  # with LoRA it is the adapters switched off
    averages = {name: value for name, value in tensors["ema"].items() if name != "step"}
    policy.load_state("default", tensors["policy"] | averages)
    return policy


def lora_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """LoRA weights and their settings: of a run folder, or of a folder that a run exported."""
    weights = folder / "lora" if (folder / "lora").is_dir() else folder
    settings = weights / LORA_SETTINGS
    if not settings.is_file():
        raise ValueError(
            f"{folder} holds no exported LoRA: {settings.name} is missing; give a finished run's"
            " folder"
        )
    return weights, json.loads(settings.read_text())


def pipeline_of(folder: Path) -> dict[str, Any]:
    """Arguments of the pipeline's own call (size, frames ...) that a run was trained with; {} of a
    folder that is not a run."""
    path = folder / "config.yaml"
    return dict(config.read_config(path).model.pipeline) if path.is_file() else {}


class Booked:
    """The policy as objectives see it: autocast, and every network call booked; other views are the
    phase "reference"."""

    def __init__(self, parts: Parts) -> None:
        self.policy, self.ledger, self.accelerator, self.autocast = (
            parts.policy,
            parts.ledger,
            parts.accelerator,
            parts.autocast,
        )
        self.rows = 0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Any, rows: Tensor, **options: Any) -> Tensor:
        before = self.policy.calls
        with self.ledger.work("network", rows=len(x)), self.autocast():
            v = self.policy.velocity(x, sigma, cond, rows, **options)
        self.ledger.add_nfe(
            "update" if torch.is_grad_enabled() else "reference", self.policy.calls - before
        )
        self.rows = len(x)
        return v

    @contextmanager
    def view(self, name: str) -> Iterator[None]:
        with self.ledger.phase("reference"), self.policy.view(name):
            yield

    def same(self, a: str, b: str) -> bool:
        return self.policy.same(a, b)

    def backward(self, loss: Tensor) -> None:
        with self.ledger.work("network", rows=self.rows, call="backward"):
            self.accelerator.backward(loss)
