"""Networks whose blocks wait in host memory until they are split: one block at a time is on the
device. There is one device here, so that what is put there is noted in place of moved."""

import pytest
import tiny
import torch

from flowrl.policy import load_policy
from flowrl.policy.weights import waiting
from flowrl.policy.weights.blocks import blocks

PROMPTS = ["a red circle", "two blue squares"]


def noted(monkeypatch):
    """Weights that are on the device, by identity; what `leave` gives back is there no more."""
    there = {}
    put, leave = waiting.put, waiting.Waiting._leave

    def putting(tensors, device):
        tensors = list(tensors)
        there.update({id(t): t for t in tensors})
        put(tensors, device)

    def leaving(self, block, *call):
        for t, _ in self.home.get(block, []):
            there.pop(id(t))
        leave(self, block, *call)

    monkeypatch.setattr(waiting, "put", putting)
    monkeypatch.setattr(waiting.Waiting, "_leave", leaving)
    return there


def ids(tensors):
    return {id(t) for t in tensors}


def test_one_block_at_a_time_is_on_the_device(monkeypatch):
    there = noted(monkeypatch)
    torch.manual_seed(0)
    network = tiny.pipeline("sd3").transformer
    found = blocks(network)
    inside = ids(t for block in found for t in waiting.tensors_of(block))
    outside = ids(waiting.tensors_of(network)) - inside
    held = waiting.Waiting([network], "cpu")
    assert outside and there.keys() == outside  # positions, embeddings, the last layer

    seen = []
    for block in found:
        block.register_forward_hook(lambda *call: seen.append(set(there) - outside), prepend=True)
    call = tiny_call(network)
    with torch.no_grad():
        network(**call)
    assert seen == [ids(waiting.tensors_of(block)) for block in found]
    assert there.keys() == outside

    held.end()
    seen.clear()
    network(**call)  # with a gradient, too: nothing moves any more
    assert seen == [set()] * len(found)


def tiny_call(network):
    c = network.config
    return {
        "hidden_states": torch.randn(1, c.in_channels, 8, 8),
        "encoder_hidden_states": torch.randn(1, 4, c.joint_attention_dim),
        "pooled_projections": torch.randn(1, c.pooled_projection_dim),
        "timestep": torch.tensor([500.0]),
    }


def test_a_block_that_fails_leaves_the_device(monkeypatch):
    there = noted(monkeypatch)
    network = tiny.pipeline("sd3").transformer
    held = waiting.Waiting([network], "cpu")
    before = set(there)
    within = next(blocks(network)[0].children())
    within.register_forward_pre_hook(lambda *call: [][0])
    with torch.no_grad(), pytest.raises(IndexError):
        network(**tiny_call(network))
    assert set(there) == before and not held.home


def test_a_policy_that_waits_predicts_the_same_and_is_checked(monkeypatch):
    there = noted(monkeypatch)
    whole, split = (policy_of(split=split) for split in (False, True))
    assert split.turns.waiting is not None and whole.turns.waiting is None
    adapters = ids(
        p for name, p in split.networks["transformer"].named_parameters() if "lora_" in name
    )
    assert adapters and adapters <= there.keys()  # they are not split, and come to stay
    assert split.self_check().holds
    noise = torch.randn(2, *whole.latent_shape)
    rows = torch.arange(2)
    with torch.no_grad():
        ours, theirs = (p.velocity(noise, 0.7, p.encode(PROMPTS), rows) for p in (split, whole))
    assert torch.equal(ours, theirs)


def policy_of(split):
    torch.manual_seed(3)
    pipe = tiny.pipeline("sd3")
    return load_policy(pipe, lora={"rank": 2}, device="cpu", split=split)
