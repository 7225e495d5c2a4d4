"""EditReward: two rubrics, two passes, two heads; the source picture; the
reference's checkpoint layouts."""

import hashlib
import os

import pytest
import torch
from safetensors.torch import save_file
from test_rewards_vlm import make_base, make_head, make_state
from torch import nn

from flowrl import rewards
from flowrl.data.media import save
from flowrl.rewards.networks import vlm
from flowrl.runtime.registry import find
from flowrl.types import MediaContext

editreward = find("flowrl.rewards", "editreward", what="reward")
RUBRICS = {
    "following": "\nWas it done? {text_prompt}\n",
    "quality": "\nDoes it look good? {text_prompt}\n",
}
PROMPTS = ["add a hat", "paint the red car blue and remove the tree"]
SUFFIX = "\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n"


def write(folder):
    """Settings of a tiny Qwen2.5-VL as transformers >= 4.52 names it, two heads beside it."""
    base = make_base(folder / "base", "qwen2_5_vl")
    state = (
        make_state(base, 264, old=False)
        | make_head("rm_heads.head_0.")
        | make_head("rm_heads.head_1.", seed=2)
    )
    save_file(state, folder / "model.safetensors")
    for key, text in RUBRICS.items():
        (folder / f"{key}.txt").write_text(text)
    texts = {key: str(folder / f"{key}.txt") for key in RUBRICS}
    return {"weights": str(folder), "base": str(base), "dtype": "float32", **texts}


def known(monkeypatch):
    """The tiny network's rubrics are taken for the published ones."""
    sums = {key: hashlib.sha256(text.encode()).hexdigest()[:16] for key, text in RUBRICS.items()}
    monkeypatch.setattr(editreward, "RUBRICS", sums)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("edit"))


@pytest.fixture
def load(files, monkeypatch):
    known(monkeypatch)
    return lambda **settings: rewards.load("editreward", **files | settings)


@pytest.fixture
def media():
    return torch.rand(2, 3, 56, 56)


@pytest.fixture
def source():
    return MediaContext(source=torch.rand(2, 3, 40, 80))


def test_each_head_reads_its_own_rubric_with_source_before_edit(load, media, source):
    reward = load(rounding=False)
    before, after = vlm.fitted(source.source, by="float"), vlm.fitted(media, by="float")
    pairs = [[b[None], a[None]] for b, a in zip(before, after, strict=True)]
    heads = [
        head(reward.vlm.hidden(pairs, [text.format(text_prompt=p) + SUFFIX for p in PROMPTS])[:, 0])
        for head, text in zip(reward.heads, RUBRICS.values(), strict=True)
    ]
    out, parts = reward(media, PROMPTS, source), reward.parts(media, PROMPTS, source)
    assert out.shape == (2,) and out.dtype == torch.float32
    assert torch.allclose(out, (heads[0][:, 0] + heads[1][:, 0]) / 2, atol=1e-5)
    assert torch.allclose(parts["following"], heads[0][:, 0], atol=1e-5)
    assert torch.allclose(parts["quality"], heads[1][:, 0], atol=1e-5)
    assert torch.allclose(parts["sigma"], ((heads[0][:, 1] + heads[1][:, 1]) / 2).exp(), rtol=1e-4)


def test_the_source_and_its_place_change_a_score(load, media, source):
    reward = load()
    whole = reward(media, PROMPTS, source)
    assert (
        whole - reward(media, PROMPTS, MediaContext(source=source.source.flip(0)))
    ).abs().min() > 1e-4
    swapped = reward(source.source, PROMPTS, MediaContext(source=media))
    assert (whole - swapped).abs().min() > 1e-4


def test_the_older_layout_model_pth_with_old_names_loads_too(load, files, media, source, tmp_path):
    old = (
        make_state(files["base"], 264)
        | make_head("rm_heads.head_0.")
        | make_head("rm_heads.head_1.", seed=2)
    )
    torch.save({"model": old}, tmp_path / "model.pth")
    assert torch.equal(
        load()(media, PROMPTS, source), load(weights=str(tmp_path))(media, PROMPTS, source)
    )


def test_a_source_that_each_prompt_names_is_the_source_in_the_context(
    load, media, source, tmp_path
):
    """Files of two sizes, one above the other would not stack."""
    other = torch.rand(3, 60, 40)
    names = [save(source.source[0], tmp_path / "a.png").name, save(other, tmp_path / "b.png").name]
    reward = load(source="meta", folder=str(tmp_path))
    assert (reward.needs, reward.reads) == ({"meta"}, {"source"})
    assert reward.complaint({"source": names[0]}) is None
    out = reward(media, PROMPTS, MediaContext(meta=[{"source": name} for name in names]))
    alone = [
        load()(media[i : i + 1], PROMPTS[i : i + 1], MediaContext(source=x[None]))
        for i, x in enumerate((source.source[0], other))
    ]
    assert torch.allclose(out, torch.cat(alone), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: (x * 255).byte(), "must be as media are: media is a torch.uint8 tensor"),
        (lambda x: x * 255, r"must be as media are: media spans \[.*media / 255 from bytes"),
        (lambda x: x[:1], "must be as media are: 1 media but 2 prompts"),
        (lambda x: x.log().log(), "holds NaN or inf"),
    ],
)
def test_a_source_that_is_not_as_media_are_is_refused(load, media, source, change, said):
    with pytest.raises(ValueError, match=f"context.source {said}"):
        load()(media, PROMPTS, MediaContext(source=change(source.source)))


def test_what_is_missing_is_one_sentence(load, files, media, source, tmp_path):
    said = r"context.source is missing: give MediaContext\(source=...\), one a sample"
    with pytest.raises(ValueError, match=said):
        load()(media, PROMPTS)
    said = r'needs the context column "source", .*Python with MediaContext\(source=...\)'
    with pytest.raises(ValueError, match=said):
        rewards.score(media, PROMPTS, {"editreward": {"reward": load()}})
    with pytest.raises(ValueError, match="holds neither model.pth nor model.safetensors"):
        load(weights=str(tmp_path))
    said = "save the literal INSTRUCTION_EDIT_QUALITY of .* set reward.editreward.quality=/path"
    with pytest.raises(ValueError, match=said):
        load(quality=None)
    state = make_state(files["base"], 264) | make_head("rm_heads.head_0.")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds no head rm_heads.head_1.0, .* \(found: nothing\)"):
        load(weights=str(tmp_path))


@pytest.mark.hub
def test_editreward_prefers_the_edit_that_was_asked_for():
    """Needs FLOWRL_EDITREWARD_RUBRICS, a folder with following.txt and quality.txt."""
    folder = os.environ.get("FLOWRL_EDITREWARD_RUBRICS")
    if not folder:
        pytest.skip("FLOWRL_EDITREWARD_RUBRICS names no folder")
    reward = rewards.load("editreward", **{key: f"{folder}/{key}.txt" for key in RUBRICS})
    blue, red = torch.zeros(1, 3, 448, 448), torch.zeros(1, 3, 448, 448)
    blue[:, 2], red[:, 0] = 0.8, 0.8
    y, x = torch.arange(448)[:, None] - 224, torch.arange(448) - 224
    disc = (x**2 + y**2 < 120**2).float()
    scene = [disc * colour + (1 - disc) * 0.9 for colour in (blue, red)]
    before = MediaContext(source=nn.functional.pad(scene[0], (0, 0)).repeat(2, 1, 1, 1))
    kept, done = reward(
        torch.cat(scene), ["change the colour of the disc to red"] * 2, before
    ).tolist()
    assert done > kept
