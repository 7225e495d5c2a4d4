"""ImageReward: a tiny checkpoint in the published layout against the reference's forward.

That forward is written here a second time.
"""

import json
import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from shape_tables import linear, norm, random_state

from flowrl import rewards
from flowrl.data.media import to_pil
from flowrl.rewards.core import tokens
from flowrl.rewards.core.pictures import cropped, normalized

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square"]
WORDS += ["and", "of", "##s", "painting", ","]
PROMPTS = ["a red circle", "a painting of blue squares, and a circle", "Square", "a unicorn"]
WIDTH, DEPTH, PATCH, SIDE = 128, 2, 8, 32  # two heads: BLIP's picture towers have one per 64 dims
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


def picture_tower_shapes(name):
    out = {
        f"{name}.cls_token": (1, 1, WIDTH),
        f"{name}.pos_embed": (1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        f"{name}.patch_embed.proj.weight": (WIDTH, 3, PATCH, PATCH),
        f"{name}.patch_embed.proj.bias": (WIDTH,),
    }
    for i in range(DEPTH):
        block = f"{name}.blocks.{i}"
        out |= norm(f"{block}.norm1", WIDTH)
        out |= linear(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        out |= linear(f"{block}.attn.proj", WIDTH, WIDTH)
        out |= norm(f"{block}.norm2", WIDTH)
        out |= linear(f"{block}.mlp.fc1", 4 * WIDTH, WIDTH)
        out |= linear(f"{block}.mlp.fc2", WIDTH, 4 * WIDTH)
    return out | norm(f"{name}.norm", WIDTH)


def text_tower_shapes(name):
    out = {
        f"{name}.embeddings.word_embeddings.weight": (len(WORDS) + 2, TEXT),
        f"{name}.embeddings.position_embeddings.weight": (LENGTH, TEXT),
    }
    out |= norm(f"{name}.embeddings.LayerNorm", TEXT)
    for i in range(LAYERS):
        layer = f"{name}.encoder.layer.{i}"
        for kind, seen in (("attention", TEXT), ("crossattention", WIDTH)):
            out |= linear(f"{layer}.{kind}.self.query", TEXT, TEXT)
            out |= linear(f"{layer}.{kind}.self.key", TEXT, seen)
            out |= linear(f"{layer}.{kind}.self.value", TEXT, seen)
            out |= linear(f"{layer}.{kind}.output.dense", TEXT, TEXT)
            out |= norm(f"{layer}.{kind}.output.LayerNorm", TEXT)
        out |= linear(f"{layer}.intermediate.dense", 64, TEXT)
        out |= linear(f"{layer}.output.dense", TEXT, 64)
        out |= norm(f"{layer}.output.LayerNorm", TEXT)
    return out


def shapes():
    """Every key of ImageReward.pt and its shape, at the tiny sizes."""
    out = picture_tower_shapes("blip.visual_encoder") | text_tower_shapes("blip.text_encoder")
    out |= linear("blip.vision_proj", 256, WIDTH)
    out |= linear("blip.text_proj", 256, TEXT)
    sizes = (TEXT, 1024, 128, 64, 16, 1)
    for i, place in enumerate((0, 2, 4, 6, 7)):
        out |= linear(f"mlp.layers.{place}", sizes[i + 1], sizes[i])
    return out


def write(folder):
    """ImageReward.pt, med_config.json and vocab.txt -> settings, and the state dict."""
    state = random_state(shapes(), 0.08)
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    torch.save(state, folder / "ImageReward.pt")
    (folder / "med_config.json").write_text(json.dumps(MED_CONFIG))
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return {"weights": str(folder), "vocab": str(folder)}, state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imagereward")
    return folder, write(folder)[1]


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


class Reference:
    """Rewards (n,) from normalised pixels, as ImageReward.py, vit.py and med.py compute them."""

    def __init__(self, state):
        self.state = state

    def linear(self, x, name):
        return F.linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, x, name, eps):
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    def picture(self, pixels):
        v = "blip.visual_encoder"
        patch = f"{v}.patch_embed.proj"
        weight, bias = self.state[f"{patch}.weight"], self.state[f"{patch}.bias"]
        patches = F.conv2d(pixels, weight, bias, stride=PATCH).flatten(2).transpose(1, 2)
        first = self.state[f"{v}.cls_token"].expand(len(pixels), 1, -1)
        x = torch.cat([first, patches], 1) + self.state[f"{v}.pos_embed"]
        for i in range(DEPTH):
            b = f"{v}.blocks.{i}"
            q, k, w = self.linear(self.norm(x, f"{b}.norm1", 1e-6), f"{b}.attn.qkv").chunk(3, -1)
            x = x + self.linear(attend(q, k, w, WIDTH // 64), f"{b}.attn.proj")
            inner = F.gelu(self.linear(self.norm(x, f"{b}.norm2", 1e-6), f"{b}.mlp.fc1"))
            x = x + self.linear(inner, f"{b}.mlp.fc2")
        return self.norm(x, f"{v}.norm", 1e-6)

    def attention(self, h, seen, name, hidden):
        """Of h to seen, with its residual and norm after it."""
        q = self.linear(h, f"{name}.self.query")
        k, v = self.linear(seen, f"{name}.self.key"), self.linear(seen, f"{name}.self.value")
        out = self.linear(attend(q, k, v, HEADS, hidden), f"{name}.output.dense")
        return self.norm(out + h, f"{name}.output.LayerNorm", 1e-12)

    def text(self, ids, mask, picture):
        t = "blip.text_encoder"
        places = self.state[f"{t}.embeddings.position_embeddings.weight"][: ids.shape[1]]
        h = self.state[f"{t}.embeddings.word_embeddings.weight"][ids] + places
        h = self.norm(h, f"{t}.embeddings.LayerNorm", 1e-12)
        hidden = 0.0 if mask is None else (1 - mask[:, None, None].float()) * -10000
        for i in range(LAYERS):
            b = f"{t}.encoder.layer.{i}"
            h = self.attention(h, h, f"{b}.attention", hidden)
            h = self.attention(h, picture, f"{b}.crossattention", 0.0)
            inner = F.gelu(self.linear(h, f"{b}.intermediate.dense"))
            out = self.linear(inner, f"{b}.output.dense")
            h = self.norm(out + h, f"{b}.output.LayerNorm", 1e-12)
        return h[:, 0]

    def __call__(self, pixels, ids, mask):
        """mask: (n, L) or None."""
        h = self.text(ids, mask, self.picture(pixels))
        for place in (0, 2, 4, 6, 7):
            h = self.linear(h, f"mlp.layers.{place}")
        return (h[:, 0] - 0.16717362830052426) / 1.0333394966054072


def pixels_of(media):
    """The reference's transform, by PIL alone: shortest side to 32, bicubic; centre crop; CLIP's
    mean and standard deviation."""
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])
    out = []
    for image in to_pil(media):
        short = min(image.size)
        size = (int(SIDE * image.width / short), int(SIDE * image.height / short))
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        image = image.crop((left, top, left + SIDE, top + SIDE))
        levels = torch.from_numpy(np.array(image)).float()
        out.append(((levels / 255 - mean) / std).permute(2, 0, 1))
    return torch.stack(out)


def test_scores_are_those_of_the_reference_forward(load, checkpoint, media):
    reward, state = load(), checkpoint[1]
    ids, mask = reward._tokens(PROMPTS)
    expected = Reference(state)(pixels_of(media), ids, mask)
    out = reward(media, PROMPTS)
    assert out.shape == (4,) and out.dtype == torch.float32 and expected.std() > 1e-3
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_padding_of_a_prompt_changes_nothing(load, checkpoint, media):
    reward, state = load(), checkpoint[1]
    for i, prompt in enumerate(PROMPTS):
        ids, mask = reward._tokens([prompt])
        bare = ids[:, : int(mask.sum())]
        alone = Reference(state)(pixels_of(media[i : i + 1]), bare, None)
        torch.testing.assert_close(reward(media[i : i + 1], [prompt]), alone, atol=2e-5, rtol=1e-4)


def test_the_epsilon_of_blips_picture_tower_matters_and_is_1e_6(load, media):
    reward = load()
    exact = reward(media, PROMPTS)
    norms = [m for m in reward.model.blip.vision.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(norms) == 2 * DEPTH + 1 and {m.eps for m in norms} == {1e-6}
    for layer in norms:
        layer.eps = 1e-3
    assert not torch.allclose(reward(media, PROMPTS), exact, atol=1e-5)


def test_a_prompt_becomes_berts_tokens_padded_to_35(load):
    ids, mask = load()._tokens(PROMPTS)
    words = [[WORDS[i] for i in row] for row in ids]
    assert ids.shape == mask.shape == (4, 35)
    whole = "[CLS] a painting of blue square ##s , and a circle [SEP]"
    assert " ".join(words[1][:12]) == whole
    assert ids[1, 12:].sum() == 0 and mask.sum(1).tolist() == [5, 12, 3, 4]
    assert words[2][:3] == ["[CLS]", "square", "[SEP]"] and words[3][2] == "[UNK]"


def test_a_long_prompt_keeps_its_end_and_is_warned_about_once(load, media, monkeypatch, caplog):
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


def test_without_rounding_the_gradient_is_that_of_finite_differences(load, media):
    reward = load(rounding=False)
    model, (ids, mask) = reward.model.double(), reward._tokens(PROMPTS)

    def score(x):
        return model(normalized(cropped(x, SIDE)), ids, mask)

    x = (0.2 + 0.6 * media).double().requires_grad_()
    gradient = torch.autograd.grad(score(x).sum(), x)[0]
    direction, h = torch.randn_like(x), 1e-5
    with torch.no_grad():
        numeric = (score(x + h * direction) - score(x - h * direction)).sum() / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-4, atol=1e-7)


# --- bad input


def test_what_is_missing_is_said_with_where_to_put_it(checkpoint, load, tmp_path, monkeypatch):
    folder, state = checkpoint
    with pytest.raises(ValueError, match=r"reward.imagereward.vocab=.*no such file"):
        load(vocab=str(tmp_path / "vocab.txt"))
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
def test_a_checkpoint_that_does_not_fit_is_refused(checkpoint, load, tmp_path, change, said):
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
    folder = "https://raw.githubusercontent.com/THUDM/ImageReward/main/assets/images"
    try:
        for i in range(1, 5):
            answer = httpx.get(f"{folder}/{i}.webp", follow_redirects=True)
            (tmp_path / f"{i}.webp").write_bytes(answer.raise_for_status().content)
    except httpx.HTTPError as error:
        pytest.skip(f"the pictures cannot be fetched: {error}")
    prompt = "a painting of an ocean with clouds and birds, day time, low depth field effect"
    pictures = [from_pil(Image.open(tmp_path / f"{i}.webp")) for i in range(1, 5)]
    scores = torch.cat([reward(picture, [prompt]) for picture in pictures])
    published = torch.tensor([0.5811623, 0.2745276, -1.4131819, -2.0295696])
    torch.testing.assert_close(scores, published, atol=2e-3, rtol=0)
