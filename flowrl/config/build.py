"""The policy and the algorithm are made from a config, or loaded from a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.common.base import Algorithm
from flowrl.algorithms.common.find import algorithm_class
from flowrl.config import load
from flowrl.config.facts import of_config
from flowrl.config.live import Live, check_given
from flowrl.config.rules import climbs
from flowrl.config.schema import Config, options_of
from flowrl.data import conditions
from flowrl.data import prompts as data_prompts
from flowrl.data.conditions import Conditions
from flowrl.data.scored_dataset import load as load_dataset
from flowrl.policy import Policy, load_policy
from flowrl.policy.generator import GeneratorPolicy
from flowrl.policy.load import call_options
from flowrl.policy.module import ModulePolicy
from flowrl.policy.replay.prompt_cache import PromptCache
from flowrl.policy.replay.record import Encoding
from flowrl.policy.weights import heads
from flowrl.policy.weights.attention import set_attention
from flowrl.policy.weights.lora import SETTINGS as LORA_SETTINGS
from flowrl.policy.weights.lora import read_settings
from flowrl.policy.weights.recompute import recompute
from flowrl.rewards import RewardSet, load_set
from flowrl.rewards.core import score
from flowrl.runtime import registry
from flowrl.runtime.log import logger
from flowrl.runtime.store import checkpoint
from flowrl.runtime.store.checkpoint import Checkpoint, CheckpointError
from flowrl.runtime.store.run_folder import config_file, lora_folder
from flowrl.samplers import flow_sde, sigmas

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision(cfg: Config) -> str:
    """The lowest precision that network outputs went through: "no" (fp32), "bf16" or "fp16"."""
    return (
        cfg.train.precision
        if cfg.train.precision != "no" or cfg.model.dtype == "fp32"
        else cfg.model.dtype
    )


def autocast(cfg: Config, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context in which networks run at train.precision.

    A bf16 network with LoRA has no autocast: it computes in bf16 throughout (weights/masters.py),
    and autocast would widen its layer norms. A network whose weights are all trained is fp32, and
    needs autocast.
    """
    own = cfg.model.dtype == "bf16" and cfg.train.mode == "lora"
    if cfg.train.precision == "no" or own:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=DTYPES[cfg.train.precision])


def make_algorithm(cfg: Config) -> Algorithm:
    cls = algorithm_class(cfg.algorithm["name"])
    return cls(cls.Config.model_validate(options_of(cfg.algorithm)))


def make_policy(
    cfg: Config,
    *,
    algorithm: Algorithm | None = None,
    device: torch.device | str | None = None,
    live: Live | None = None,
    split: bool = False,
    main: bool = True,
) -> Policy:
    """Make the policy that a config trains, with fresh adapters or those of train.init_lora.

    algorithm: the algorithm of this config, if it was made already. live: a policy or prompts that
    a script handed over. split: see load_policy; where each forward brings all blocks from the
    host, main alone checks the policy against its pipeline."""
    live = live or Live()
    algorithm = algorithm or live.algorithm or make_algorithm(cfg)
    of_config(cfg)  # raises ConfigError where a rule over its words refuses it
    own = [part for part in cfg.train.parts if part not in heads.KINDS]
    adapted = cfg.train.mode == "lora" and (own or cfg.train.init_lora)
    lora = cfg.train.lora.model_dump() if adapted else None
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)  # seeds the first values of the adapters
        policy: Any = load_policy(
            cfg.model.source if live.policy is None else live.policy,
            lora=lora,
            parts=own or None,
            dtype=DTYPES[cfg.model.dtype] if live.policy is None else None,
            device=device,
            example=_example(cfg, live),
            hints=cfg.model.hints,
            encoding=encoding(cfg),
            quantize="none" if isinstance(live.policy, Policy) else cfg.model.quantize,
            split=split,
            **conditions.loaded(call_options(cfg.model.pipeline)),
        )
    policy.trainable.freeze(False)
    set_attention(policy.networks.values(), cfg.train.attention, policy.device)
    if own:
        check_trained(cfg, policy)
    if cfg.model.self_check and (main or not split) and hasattr(policy, "self_check"):
        told = isinstance(policy, ModulePolicy | GeneratorPolicy)
        for note in policy.self_check(*[_texts(cfg, live)] * told).notes:
            logger.info(f"model: {note}")
    if cfg.train.init_lora:
        policy.load_lora(Path(cfg.train.init_lora))
    if cfg.train.gradient_checkpointing:
        recompute(policy.networks.values(), cfg.train.gradient_checkpointing)
    if live.policy is None and not climbs(cfg.reward, algorithm.needs):
        policy.narrow_decoder()
    if cfg.model.tiling:
        policy.tile_decoder()
    policy.compile_blocks(cfg.train.compile == "blocks")
    policy.trainable.freeze(not own)
    if cfg.model.offload != "none":
        policy.turns.offload(policy.networks, scorers=cfg.model.offload == "all")
    give_heads(cfg, policy, algorithm)
    return policy


