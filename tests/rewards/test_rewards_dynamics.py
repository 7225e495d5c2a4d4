"""Inverse dynamics: actions read back from frames, discrete and continuous, and models that are
loaded without running what they hold."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from flowrl import rewards
from flowrl.types import MediaContext


class Step(nn.Module):
    """Reads the change of mean brightness: action 0 darker, 1 same, 2 brighter, as logits that peak
    at it."""

    def forward(self, before, after):
        change = (after - before).flatten(1).mean(1)
        return -(change[:, None] / 0.1 - torch.tensor([-1.0, 0.0, 1.0])).square()


class Vector(nn.Module):
    """Reads (change of red, change of green) of a clip, an answer for each step."""

    def forward(self, clip):
        return clip.mean((3, 4)).diff(dim=1)[..., :2]


def clips(*values):
    """Videos of flat 4 x 4 frames: values (B, F), a brightness a frame."""
    return torch.tensor(values)[:, :, None, None, None].expand(-1, -1, 3, 4, 4).contiguous()


def reward(model=None, **settings):
    return rewards.load(
        "inverse_dynamics", model=Step() if model is None else model, rounding=False, **settings
    )


def given(*actions):
    return MediaContext(actions=torch.tensor(actions))


# --- discrete actions


def test_the_reward_is_the_share_of_steps_whose_action_is_read_back():
    """Brighter, same, darker, brighter: reads 2, 1, 0, 2."""
    media = clips([0.1, 0.2, 0.2, 0.1, 0.2], [0.1, 0.2, 0.2, 0.1, 0.2])
    out = reward()(media, ["a", "a"], given([2, 1, 0, 2], [2, 2, 2, 2]))
    assert out.tolist() == [1.0, 0.5] and out.dtype == torch.float32


def test_a_video_played_backwards_or_in_another_order_no_longer_follows_its_actions():
    """Rising by 0.1 a frame with the action "brighter" throughout; frozen it follows only the
    action "same"."""
    media, up = clips([0.1, 0.2, 0.3, 0.4, 0.5]), given([2, 2, 2, 2])
    assert reward()(media, ["a"], up).item() == 1.0
    assert reward()(media.flip(1), ["a"], up).item() == 0.0
    assert reward()(media[:, [0, 2, 1, 4, 3]], ["a"], up).item() == 0.5
    assert reward()(media[:, :1].expand_as(media), ["a"], up).item() == 0.0


def test_actions_may_come_with_the_prompt():
    from_meta = reward(actions="meta")
    assert from_meta.needs == {"meta"}
    assert from_meta.reads == {"actions"}
    assert reward().needs == {"actions"}
    context = MediaContext(meta=[{"actions": [2, 1]}, {"actions": [0, 0]}])
    out = rewards.score(
        clips([0.1, 0.2, 0.2], [0.3, 0.2, 0.2]), ["a", "a"], {"i": {"reward": from_meta}}, context
    )
    assert out.total.tolist() == [1.0, 0.5]
    assert from_meta.complaint({"actions": [2, 1]}) is None
    assert "agreement=argmax takes one whole number a step" in from_meta.complaint(
        {"actions": [0.5]}
    )
    assert "actions that cannot be used" in from_meta.complaint({"actions": "left"})


def test_chunks_and_batch_mates_do_not_change_a_score():
    media, actions = torch.rand(5, 4, 3, 4, 4), torch.randint(0, 3, (5, 3))
    whole = reward()(media, ["a"] * 5, MediaContext(actions=actions))
    assert torch.equal(whole, reward(chunk=2)(media, ["a"] * 5, MediaContext(actions=actions)))
    alone = torch.cat(
        [
            reward()(media[i : i + 1], ["a"], MediaContext(actions=actions[i : i + 1]))
            for i in range(5)
        ]
    )
    assert torch.equal(whole, alone) and 0 < whole.mean() < 1


def test_logits_that_are_not_finite_are_no_action():
    class Breaks(Step):
        def forward(self, before, after):
            return (
                super()
                .forward(before, after)
                .masked_fill(after.flatten(1).mean(1, keepdim=True) > 0.5, math.nan)
            )

    out = reward(Breaks())(
        clips([0.1, 0.2, 0.6], [0.1, 0.2, 0.3]), ["a", "a"], given([2, 2], [2, 2])
    )
    assert out.isnan().tolist() == [True, False] and out[1].item() == 1.0


def test_rounding_reads_what_a_saved_video_shows():
    media = clips([0.5, 0.5 + 0.4 / 255])
    model = Step()
    model.forward = lambda before, after: (
        ((after - before).flatten(1).mean(1, keepdim=True) > 0) * torch.tensor([[0.0, 1.0]])
    )
    exact, saved = reward(model), rewards.load("inverse_dynamics", model=model)
    assert exact(media, ["a"], given([1])).item() == 1.0
    assert saved(media, ["a"], given([1])).item() == 0.0


# --- continuous actions


def test_continuous_actions_agree_by_their_distance():
    """Read (0.3, 0.0) and (0.1, 0.4); given (0.3, 0.0) and (0.4, 0.8): distances 0 and 0.5."""
    media = torch.zeros(1, 3, 3, 4, 4)
    media[0, 1, 0], media[0, 2, 0], media[0, 2, 1] = 0.3, 0.4, 0.4
    context = given([[0.3, 0.0], [0.4, 0.8]])
    close = reward(Vector(), input="video", agreement="exp", scale=0.5)
    assert close(media, ["a"], context).item() == pytest.approx((1 + math.exp(-0.25 / 0.5)) / 2)


def test_the_gradient_of_agreement_moves_frames_towards_the_action():
    model = reward(Vector(), input="video", agreement="exp")
    media = torch.full((1, 2, 3, 4, 4), 0.5).requires_grad_()
    model(media, ["a"], given([[0.4, 0.0]])).backward()
    assert model.differentiable
    assert (media.grad[0, 1, 0] > 0).all()
    assert (media.grad[0, 0, 0] < 0).all()
    assert not media.grad[0, :, 2].any()
    assert not reward().differentiable
    assert not rewards.load("inverse_dynamics", model=Vector(), agreement="exp").differentiable


def test_a_model_of_clips_is_given_whole_clips_in_chunks_of_steps():
    sizes = []

    class Spy(Vector):
        def forward(self, clip):
            sizes.append(tuple(clip.shape[:2]))
            return super().forward(clip)

    context = MediaContext(actions=torch.rand(5, 3, 2))
    reward(Spy(), input="video", agreement="exp", chunk=7)(
        torch.rand(5, 4, 3, 4, 4), ["a"] * 5, context
    )
    assert sizes == [(2, 4), (2, 4), (1, 4)]


# --- models from files


FILE = """
import torch
from torch import nn

