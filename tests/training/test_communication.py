"""What the budget says that processes send each other is what they then ask for: torch's fake
process group takes every call and sends nothing."""

from collections import defaultdict
from contextlib import contextmanager
from types import SimpleNamespace

import long
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.config.load import load_config
from flowrl.policy import load_policy
from flowrl.policy.weights.recompute import recompute
from flowrl.runtime.processes.world import World
from flowrl.training.budget.call_costs import Cost
from flowrl.training.budget.planner import Planner
from flowrl.training.budget.roofline import GIB, GPUS
from flowrl.training.budget.weight_costs import weight_costs
from flowrl.training.split.shard import split

SIZE = 4
WORDS = ["model=shapes-sd3", "algorithm=flow_grpo", "reward=jpeg", "batch.prompts=8"]
NAMES = {
    "_allgather_base_": "gathered",
    "_reduce_scatter_base_": "scattered",
    "allreduce_": "summed",
}


class Sent(TorchDispatchMode):
    """Calls of the process group, and the bytes of the whole that each is about."""

    def __init__(self):
        super().__init__()
        self.calls, self.bytes = defaultdict(int), defaultdict(int)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = NAMES[func._opname]
            tensors = [t for a in args[:2] for t in (a if isinstance(a, list) else [a])]
            sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
            self.calls[name] += 1
            self.bytes[name] += max(sizes)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_processes():
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def planned(*words):
    return Planner(load_config(None, [*WORDS, *words]), GPUS["h100"], gpus=SIZE)


def reduce(tensor, _):
    dist.all_reduce(tensor)
    return tensor


def test_gradients_of_a_lora_are_summed_in_few_calls_of_all_their_bytes():
    told = planned("batch.updates=2").budget().reduced
    cfg = load_config(None, WORDS)
    policy = load_policy("shapes-sd3", lora=cfg.train.lora.model_dump())
    world = World(
        SimpleNamespace(process_index=0, num_processes=SIZE, is_main_process=True, reduce=reduce)
    )
    with fake_processes(), Sent() as sent:
        world.sum_gradients(policy.trainable.named().values())
    assert told["gb"] * GIB == 2 * sent.bytes["summed"] and sent.calls["summed"] == 1
    link = GPUS["h100"].link
    ring = 2 * (SIZE - 1) / SIZE * sent.bytes["summed"] / link + 3e-5 * sent.calls["summed"]
    assert told["seconds"] == pytest.approx(2 * ring)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", long.but([False, True], {False}))
@pytest.mark.parametrize("mode", long.but(["lora", "full"], {"full"}))
def test_split_weights_come_once_a_forward_and_once_a_backward(mode, checkpointing):
    """Of each whole, N - 1 of N parts come from other processes, or go to them."""
    planner = planned(f"train.mode={mode}", "train.shard=[denoiser]")
    costs = weight_costs(planner.cfg, planner.policy, SIZE)
    lora = planner.cfg.train.lora.model_dump() if mode == "lora" else None
    policy = load_policy("shapes-sd3", lora=lora)
    (name,) = policy.networks
    if mode == "full":
        policy.networks[name].requires_grad_(True)
    cond, rows = policy.encode(["a red circle"]), torch.zeros(2, dtype=torch.int64)
    recompute(policy.networks.values(), checkpointing)
    x = torch.randn(2, *policy.latent_shape)
    with fake_processes():
        policy.modules[name] = split(policy.networks[name], init_device_mesh("cpu", (SIZE,)))
        with Sent() as forward:
            v = policy.velocity(x, 0.5, cond, rows, guidance="none")
        with Sent() as backward:
            v.sum().backward()
    part = (SIZE - 1) / SIZE
    assert forward.bytes == {"gathered": costs.gathered / part}
    assert backward.bytes["gathered"] == costs.gathered / part
    assert backward.bytes.get("scattered", 0) == costs.scattered / part
    seconds = [
        costs.paid(Cost(), GPUS["h100"], 2.0, backward=True).seconds,
        costs.paid(Cost(), GPUS["h100"], 1.0, backward=False).seconds,
    ]
    sent = [sum(sent.bytes.values()) * part / GPUS["h100"].link for sent in (backward, forward)]
    assert seconds == pytest.approx(sent)
    assert (planner.budget().reduced["gb"] > 0) == (mode == "lora")
