"""Pictures whose truth is known: the verifier agrees with every prompt and near miss, and what is
made of a picture is what it is called."""

import json
import math

import pytest
import small
import torch
from PIL import Image

from flowrl import rewards
from flowrl.data.media import save
from flowrl.rewards import Reward
from flowrl.rewards.checks import examples
from flowrl.rewards.checks.pictures import attacks, recoded, written
from flowrl.shapes import verify


@pytest.fixture(scope="module")
def pictures():
    return examples.shapes(16)


def strictly(media, metas):
    """Whether each picture shows exactly what each meta asks for, seen in the pixels."""
    return [
        verify.strict(found, meta["include"])
        for found, meta in zip(verify.detect(torch.stack(media)), metas, strict=True)
    ]


def psnr(a, b):
    return -10 * math.log10(float((a - b).square().mean()))


# --- shapes


def test_every_picture_shows_its_prompt_and_none_of_its_near_misses(pictures):
    assert all(strictly([s.media for s in pictures], [s.meta for s in pictures]))
    pairs = [(s.media, miss.meta) for s in pictures for miss in s.near_misses]
    assert len(pairs) > 70 and not any(strictly(*zip(*pairs, strict=True)))


def test_the_picture_of_a_near_miss_shows_it_and_neither_the_prompt_nor_another(pictures):
    for s in pictures[:6]:
        shown = [miss.media for miss in s.near_misses]
        assert all(strictly(shown, [miss.meta for miss in s.near_misses]))
        for i, media in enumerate(shown):
            others = [
                s.meta,
                *(miss.meta for j, miss in enumerate(s.near_misses) if j != i),
            ]
            assert not any(strictly([media] * len(others), others))


def test_near_misses_differ_in_every_attribute_and_each_relation_has_its_turn(pictures):
    counts = {
        kind: sum(f.attribute == kind for s in pictures for f in s.near_misses)
        for kind in ("colour", "shape", "count", "relation", "swap")
    }
    assert min(counts.values()) >= 4, counts
    relations = [
        s.meta["include"][1]["position"][0] for s in pictures if s.meta["task"] == "position"
    ]
    assert relations == ["left of", "right of", "above", "below", "left of", "right of"]


def test_the_mirror_image_shows_the_mirrored_prompt(pictures):
    assert all(strictly([s.mirror().media for s in pictures], [s.mirrored[1] for s in pictures]))
    turned = {s.prompt: s.mirrored[0] for s in pictures if s.mirrored[0] != s.prompt}
    assert len(turned) == 4 and all(
        ("left of" in a) == ("right of" in b) for a, b in turned.items()
    )


def test_the_mirror_image_takes_pictures_in_other_columns_along(pictures):
    s = pictures[0].mirror()
    assert torch.equal(s.columns["reference"], s.media) and torch.equal(
        s.columns["source"], pictures[0].columns["source"].flip(-1)
    )


def test_the_checklist_of_a_prompt_is_answered_yes_by_its_picture_only(pictures):
    checklist = rewards.load("checklist")
    few = pictures[:4]
    own = rewards.score(
        torch.stack([s.media for s in few]),
        [s.prompt for s in few],
        {"c": checklist},
        examples.context_of(few),
    )
    wrong = [s.under(s.near_misses[0].prompt, s.near_misses[0].meta) for s in few]
    other = rewards.score(
        torch.stack([s.media for s in wrong]),
        [s.prompt for s in wrong],
        {"c": checklist},
        examples.context_of(wrong),
    )
    assert own.total.tolist() == [1.0] * 4 and bool((other.total < 1).all())


def test_equal_seeds_give_equal_examples_and_others_differ():
    a, b, c = (examples.shapes(3, seed=seed) for seed in (5, 5, 6))
    assert [s.prompt for s in a] == [s.prompt for s in b] != [s.prompt for s in c]
    assert all(torch.equal(x.media, y.media) for x, y in zip(a, b, strict=True))


def test_in_a_video_every_frame_shows_the_prompt_and_the_scene_moves_to_the_right():
    for s in examples.shapes(3, frames=5):
        assert s.media.shape == (5, 3, 64, 64) and all(strictly(list(s.media), [s.meta] * 5))
        places = [sum(o.x for o in found) / len(found) for found in verify.detect(s.media)]
        assert all(0 < b - a < 2 for a, b in zip(places, places[1:], strict=False))
        assert (
            s.columns["source"].shape == (3, 64, 64)
            and s.near_misses[0].media.shape == s.media.shape
        )


# --- text


