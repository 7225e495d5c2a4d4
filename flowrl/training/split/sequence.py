"""train.sequence_parallel: a team of processes shares each call of the network.

Every member holds all weights and the same rows, and computes a part of their tokens; in attention
they exchange tokens for heads (Ulysses, Jacobs et al. 2023, arXiv:2309.14509), and the output is
gathered whole. diffusers does this if a model says how its tokens are split (`_cp_plan`). A
member's backward yields the part of the gradient that belongs to its own tokens, so gradients are
summed over members in the same way as over teams.

Every member computes the same samples and losses: noise is named by prompt and copy, and the scores
of a team's first member count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flowrl.data.prompts import Prompts
from flowrl.policy import Policy
from flowrl.policy.replay.record import prediction_of
from flowrl.runtime.log import logger
from flowrl.runtime.processes.world import Lost, World
from flowrl.training.split.shard import check_replayed, one_row

# torch 2.12 and later warn about a call that diffusers makes
warnings.filterwarnings("ignore", message=".*_functional_collectives.all_gather_tensor")
SETTING = "train.sequence_parallel"
Autocast = Callable[[], AbstractContextManager[object]]


def share_calls(
    policy: Policy,
    world: World,
    prompts: Prompts,
    *,
    guidance: float | str,
    autocast: Autocast,
) -> None:
    """Share the calls of a policy's networks among the members of a team from here on; its adapters
    must exist already. ValueError for a network that cannot be shared, or whose prediction for one
    row differs then."""
    check_replayed(policy, SETTING)
    for name, network in policy.networks.items():
        check_network(name, network, world.members)
    with autocast():
        calls = one_row(policy, prompts, guidance, SETTING)
    alone = {name: _predict(policy, name, calls, autocast) for name in policy.networks}
    plan = plan_of(world)
    for network in policy.networks.values():
        hook(network, plan)
    for name, whole in alone.items():
        if wrong := _compared(policy, name, calls, autocast, world, whole):
            for network in policy.networks.values():
                unhook(network)
            kind = type(policy.networks[name]).__name__
            raise ValueError(f"{SETTING}={world.members}: the {name} ({kind}): {wrong}")
    for name in policy.networks:
        policy.modules[name] = Shared(policy.modules[name], world)
    logger.info(f"{SETTING}: teams of {world.members} share the calls of the network")


def check_network(name: str, network: nn.Module, members: int) -> None:
    """Raise ValueError if a network does not say how its tokens are split, or cannot be split into
    so many parts."""
    kind = f"{SETTING}={members}: the {name} ({type(network).__name__})"
    if not getattr(network, "_cp_plan", None):
        raise ValueError(
            f"{kind} has no context-parallel plan in diffusers (_cp_plan); leave {SETTING} out"
        )
    processors = [module.processor for module in attentions(network)]
    if any(processor._parallel_config is not None for processor in processors):
        raise ValueError(f"{kind} was shared by a run before; load the policy anew")
    for backend in {backend_of(processor) for processor in processors}:
        if not _AttentionBackendRegistry._is_context_parallel_available(backend):
            raise ValueError(
                f"{kind} attends by {backend.value}, which cannot be shared; set train.attention to"
                f" one of {', '.join(sorted(_AttentionBackendRegistry._supports_context_parallel))}"
            )
    for heads in sorted({module.heads for module in attentions(network)}):
        if heads % members:
            raise ValueError(
                f"{kind} has {heads} attention heads, which do not divide by {members}"
            )


def attentions(network: nn.Module) -> list[Any]:
    """List the attention modules of a network whose calls can be shared."""
    found = [m for m in network.modules() if isinstance(m, Attention | AttentionModuleMixin)]
    return [m for m in found if hasattr(m.processor, "_parallel_config")]


def backend_of(processor: Any) -> AttentionBackendName:
    if processor._attention_backend is not None:
        return AttentionBackendName(processor._attention_backend)
    return _AttentionBackendRegistry.get_active_backend()[0]


def plan_of(world: World) -> ContextParallelConfig:
    """Describe the team of this process for diffusers."""
    plan = ContextParallelConfig(ulysses_degree=world.members)
    device = world.accelerator.device
    names = ("team", "ring", "ulysses")
    mesh = init_device_mesh(device.type, (world.size, 1, world.members), mesh_dim_names=names)
    plan.setup(world.process, world.processes, device, mesh["ring", "ulysses"])
    world.meet()  # a process that leaves while others still connect would break their connections
    return plan


def hook(network: Any, plan: ContextParallelConfig) -> None:
    """Share a network's calls. diffusers' `enable_parallelism` does the same, but it counts the
    GPUs of a host and takes all processes for one team."""
    for module in attentions(network):
        module.processor._parallel_config = ParallelConfig(context_parallel_config=plan)
    apply_context_parallel(network, plan, network._cp_plan)


def unhook(network: Any) -> None:
    """Undo `hook`."""
    for module in attentions(network):
        module.processor._parallel_config = None
    remove_context_parallel(network, network._cp_plan)


def _compared(
    policy: Policy,
    name: str,
    calls: dict[str, dict[str, Any]],
    autocast: Autocast,
    world: World,
    whole: Tensor,
) -> str:
    """Say why a team cannot share a network's calls, or "". whole: prediction of one row alone."""
    try:
        with world.safely():
            together = _predict(policy, name, calls, autocast)
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, Lost):
            raise
        shape = "x".join(map(str, policy.latent_shape))
        why = str(error).partition("\n")[0]
        return f"its tokens of a latent {shape} cannot be dealt out: {why}"
    if together.shape != whole.shape:
        return (
            f"a team predicts {[*together.shape]} for one row, and a process alone {[*whole.shape]}"
        )
    apart = float((together - whole).norm() / whole.norm())
    if apart <= torch.finfo(whole.dtype).eps ** 0.5:
        return ""
    return f"a team predicts something else for one row than a process alone, by {apart:.1e}"


def _predict(
    policy: Policy, name: str, calls: dict[str, dict[str, Any]], autocast: Autocast
) -> Tensor:
    """Return a network's prediction for its one row, (1, ...)."""
    with autocast(), torch.no_grad():
        return prediction_of(policy.modules[name](*calls[name]["args"], **calls[name]["kwargs"]))


class Shared(nn.Module):
    """A network that a team calls together; if a member is gone, the others say so."""

    def __init__(self, network: nn.Module, world: World) -> None:
        super().__init__()
        self.network, self.world = network, world

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.world.safely():
            return self.network(*args, **kwargs)
