"""train.shard: the weights of networks are split, and each process keeps its share.

Until then the blocks wait in host memory (policy/weights/waiting.py), and each comes to the device
alone. A block is gathered from all processes when it runs and freed after it (torch's FSDP2,
`fully_shard`), so that a forward holds one block whole. LoRA stays whole on every process, so
optimizer, averages, views, checkpoints and exports are not affected. In full mode all of these are
shares as well (runtime/processes/shares.py), gradients are added up over processes in the backward,
block by block, and checkpoints are written whole. Calls of processes that differ in their number of
rows are kept in step (runtime/processes/in_step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from flowrl.data import conditions
from flowrl.data.prompts import Prompts
from flowrl.policy import Policy
from flowrl.policy.pipeline import PipelinePolicy
from flowrl.policy.replay.body import BodyReplay
from flowrl.policy.replay.record import prediction_of
from flowrl.policy.weights.blocks import blocks
from flowrl.runtime.log import logger
from flowrl.runtime.processes import shares
from flowrl.runtime.processes.in_step import Together
from flowrl.runtime.processes.world import World

STEPS = 8  # number of steps in the schedule whose noise levels are tried, to reach every network


class Root(nn.Module):
    """The module that `fully_shard` takes for the whole network: a pipeline that calls the network
    itself, with a stub in place of its forward, gathers nothing."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)


def shard(
    policy: Policy,
    world: World,
    prompts: Prompts,
    *,
    guidance: float | str,
    autocast: Callable[[], AbstractContextManager[object]],
) -> None:
    """Split the denoisers of a policy over all processes, before views and optimizer are made,
    which in full mode are split likewise. ValueError for a network that cannot be split."""
    if world.size == 1:
        logger.warning("train.shard splits nothing: there is one process")
        return
    check_policy(policy)
    whole = sum(map(size_of, policy.networks.values()))
    with autocast():
        calls = one_row(policy, prompts, guidance, "train.shard")
    # the policy's device, not the networks': weights of a waiting network are on the host
    mesh = init_device_mesh(policy.device.type, (world.size,))
    policy.turns.end_waiting()
    roots = {name: split(network, mesh) for name, network in policy.networks.items()}
    rows = [_call(roots[name], calls[name], autocast) for name in roots]
    in_step = world.keep_in_step(rows)
    for number, (name, root) in enumerate(roots.items()):
        policy.modules[name] = Together(root, number, in_step)
    share = sum(map(size_of, policy.networks.values()))
    logger.info(f"train.shard: {share / 1e6:,.1f} of {whole / 1e6:,.1f} MB of weights a process")


def check_policy(policy: Policy) -> None:
    """Raise ValueError if a policy's networks cannot be split."""
    check_replayed(policy, "train.shard")
    for name, network in policy.networks.items():
        kind = type(network).__name__
        if not blocks(network):
            raise ValueError(
                f"train.shard: the {name} ({kind}) has no repeated blocks (modules in an"
                " nn.ModuleList) to split; leave train.shard out"
            )
        odd = [p for p in network.parameters() if not p.is_floating_point()]
        if odd:
            raise ValueError(
                f"train.shard: weights of the {name} ({kind}) are {odd[0].dtype}, and only whole"
                " floating-point weights are split; leave quantisation or train.shard out"
            )
        if any(map(shares.is_split, network.parameters())):
            raise ValueError(
                f"train.shard: the {name} ({kind}) was split by a run before; load the policy anew"
            )
        if single := [key for key, p in network.named_parameters() if not p.ndim]:
            raise ValueError(
                f"train.shard: {single[0]} of the {name} ({kind}) is a single number, which has no"
                " rows to split; leave train.shard out"
            )


def check_replayed(policy: Policy, setting: str) -> None:
    """Raise ValueError if a policy calls no network that processes could share."""
    if isinstance(policy, PipelinePolicy) and isinstance(policy.replay, BodyReplay):
        raise ValueError(
            f"{setting}: {policy.replay.pipeline} is run by its own loop body, whose calls cannot"
            f" be kept in step; leave {setting} out"
        )
    if not policy.networks:
        raise ValueError(
            f"{setting}: the model is a generator, which has no weights; leave {setting} out"
        )


def one_row(
    policy: Policy, prompts: Prompts, guidance: float | str, setting: str
) -> dict[str, dict[str, Any]]:
    """Record the arguments of a call with one row, by network. setting: its name in a refusal."""
    calls: dict[str, dict[str, Any]] = {}
    known, counted = policy.modules, policy.calls
    policy.modules = {name: Noted(module, name, calls) for name, module in known.items()}
    try:
        cond = policy.encode([prompts[0]["prompt"]], conditions.of(prompts[:1]))
        # random, so that its tokens differ
        drawn = torch.randn((1, *policy.latent_shape), generator=torch.Generator().manual_seed(0))
        noise = drawn.to(policy.device)
        rows = torch.zeros(1, dtype=torch.int64)
        for sigma in policy.schedule(STEPS).sigmas[:-1]:
            with torch.no_grad():
                policy.velocity(noise, sigma, cond, rows, guidance=guidance)
            if calls.keys() == known.keys():
                break
    finally:
        policy.modules, policy.calls = known, counted
    if missing := known.keys() - calls.keys():
        raise ValueError(
            f"{setting}: the {sorted(missing)[0]} is called at no noise level of the schedule;"
            f" leave {setting} out"
        )
    return calls


class Noted(nn.Module):
    """A network that notes the arguments of its first call."""

    def __init__(self, network: nn.Module, name: str, calls: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.network, self.name, self.calls = network, name, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.setdefault(self.name, {"args": args, "kwargs": kwargs})
        return self.network(*args, **kwargs)


def split(network: nn.Module, mesh: DeviceMesh) -> Root:
    """Split a network's weights, block by block, and the weights outside of blocks. Gradients of
    trained ones are sums over processes: each divides its loss by the weight of all."""
    root = Root(network)
    for module in (*blocks(network), root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=adapters(module))
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return root


def adapters(module: nn.Module) -> set[nn.Parameter]:
    """Return the weights of adapters, of all views."""
    return {p for name, p in module.named_parameters() if "lora_" in name}


def _call(
    root: Root, call: dict[str, Any], autocast: Callable[[], AbstractContextManager[object]]
) -> Callable[[], Tensor]:
    """Make a function that calls a network with one row -> its prediction."""

    def run() -> Tensor:
        with autocast():
            return prediction_of(root(*call["args"], **call["kwargs"]))

    return run


def size_of(network: nn.Module) -> int:
    """Count the bytes of the weights that this process holds."""
    return sum(p.numel() * p.element_size() for p in map(shares.held, network.parameters()))