def test_drawn_words_are_read_and_their_near_misses_are_not():
    pytest.importorskip("rapidocr_onnxruntime")
    ocr = rewards.load("ocr", threads=1)
    s, _ = examples.texts(2, side=128)
    assert {miss.attribute for miss in s.near_misses} == {
        "word",
        "letter",
    } and s.mirrored is None
    rows = [s, *(s.under(miss.prompt, miss.meta) for miss in s.near_misses)]
    scores = ocr(
        torch.stack([r.media for r in rows]), [r.prompt for r in rows], examples.context_of(rows)
    ).tolist()
    letters = len(s.meta["text"])
    assert scores[0] == 1 and scores[1] < 0.7 and scores[2] == pytest.approx(1 - 1 / letters)


def test_short_text_is_large_and_long_text_still_fits():
    short, long = (
        written("Hi", 64, 64),
        written("a green triangle to the left of a large purple circle", 64, 64),
    )
    assert short.shape == (3, 64, 64) and float((short < 0.5).float().mean()) > 0.02
    ink = torch.nonzero(long[0] < 0.5)
    assert int(ink.min()) > 0 and int(ink.max()) < 63  # nothing is cut off


# --- files


def folder(tmp_path, prompts, **meta):
    for i, _ in enumerate(prompts):
        save(torch.full((3, 8, 8 + i), i / 10), tmp_path / f"{i}.png")
    lines = [
        json.dumps({"file": f"{i}.png", "prompt": prompt, **meta})
        for i, prompt in enumerate(prompts)
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_files_come_with_their_prompts_and_other_files_prompts_as_near_misses(tmp_path):
    found = examples.files(
        rewards.load("jpeg"), [folder(tmp_path, ["a cat", "a cat", "a dog"], mood="calm")]
    )
    assert [s.prompt for s in found] == ["a cat", "a cat", "a dog"] and found[0].meta == {
        "mood": "calm"
    }
    assert [[f.prompt for f in s.near_misses] for s in found] == [
        ["a dog"],
        ["a dog"],
        ["a cat", "a cat"],
    ]
    assert [tuple(s.media.shape) for s in found] == [(3, 8, 8), (3, 8, 9), (3, 8, 10)]


def test_of_many_files_some_are_taken_evenly(tmp_path):
    found = examples.files(
        rewards.load("jpeg"), [folder(tmp_path, [f"prompt {i}" for i in range(10)])], most=5
    )
    assert [s.prompt for s in found] == [f"prompt {i}" for i in (0, 2, 4, 6, 8)]


def test_files_serve_a_reward_that_compares_a_group(tmp_path):
    found = examples.files(
        rewards.load("rank", reward="jpeg"), [folder(tmp_path, ["a cat", "a dog"])]
    )
    # Their groups are made of them: the right picture and its rivals.
    assert [s.prompt for s in found] == ["a cat", "a dog"]


def test_files_whose_prompts_lack_what_the_reward_reads_are_refused(tmp_path):
    with pytest.raises(ValueError, match='"a cat" is not a prompt of the shapes world'):
        examples.files(rewards.load("shapes"), [folder(tmp_path, ["a cat", "a dog"])])


# --- which ones suit a reward


def reading(**attributes):
    found = Reward()
    found.name = "mine"
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def test_a_reward_of_videos_gets_videos_and_the_others_pictures():
    moving = examples.fits(rewards.load("motion_smoothness"), count=2)[0]
    assert moving.media.shape == (examples.FRAMES, 3, 64, 64)
    assert examples.fits(rewards.load("jpeg"), count=2)[0].media.shape == (3, 64, 64)
    assert len(examples.fits(rewards.load("shapes"))) == 16


def test_a_reward_that_pools_frames_gets_videos_by_itself_and_inside_another():
    pooled = rewards.load("video", reward="jpeg", pool="softmin")
    for reward in (
        pooled,
        rewards.load("rank", reward=pooled),
        rewards.load("win_rate", judge=pooled),
    ):
        assert examples.fits(reward, count=2)[0].media.shape == (examples.FRAMES, 3, 64, 64)
    assert examples.fits(pooled, count=2, frames=3)[0].media.shape == (3, 3, 64, 64)
    assert examples.fits(rewards.load("jpeg"), count=2, frames=5)[1].media.shape == (5, 3, 64, 64)


def test_the_command_line_tries_pooled_frames_on_videos_of_any_length(tmp_path):
    said = small.invoke(
        "check", "--reward", "video.reward=jpeg", "--count", "2", "--frames", "3"
    ).output
    assert "frames shuffled" in said and "frozen" in said
    assert "shuffled" not in small.invoke("check", "--reward", "jpeg", "--count", "2").output
    own = folder(tmp_path, ["a cat", "a dog"])
    refused = small.invoke("check", "--reward", "jpeg", "--media", own, "--frames", "3")
    assert refused.exit_code == 2 and "--frames 3 is of videos that are drawn" in refused.output


@pytest.mark.parametrize("attributes", [{"name": "ocr"}, {"video": "no"}])
def test_frames_for_a_reward_that_is_tried_on_pictures_are_refused(attributes):
    with pytest.raises(ValueError, match="frames=4: reward .* is tried on pictures; leave it out"):
        examples.fits(reading(**attributes), frames=4)


def test_a_reward_of_written_text_gets_words():
    found = examples.fits(reading(name="ocr"), count=2)
    assert all(s.meta["text"] in s.prompt for s in found)


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        (
            {"needs": frozenset({"actions"})},
            'reward "mine" needs the context column "actions", which none of our pictures has',
        ),
        (
            {"reads": frozenset({"include", "tag"})},
            (
                'reward "mine" reads "tag" of each prompt, which none of our prompts carries;'
                " give pictures"
            ),
        ),
        (
            {"complaint": lambda meta: f"has task={meta['task']}"},
            "of the shapes world has task=position; give pictures of your own",
        ),
    ],
)
def test_a_reward_that_ours_cannot_serve_is_one_sentence(attributes, said):
    with pytest.raises(ValueError, match=said):
        examples.fits(reading(**attributes))


