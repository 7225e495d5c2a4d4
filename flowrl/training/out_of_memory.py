"""Explain in a sentence that memory ran out in a run: in which phase, what holds memory, what to
set, and which checkpoint is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.config.device import usual_device
from flowrl.config.lighter import BETWEEN, START, Shortage, as_words, next_change
from flowrl.config.schema import Config
from flowrl.policy.weights.waiting import tensors_of
from flowrl.rewards.core.reward import networks
from flowrl.runtime.memory import OutOfMemory, ran_out
from flowrl.runtime.processes import shares
from flowrl.runtime.processes.launcher import launched
from flowrl.runtime.store import checkpoint
from flowrl.runtime.text import printable
from flowrl.training.records import RunParts

BUDGET = "flowrl budget says what fits"


class RunInProgress(Protocol):
    """The parts of a run that an out-of-memory message needs."""

    cfg: Config
    parts: RunParts


@contextmanager
def explained_start(cfg: Config) -> Iterator[None]:
    """Turn an error of memory while a run is made into OutOfMemory, which says what to set."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        short = Shortage(
            phase=START,
            gpus=launched(),
            cuda=usual_device() == "cuda" and not of_host(error),
        )
        what = f"memory ran out at the start, in the phase {START} ({words_of(error)}){used(())}"
        raise OutOfMemory(
            f"{what}; {advised(cfg, short)}; {BUDGET}; nothing was trained yet"
        ) from error


@contextmanager
def explained(trainer: RunInProgress) -> Iterator[None]:
    """Turn an error of memory inside a run into OutOfMemory, which says what to set."""
    try:
        yield
    except Exception as error:
        if not ran_out(error) or isinstance(error, OutOfMemory):
            raise
        cfg, parts = trainer.cfg, trainer.parts
        short = shortage(parts, error)
        what = (
            f"memory ran out in the phase {short.phase} ({words_of(error)}){used(resident(parts))}"
        )
        go_on = f"flowrl train SETTINGS --resume {parts.path} --accept-changes"
        raise OutOfMemory(
            f"{what}; {advised(cfg, short)}; {BUDGET}; {kept(parts)}: {go_on}"
        ) from error


def shortage(parts: RunParts, error: Exception) -> Shortage:
    """Describe where memory was short in a run."""
    found, world = checkpoint.steps(parts.path), parts.source.world
    return Shortage(
        phase=getattr(error, "phase", BETWEEN),
        gpus=world.processes,
        state=parts.setup.state_rows,
        cuda=parts.source.policy.device.type == "cuda" and not of_host(error),
        moments=bool(found) and checkpoint.iteration_of(found[-1]) > 0,
    )


def of_host(error: Exception) -> bool:
    """Whether host memory ran out, not a GPU's."""
    return isinstance(error, MemoryError | OSError) or "CPUAllocator" in str(error)


def words_of(error: Exception) -> str:
    return printable(error, 120) or type(error).__name__


def kept(parts: RunParts) -> str:
    """Say which part of the run is on the disk."""
    found = checkpoint.steps(parts.path)
    if not found:
        return "no checkpoint was written yet, and the run starts anew"
    return f"the checkpoint of iteration {checkpoint.iteration_of(found[-1])} is intact, go on"


def resident(parts: RunParts) -> list[tuple[str, int]]:
    """List what stays in memory from phase to phase on the policy's device: (what, bytes), largest
    first."""
    policy, weights = parts.source.policy, parts.weights
    pipe = getattr(policy, "pipe", None)
    others = list(getattr(pipe, "components", {}).values()) if pipe else []
    model = [part for part in (*policy.networks.values(), *others) if isinstance(part, nn.Module)]
    own = [*weights.parameters.values()]
    moments = [value for state in weights.adamw.state.values() for value in state.values()]
    gradients = [p.grad for p in own if p.grad is not None]
    copies = [t for view in getattr(policy.trainable, "copies", {}).values() for t in view.values()]
    trained = [*own, *moments, *gradients, *copies, *weights.ema.state_dict().values()]
    tensors = [t for module in model for t in tensors_of(module)]
    rewards = [t for net in networks(parts.source.rewards.rewards) for t in tensors_of(net)]
    seen: set[int] = set()
    named = (
        ("trained weights, their copies, gradients and moments", trained),
        ("weights of the model", tensors),
        ("weights of rewards", rewards),
    )
    sizes = {what: size_of(found, policy.device, seen) for what, found in named}
    return sorted(sizes.items(), key=lambda item: -item[1])


def size_of(found: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    """Count the bytes of the storages of tensors on a device, each once."""
    total = 0
    for tensor in found:
        if isinstance(tensor, Tensor) and tensor.device == device:
            share = shares.held(tensor)  # this process holds only its share of a split tensor
            flatten = getattr(share, "__tensor_flatten__", None)
            inner = [getattr(share, name) for name in flatten()[0]] if flatten else [share]
            for part in inner:
                storage = part.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
    return total


def used(known: Iterable[tuple[str, int]]) -> str:
    """Say what uses the memory, the largest first; on a GPU the phase uses the rest."""
    words = [f"{size / 2**30:.2f} GB {what}" for what, size in known if size]
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated() - sum(size for _, size in known)
        words.append(f"up to {max(0, peak) / 2**30:.2f} GB activations and states of the phase")
        words.append(f"of {total / 2**30:.1f} GB, {free / 2**30:.1f} of them free now")
    return f", which holds {', '.join(words)}" if words else ""


def advised(cfg: Config, short: Shortage) -> str:
    """Find the next lighter setting that goes with the config's others."""
    if settings := next_change(cfg, short):
        return f"set {as_words(settings)}"
    if short.phase == "reward":
        return "serve the reward on another device (flowrl serve, reward=remote)"
    if short.phase != "decode" and cfg.train.mode == "full":
        return "set train.mode=lora, or train.shard on more GPUs"
    return "ask for smaller pictures (model.pipeline.height and width)"
