"""A policy at another size (eval.height, eval.width): the same weights, and that size's loop."""

import pytest
import small
import tiny
import torch

from flowrl.evaluation.of_run import evaluate_run
from flowrl.policy.load import load_policy
from flowrl.rollouts.generation import sample

LORA = {"rank": 2, "alpha": 4, "targets": None, "init": "gaussian"}
PARTS = {"sd3": ["denoiser", "text_encoder"]}  # trained prompts are encoded at both sizes
SIZE = {"height": 32, "width": 16}
SHORT = ["sd3"]


def load(name, **size):
    """A tiny pipeline whose LoRA has values of its own, the same at every size."""
    call = {**tiny.CALLS[name], **size}
    policy = load_policy(
        tiny.pipeline(name), lora=LORA, parts=PARTS.get(name, ["denoiser"]), **call
    )
    for key, weight in policy.trainable.named().items():
        generator = torch.Generator().manual_seed(len(key) + weight.numel())
        weight.data.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return policy


def pictures(policy):
    x, sigma, (cond, rows) = sample(
        policy, tiny.PROMPTS, torch.arange(2), steps=2, guidance="pipeline"
    )
    return policy.decode(x, sigma[0].item(), cond, rows)


@torch.no_grad()
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.long) for n in tiny.NAMES]
)
def test_a_policy_at_another_size_is_one_that_was_loaded_at_it(name):
    policy = load(name)
    before = pictures(policy)
    other, fresh = policy.sized(**SIZE), load(name, **SIZE)
    assert other.latent_shape == fresh.latent_shape != policy.latent_shape
    assert policy.sized(**SIZE) is other and policy.sized() is policy
    torch.testing.assert_close(pictures(other), pictures(fresh), rtol=0, atol=1e-5)
    torch.testing.assert_close(pictures(policy), before, rtol=0, atol=0)
    # both have one set of weights: what training changes is evaluated
    for weight in policy.trainable.named().values():
        weight.data.zero_()
    assert (pictures(other) - pictures(fresh)).abs().max() > 1e-3


def test_a_size_that_the_pipeline_refuses_is_said_with_the_setting(tmp_path):
    with pytest.raises(
        ValueError, match=r"\(eval.height, eval.width\).*Height .80.*pos_embed_max_size"
    ):
        small.trainer(tmp_path / "run", eval__height="640")


def test_a_plain_network_has_one_size():
    with pytest.raises(ValueError, match="another size, and those of this model have one"):
        load_policy(tiny.ToyFlow(), shape=(2,), cond=lambda texts: None).sized(64)


def test_a_run_is_evaluated_at_a_size_of_its_own(tmp_path):
    run = small.trainer(
        tmp_path / "run", iterations="1", eval__height="48", data__train="shapes:eval"
    ).run()
    rows = {row["name"]: row for row in run.evaluation["rows"]}
    assert (
        rows["before"]["height"] == rows["after"]["height"] == 48 and "width" not in rows["after"]
    )
    found = evaluate_run(run.path, into=tmp_path)["rows"]
    # the same weights, prompts and noise, at the same size, from the folder alone
    assert found[0]["values"] == rows["after"]["values"] and found[0]["height"] == 48
