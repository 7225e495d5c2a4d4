"""What differs with the arguments of the call: the rule of an argument that follows time, decoders
that enlarge rounding, and the second sets of the zoo."""

import pytest
import torch
from test_policy_refusal import Loop, Net, Vae, loop
from tiny_parts import randomise
from zoo import cases, second

from flowrl.policy import UnreplayableError, load_policy
from flowrl.policy.replay.classify import fit_time

SIGMA = (1 - torch.arange(1, 8) * 0.999 / 8).double()  # fp32, as a scheduler has them
FRAMES = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64).reshape(
    1, 3, 1, 1
)  # the first is given


@pytest.mark.parametrize(
    ("follows", "rule"),
    [
        (lambda t, s: s * FRAMES, "a * sigma + c"),
        (lambda t, s: t * FRAMES, "a * t + c"),
        (lambda t, s: 1e-4 * (1 - FRAMES) + s * FRAMES, "a * sigma + c"),
        (lambda t, s: 1000 - t * FRAMES, "a * t + c"),
        (lambda t, s: (1 - s) * FRAMES + 3, "a * sigma + c"),
    ],
)
def test_an_argument_follows_the_noise_level_or_the_whole_time_whichever_is_exact(follows, rule):
    """Whole times 875, 750, ... are cut noise levels 0.875125, 0.75025, ..., on one line."""
    times = (1000 * SIGMA).floor()
    values = [follows(t, s).float() for t, s in zip(times, SIGMA, strict=True)]
    found = fit_time(("timestep",), values, times, SIGMA, True)
    assert found.rule == rule
    t, sigma = torch.tensor([432.0, 0.4321], dtype=torch.float64)
    made = found(t, sigma, torch.zeros(1, 4))
    assert torch.allclose(made, follows(t, sigma).float(), rtol=1e-5)


class Sharp(Vae):
    """A decoder that makes units in the last place visible."""

    def decode(self, z, return_dict=True):
        return (torch.sin(4e3 * self.up(z)).reshape(-1, 3, 2, 2),)


def sharp():
    pipe = loop()
    return Loop(randomise(Net()), pipe.scheduler, randomise(Sharp(), 1))


def test_media_are_judged_by_what_rounding_latents_changes_in_them():
    for make, least, most in ((sharp, 1e-4, 0.1), (loop, 0.0, 1e-6)):
        policy = load_policy(make())
        right = policy.decoder
        policy.decoder = lambda x, *rest, right=right: right(x * (1 + 2.4e-7), *rest)
        check = policy.self_check()
        assert least < check.errors["decode"] < most and check.tolerance == 1e-4
        assert (check.media > 1e-4) == (make is sharp)


@pytest.mark.parametrize("off", [0.3, 1.0])
@pytest.mark.parametrize("make", [sharp, loop])
def test_a_wrong_decoder_is_found_also_where_rounding_counts(make, off):
    policy = load_policy(make())
    right = policy.decoder
    policy.decoder = lambda *given: right(*given) + off
    with pytest.raises(UnreplayableError, match="the replay differs in media"):
        policy.self_check()


def test_each_case_that_passes_has_two_sets_of_other_arguments():
    passing = {name for name, case in cases().items() if not case.refused}
    passing = {name for name in passing if not name.startswith("modular_")}  # tried as they are
    assert {name.partition("/")[0] for name in second.second()} == passing
    assert set(second.FIXED) <= passing
    for name in ("wan21", "ltx_i2v", "wan_vace", "cosmos25"):
        case, pipe = cases()[name], cases()[name].make()
        wide, still = (second.changed(f"{name}/{kind}", pipe) for kind in second.SETS)
        assert wide.call["width"] == 2 * case.call["width"] == 2 * still.call["width"]
        assert wide.call["guidance_scale"] == 2.5 and wide.call["negative_prompt"]
        assert still.call["guidance_scale"] == 1.0 and "negative_prompt" not in still.call
        frames = case.call.get("num_frames")
        if frames:
            assert wide.call["num_frames"] == 2 * frames - 1
            assert still.call["num_frames"] == (frames if case.conditions else 1)
        for was, now in zip(case.conditions, wide.conditions, strict=True):
            for key in was.keys() & {"image"}:
                assert now[key].size == (2 * was[key].size[0], was[key].size[1])
