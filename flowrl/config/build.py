"""From a config to its policy and its algorithm, and from a run folder back to them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.config import load
from flowrl.config.schema import Config
from flowrl.data import conditions
from flowrl.data import prompts as data_prompts
from flowrl.policy import Policy, load_policy
from flowrl.policy.load import call_options
from flowrl.policy.lora import SETTINGS as LORA_SETTINGS
from flowrl.policy.lora import read_settings
from flowrl.rewards import RewardSet, load_set
from flowrl.rewards.core import score
from flowrl.runtime import checkpoint, registry
from flowrl.runtime.checkpoint import Checkpoint, CheckpointError
from flowrl.runtime.run_folder import config_file
from flowrl.samplers import flow_sde, sigmas

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision(cfg: Config) -> str:
    """The lowest precision that network outputs went through: "no" (fp32), "bf16" or "fp16"."""
    return (
        cfg.train.precision
        if cfg.train.precision != "no" or cfg.model.dtype == "fp32"
        else cfg.model.dtype
    )


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the context in which networks run at train.precision."""
    if precision == "no":
        return nullcontext
    return partial(torch.autocast, device.type, dtype=DTYPES[precision])


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
            example=data_prompts.example(cfg.data.train),
            **conditions.loaded(call_options(cfg.model.pipeline)),
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


def load_run(run: Path) -> tuple[Config, Policy, RewardSet, data_prompts.Prompts]:
    """Config, policy with the averaged weights of the newest checkpoint, rewards and held-out
    prompts of a run."""
    cfg = load.read_config(config_file(run))
    if not cfg.data.eval:
        raise ValueError(
            f"{run} was trained without held-out prompts (data.eval); there is nothing to"
            " evaluate on"
        )
    policy = load_tuned(cfg, newest_of(run))
    rewards, prompts = load_set(cfg.reward), data_prompts.load_prompts(cfg.data.eval)
    score.check_meta(rewards, {"data.eval": prompts})
    return cfg, policy, rewards.to(policy.device), prompts


def newest_of(run: Path) -> Checkpoint:
    """The newest checkpoint of a run. Damaged -> CheckpointError: another holds other weights."""
    found = checkpoint.load_newest(run)
    for folder, what in found.damaged.items():
        if folder.exists():  # else the run goes on and has removed it
            raise CheckpointError(f"{what}; remove {folder} to take {found.folder.name} instead")
    return found


def load_tuned(cfg: Config, saved: Checkpoint) -> Policy:
    """The policy of a run with the averaged weights of a checkpoint of it, which before the first
    iteration are the untrained ones; the view "reference" is the base model."""
    policy = make_policy(cfg)
    if cfg.train.mode == "full":
        policy.add_view("reference")  # with LoRA it is the adapters switched off
    if saved.meta["iteration"]:
        averages = {name: value for name, value in saved.group("ema").items() if name != "step"}
        policy.load_state("default", saved.group("policy") | averages)
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
    return weights, read_settings(settings)


def pipeline_of(folder: Path) -> dict[str, Any]:
    """Arguments of the pipeline's own call (size, frames ...) that a run was trained with; {} of a
    folder that is not a run."""
    path = folder / "config.yaml"
    return dict(load.read_config(path).model.pipeline) if path.is_file() else {}
