"""A policy in bf16 or fp16 rounds as its pipeline does, and finds the numbers that fp32 finds."""

import long
import pytest
import tiny
import torch
from torch import nn

from flowrl.policy import load_policy
from flowrl.policy.load import cast
from flowrl.policy.replay.guidance import Guidance
from flowrl.training.identity import _sampled

LOW = [torch.bfloat16, torch.float16]
GUIDED = {
    f"{name} {kind}": (name, dtype)
    for name in ("sd15", "sdxl", "sd3", "flux", "qwenimage", "wan21", "wan22")
    for kind, dtype in zip(("bf16", "fp16"), LOW, strict=True)
}
FEW = {"wan21 bf16", "qwenimage fp16"}


@pytest.mark.parametrize("case", long.but(GUIDED, GUIDED.keys() - FEW))
def test_predictions_are_those_of_the_pipeline_to_the_bit(case):
    name, dtype = GUIDED[case]
    policy = tiny.policy(name, dtype=dtype)
    checked = policy.self_check()
    assert checked.errors["prediction"] == 0.0 and checked.errors["mixed"] < 1e-2
    exact = tiny.policy(name)
    for regime, other in zip(policy.replay.regimes, exact.replay.regimes, strict=True):
        assert regime.guidance.rule == other.guidance.rule
        assert regime.guidance.weights == pytest.approx(other.guidance.weights, abs=1e-6)
    before, after = policy.decoder.before, exact.decoder.before
    assert torch.allclose(before.scale, after.scale, rtol=1e-6)
    if before.const is not None:
        assert torch.allclose(before.const.double(), after.const.double(), atol=1e-6)
    assert policy.decoder.after.scale == pytest.approx(exact.decoder.after.scale, abs=1e-6)


@pytest.mark.parametrize("scale", long.but((4.97, 1.003, 7.5, 12.3456), (7.5, 12.3456)))
def test_an_odd_scale_stays_as_it_is(scale):
    policy = load_policy("shapes-sd3", dtype=torch.bfloat16, guidance_scale=scale)
    assert max(policy.replay.regimes[0].guidance.weights) == pytest.approx(scale, abs=1e-6)


def test_outputs_are_combined_in_the_order_of_the_pipelines():
    """u + g (c - u), where g c - (g - 1) u would round otherwise."""
    c, u = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    rule = Guidance("linear", (-3.97, 4.97), 1.0, 1)
    assert torch.equal(rule([u, c], "pipeline"), u + 4.97 * (c - u))
    assert torch.equal(rule([u, c], 2.5), u + 2.5 * (c - u))
    turned = Guidance("linear", (4.97, -3.97), 1.0, 0)
    assert torch.equal(turned([c, u], "pipeline"), u + 4.97 * (c - u))
    minus = Guidance("linear", (-4.97, 3.97), -1.0, 0)
    assert torch.equal(minus([c, u], "pipeline"), -(u + 4.97 * (c - u)))


class Kept(nn.Module):
    """A network whose class keeps a part in fp32."""

    _keep_in_fp32_modules = ["time", "table"]

    def __init__(self):
        super().__init__()
        self.time, self.block = nn.Linear(2, 2), nn.ModuleDict({"time": nn.Linear(2, 2)})
        self.table, self.out = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))


def test_what_a_class_keeps_in_fp32_stays_so():
    network = Kept()
    cast(network, torch.bfloat16)
    types = {name: value.dtype for name, value in network.state_dict().items()}
    kept = ("time.", "block.time.", "table")
    floating = {name: kind for name, kind in types.items() if name != "count"}
    assert {name for name, kind in floating.items() if kind == torch.float32} == {
        name for name in floating if name.startswith(kept)
    }
    assert types["count"] == torch.int64


def test_t5_keeps_its_outputs_in_fp32_in_fp16_alone():
    from transformers import T5Config, T5EncoderModel

    small = T5Config(d_model=8, d_ff=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=8)
    for dtype in LOW:
        encoder = T5EncoderModel(small)
        cast(encoder, dtype)
        wo = next(p for name, p in encoder.named_parameters() if ".wo." in name)
        assert wo.dtype == (torch.float32 if dtype == torch.float16 else dtype)


def test_a_tensor_beyond_what_fp32_counts_is_sampled():
    """2**24 + 3 values: in fp32 the last place would be past the end."""
    for size in (1, 2, 63, 65, 2**24 + 1, 2**24 + 3):
        one, other = (torch.zeros(size, dtype=torch.int8) for _ in range(2))
        other[-1] = 1
        assert _sampled({"w": one}) != _sampled({"w": other})
