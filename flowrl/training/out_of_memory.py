"""Memory that ran out in a run, as a sentence: in which phase, what holds memory, what to set, and
which checkpoint is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.config.build import dearest
from flowrl.config.combine import Settings, combines, words
from flowrl.config.schema import Config
from flowrl.runtime import checkpoint, shares
from flowrl.runtime.memory import OutOfMemory, ran_out
from flowrl.runtime.text import printable
from flowrl.training.records import Parts

START = "start-up"
FORWARD = ("rollout", "reference", "evaluation", "update")


class Trained(Protocol):
    """A trainer."""

    cfg: Config
    parts: Parts


@contextmanager
def explained_start(cfg: Config) -> Iterator[None]:
    """An error of memory while a run is made -> OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        phase = getattr(error, "phase", START)
        raise OutOfMemory(
            f"memory ran out at the start, in the phase {phase} ({said(error)}){used(())};"
            f" {advised(cfg, phase)}; nothing was trained yet"
        ) from error


@contextmanager
def explained(trainer: Trained) -> Iterator[None]:
    """An error of memory inside a run -> OutOfMemory."""
    try:
        yield
    except Exception as error:
        if not ran_out(error) or isinstance(error, OutOfMemory):
            raise
        phase, path = getattr(error, "phase", "between phases"), trainer.parts.path
        raise OutOfMemory(
            f"memory ran out in the phase {phase} ({said(error)}){used(held(trainer.parts))};"
            f" {advised(trainer.cfg, phase, state=rows_of_a_state(trainer.parts))};"
            f" {kept(trainer.parts)}: flowrl train SETTINGS --resume"
            f" {path} --accept-changes"
        ) from error


def said(error: Exception) -> str:
    return printable(error, 120) or type(error).__name__


def kept(parts: Parts) -> str:
    """What of the run is on the disk."""
    found = checkpoint.steps(parts.path)
    if not found:
        return "no checkpoint was written yet, and the run starts anew"
    return f"the checkpoint of iteration {checkpoint.iteration_of(found[-1])} is intact, go on"


def held(parts: Parts) -> list[tuple[str, int]]:
    """(what, bytes) of what stays in memory from phase to phase, on the policy's device."""
    policy, weights = parts.source.policy, parts.weights
    pipe = getattr(policy, "pipe", None)
    others = list(getattr(pipe, "components", {}).values()) if pipe else []
    model = [part for part in (*policy.networks.values(), *others) if isinstance(part, nn.Module)]
    own = [*weights.parameters.values()]
    moments = [value for state in weights.adamw.state.values() for value in state.values()]
    gradients = [p.grad for p in own if p.grad is not None]
    copies = [t for view in getattr(policy.trainable, "copies", {}).values() for t in view.values()]
    trained = [*own, *moments, *gradients, *copies, *weights.ema.state_dict().values()]
    tensors = [t for module in model for t in (*module.parameters(), *module.buffers())]
    rewards = [
        tensor
        for reward in parts.source.rewards.rewards.values()
        for value in vars(reward).values()
        if isinstance(value, nn.Module)
        for tensor in value.parameters()
    ]
    seen: set[int] = set()
    named = (
        ("trained weights, their copies, gradients and moments", trained),
        ("weights of the model", tensors),
        ("weights of rewards", rewards),
    )
    sizes = {what: size_of(found, policy.device, seen) for what, found in named}
    return sorted(sizes.items(), key=lambda item: -item[1])


def size_of(found: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages of tensors on a device, each counted once."""
    total = 0
    for tensor in found:
        if isinstance(tensor, Tensor) and tensor.device == device:
            own = shares.held(tensor)  # of a split tensor, the share
            parts = getattr(own, "__tensor_flatten__", None)
            inner = [getattr(own, name) for name in parts()[0]] if parts else [own]
            for part in inner:
                storage = part.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
    return total


def used(known: Iterable[tuple[str, int]]) -> str:
    """Who uses the memory, the largest first; on a GPU the rest is that of the phase."""
    words = [f"{size / 2**30:.2f} GB {what}" for what, size in known if size]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated() - sum(size for _, size in known)
        words.append(f"up to {max(0, peak) / 2**30:.2f} GB activations and states of the phase")
        words.append(f"of {total / 2**30:.1f} GB, {free / 2**30:.1f} of them free now")
    return f", which holds {', '.join(words)}" if words else ""


def rows_of_a_state(parts: Parts) -> int:
    """Network rows of one state of a run, the least that a forward has."""
    policy = parts.source.policy
    return policy.branches(dearest(parts.source.guidance, parts.algorithm, policy))


def advised(cfg: Config, phase: str, *, state: int = 1) -> str:
    """The nearest setting that needs less in a phase, of those that go with the config's others.
    state: network rows of one state, where they are known."""
    for settings in lighter(cfg, phase, state=state):
        if combines(cfg, settings):
            return f"set {words(settings)}"
    if phase == "reward":
        return "serve the reward on another device (flowrl serve, reward=remote)"
    if phase != "decode" and cfg.train.mode == "full":
        return "set train.mode=lora, or train.shard on more GPUs"
    return "ask for smaller pictures (model.pipeline.height and width)"


def lighter(cfg: Config, phase: str, *, state: int = 1) -> Iterator[Settings]:
    """Settings that need less in a phase, each by itself, the nearest first. batch.micro is not
    halved below the rows of one state, which would change nothing."""
    b = cfg.batch
    if phase in ("decode", "reward"):
        if (most := min(b.decode, b.prompts * b.group)) > 1:
            yield {"batch.decode": most // 2}
        if phase == "decode" and not cfg.model.tiling:
            yield {"model.tiling": True}
        return
    if phase == "update" and cfg.train.gradient_checkpointing is not True:
        yield {"train.gradient_checkpointing": True}
    if phase in FORWARD and b.micro // 2 >= state:
        yield {"batch.micro": b.micro // 2}
    if cfg.model.dtype == "fp32":
        yield {"model.dtype": "bf16"}
    if cfg.model.encoders == "stay":
        yield {"model.encoders": "leave"}
    if cfg.train.mode == "full" and cfg.optimizer.name == "adamw":
        yield {"optimizer.name": "adamw8bit"}
    if cfg.model.quantize != "nf4":
        yield {"model.quantize": "int8" if cfg.model.quantize == "none" else "nf4"}