def encoding(cfg: Config) -> Encoding | None:
    """How prompts are encoded; None: as usual."""
    model, leave = cfg.model, cfg.model.encoders == "leave"
    own = Encoding(leave=leave, offload=leave and model.offload != "none")
    if model.prompt_cache is not None:
        return replace(own, cache=PromptCache(model.prompt_cache, model.prompt_cache_gb))
    return own if leave else None


def give_heads(cfg: Config, policy: Policy, algorithm: Algorithm) -> None:
    """Put the small networks of train.parts beside the policy; those of an earlier run of the same
    live policy stay, where they are of the same kind."""
    names = [part for part in cfg.train.parts if part in heads.KINDS]
    if not names:
        policy.trainable.set_heads(None)
        return
    options = algorithm.heads
    made = heads.make({name: options[name] for name in names}, policy.latent_shape, cfg.seed)
    alike = {name: head.options for name, head in policy.trainable.heads.items()}
    if alike != {name: head.options for name, head in made.items()}:
        policy.trainable.set_heads({name: head.to(policy.device) for name, head in made.items()})


def _example(cfg: Config, live: Live) -> Conditions | None:
    """Return the conditions of the first prompt, if it has some."""
    if live.prompts is None:
        train = cfg.data.sources[0]
        return None if registry.is_live(train) else data_prompts.example(train, cfg.data.columns)
    found = conditions.of(live.prompts[:1])
    return found[0] if found else None


def _texts(cfg: Config, live: Live) -> list[str]:
    """Return two prompts of the run: a module's own function of texts may know no others."""
    data = cfg.data
    if live.prompts is not None:
        found = live.prompts
    elif data.offline:
        found = load_dataset(data.offline, soft=True).prompts
    else:
        source = data.eval if registry.is_live(data.train) else data.sources[0]
        found = data_prompts.load_prompts(str(source), data.columns)
    return list(dict.fromkeys(prompt["prompt"] for prompt in found))[:2]


def check_trained(cfg: Config, policy: Policy) -> None:
    """Raise ValueError where a Policy that a factory made trains other parts than the config
    says."""
    if isinstance(policy, GeneratorPolicy):
        raise ValueError(
            f"the model is a generator, which has no weights to train, and"
            f" algorithm={cfg.algorithm['label']} trains a network; use algorithm=dsrl, which"
            " learns its initial noise"
        )
    own = "full" if policy.trainable.lora is None else "lora"
    if own != cfg.train.mode:
        raise ValueError(
            f"model.source={cfg.model.source} makes a Policy that trains with train.mode={own},"
            f" and the config has train.mode={cfg.train.mode}; set it to {own}"
        )


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


def load_run(
    run: Path, live: Live | None = None
) -> tuple[Config, Policy, RewardSet, data_prompts.Prompts]:
    """Load the config, the policy with the averaged weights of the newest checkpoint, rewards and
    held-out prompts of a run. live: objects that a script hands over; its prompts are the held-out
    ones."""
    cfg, live = load.read_config(config_file(run)), live or Live()
    needed = ["policy", "rewards", *["prompts"] * registry.is_live(cfg.data.eval)]
    check_given(cfg, live, call="flowrl.evaluate_run", needed=needed)
    if not cfg.data.eval and live.prompts is None:
        raise ValueError(
            f"{run} was trained without held-out prompts (data.eval); there is nothing to"
            " evaluate on"
        )
    policy = load_tuned(cfg, newest_of(run), live)
    rewards = replace(live.rewards or load_set(cfg.reward), domain_field=cfg.data.domain)
    prompts = live.prompts or data_prompts.load_prompts(str(cfg.data.eval), cfg.data.columns)
    score.check_meta(rewards, {"data.eval": prompts})
    return cfg, policy, rewards.beside(policy), prompts


