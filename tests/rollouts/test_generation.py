"""One picture a prompt and seed, whatever stands beside it; guidance by the reference; the best of
several."""

import pytest
import torch

from flowrl import generate, load_policy
from flowrl.rewards import score
from flowrl.rollouts import generation
from flowrl.rollouts.scorer import media_of
from flowrl.runtime.ledger import Ledger
from flowrl.samplers import keys

PROMPTS = [
    "a red circle",
    "two blue squares",
    "a green triangle",
    "a black square above a yellow circle",
]


@pytest.fixture(scope="module")
def policy():
    """With a LoRA away from zero, so that the policy differs from its reference."""
    torch.set_num_threads(1)
    torch.manual_seed(
        1
    )  # of the adapter's first values: a fixture of the module comes before the seed of a test
    policy = load_policy("shapes-sd3", lora={"rank": 4, "alpha": 4.0})
    generator = torch.Generator().manual_seed(0)
    for p in policy.parts["denoiser"].values():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)
    return policy


def latents(policy, prompts, noise, **options):
    return generation.sample(policy, prompts, noise, **{"steps": 4, "guidance": "none", **options})[
        0
    ]


def close(a, b):
    """Up to rounding (4e-5 here), which steps and guidance amplify; another prompt or noise is 0.1
    and more off."""
    torch.testing.assert_close(a, b, rtol=0, atol=5e-4)


def test_a_seed_names_its_picture_and_another_seed_another(policy):
    first = generate(policy, PROMPTS[:2], steps=8, seed=3)
    assert first.shape == (2, 3, 64, 64) and first.min() >= 0 and first.max() <= 1
    assert torch.equal(generate(policy, PROMPTS[:2], steps=8, seed=3), first)
    close(generate(policy, PROMPTS[1:2] * 2, steps=8, seed=[4, 3], places=[1, 1])[1], first[1])
    assert (generate(policy, PROMPTS[:2], steps=8, seed=4) - first).abs().amax(
        (1, 2, 3)
    ).min() > 0.05


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_micro_batches_neighbours_and_order_do_not_change_a_picture(policy, solver):
    noise = keys.key(0, torch.arange(4))
    whole = latents(policy, PROMPTS, noise, solver=solver)
    close(latents(policy, PROMPTS, noise, solver=solver, micro=1), whole)
    guided = {"solver": solver, "guidance": 2.0}
    close(
        latents(policy, PROMPTS, noise, micro=3, **guided),
        latents(policy, PROMPTS, noise, **guided),
    )
    order = [2, 0, 3, 1]
    close(latents(policy, [PROMPTS[i] for i in order], noise[order], solver=solver), whole[order])
    close(latents(policy, PROMPTS[1:2], noise[1:2], solver=solver), whole[1:2])
    repeated = latents(
        policy, [PROMPTS[0]] * 2 + PROMPTS[:1], noise[[0, 1, 0]], solver=solver
    )  # one prompt, encoded once
    close(repeated[0], whole[0])
    close(repeated[2], whole[0])
    assert (repeated[1] - whole[0]).abs().max() > 0.1


def test_weight_one_is_the_policy_zero_the_reference_and_two_twice_the_way(policy):
    noise, one = keys.key(0, torch.arange(4)), {"steps": 1}
    tuned = latents(policy, PROMPTS, noise, **one)
    with policy.view("reference"):
        reference = latents(policy, PROMPTS, noise, **one)
    assert (tuned - reference).abs().max() > 1e-2
    assert torch.equal(latents(policy, PROMPTS, noise, rlg=0.0, **one), reference)
    assert torch.equal(latents(policy, PROMPTS, noise, rlg=1.0, **one), tuned)
    close(
        latents(policy, PROMPTS, noise, rlg=2.0, **one), reference + 2 * (tuned - reference)
    )  # one step is linear in the velocity
    close(latents(policy, PROMPTS, noise, rlg=1 + 1e-9), latents(policy, PROMPTS, noise))
    before = policy.calls
    latents(policy, PROMPTS, noise, rlg=1.5)
    assert policy.calls - before == 2 * 4 * 4  # two networks, four steps, four prompts


def test_best_of_keeps_the_candidate_with_the_highest_reward(policy):
    def candidate(i, c):
        made = generation.sample(
            policy,
            [PROMPTS[i]],
            keys.key(5, "generate", i, torch.tensor([c])),
            steps=4,
            guidance="none",
        )
        return media_of(policy, *made, decode=1, ledger=Ledger())

    candidates = [candidate(i, c) for i in range(2) for c in range(3)]
    pictures = torch.cat([media for chunks in candidates for _, media in chunks])
    values = score(
        pictures, [p for p in PROMPTS[:2] for _ in range(3)], {"jpeg": 1.0}
    ).total.reshape(2, 3)
    assert (values.std(1) > 0).all()
    best = generate(policy, PROMPTS[:2], steps=4, guidance="none", seed=5, best_of=3, reward="jpeg")
    for i in range(2):
        close(best[i], pictures[3 * i + values[i].argmax()])


def test_a_failed_candidate_is_never_the_best(policy):
    def only_the_second(media, prompts, context):
        return torch.tensor([float("nan"), -1.0, float("nan")])

    best = generate(
        policy, PROMPTS[0], steps=2, seed=5, best_of=3, reward={"custom": only_the_second}
    )
    mirrored = generate(
        policy,
        PROMPTS[0],
        steps=2,
        seed=5,
        best_of=3,
        reward={"custom": lambda m, p, c: torch.tensor([0.0, 1.0, 0.0])},
    )
    assert torch.equal(best, mirrored)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([],), "prompts is empty or not text"),
        (([3],), "prompts is empty or not text"),
        ((PROMPTS, {"seed": [1, 2]}), "seed has 2 entries; give one for each prompt"),
        ((PROMPTS[0], {"best_of": 0}), "best_of=0 needs best_of >= 1"),
        ((PROMPTS[0], {"best_of": 2}), "best_of=2 needs best_of >= 1 and, above 1, a reward"),
        (
            (PROMPTS[0], {"guidance": "strong"}),
            "guidance='strong'; allowed are 'pipeline', 'none' or a number",
        ),
    ],
)
def test_wrong_arguments_are_named(policy, arguments, sentence):
    prompts, options = arguments[0], arguments[1] if len(arguments) > 1 else {}
    with pytest.raises(ValueError, match=sentence):
        generate(policy, prompts, steps=1, **options)
