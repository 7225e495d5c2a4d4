"""Features of media: what each name gives, and functions of the user's that give something else."""

import pytest
import tiny_clip
import torch

from flowrl.rewards import RewardBug, RewardSet, concat, load_set, score
from flowrl.rewards.core.features import Features, load_features

NAN = float("nan")


def pictures(n=3, side=16, seed=0):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def own(function):
    return Features(label="own", function=function, pictures=False)


def every(media):
    return torch.arange(len(media))


def dino_folder(folder):
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    tiny_clip.randomized(Dinov2Model(config)).save_pretrained(folder)
    return folder


def test_the_tiny_clip_tells_colours_apart():
    media = torch.zeros(3, 3, 64, 64)
    media[0, 0], media[1, 0], media[2, 2] = 1.0, 0.9, 1.0  # red, nearly red, blue
    found = load_features("shapes").of(media, every(media))
    assert found.norm(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert found[0] @ found[1] > found[0] @ found[2]


def test_clip_gives_the_picture_embeddings_of_the_reward(tmp_path):
    folder = str(tiny_clip.clip_folder(tmp_path))
    features, reward = load_features("clip", folder), load_set({"clip": {"model": folder}})
    media = pictures(side=40)
    found = features.of(media, every(media))
    text = reward.rewards["clip"].prompts(["a cat"], "cpu")[0]
    assert found.shape == (3, 24)
    assert torch.allclose(found @ text, score(media, ["a cat"] * 3, reward).total, atol=1e-6)


def test_dino_reads_the_middle_as_the_processor_of_transformers_does(tmp_path):
    """A picture with a shortest side of 256 is not resized, so its crop is exact."""
    features = load_features("dino", str(dino_folder(tmp_path)))
    media = (pictures(2, side=256) * 255).round() / 255
    middle = media[:, :, 16:240, 16:240]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (middle - mean[:, None, None]) / std[:, None, None]
    expected = features.network.model(pixels).last_hidden_state[:, 0]
    found = features.of(media, every(media))
    assert torch.allclose(found, torch.nn.functional.normalize(expected), atol=1e-5)


def test_a_video_has_the_mean_of_its_frames():
    frames = pictures(4, side=64)
    features = load_features("shapes")
    each = features.of(frames, every(frames))
    video = frames.view(2, 2, 3, 64, 64)
    found = features.of(video, every(video))
    assert torch.allclose(found, each.view(2, 2, -1).mean(1), atol=1e-6)


def test_a_users_file_and_a_live_function_are_features(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def colour(media):\n    return media.flatten(2).mean(2)\n")
    media, expected = pictures(), pictures().flatten(2).mean(2)
    features = load_features(f"{file}:colour")
    assert features.label == "colour" and not features.pictures
    assert torch.equal(features.of(media, every(media)), expected)
    features = load_features("live:f", live=lambda media: media.flatten(2).mean(2))
    assert torch.equal(features.of(media, every(media)), expected)


def test_samples_that_are_not_shown_have_nan_and_chunks_of_them_any_length():
    rewards = load_set({"m": lambda media, *_: media.flatten(1).mean(1)})
    chosen = RewardSet(
        rewards=rewards.rewards,
        weights=rewards.weights,
        features=own(lambda media: media.flatten(2).mean(2)),
    )
    media = pictures(3)
    media[0, 0, 0, 0] = NAN
    parts = [score(part, ["a"] * len(part), chosen) for part in media.split(1)]
    found = concat(parts).features
    assert found.shape == (3, 3) and found.isnan().all(1).tolist() == [True, False, False]
    assert torch.equal(found[1:], media[1:].flatten(2).mean(2))
    assert concat(parts[:1]).features.shape == (1, 0)
    assert chosen.pointwise().features is None
    assert score(media, ["a"] * 3, rewards).features is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m: m.flatten(1).mean(1), r"a float32 tensor of shape \(3,\) .* shape \(3, d\)"),
        (lambda m: m[:2].flatten(1), r"tensor of shape \(2, 768\)"),
        (lambda m: m.flatten(1)[:, :0], r"tensor of shape \(3, 0\)"),
        (lambda m: m.flatten(1).long(), r"int64 tensor .* of floating point"),
        (lambda m: m.flatten(1).tolist(), r"a list; expected a tensor"),
        (lambda m: m.flatten(1) * torch.tensor([[1], [NAN], [1]]), r"for 1 of 3 samples"),
        (lambda m: m.flatten(1) * 0, r"only zeros for 3 of 3 samples"),
    ],
)
def test_vectors_that_cannot_be_compared_are_refused(function, message):
    with pytest.raises(RewardBug, match=f"^diversity.features=own returned.*{message}"):
        own(function).of(pictures(), every(range(3)))


def test_vectors_of_two_lengths_are_refused():
    lengths = iter([2, 3])
    chosen = RewardSet(rewards={}, weights={}, features=own(lambda m: torch.ones(1, next(lengths))))
    parts = [score(pictures(1), ["a"], chosen) for _ in range(2)]
    with pytest.raises(ValueError, match="vectors of 2 and of 3 numbers"):
        concat(parts)


def test_names_and_weights_that_are_not_there_are_refused_in_the_words_of_the_setting(tmp_path):
    with pytest.raises(ValueError, match='"clup" is not known; choose clip, dino, shapes'):
        load_features("clup")
    for name in ("clip", "dino"):
        with pytest.raises(ValueError, match="^diversity.weights=/not/there: there is no such"):
            load_features(name, "/not/there")
        with pytest.raises(ValueError, match=f"^diversity.features={name} needs .* diversity.weig"):
            load_features(name, "nobody/has-this")
    with pytest.raises(ValueError, match=r"mine.py has no \"color\"; did you mean \"colour\"\?"):
        (tmp_path / "mine.py").write_text("def colour(media):\n    return media\n\nsize = 3\n")
        load_features(f"{tmp_path}/mine.py:color")
    with pytest.raises(ValueError, match="diversity.features=size is a int; give a function"):
        load_features(f"{tmp_path}/mine.py:size")