class Idm(nn.Module):
    def __init__(self, actions=3):
        super().__init__()
        self.head = nn.Linear(1, actions)

    def forward(self, before, after):
        return self.head((after - before).flatten(1).mean(1, keepdim=True))

class Fixed(nn.Module):
    def forward(self, before, after):
        return torch.eye(2)[((after - before).flatten(1).mean(1) > 0).long()]

class NotATorchModule:
    pass
"""


@pytest.fixture
def idm(tmp_path):
    """Path of the file, and of weights that make the head read 0 darker, 1 same, 2 brighter."""
    (tmp_path / "idm.py").write_text(FILE)
    weights = {
        "head.weight": torch.tensor([[-10.0], [0.0], [10.0]]),
        "head.bias": torch.tensor([-0.5, 0.0, -0.5]),
    }
    save_file(weights, str(tmp_path / "idm.safetensors"))
    return tmp_path


def test_a_class_in_a_users_file_is_loaded_with_its_safetensors_and_frozen(idm):
    loaded = rewards.load(
        "inverse_dynamics", model=f"{idm}/idm.py:Idm", weights=f"{idm}/idm.safetensors"
    )
    assert loaded(clips([0.1, 0.3, 0.3, 0.1]), ["a"], given([2, 1, 0])).item() == 1.0
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.to("meta").model.head.weight.device.type == "meta"
    fixed = rewards.load("inverse_dynamics", model=f"{idm}/idm.py:Fixed")
    assert fixed(clips([0.1, 0.3, 0.2]), ["a"], given([1, 0])).item() == 1.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {},
            (
                "needs a model that reads actions from frames: set"
                " reward.inverse_dynamics.model=path/to/file.py:Class"
            ),
        ),
        (
            {"model": "idm.pt"},
            "model=idm.pt: give a torch module as .*TorchScript archives and pickles run code",
        ),
        ({"model": 3}, "model=3: give a torch module"),
        ({"model": "nowhere.py:Idm"}, "there is no file .*nowhere.py"),
        ({"model": "{}/idm.py:Idmm"}, 'idm.py has no torch module "Idmm"; did you mean "Idm"'),
        ({"model": "{}/idm.py:NotATorchModule"}, 'no torch module "NotATorchModule"'),
        (
            {"model": "{}/idm.py:Idm"},
            "Idm has weights of its own; set reward.inverse_dynamics.weights",
        ),
        (
            {"model": "{}/idm.py:Idm", "weights": "{}/gone.safetensors"},
            "weights=.*gone.safetensors: there is no such file",
        ),
        (
            {"model": "{}/idm.py:Idm", "weights": "{}/idm.pt"},
            r"weights=.*idm.pt: save them as .safetensors; other files may run code",
        ),
        (
            {
                "model": "{}/idm.py:Idm",
                "model_settings": {"actions": 5},
                "weights": "{}/idm.safetensors",
            },
            r"does not fit Idm: 2 tensors of another shape \(head.bias \(3,\) instead of \(5,\)",
        ),
        ({"model": "{}/broken.py:Idm"}, "broken.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_model_that_cannot_be_loaded_safely_is_one_sentence(idm, settings, said):
    torch.jit.save(torch.jit.script(nn.Linear(1, 3)), str(idm / "idm.pt"))
    (idm / "broken.py").write_text("1 / 0")
    settings = {
        key: value.format(idm) if isinstance(value, str) else value
        for key, value in settings.items()
    }
    with pytest.raises(ValueError, match=said):
        rewards.load("inverse_dynamics", **settings)


# --- actions that do not fit


@pytest.mark.parametrize(
    ("settings", "context", "said"),
    [
        (
            {},
            given([2, 1, 0]),
            (
                r"3 frames are 2 steps, and 1 videos came with actions of shape \(1, 3\); give one"
                r" a step"
            ),
        ),
        ({}, MediaContext(), "came with no actions"),
        (
            {"actions": "meta"},
            MediaContext(meta=[{"actions": [1]}]),
            "3 frames are 2 steps, and 1 videos came with 1 actions",
        ),
        ({}, given([0, 3]), "actions from 0 to 3, and the model knows 0 to 2"),
        ({}, given([-1, 0]), "actions from -1 to 0, and the model knows 0 to 2"),
        (
            {},
            given([0.0, 1.0]),
            "agreement=argmax takes one whole number a step, and the actions are torch.float32",
        ),
        (
            {"agreement": "exp"},
            given([0, 1]),
            r"agreement=exp takes a list of numbers a step, .* have shape \(1, 2\)",
        ),
        (
            {"agreement": "exp"},
            given([[0.0], [1.0]]),
            r"answered with shape \(1, 2, 3\); expected \(1, 2, 1\)",
        ),
    ],
)
def test_actions_that_do_not_fit_the_video_are_one_sentence(settings, context, said):
    with pytest.raises(ValueError, match=said):
        reward(**settings)(clips([0.1, 0.2, 0.2]), ["a"], context)


def test_a_model_that_answers_for_the_wrong_number_of_steps_is_named():
    class Short(Vector):
        def forward(self, clip):
            return super().forward(clip)[:, 1:]

    said = r"the inverse dynamics model answered with shape \(1, 1, 2\); expected \(1, 2, 2\)"
    with pytest.raises(ValueError, match=said):
        reward(Short(), input="video", agreement="exp")(
            clips([0.1, 0.2, 0.3]), ["a"], given([[0.0, 0.0], [0.0, 0.0]])
        )


def test_a_module_that_is_loaded_takes_neither_weights_nor_settings():
    said = (
        "reward.inverse_dynamics.weights=/nowhere.safetensors would not be used: the model is a"
        " module"
    )
    with pytest.raises(ValueError, match=said):
        reward(weights="/nowhere.safetensors")
    said = r"inverse_dynamics.model_settings=\{'actions': 5\} would not be used"
    with pytest.raises(ValueError, match=said):
        reward(model_settings={"actions": 5})


def test_a_run_without_actions_is_told_before_it_starts_and_how_the_prompts_may_bring_them():
    said = (
        'reward "i" needs the context column "actions", .*provided: group, meta.; no data file'
        " brings it: set actions=meta"
    )
    with pytest.raises(ValueError, match=said):
        rewards.check_needs({"i": {"reward": reward()}}, ["meta", "group"])
