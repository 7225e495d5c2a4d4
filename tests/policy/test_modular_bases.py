"""A canary for each base class of modular blocks: diffusers may change it, or bring another."""

import inspect

import pytest
import tiny
import torch
from diffusers import modular_pipelines
from zoo import cases

from flowrl import load_policy

CASE = cases()["modular_sd3"]
WHOLE = modular_pipelines.StableDiffusion3AutoBlocks
STEPS = WHOLE().get_execution_blocks(prompt=True)
LOOP = STEPS.sub_blocks["denoise.denoise"]


class Plain(modular_pipelines.ModularPipelineBlocks):
    """One block that runs all others."""

    model_name = WHOLE.model_name
    expected_components, inputs = STEPS.expected_components, STEPS.inputs
    intermediate_outputs = STEPS.intermediate_outputs

    def __init__(self):
        super().__init__()
        self.sub_blocks = STEPS.sub_blocks

    def __call__(self, components, state):
        for block in self.sub_blocks.values():
            components, state = block(components, state)
        return components, state


class Chosen(modular_pipelines.ConditionalPipelineBlocks):
    block_classes, block_names, block_trigger_inputs = [WHOLE], ["whole"], ["prompt"]

    def select_block(self, prompt=None):
        return "whole"


class Triggered(modular_pipelines.AutoPipelineBlocks):
    block_classes, block_names, block_trigger_inputs = [WHOLE], ["whole"], [None]


class Looped(modular_pipelines.LoopSequentialPipelineBlocks):
    model_name, description = WHOLE.model_name, ""
    block_classes, block_names = LOOP.block_classes, LOOP.block_names
    loop_expected_components, loop_inputs = LOOP.loop_expected_components, LOOP.loop_inputs

    @torch.no_grad()
    def __call__(self, components, state):
        own = self.get_block_state(state)
        for i, t in enumerate(own.timesteps):
            components, own = self.loop_step(components, own, i=i, t=t)
        self.set_block_state(state, own)
        return components, state


def in_sequence(loop=None):
    blocks = {**STEPS.sub_blocks, **({"denoise.denoise": loop} if loop else {})}
    return modular_pipelines.SequentialPipelineBlocks.from_blocks_dict(blocks)


BASES = {
    "ModularPipelineBlocks": Plain,
    "ConditionalPipelineBlocks": Chosen,
    "AutoPipelineBlocks": Triggered,
    "SequentialPipelineBlocks": in_sequence,
    "LoopSequentialPipelineBlocks": lambda: in_sequence(Looped()),
}


def velocity(blocks):
    """A velocity of the blocks' policy, with a gradient to the text encoder."""
    pipe, given = blocks.init_pipeline(), CASE.make().components
    pipe.update_components(**{spec.name: given[spec.name] for spec in blocks.expected_components})
    policy = load_policy(pipe, lora={"rank": 2}, parts=["text_encoder"], **CASE.call)
    for parameter in policy.parts["text_encoder"].values():
        torch.nn.init.constant_(parameter, 0.01)
    x = torch.randn(2, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    cond, rows = policy.encode(list(tiny.PROMPTS)), torch.tensor([0, 1])
    v = policy.velocity(x, policy.schedule(4).sigmas[1].item(), cond, rows)
    v.square().sum().backward()
    return v.detach(), [parameter.grad for parameter in policy.parts["text_encoder"].values()]


@pytest.fixture(scope="module")
def usual():
    return velocity(WHOLE())


@pytest.mark.long
@pytest.mark.parametrize("name", BASES)
def test_blocks_of_each_base_class_make_the_same_velocity_and_gradient(name, usual):
    v, gradients = velocity(BASES[name]())
    assert torch.equal(v, usual[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, usual[1], strict=True))
    assert any(gradient.any() for gradient in gradients)


def test_diffusers_has_no_other_base_class():
    base = modular_pipelines.ModularPipelineBlocks
    exported = (getattr(modular_pipelines, name) for name in dir(modular_pipelines))
    kinds = [kind for kind in exported if inspect.isclass(kind) and issubclass(kind, base)]
    names = {kind.__name__ for kind in kinds if kind.__module__ == base.__module__}
    assert names == BASES.keys(), "each needs a case here"
