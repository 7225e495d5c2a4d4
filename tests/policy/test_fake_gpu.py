"""Forwards of real architectures on a GPU that is not there: torch's fake tensors say "cuda" and
compute nothing, and an operator with tensors of two devices, or a read of a value, is an error.

Autograd asks the driver for the device of a gradient ("hasPrimaryContext"), so that backwards, and
whole runs, are on the device of tests/helpers/far.py (test_far_device.py).
"""

from dataclasses import replace

import long
import pytest
import thin
import torch
from small import NAMED
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from flowrl.config.load import load_config
from flowrl.policy.load import call_options
from flowrl.training.budget import modelled
from flowrl.training.budget.architecture import read
from flowrl.training.budget.modelled import ModelledPolicy

GPU = torch.device("cuda")
SIGMA = 0.5
pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.10."), reason="its fake tensors read no number of the host"
)
MODELS = ["sd3.5-medium", "flux.1-dev", "sd1.5", "sdxl", "qwen-image", "wan2.1-1.3b"]


def policy_of(name):
    """bf16 with LoRA in fp32, as a GPU trains; few layers."""
    cfg = load_config(None, [f"model={name}", *NAMED])
    known = read(cfg.model.source)
    parts = {part: {**config, **thin.fewer(config)} for part, config in known.parts.items()}
    policy = ModelledPolicy(
        replace(known, parts=parts),
        call_options(cfg.model.pipeline),
        lora={"rank": 2},
        dtype=torch.bfloat16,
        decoder=torch.bfloat16,
    )
    policy.replay.coords.time.at(SIGMA)  # a number of the host, which is known from here on
    return policy


def sent(policy):
    """Networks on the GPU, the prompts' part of the calls, latents and their rows."""
    for network in (*policy.networks.values(), policy.vae, *policy.others.values()):
        network.to_empty(device=GPU)
    cond = modelled.cond_of(policy.shapes, ["a", "b"], policy.dtype, GPU)
    rows = torch.zeros(2, dtype=torch.int64, device=GPU)
    return torch.empty(2, *policy.latent_shape, device=GPU), cond, rows


@pytest.mark.parametrize("name", long.but(MODELS, set(MODELS[1:])))
def test_calls_of_the_networks_stay_on_the_gpu_and_read_no_value(name, monkeypatch):
    policy = policy_of(name)
    monkeypatch.setattr(modelled, "META", GPU)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, cond, rows = sent(policy)
        v = policy.velocity(x, SIGMA, cond, rows)  # with a gradient
        with torch.no_grad():
            media = policy.decode(x)
            answers = policy.encode_one()
        assert policy.device.type == "cuda" and v.requires_grad
        assert v.shape == x.shape and v.device.type == media.device.type == "cuda"
        plain = [dict(a) if hasattr(a, "keys") else a for a in answers]
        found = torch.utils._pytree.tree_leaves(plain)
        assert {t.device.type for t in found if isinstance(t, torch.Tensor)} == {"cuda"}


def test_tensors_of_two_devices_and_reads_would_be_found():
    policy = policy_of("sd3.5-medium")
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, cond, rows = sent(policy)
        with pytest.raises(RuntimeError, match="same device"):
            policy.velocity(x.to("cpu"), SIGMA, cond, rows)
        with pytest.raises(DataDependentOutputException):
            policy.velocity(x, SIGMA, cond, rows).sum().item()
