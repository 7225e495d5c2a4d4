"""What every reward with a network keeps to: a score is that of its own picture and prompt, a video
has the mean of its frames, what is rounded has no gradient, what is missing is one sentence.

Each runs on a tiny random network in the layout of its published files; the file of a reward
compares it with its authors' code.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import test_rewards_aesthetic as aesthetic
import test_rewards_deqa as deqa
import test_rewards_editreward as editreward
import test_rewards_hpsv2 as hpsv2
import test_rewards_hpsv3 as hpsv3
import test_rewards_imagereward as imagereward
import test_rewards_mps as mps
import test_rewards_nsfw as nsfw
import test_rewards_pickscore as pickscore
import test_rewards_videoalign as videoalign
import test_rewards_vqascore as vqascore
import tiny_clip
import torch
import torch.nn.functional as F

from flowrl import rewards
from flowrl.rewards.core.reward import networks
from flowrl.types import MediaContext


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A reward on a tiny network."""

    reward: str  # its name
    write: Callable = lambda folder: {}  # files into an empty folder -> settings
    known: Callable = lambda monkeypatch: None  # makes the tiny texts those that are expected
    prompts: tuple = ("a cat", "a dog", "two red circles", "a blue square")  # one a sample
    shape: tuple = (3, 40, 57)  # of a sample
    near: float = 1e-5  # largest difference that another size of the batch makes
    source: bool = False  # whether it is shown a picture before editing
    video: str = "mean"  # of the frames; "no", "only", or "lowest" frame
    free: dict = field(default_factory=lambda: {"rounding": False})  # None: it never has a gradient
    remedy: str = "rounding=False"  # what a refusal of the gradient proposes
    reached: float = 0.0  # share of the pixels that the gradient reaches
    floats: float | None = None  # between bytes and floats of a photograph; 0: of any picture
    half: float | None = None  # largest difference that bfloat16 makes
    unfetched: str | None = None  # what is said where the weights are not on this machine


def tiny_open_clip(folder):
    return {"model": tiny_clip.open_clip_name(folder), "pretrained": None}


def transformers_clip(folder):
    return {"model": str(tiny_clip.clip_folder(folder, eos=2))}


def hpsv2_files(folder):
    return hpsv2.write(folder, tiny_clip.open_clip_name(folder))


def as_tiny(monkeypatch):
    monkeypatch.setattr(hpsv2.MODULE.REWARD, "architecture", "flowrl-tiny")


WORDS = tuple(imagereward.PROMPTS)
CLIP = {"reward": "clip", "remedy": "transform=tensor, rounding=False"}
TINY = {
    "clip": Tiny(write=tiny_open_clip, floats=0, **CLIP),
    "clip of transformers": Tiny(write=transformers_clip, **CLIP),
    "clip, bilinear": Tiny(
        write=lambda folder: transformers_clip(folder) | {"transform": "tv_bilinear"}, **CLIP
    ),
    "clip, by PIL": Tiny(
        write=lambda folder: transformers_clip(folder) | {"transform": "pil"}, free=None, **CLIP
    ),
    "clip, preset nft": Tiny(
        write=lambda folder: {"preset": "nft", "pretrained": transformers_clip(folder)["model"]},
        **CLIP,
    ),
    "pickscore": Tiny(
        reward="pickscore", write=pickscore.write, near=1e-4, floats=0.1,
        unfetched="pickscore needs yuvalkirstain/PickScore_v1.*=/path/to/the folder",
    ),
    "hpsv2": Tiny(reward="hpsv2", write=hpsv2_files, known=as_tiny, floats=0),
    "aesthetic": Tiny(
        reward="aesthetic", write=lambda folder: aesthetic.write(folder, "aesthetic"), floats=5e-3
    ),
    "aesthetic_v25": Tiny(
        reward="aesthetic_v25", write=lambda folder: aesthetic.write(folder, "aesthetic_v25"),
        floats=5e-3, half=0.02,
    ),
    "nsfw": Tiny(
        reward="nsfw", write=lambda folder: nsfw.write(folder)[0] | {"reading": "margin"},
        video="lowest", remedy="reading=margin, rounding=False", floats=0.05,
        unfetched="needs config.json and model.safetensors of CompVis/.*=/path/to/the folder",
    ),
    "imagereward": Tiny(
        reward="imagereward", write=lambda folder: imagereward.write(folder)[0], prompts=WORDS,
        floats=0.02,
        unfetched="needs ImageReward.pt and med_config.json of THUDM/ImageReward, .*=/path/to/the",
    ),
    "mps": Tiny(
        reward="mps", write=lambda folder: mps.write(folder)[0], known=mps.known, near=1e-4,
        # cosines times 100: two roundings of bfloat16, whose order is the processor's
        prompts=tuple(mps.PROMPTS), half=0.8,
    ),
    "deqa": Tiny(
        reward="deqa", write=deqa.write, shape=(3, 40, 60), reached=0.9, half=0.1,
    ),
    "preference": Tiny(
        reward="preference",
        prompts=("a red circle", "two blue squares", "a green triangle", "a black circle"),
        shape=(3, 64, 64), near=1e-4, floats=0,
    ),
    "hpsv3": Tiny(
        reward="hpsv3", write=hpsv3.write, known=hpsv3.known, shape=(3, 64, 96), reached=0.9
    ),
    "editreward": Tiny(
        reward="editreward", write=editreward.write, known=editreward.known, shape=(3, 56, 56),
        source=True, video="no",
    ),
    "videoalign": Tiny(
        reward="videoalign", write=videoalign.write, known=videoalign.known,
        shape=(8, 3, 56, 84), video="only",
    ),
    "vqascore": Tiny(reward="vqascore", write=vqascore.write, shape=(3, 40, 60), reached=0.9),
    "vqascore, qwen": Tiny(
        reward="vqascore", write=vqascore.write_qwen, shape=(3, 40, 60), free=None,
        remedy="model=clip-flant5, rounding=False",
    ),
}  # fmt: skip


