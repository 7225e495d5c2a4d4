"""The scheduler's step under control: which calls move latents, and a class that is put back."""

import copy
from types import SimpleNamespace

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.steps import StepPattern, Stepper, patched_scheduler, read_pattern


def step(value, time=500.0, shape=(3,), rows=2):
    return {"sample": torch.full((rows, *shape), float(value)), "timestep": torch.tensor(time)}


def stepper(pattern=StepPattern(), **changes):
    plain = {"on_step": None, "following": None, "on_done": None, "on_raw": None, "skip": False}
    return Stepper(pattern, **{**plain, **changes})


# ---------------------------------------------------------------------------
# read_pattern


def test_one_step_an_iteration_is_the_plain_pattern():
    assert read_pattern([[step(1)], [step(2)]], 2) == StepPattern()


def test_a_step_whose_latents_come_again_only_converts():
    twice = [[step(k), step(k)] for k in range(3)]
    assert read_pattern(twice, 2) == StepPattern((False, True))


def test_other_rows_than_those_asked_for_do_not_count():
    """A third row fixes the text length; what happens to it is no part of the state."""
    first, second = step(1, rows=3), step(1, rows=3)
    second["sample"][2] = 7
    assert read_pattern([[first, second]], 2).updates == (False, True)
    assert read_pattern([[first, second]], 3).updates == (True, True)


def test_two_latents_at_one_time_are_one_state():
    both = [[step(k, shape=(4, 2)), step(-k - 1.0, shape=(5,))] for k in range(2)]
    assert read_pattern(both, 2) == StepPattern((True, True), ((4, 2), (5,)))


@pytest.mark.parametrize(
    ("iterations", "sentence"),
    [
        (
            [[step(1)], [step(2), step(3)]],
            r"scheduler.step is called \[1, 2\] times in an iteration; the number must not change",
        ),
        (
            [[step(1, 500.0), step(2, 400.0)]],
            r"scheduler.step is called at different times in one iteration, \[400.0, 500.0\]: its"
            " latents are not at one noise level",
        ),
    ],
)
def test_a_pattern_that_is_no_state_is_refused(iterations, sentence):
    with pytest.raises(UnreplayableError, match=f"^{sentence}$"):
        read_pattern(iterations, 2)


def test_a_state_of_several_latents_comes_apart_as_it_was_joined():
    pattern = StepPattern((True, True), ((4, 2), (5,)))
    parts = [torch.randn(3, 4, 2), torch.randn(3, 5)]
    state = pattern.join(parts)
    assert state.shape == (3, 13)
    assert all(torch.equal(a, b) for a, b in zip(pattern.split(state), parts, strict=True))
    alone = torch.randn(3, 4, 2)
    assert StepPattern().join([alone]) is alone and StepPattern().split(alone)[0] is alone


# ---------------------------------------------------------------------------
# Stepper


def test_latents_are_replaced_in_what_the_scheduler_returns_and_the_rest_stays():
    given = {"model_output": torch.ones(2, 3), "sample": torch.zeros(2, 3), "timestep": 5}
    moved, seen, done = torch.full((2, 3), 9.0), [], []
    own = stepper(following=lambda: moved, on_step=lambda *a: seen.append(a), on_done=done.append)
    result = own(given, lambda: (torch.ones(2, 3), "x0"))
    assert torch.equal(result[0], moved) and result[0] is not moved and result[1] == "x0"
    result = own(given, lambda: SimpleNamespace(prev_sample=torch.ones(2, 3), x0="x0"))
    assert torch.equal(result.prev_sample, moved) and result.x0 == "x0"
    prediction, time, sample = seen[0]
    assert prediction is given["model_output"] and sample is given["sample"] and time == 5
    assert len(seen) == len(done) == 2 and torch.equal(done[0], moved)


def test_nothing_given_keeps_what_the_scheduler_made():
    made, done = (torch.ones(2, 3), "x0"), []
    own = stepper(following=lambda: None, on_done=done.append)
    given = {"model_output": torch.ones(2, 3), "sample": torch.zeros(2, 3), "timestep": 5}
    assert own(given, lambda: made) is made and torch.equal(done[0], made[0])


def test_a_converting_step_is_the_schedulers_own_and_two_latents_are_seen_as_one():
    pattern, seen, done = StepPattern((False, True, True), ((3,), (2,))), [], []
    state = torch.arange(10.0).reshape(2, 5)
    own = stepper(
        pattern,
        following=lambda: state,
        on_step=lambda prediction, time, sample: seen.append((prediction, sample)),
        on_done=done.append,
    )
    for _ in range(2):
        converted = own({}, lambda: "converted")
        made = [
            own(
                {"model_output": torch.full((2, n), p), "sample": torch.zeros(2, n), "timestep": 5},
                lambda: (torch.zeros(2),),
            )[0]
            for n, p in ((3, 1.0), (2, 2.0))
        ]
        assert converted == "converted"
        assert torch.equal(made[0], state[:, :3]) and torch.equal(made[1], state[:, 3:])
    assert len(seen) == len(done) == 2 and torch.equal(done[1], state)
    assert seen[1][0][0].tolist() == [1, 1, 1, 2, 2] and seen[1][1].shape == (2, 5)


@pytest.mark.parametrize("as_tuple", [True, False])
def test_a_skipped_step_asks_the_scheduler_nothing(as_tuple):
    def forbidden():
        raise AssertionError

    given = {"model_output": None, "sample": torch.zeros(2, 3), "timestep": 5}
    given |= {"return_dict": False} if as_tuple else {}
    for following, value in ((lambda: torch.ones(2, 3), 1.0), (None, 0.0)):
        result = stepper(skip=True, following=following)(given, forbidden)
        assert ((result[0] if as_tuple else result.prev_sample) == value).all()


# ---------------------------------------------------------------------------
# patched_scheduler


class Inheriting(FlowMatchEulerDiscreteScheduler):
    """Has no step of its own."""


@pytest.mark.parametrize("kind", [FlowMatchEulerDiscreteScheduler, Inheriting, DDIMScheduler])
def test_a_schedulers_class_is_as_it_was_afterwards_also_after_an_error(kind):
    def patched():
        return {name: vars(kind).get(name) for name in ("step", "set_timesteps")}

    own, other, before, raw, times = kind(), kind(), patched(), [], []
    with pytest.raises(RuntimeError):  # noqa: SIM117
        with patched_scheduler(own, stepper(on_raw=raw.append), times.append):
            assert type(own) is kind, "some pipelines ask for a scheduler's type"
            copied = copy.deepcopy(own)
            for scheduler in (own, other, copied):
                scheduler.set_timesteps(4)
                x = torch.ones(1, 2, 2, 2)
                scheduler.step(x, scheduler.timesteps[0], x, return_dict=False)
            raise RuntimeError
    assert patched() == before and own.__dict__.keys() == other.__dict__.keys()
    assert [given["self"] for given in raw] == [own, copied], "another's scheduler is left alone"
    assert times == [own, copied]


def test_arguments_of_a_patched_step_come_by_name():
    own, raw = FlowMatchEulerDiscreteScheduler(), []
    own.set_timesteps(4)
    with patched_scheduler(own, stepper(on_raw=raw.append), None):
        own.step(torch.ones(1, 2), own.timesteps[0], sample=torch.zeros(1, 2))
    assert raw[0].keys() == {"self", "model_output", "timestep", "sample"}
    assert raw[0]["timestep"] == own.timesteps[0]
