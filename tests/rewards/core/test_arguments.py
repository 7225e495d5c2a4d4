"""What a reward or a part of a module writes into its arguments reaches nobody else."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import flowrl
from flowrl.policy import load_policy
from flowrl.policy.generator import GeneratorPolicy
from flowrl.rewards import load_set, readings
from flowrl.rewards.core.climb import climb
from flowrl.runtime.copies import own
from flowrl.types import MediaContext

Box = namedtuple("Box", "corner size")


def brightness(media, prompts, context):
    """The mean pixel, if nothing else has changed either."""
    assert prompts == ["a", "b"] and context.meta[0]["boxes"] == [[1, 2]]
    assert context.meta[0]["mask"].sum() == 4 and context.meta[1] == {"boxes": [[1, 2]]}
    assert context.source.eq(1).all()
    return media.flatten(1).mean(1)


def in_torch(media, prompts, context):
    media.zero_()
    context.source.zero_()
    return torch.zeros(2)


def in_numpy(media, prompts, context):
    media.detach().numpy()[:] = 0  # torch does not count such a write
    context.meta[0]["mask"][:] = 0
    return torch.zeros(2)


def in_lists(media, prompts, context):
    prompts[0] = "c"
    context.meta[0]["boxes"][0].append(3)
    context.meta[1]["seen"] = True
    return torch.zeros(2)


def given():
    meta = [{"boxes": [[1, 2]], "mask": np.ones(4)}, {"boxes": [[1, 2]]}]
    source = torch.ones(2, 3, 4, 4)
    return torch.full((2, 3, 4, 4), 0.25), ["a", "b"], MediaContext(meta=meta, source=source)


def check_unchanged(media, prompts, context):
    assert brightness(media, prompts, context).tolist() == [0.25, 0.25]


@pytest.mark.parametrize("writer", [in_torch, in_numpy, in_lists])
def test_a_reward_may_write_into_what_it_is_given(writer):
    media, prompts, context = given()
    found = flowrl.score(media, prompts, {"first": writer, "then": brightness}, context)
    assert found.raw["then"].tolist() == [0.25, 0.25] and found.errors == []
    readings(media, prompts, load_set({"first": writer, "then": brightness}), context)
    check_unchanged(media, prompts, context)


@pytest.mark.parametrize("writer", [in_torch, in_numpy, in_lists])
def test_a_climbed_reward_may_write_and_the_gradient_is_that_of_the_others(writer):
    media, prompts, context = given()
    media.requires_grad_()
    rewards = load_set({"first": writer, "then": brightness})
    climb(media, prompts, rewards, context).sum().backward()
    assert torch.allclose(media.grad, torch.full_like(media, 1 / 48))
    check_unchanged(media.detach(), prompts, context)


def test_a_member_of_an_ensemble_may_write():
    members = {"first": in_torch, "then": brightness}
    ensemble = load_set({"ensemble": {"members": members, "how": "spread", "k": 0}})
    media, prompts, context = given()
    with torch.no_grad():
        values = ensemble.rewards["ensemble"](media, prompts, context)
    assert values.tolist() == [0.125, 0.125]


def test_a_module_and_its_functions_may_write_and_return_the_same_tensor_again():
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x, t, cond):
            out = self.inner(x) + cond
            x.zero_(), t.zero_(), cond.zero_()
            return out

    table, canvas = torch.zeros(2, 2), torch.zeros(1, 2)

    def cond(prompts):
        table.fill_(len(prompts.pop()))
        return table[: len(prompts) + 1]

    def decode(x):
        torch.tanh(x, out=canvas)
        x.zero_()
        return canvas

    policy = load_policy(Moves(), shape=(2,), cond=cond, decode=decode)
    prompts, x, rows = ["abc", "abcd"], torch.ones(1, 2), torch.tensor([1])
    first = policy.encode(prompts)
    before = policy.velocity(x, 0.5, first, rows)
    policy.encode(["a"])
    assert prompts == ["abc", "abcd"] and torch.equal(x, torch.ones(1, 2))
    assert torch.equal(policy.velocity(x, 0.5, first, rows), before)
    media = policy.decode(x)
    assert torch.equal(x, torch.ones(1, 2))
    policy.decode(2 * x)
    assert torch.equal(media, x.tanh())


def test_a_generator_may_write_into_its_noise():
    def generator(prompts, noise):
        prompts.clear()
        return noise.mul_(2)

    policy, noise = GeneratorPolicy(generator, (2,)), torch.ones(1, 2)
    cond = policy.encode(["a"])
    assert policy.decode(noise, 0.0, cond, torch.tensor([0])).tolist() == [[2, 2]]
    assert noise.tolist() == [[1, 1]] and cond.prompts == ("a",)


def test_copies_keep_their_classes_and_other_objects_are_handed_over():
    simulator = object()
    value = {
        "boxes": [Box((0, 0), [1, 1])],
        "order": OrderedDict(a={1}),
        "picture": Image.new("RGB", (2, 2)),
        "simulator": simulator,
    }
    copied = own(value)
    assert copied["simulator"] is simulator
    copied["boxes"][0].size.append(1)
    copied["order"]["a"].add(2)
    copied["picture"].putpixel((0, 0), (255, 0, 0))
    assert value["boxes"] == [Box((0, 0), [1, 1])] and value["order"] == OrderedDict(a={1})
    assert value["picture"].getpixel((0, 0)) == (0, 0, 0)
    assert isinstance(copied["order"], OrderedDict)