@pytest.mark.parametrize("make", [examples.shapes, examples.texts])
def test_one_example_is_too_few(make):
    with pytest.raises(
        ValueError, match="count=1: a reward is compared over pictures; use at least 2"
    ):
        make(1)


# --- what is made of a picture


def test_attacks_are_what_they_are_called(pictures):
    media = pictures[0].media
    made = attacks(media, pictures[0].prompt)
    assert all(
        m.shape == media.shape and float(m.min()) >= 0 and float(m.max()) <= 1
        for m in made.values()
    )
    assert (
        float(made["white"].min()) == 1
        and float(made["black"].max()) == 0
        and float(made["noise"].std()) > 0.25
    )
    objects = {name: len(verify.detect(m[None])[0]) for name, m in made.items()}
    assert objects["oversharpened"] == len(verify.detect(media[None])[0]) and objects["white"] == 0
    tile = made["tiled 3 x 3"]
    assert torch.equal(tile[:, :22, :22], tile[:, 22:44, 22:44]) and torch.equal(
        tile[:, :22, :20], tile[:, :22, 44:]
    )
    edges = {
        name: float(made[name].diff(dim=-1).abs().amax()) for name in ("blurred", "oversharpened")
    }
    assert edges["blurred"] < 0.2 < float(media.diff(dim=-1).abs().amax()) <= edges["oversharpened"]


def test_attacks_on_a_video_are_videos_and_one_is_frozen():
    s = examples.shapes(2, frames=3)[0]
    made = attacks(s.media, s.prompt)
    assert all(m.shape == s.media.shape for m in made.values())
    assert torch.equal(made["frozen"][2], s.media[0]) and not torch.equal(s.media[2], s.media[0])


def test_attacks_on_pictures_of_odd_sizes_keep_them():
    media = torch.rand(3, 7, 17)
    assert all(m.shape == media.shape for m in attacks(media, "a cat").values())


@pytest.mark.parametrize(("kind", "least"), [(0, 40), (1, 48), (2, 45)])
def test_a_recoded_copy_differs_but_by_levels_that_nobody_sees(pictures, kind, least):
    media = torch.stack([pictures[1].media, pictures[2].media])
    copy = recoded(media, kind)
    assert (
        copy.shape == media.shape and copy.dtype == torch.float32 and not torch.equal(copy, media)
    )
    assert psnr(copy, media) > least and torch.equal(copy, (copy * 255).round() / 255)


def test_random_recodings_follow_their_seed(pictures):
    media = pictures[0].media
    assert torch.equal(recoded(media, 1, seed=3), recoded(media, 1, seed=3))
    assert not torch.equal(recoded(media, 1, seed=3), recoded(media, 1, seed=4))
    means = {
        float(recoded(media * 0.8, 2, seed=seed).mean() - (media * 0.8).mean()) > 0
        for seed in range(6)
    }
    assert means == {True, False}  # brighter or darker


def test_jpeg_recoding_is_what_pil_reads_back(tmp_path):
    media = torch.rand(3, 16, 16)
    Image.fromarray((media * 255).round().byte().permute(1, 2, 0).numpy()).save(
        tmp_path / "a.jpg", quality=98, subsampling=0
    )
    read = torch.tensor(list(Image.open(tmp_path / "a.jpg").tobytes())).view(16, 16, 3)
    back = read.permute(2, 0, 1) / 255
    assert torch.equal(recoded(media, 0), back)