def newest_of(run: Path) -> Checkpoint:
    """Load the newest checkpoint of a run; raise CheckpointError if it is damaged, because an older
    one holds other weights."""
    found = checkpoint.load_newest(run)
    for folder, what in found.damaged.items():
        if folder.exists():  # a folder that is gone was removed by the run, which still goes on
            raise CheckpointError(f"{what}; remove {folder} to take {found.folder.name} instead")
    return found


def load_tuned(cfg: Config, saved: Checkpoint, live: Live | None = None) -> Policy:
    """Load the policy of a run with the averaged weights of one of its checkpoints, which before
    the first iteration are the untrained ones; the view "reference" is the base model."""
    live = live or Live()
    check_given(cfg, live, call="flowrl.evaluate_run", needed=("policy",))
    if saved.meta["iteration"] and not set(cfg.train.parts) <= set(heads.KINDS):
        # the checkpoint has the weights of a first LoRA, too, as they became
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"init_lora": None})})
    policy = make_policy(cfg, live=live)
    if cfg.train.mode == "full" and not policy.trainable.has("reference"):
        # with LoRA the reference is the network with its adapters switched off
        policy.trainable.add_view("reference")
    if saved.meta["iteration"]:
        averages = {name: value for name, value in saved.group("ema").items() if name != "step"}
        policy.trainable.load("default", saved.group("policy") | averages)
    return policy


def trained(
    run: Path,
    call: Mapping[str, Any],
    hints: str | None = None,
    saved: Checkpoint | None = None,
    prompts: Sequence[Any] = ("",),
    **model: Any,
) -> Policy:
    """Load the policy that a run trained, LoRA or all weights, averaged; its view "reference" is
    the base model. call: arguments of the pipeline's call in place of the run's. saved: a
    checkpoint in place of the newest. prompts: those to sample, which show how the pipeline is
    called where the run's are gone. model: settings of `model` in place of the run's."""
    cfg, saved = load.read_for_sampling(config_file(run)), saved or newest_of(run)
    check_given(cfg, Live(), call="flowrl.generate", needed=("policy",))
    if not saved.meta["iteration"]:
        raise ValueError(f"{run} has trained nothing yet: its checkpoint is of iteration 0")
    own = {**cfg.model.pipeline, **call}
    new = {"self_check": False, "pipeline": own, "hints": hints or cfg.model.hints, **model}
    try:
        shown = data_prompts.load_prompts(cfg.data.sources[0], cfg.data.columns)[:1]
    except ValueError:
        shown = [{"prompt": p} if isinstance(p, str) else p for p in prompts[:1]]
    own_model = cfg.model.model_copy(update=new)
    return load_tuned(cfg.model_copy(update={"model": own_model}), saved, Live(prompts=shown))


def lora_of(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Find LoRA weights and what load_policy takes for them, {"lora", "parts"}, in a run folder or
    a folder that a run exported. Where the first is None, load_policy loads the LoRA itself (a
    file or folder of any trainer), or the run trained heads alone (`heads_of`)."""
    weights = lora_folder(folder)
    settings = weights / LORA_SETTINGS
    if not folder.exists():
        raise ValueError(
            f"--lora: there is no {folder}; give a finished run's folder, or a LoRA of any trainer"
        )
    if not settings.is_file() and heads_of(folder):
        return None, {}
    if weights.is_file() or (not settings.is_file() and [*weights.glob("*.safetensors")]):
        return None, {"lora": weights}
    if not settings.is_file():
        raise ValueError(
            f"{folder} holds no LoRA, neither {settings.name} of a run nor a .safetensors file;"
            " give a finished run's folder (or, where a run trained all weights, the run as the"
            " model), or a LoRA of any trainer"
        )
    found = read_settings(settings)
    return weights, {"parts": found.pop("parts"), "lora": found}


def heads_of(folder: Path) -> Path | None:
    """Folder of the small networks that a run trained beside the model, if it exported any."""
    heads = folder / "heads"
    return heads if heads.is_dir() else None


def pipeline_of(folder: Path) -> dict[str, Any]:
    """Arguments of the pipeline's own call (size, frames ...) that a run was trained with, and its
    hints; {} of a folder that is not a run."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    model = load.read_for_sampling(path).model
    return {**model.pipeline, **({"hints": model.hints} if model.hints else {})}
