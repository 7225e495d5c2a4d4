"""ImageReward: a tiny random checkpoint in the published layout against a second statement of the
reference's forward, written here."""

import json
import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from flowrl import rewards
from flowrl.data.media import to_pil
from flowrl.rewards.core import tokens
from flowrl.rewards.core.pictures import cropped, normalized

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "red",
    "blue",
    "circle",
    "square",
    "and",
    "of",
    "##s",
    "painting",
    ",",
]
PROMPTS = ["a red circle", "a painting of blue squares, and a circle", "Square", "a unicorn"]
WIDTH, DEPTH, PATCH, SIDE = (
    128,
    2,
    8,
    32,
)  # two heads of 64: BLIP's picture towers have one per 64 dims
TEXT, HEADS, LAYERS, LENGTH = 32, 4, 2, 40
MED_CONFIG = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": TEXT,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": LENGTH,
    "model_type": "bert",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "type_vocab_size": 2,
    "vocab_size": len(WORDS) + 2,
    "encoder_width": 768,
    "add_cross_attention": True,
}


def shapes():
    """Every key of ImageReward.pt and its shape, at the tiny sizes."""
    linear = lambda name, out, inputs: {
        f"{name}.weight": (out, inputs),
        f"{name}.bias": (out,),
    }
    norm = lambda name, width: {f"{name}.weight": (width,), f"{name}.bias": (width,)}  # noqa: E731
    v, t = "blip.visual_encoder", "blip.text_encoder"
    out = {f"{v}.cls_token": (1, 1, WIDTH), f"{v}.pos_embed": (1, 1 + (SIDE // PATCH) ** 2, WIDTH)}
    out |= {
        f"{v}.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        f"{v}.patch_embed.proj.bias": (WIDTH,),
    }
    for i in range(DEPTH):
        b = f"{v}.blocks.{i}"
        out |= (
            norm(f"{b}.norm1", WIDTH)
            | linear(f"{b}.attn.qkv", 3 * WIDTH, WIDTH)
            | linear(f"{b}.attn.proj", WIDTH, WIDTH)
        )
        out |= (
            norm(f"{b}.norm2", WIDTH)
            | linear(f"{b}.mlp.fc1", 4 * WIDTH, WIDTH)
            | linear(f"{b}.mlp.fc2", WIDTH, 4 * WIDTH)
        )
    out |= norm(f"{v}.norm", WIDTH)
    e = f"{t}.embeddings"
    out |= {
        f"{e}.word_embeddings.weight": (len(WORDS) + 2, TEXT),
        f"{e}.position_embeddings.weight": (LENGTH, TEXT),
    }
    out |= norm(f"{e}.LayerNorm", TEXT)
    for i in range(LAYERS):
        b = f"{t}.encoder.layer.{i}"
        for kind, seen in (("attention", TEXT), ("crossattention", WIDTH)):
            out |= linear(f"{b}.{kind}.self.query", TEXT, TEXT) | linear(
                f"{b}.{kind}.self.key", TEXT, seen
            )
            out |= linear(f"{b}.{kind}.self.value", TEXT, seen) | linear(
                f"{b}.{kind}.output.dense", TEXT, TEXT
            )
            out |= norm(f"{b}.{kind}.output.LayerNorm", TEXT)
        out |= (
            linear(f"{b}.intermediate.dense", 64, TEXT)
            | linear(f"{b}.output.dense", TEXT, 64)
            | norm(f"{b}.output.LayerNorm", TEXT)
        )
    out |= linear("blip.vision_proj", 256, WIDTH) | linear("blip.text_proj", 256, TEXT)
    for index, (inputs, outputs) in zip(
        (0, 2, 4, 6, 7), ((TEXT, 1024), (1024, 128), (128, 64), (64, 16), (16, 1)), strict=True
    ):
        out |= linear(f"mlp.layers.{index}", outputs, inputs)
    return out


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with ImageReward.pt, med_config.json and vocab.txt, and its state dict."""
    folder, g = tmp_path_factory.mktemp("imagereward"), torch.Generator().manual_seed(0)
    state = {key: 0.08 * torch.randn(shape, generator=g) for key, shape in shapes().items()}
    for key in state:
        state[key] += (
            1
            if key.endswith((".norm.weight", ".norm1.weight", ".norm2.weight", "LayerNorm.weight"))
            else 0
        )
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    torch.save(state, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return folder, state


@pytest.fixture
def load(checkpoint):
    folder, _ = checkpoint
    return lambda **settings: rewards.load(
        "imagereward", **{"weights": str(folder), "vocab": str(folder), **settings}
    )


@pytest.fixture
def media():
    return F.interpolate(torch.rand(4, 3, 6, 8), (40, 48), mode="bicubic").clamp(0, 1)


# --- the reference, stated a second time


def attend(q, k, v, heads, mask=0.0):
    """Multi-head softmax attention on projected (n, tokens, width)."""
    q, k, v = (x.view(len(x), x.shape[1], heads, -1).transpose(1, 2) for x in (q, k, v))
    weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + mask).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def reference(state, pixels, ids, mask):
    """Rewards (n,) from normalised pixels, as ImageReward.py, vit.py and med.py compute them; mask
    (n, L) or None."""
    lin = lambda x, name: F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])  # noqa: E731
    norm = lambda x, name, eps: F.layer_norm(
        x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], eps
    )
    v, t = "blip.visual_encoder", "blip.text_encoder"
    x = F.conv2d(
        pixels,
        state[f"{v}.patch_embed.proj.weight"],
        state[f"{v}.patch_embed.proj.bias"],
        stride=PATCH,
    )
    x = (
        torch.cat([state[f"{v}.cls_token"].expand(len(x), 1, -1), x.flatten(2).transpose(1, 2)], 1)
        + state[f"{v}.pos_embed"]
    )
    for i in range(DEPTH):
        b = f"{v}.blocks.{i}"
        q, k, w = lin(norm(x, f"{b}.norm1", 1e-6), f"{b}.attn.qkv").chunk(3, -1)
        x = x + lin(attend(q, k, w, WIDTH // 64), f"{b}.attn.proj")
        x = x + lin(F.gelu(lin(norm(x, f"{b}.norm2", 1e-6), f"{b}.mlp.fc1")), f"{b}.mlp.fc2")
    x = norm(x, f"{v}.norm", 1e-6)
    e = f"{t}.embeddings"
    h = (
        state[f"{e}.word_embeddings.weight"][ids]
        + state[f"{e}.position_embeddings.weight"][: ids.shape[1]]
    )
    h = norm(h, f"{e}.LayerNorm", 1e-12)
    hidden = 0.0 if mask is None else (1 - mask[:, None, None].float()) * -10000
    for i in range(LAYERS):
        b = f"{t}.encoder.layer.{i}"
        for kind, seen, m in (("attention", None, hidden), ("crossattention", x, 0.0)):
            s, seen = f"{b}.{kind}.self", h if seen is None else seen
            out = attend(
                lin(h, f"{s}.query"), lin(seen, f"{s}.key"), lin(seen, f"{s}.value"), HEADS, m
            )
            h = norm(
                lin(out, f"{b}.{kind}.output.dense") + h, f"{b}.{kind}.output.LayerNorm", 1e-12
            )
        h = norm(
            lin(F.gelu(lin(h, f"{b}.intermediate.dense")), f"{b}.output.dense") + h,
            f"{b}.output.LayerNorm",
            1e-12,
        )
    h = h[:, 0]
    for index in (0, 2, 4, 6, 7):
        h = lin(h, f"mlp.layers.{index}")
    return (h[:, 0] - 0.16717362830052426) / 1.0333394966054072


def pixels_of(media):
    """The reference's transform, by PIL alone: shortest side to 32, bicubic; centre crop; CLIP's
    mean and standard deviation."""
    out = []
    for image in to_pil(media):
        width, height = image.size
        short = min(width, height)
        image = image.resize(
            (int(SIDE * width / short), int(SIDE * height / short)), Image.Resampling.BICUBIC
        )
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        levels = torch.from_numpy(
            np.array(image.crop((left, top, left + SIDE, top + SIDE)))
        ).float()
        mean, std = (
            torch.tensor([0.48145466, 0.4578275, 0.40821073]),
            torch.tensor([0.26862954, 0.26130258, 0.27577711]),
        )
        out.append(((levels / 255 - mean) / std).permute(2, 0, 1))
    return torch.stack(out)


def test_scores_are_those_of_the_reference_forward_on_a_checkpoint_in_its_layout(
    load, checkpoint, media
):
    reward, state = load(), checkpoint[1]
    ids, mask = reward._tokens(PROMPTS)
    expected = reference(state, pixels_of(media), ids, mask)
    out = reward(media, PROMPTS)
    assert out.shape == (4,) and out.dtype == torch.float32 and expected.std() > 1e-3
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_padding_of_a_prompt_changes_nothing(load, checkpoint, media):
    reward, state = load(), checkpoint[1]
    for i, prompt in enumerate(PROMPTS):
        ids, mask = reward._tokens([prompt])
        bare = ids[:, : int(mask.sum())]
        alone = reference(state, pixels_of(media[i : i + 1]), bare, None)
        torch.testing.assert_close(reward(media[i : i + 1], [prompt]), alone, atol=2e-5, rtol=1e-4)


def test_the_epsilon_of_blips_picture_tower_matters_and_is_1e_6(load, media):
    reward = load()
    exact = reward(media, PROMPTS)
    norms = [m for m in reward.model.blip.vision.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 2 * DEPTH + 1 and {m.eps for m in norms} == {1e-6}
    for norm in norms:
        norm.eps = 1e-3
    assert not torch.allclose(reward(media, PROMPTS), exact, atol=1e-5)


def test_a_prompt_becomes_berts_tokens_padded_to_35(load):
    ids, mask = load()._tokens(PROMPTS)
    expected = [
        "[CLS]",
        "a",
        "painting",
        "of",
        "blue",
        "square",
        "##s",
        ",",
        "and",
        "a",
        "circle",
        "[SEP]",
    ]
    assert ids.shape == mask.shape == (4, 35)
    assert (
        [WORDS[i] for i in ids[1, :12]] == expected
        and ids[1, 12:].sum() == 0
        and mask.sum(1).tolist() == [5, 12, 3, 4]
    )
    assert [WORDS[i] for i in ids[2, :3]] == ["[CLS]", "square", "[SEP]"] and WORDS[
        ids[3, 2]
    ] == "[UNK]"


def test_a_prompt_of_more_than_35_tokens_keeps_its_end_and_is_warned_about_once(
    load, media, monkeypatch, caplog
):
    monkeypatch.setattr(tokens, "_told", set())
    reward, long = load(), "red " * 40
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        reward.expect(["red", long, long, f"{long} red"])
    assert "imagereward reads 35 tokens of a prompt: 2 of 3 are longer (up to 43);" in caplog.text
    caplog.clear()
    monkeypatch.setattr(tokens, "_told", set())
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        first = reward(media[:1], [long])
        reward(media[:1], [long])
    assert [r.message for r in caplog.records if "imagereward" in r.message] == [
        "imagereward reads 35 tokens of a prompt: 1 of the first 1 are longer (up to 42); the rest"
        " does not count (said once)"
    ]
    ids, mask = reward._tokens([long])
    assert ids[0].tolist() == [2] + [6] * 33 + [3] and int(mask.sum()) == 35
    assert torch.equal(first, reward(media[:1], ["red " * 33]))


def test_batch_mates_and_chunks_do_not_change_a_score_and_each_picture_has_its_own_prompt(
    load, media
):
    reward = load()
    whole = reward(media, PROMPTS)
    alone = torch.cat([reward(media[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole, load(chunk=3)(media, PROMPTS), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        reward(media.flip(0), PROMPTS[::-1]), whole.flip(0), atol=1e-5, rtol=1e-5
    )
    assert not torch.allclose(reward(media, PROMPTS[::-1]), whole, atol=1e-4)


def test_a_video_has_the_mean_of_its_frames(load, media):
    reward = load(chunk=3)
    frames = reward(media, [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]])
    torch.testing.assert_close(
        reward(media.view(2, 2, 3, 40, 48), PROMPTS[:2]),
        frames.view(2, 2).mean(1),
        atol=1e-5,
        rtol=1e-5,
    )


def test_without_rounding_the_gradient_is_that_of_finite_differences(load, media):
    reward = load(rounding=False)
    assert reward.differentiable and not load().differentiable
    with pytest.raises(
        ValueError,
        match="imagereward as it is loaded .* gives no gradient; load it with rounding=False",
    ):
        load()(media.clone().requires_grad_(), PROMPTS)
    torch.testing.assert_close(reward(media, PROMPTS), load()(media, PROMPTS), atol=5e-3, rtol=0.05)
    model, (ids, mask) = reward.model.double(), reward._tokens(PROMPTS)
    score = lambda x: model(normalized(cropped(x, SIDE)), ids, mask)  # noqa: E731
    x = (0.2 + 0.6 * media).double().requires_grad_()
    gradient = torch.autograd.grad(score(x).sum(), x)[0]
    assert bool((gradient.abs().amax((1, 2, 3)) > 0).all()) and all(
        p.grad is None for p in model.parameters()
    )
    direction, h = torch.randn_like(x), 1e-5
    with torch.no_grad():
        numeric = (score(x + h * direction) - score(x - h * direction)).sum() / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-4, atol=1e-7)


# --- bad input


def test_what_is_missing_is_said_with_where_to_put_it(checkpoint, load, tmp_path, monkeypatch):
    folder, state = checkpoint
    with pytest.raises(
        ValueError, match=r"reward.imagereward.weights=/nowhere/at/all: there is no such file"
    ):
        load(weights="/nowhere/at/all")
    with pytest.raises(ValueError, match=r"reward.imagereward.vocab=.*no such file"):
        load(vocab=str(tmp_path / "vocab.txt"))
    with pytest.raises(
        ValueError,
        match=(
            r"needs ImageReward.pt and med_config.json of THUDM/ImageReward, .*weights=/path/to/the"
            r" folder"
        ),
    ):
        rewards.load("imagereward")
    torch.save(state, tmp_path / "ImageReward.pt")
    with pytest.raises(ValueError, match="med_config.json"):
        load(weights=str(tmp_path / "ImageReward.pt"))
    (tmp_path / "med_config.json").write_text(json.dumps(MED_CONFIG))
    assert load(weights=str(tmp_path / "ImageReward.pt")).name == "imagereward"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("mlp.layers.7.bias"), r"1 keys missing \(layers.7.bias\)"),
        (
            lambda s: s.pop("blip.text_encoder.encoder.layer.1.crossattention.self.key.weight"),
            "1 keys missing .*crossattention",
        ),
        (lambda s: s.update(extra=torch.zeros(1)), r"1 unknown keys \(extra\)"),
        (
            lambda s: s.update({"mlp.layers.0.weight": torch.zeros(3, 3)}),
            "1 tensors of another shape",
        ),
        (
            lambda s: s.clear() or s.update({"a": torch.zeros(3)}),
            "is not an ImageReward checkpoint.*: no visual_encoder.patch_embed",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_keys(
    checkpoint, load, tmp_path, change, said
):
    state = dict(checkpoint[1])
    change(state)
    torch.save(state, tmp_path / "ImageReward.pt")
    (tmp_path / "med_config.json").write_text(json.dumps(MED_CONFIG))
    with pytest.raises(ValueError, match=said):
        load(weights=str(tmp_path))


# --- the published numbers


@pytest.mark.hub
def test_published_weights_give_the_scores_of_the_readme(tmp_path):
    import httpx

    from flowrl.data.media import from_pil

    reward = rewards.load("imagereward")
    try:
        for i in range(1, 5):
            answer = httpx.get(
                f"https://raw.githubusercontent.com/THUDM/ImageReward/main/assets/images/{i}.webp",
                follow_redirects=True,
            )
            (tmp_path / f"{i}.webp").write_bytes(answer.raise_for_status().content)
    except httpx.HTTPError as error:
        pytest.skip(f"the pictures cannot be fetched: {error}")
    prompt = "a painting of an ocean with clouds and birds, day time, low depth field effect"
    pictures = [from_pil(Image.open(tmp_path / f"{i}.webp")) for i in range(1, 5)]
    scores = torch.cat([reward(picture, [prompt]) for picture in pictures])
    torch.testing.assert_close(
        scores, torch.tensor([0.5811623, 0.2745276, -1.4131819, -2.0295696]), atol=2e-3, rtol=0
    )