class Loaded:
    """A tiny reward and the samples that it scores."""

    def __init__(self, tiny, settings):
        self.case, self.settings, self.name = tiny, settings, tiny.reward
        rows = len(tiny.prompts)
        count = rows * math.prod(tiny.shape[:-3])  # of pictures, those of videos too
        smooth = F.interpolate(torch.rand(count, 3, 5, 7), tiny.shape[-2:], mode="bicubic")
        self.media = smooth.clamp(0.01, 0.99).view(rows, *tiny.shape)
        self.sources = torch.rand(rows, 3, 40, 80)

    def load(self, **settings):
        torch.manual_seed(0)  # a tiny open_clip has the weights that it is born with
        return rewards.load(self.name, **self.settings | settings)

    def context(self, rows):
        return MediaContext(source=self.sources[rows]) if self.case.source else None

    def score(self, reward, rows=None, media=None, prompts=None):
        """The scores of all samples, or of these rows; media, prompts: others in their place."""
        rows = list(range(len(self.media))) if rows is None else rows
        media = self.media[rows] if media is None else media
        prompts = [self.case.prompts[i] for i in rows] if prompts is None else prompts
        return reward(media, prompts, self.context(rows))

    def scored(self, media, prompts):
        """As a run scores them."""
        context = self.context(slice(None)) or MediaContext()
        return rewards.score(media, prompts, {self.name: {"reward": self.load()}}, context)


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    return functools.cache(
        lambda name: TINY[name].write(tmp_path_factory.mktemp(TINY[name].reward))
    )


@pytest.fixture
def tiny(request, written, monkeypatch):
    TINY[request.param].known(monkeypatch)
    return Loaded(TINY[request.param], written(request.param))


def each(where=lambda tiny: True):
    names = [name for name, tiny in TINY.items() if where(tiny)]
    return pytest.mark.parametrize("tiny", names, indirect=True)


@each()
def test_a_score_is_that_of_its_own_sample_whatever_its_batch_mates_chunks_and_order(tiny):
    reward, near, count = tiny.load(), tiny.case.near, len(tiny.case.prompts)
    whole = tiny.score(reward)
    assert whole.shape == (count,) and whole.dtype == torch.float32 and bool(whole.isfinite().all())
    assert whole.unique().numel() == count
    assert torch.equal(whole, tiny.score(reward))
    alone = torch.cat([tiny.score(reward, [i]) for i in range(count)])
    assert torch.allclose(whole, alone, atol=near)
    assert torch.allclose(whole, tiny.score(tiny.load(chunk=3)), atol=near)
    turned = tiny.score(reward, list(reversed(range(count))))
    assert torch.allclose(turned.flip(0), whole, atol=near)


