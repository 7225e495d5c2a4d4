"""Which of a pipeline's draws is the initial noise, and how its first latents follow it."""

import pytest
import torch

from flowrl.policy.replay.noise import Draws, start_map

PICTURE = torch.linspace(-1, 1, 16).reshape(1, 1, 4, 4)


def seeded(make):
    """make(generator) as a run of a pipeline: the same draws each time."""
    return lambda: make(torch.Generator().manual_seed(0))


def draw(generator):
    return torch.randn(1, 1, 4, 4, generator=generator)


def test_latents_that_are_scaled_noise_have_a_factor_and_no_mean():
    found = start_map(seeded(lambda g: 14.6 * draw(g)), usual=1.0)
    assert found.factor == pytest.approx(14.6, rel=1e-5) and found.mean is None


def test_a_late_start_holds_a_noisy_picture():
    found = start_map(seeded(lambda g: 0.6 * PICTURE + 0.4 * draw(g)), usual=1.0)
    assert found.factor == pytest.approx(0.4, rel=1e-5)
    assert torch.allclose(found.mean, 0.6 * PICTURE[0])


@pytest.mark.parametrize("first", ["posterior", "noise"])
def test_a_draw_that_moves_entries_by_different_factors_is_no_initial_noise(first):
    """The posterior of the picture is sampled with its own deviation at each entry."""

    def latents(generator):
        a, b = draw(generator), draw(generator)
        posterior, noise = (a, b) if first == "posterior" else (b, a)
        return 0.7 * (PICTURE + PICTURE.abs() * posterior) + 0.3 * noise

    posterior = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    a, b = draw(generator), draw(generator)
    posterior = a if first == "posterior" else b
    found = start_map(seeded(latents), usual=1.0)
    assert found.factor == pytest.approx(0.3, rel=1e-5)
    assert torch.allclose(found.mean, 0.7 * (PICTURE + PICTURE.abs() * posterior)[0], atol=1e-6)


@pytest.mark.parametrize(
    "latents", [lambda g: PICTURE.clone(), lambda g: PICTURE * draw(g)], ids=["none", "uneven"]
)
def test_without_a_draw_that_is_initial_noise_the_factor_is_what_the_caller_told(latents):
    found = start_map(seeded(latents), usual=2.5)
    assert found.factor == 2.5 and found.mean is None


def test_a_factor_that_low_precision_rounded_is_the_told_one():
    def rounded(generator):
        return (14.6 * draw(generator)).bfloat16()

    assert start_map(seeded(rounded), usual=14.6146).factor == 14.6146
    assert start_map(seeded(rounded), usual=15.0).factor == pytest.approx(14.6, rel=4e-3)


def test_draws_are_counted_the_later_ones_stay_and_randn_is_torchs_own_afterwards():
    own, run = torch.randn, seeded(lambda g: torch.cat([draw(g), draw(g)]))
    plain, draws = run(), Draws(chosen=0, value=3.0)
    with draws.watched():
        made = run()
    assert draws.count == 2
    assert torch.equal(made[0], torch.full((1, 4, 4), 3.0)) and torch.equal(made[1], plain[1])
    with pytest.raises(RuntimeError), Draws().watched():
        raise RuntimeError
    assert torch.randn is own
