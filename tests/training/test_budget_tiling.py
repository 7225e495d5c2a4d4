"""Decoding a tile at a time costs in a budget what the decoder then takes."""

from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL

from flowrl.config.lighter import changed
from flowrl.config.load import load_config
from flowrl.shapes.clip import FOLDER
from flowrl.training.budget.meter import Meter
from flowrl.training.budget.planner import Planner
from flowrl.training.budget.rehearsal import PolicyCall
from flowrl.training.budget.roofline import GIB, GPUS

CPU = replace(GPUS["h100"], name="cpu", cuda=False, reserve=0.0, memory=None)


def planner(height, *words):
    """Of the embedded model, whose tiles are 64 pixels a side."""
    own = ["model=shapes-sd3", "algorithm=flow_grpo", "reward=jpeg", "data=shapes"]
    sides = [f"model.pipeline.height={height}", "model.pipeline.width=64"]
    return Planner(load_config(None, [*own, *sides, *words]), CPU)


@pytest.mark.parametrize("grad", [False, True])
def test_tiles_change_nothing_where_a_picture_is_no_larger_than_one(grad):
    plan, call = planner(64), PolicyCall(what="decode", rows=2, grad=grad)
    tiled = changed(plan.cfg, {"model.tiling": True})
    assert plan.costs.of(call, tiled) == plan.costs.of(call, plan.cfg)


@pytest.mark.long
def test_tiles_of_a_large_picture_take_less_memory_and_more_flops_as_the_decoder_does():
    small = ["batch.prompts=1", "batch.group=2", "batch.updates=1", "sampler.steps=2"]
    plan = planner(128, *small)
    whole = plan.budget().phases["decode"]
    tiled = plan.budget(changed(plan.cfg, {"model.tiling": True})).phases["decode"]
    assert tiled.gb < 0.6 * whole.gb and tiled.flops > whole.flops
    vae = AutoencoderKL.from_pretrained(FOLDER.parent / "vae").eval()
    for phase, set_tiles in ((whole, vae.disable_tiling), (tiled, vae.enable_tiling)):
        set_tiles()
        with torch.no_grad(), Meter() as meter:
            vae.decode(torch.zeros(2, 4, 32, 16), return_dict=False)
        assert phase.gb * GIB == pytest.approx(meter.peak, rel=0.1)
        assert phase.flops == meter.flops