@each()
def test_the_prompt_counts_where_the_reward_says_so_and_an_empty_one_is_then_refused(tiny):
    reward, prompts = tiny.load(), list(tiny.case.prompts)
    whole, others = tiny.score(reward), tiny.score(reward, prompts=[*prompts[1:], prompts[0]])
    if not reward.reads_prompt:
        assert torch.equal(whole, others)
        return
    assert not torch.allclose(whole, others, rtol=1e-3, atol=0)
    said = f'reward "{tiny.name}" reads the prompt, and that of sample 1 is empty'
    with pytest.raises(ValueError, match=said):
        tiny.scored(tiny.media, [prompts[0], " ", *prompts[2:]])


@each(lambda tiny: tiny.video in ("mean", "lowest"))
def test_a_video_has_the_mean_of_its_frames_or_the_lowest(tiny):
    reward, (first, _, third, _) = tiny.load(chunk=3), tiny.case.prompts
    frames = tiny.score(reward, prompts=[first, first, third, third]).view(2, 2)
    expected = frames.mean(1) if tiny.case.video == "mean" else frames.amin(1)
    videos = reward(tiny.media.view(2, 2, *tiny.case.shape), [first, third])
    assert torch.allclose(videos, expected, atol=tiny.case.near)


@each(lambda tiny: tiny.video in ("no", "only"))
def test_media_of_the_wrong_kind_are_refused(tiny):
    wrong = tiny.media[:, None] if tiny.case.video == "no" else tiny.media[:, 0]
    kinds = ("images", "videos") if tiny.case.video == "no" else ("videos", "images")
    said = f'"{tiny.name}" takes {kinds[0]}, and the media are {kinds[1]}'
    with pytest.raises(ValueError, match=said):
        tiny.scored(wrong, list(tiny.case.prompts))


@each(lambda tiny: tiny.free is not None)
def test_without_rounding_the_gradient_reaches_every_sample_and_no_weight(tiny):
    reward, x = tiny.load(**tiny.case.free), tiny.media.clone().requires_grad_()
    tiny.score(reward, media=x).sum().backward()
    moved = x.grad.abs() > 0
    assert reward.differentiable and bool(moved.flatten(1).any(1).all())
    assert float(moved.any(-3).float().mean()) >= tiny.case.reached
    found = list(networks(reward))
    assert found and all(p.grad is None for part in found for p in part.parameters())


@each()
def test_what_is_rounded_refuses_to_pretend_that_it_has_a_gradient(tiny):
    reward = tiny.load()
    assert not reward.differentiable
    said = f"{tiny.name} .*gives no gradient; load it with {tiny.case.remedy}"
    with pytest.raises(ValueError, match=said):
        tiny.score(reward, media=tiny.media.clone().requires_grad_())


@each(lambda tiny: tiny.floats is not None)
def test_rounding_scores_what_a_saved_picture_shows_and_floats_of_it_score_nearly_alike(tiny):
    near, exact = tiny.case.floats, tiny.load(**tiny.case.free)
    rows, media = ([0], tiny_clip.photo()) if near else (None, tiny.media)
    scores, saved = tiny.score(tiny.load(), rows, media), (media * 255).round() / 255
    assert torch.allclose(scores, tiny.score(exact, rows, saved), atol=near, rtol=0)
    assert not torch.equal(scores, tiny.score(exact, rows, media))


@each(lambda tiny: tiny.half is not None)
def test_half_precision_moves_a_score_a_little_and_it_stays_fp32(tiny):
    full, half = (tiny.score(tiny.load(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert half.dtype == torch.float32
    assert 0 < float((full - half).abs().max()) < tiny.case.half


@each(lambda tiny: tiny.reward != "clip")
def test_weights_that_are_not_there_are_one_sentence(tiny):
    said = f"reward.{tiny.name}.weights=/nowhere/at/all: there is no such file or folder"
    with pytest.raises(ValueError, match=said):
        tiny.load(weights="/nowhere/at/all")


@each(lambda tiny: tiny.unfetched is not None)
def test_weights_that_cannot_be_fetched_are_named_with_where_to_put_them(tiny):
    settings = {key: value for key, value in tiny.settings.items() if key != "weights"}
    with pytest.raises(ValueError, match=tiny.case.unfetched):
        rewards.load(tiny.name, **settings)
