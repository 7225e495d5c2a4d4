"""MPS: a tiny random state dict against the reference's forward, stated here a second time."""

import hashlib
import logging
import math
import os

import pytest
import torch
import torch.nn.functional as F
from shape_tables import linear, norm, random_state, under

from flowrl import rewards
from flowrl.rewards import mps
from flowrl.rewards.core import tokens as core_tokens
from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped

# <end> has the highest id
WORDS = ["[UNK]", "red", "blue", "circle", "square", "a", "and"]
WORDS += ["light", "colour", "shape", "<start>", "<end>"]
START, END = 10, 11
PROMPTS = ["a red circle", "a blue square and a red circle", "square", "unicorn"]
CONDITION = "light colour shape"
TEXT, PICTURE, DIM, LENGTH = 32, 64, 24, 12  # towers have 16 heads: of 2 and of 4 dims
SIDE, PATCH = 32, 8
TOKENS = 1 + (SIDE // PATCH) ** 2  # of a picture
HEADS, HEAD, LAYERS = 4, 8, 2  # of the cross model


def shapes():
    """Every key of MPS_overall.pth and its shape, at the tiny sizes."""
    out = {"model.logit_scale": ()}
    out |= tower_layers("text", TEXT) | tower_layers("vision", PICTURE)
    out |= under(
        "model.text_model.embeddings",
        {"token_embedding.weight": (len(WORDS), TEXT), "position_embedding.weight": (LENGTH, TEXT)},
    )
    out |= norm("model.text_model.final_layer_norm", TEXT)
    patch = {"patch_embedding.weight": (PICTURE, 3, PATCH, PATCH)}
    places = {"position_embedding.weight": (TOKENS, PICTURE)}
    out |= under("model.vision_model.embeddings", {"class_embedding": (PICTURE,)} | patch | places)
    out |= norm("model.vision_model.pre_layrnorm", PICTURE)
    out |= norm("model.vision_model.post_layernorm", PICTURE)
    out |= {"model.visual_projection.weight": (DIM, PICTURE)}
    out |= {"model.text_projection.weight": (DIM, TEXT)}
    for i in range(LAYERS):
        out |= cross_layer(f"cross_model.layers.{i}")
    return out


def tower_layers(tower, width):
    out = {}
    for i in range(2):
        b = f"model.{tower}_model.encoder.layers.{i}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            out |= linear(f"{b}.self_attn.{part}", width, width)
        out |= norm(f"{b}.layer_norm1", width) | norm(f"{b}.layer_norm2", width)
        out |= linear(f"{b}.mlp.fc1", 2 * width, width) | linear(f"{b}.mlp.fc2", width, 2 * width)
    return out


def cross_layer(name):
    inner, hidden = HEADS * HEAD, 4 * DIM
    out = norm(f"{name}.0.fn.norm", DIM) | norm(f"{name}.1.fn.norm", DIM)
    attend = {
        "to_q.weight": (inner, DIM),
        "to_kv.weight": (2 * HEAD, DIM),
        "to_out.weight": (DIM, inner),
        "ff.0.weight": (2 * hidden, DIM),
        "ff.2.weight": (DIM, hidden),
    }
    block = {
        "fused_attn_ff_proj.weight": (inner + 2 * HEAD + 2 * hidden, DIM),
        "attn_out.weight": (DIM, inner),
        "ff_out.1.weight": (DIM, hidden),
    }
    return out | under(f"{name}.0.fn", attend) | under(f"{name}.1.fn", block)


def published_state():
    state = random_state(shapes(), 0.15, seed=1)
    for key in state:
        if "norm" in key and key.startswith("cross") and key.endswith("bias"):
            state[key] = torch.zeros_like(state[key])  # no bias: a buffer of zeros is stored
    state["model.logit_scale"] = torch.tensor(math.log(100.0))
    for i in range(LAYERS):
        frequencies = 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
        state[f"cross_model.layers.{i}.1.fn.rotary_emb.inv_freq"] = frequencies
    state["model.text_model.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    state["model.vision_model.embeddings.position_ids"] = torch.arange(TOKENS)[None]
    return state


def write(folder):
    """MPS_overall.pth, tokenizer.json and condition.txt -> settings, and the state dict."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    state = published_state()
    torch.save(state, folder / "MPS_overall.pth")
    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $0 <end>", special_tokens=[("<start>", START), ("<end>", END)]
    )
    tokenizer.enable_truncation(5)  # as saved by someone else: must not be taken over
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "condition.txt").write_text(CONDITION + "\n")
    places = {"weights": "", "tokenizer": "", "condition": "condition.txt"}
    return {key: str(folder / file) for key, file in places.items()}, state


def known(monkeypatch):
    """The tiny network's condition is taken for the published one."""
    monkeypatch.setattr(mps, "CONDITION", hashlib.sha256(CONDITION.encode()).hexdigest()[:16])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mps"))


@pytest.fixture
def load(files, monkeypatch):
    known(monkeypatch)
    return lambda **settings: rewards.load("mps", **files[0] | settings)


@pytest.fixture
def media():
    return F.interpolate(torch.rand(4, 3, 6, 8), (40, 49), mode="bicubic").clamp(0, 1)


# --- the reference, stated a second time


def tower(state, name, x, causal):
    """Hidden states after the layers of a CLIP tower, (n, tokens, width)."""

    def lin(x, key):
        return F.linear(x, state[f"{key}.weight"], state[f"{key}.bias"])

    def norm(x, key):
        return F.layer_norm(x, x.shape[-1:], state[f"{key}.weight"], state[f"{key}.bias"])

    if name == "vision":
        x = norm(x, "model.vision_model.pre_layrnorm")
    hidden = torch.full((x.shape[1],) * 2, -math.inf).triu(1) if causal else 0.0
    for i in range(2):
        b = f"model.{name}_model.encoder.layers.{i}"
        h = norm(x, f"{b}.layer_norm1")
        q, k, v = (
            lin(h, f"{b}.self_attn.{p}_proj").unflatten(2, (16, -1)).transpose(1, 2) for p in "qkv"
        )
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + hidden).softmax(-1)
        x = x + lin((weights @ v).transpose(1, 2).flatten(2), f"{b}.self_attn.out_proj")
        x = x + lin(F.gelu(lin(norm(x, f"{b}.layer_norm2"), f"{b}.mlp.fc1")), f"{b}.mlp.fc2")
    return norm(x, "model.text_model.final_layer_norm") if name == "text" else x


def text_features(state, ids):
    e = "model.text_model.embeddings"
    x = state[f"{e}.token_embedding.weight"][ids] + state[f"{e}.position_embedding.weight"]
    tokens = tower(state, "text", x, causal=True) @ state["model.text_projection.weight"].T
    ends = [row[list(i).index(END)] for row, i in zip(tokens, ids.tolist(), strict=True)]
    return tokens, torch.stack(ends)


def picture_features(state, pixels):
    e = "model.vision_model.embeddings"
    x = F.conv2d(pixels, state[f"{e}.patch_embedding.weight"], stride=PATCH)
    x = x.flatten(2).transpose(1, 2)
    x = torch.cat([state[f"{e}.class_embedding"].expand(len(x), 1, -1), x], 1)
    x = x + state[f"{e}.position_embedding.weight"]
    return tower(state, "vision", x, causal=False) @ state["model.visual_projection.weight"].T


def rotate(x):
    """Rotary positions in complex numbers.

    Dims j and j + head / 2 of a head are one number, turned by position * 10000^(-2j / head).
    """
    first, second = x.chunk(2, -1)
    angle = torch.arange(x.shape[-2])[:, None] * 10000 ** (-torch.arange(0, HEAD, 2) / HEAD)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def reference(state, pixels, ids, condition, threshold):
    """Score of one picture and one prompt. pixels (1, 3, 32, 32), ids (1, L), condition (1, L)."""
    words, sentence = text_features(state, ids)
    concepts, _ = text_features(state, condition)
    similarity = torch.einsum("bid,bjd->bji", words, concepts).amax(1)
    mask = torch.where(similarity / similarity.max() > threshold, 0.0, -math.inf)
    x = picture_features(state, pixels)
    for i in range(LAYERS):
        x = cross_attention(part(state, f"cross_model.layers.{i}.0.fn."), x, words, mask)
        x = self_attention(part(state, f"cross_model.layers.{i}.1.fn."), x)
    return state["model.logit_scale"].exp() * F.cosine_similarity(sentence, x[:, 0])


def part(state, prefix):
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def cross_attention(c, x, words, mask):
    n = F.layer_norm(x, (DIM,), c["norm.weight"])
    q = (n @ c["to_q.weight"].T).unflatten(2, (HEADS, HEAD)).transpose(1, 2)
    k, v = (words @ c["to_kv.weight"].T).chunk(2, -1)
    out = attended(q, k, v, mask[:, None, None]) @ c["to_out.weight"].T
    value, gate = (n @ c["ff.0.weight"].T).chunk(2, -1)
    return x + out + (F.silu(gate) * value) @ c["ff.2.weight"].T


def self_attention(s, x):
    n = F.layer_norm(x, (DIM,), s["norm.weight"])
    widths = (HEADS * HEAD, HEAD, HEAD, 8 * DIM)
    q, k, v, ff = (n @ s["fused_attn_ff_proj.weight"].T).split(widths, -1)
    q, k = rotate(q.unflatten(2, (HEADS, HEAD)).transpose(1, 2)), rotate(k)
    out = attended(q, k, v, 0.0) @ s["attn_out.weight"].T
    value, gate = ff.chunk(2, -1)
    return x + out + (F.silu(gate) * value) @ s["ff_out.1.weight"].T


def attended(q, k, v, mask):
    weights = (torch.einsum("bhid,bjd->bhij", q, k) * HEAD**-0.5 + mask).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2)


def ids_of(prompt):
    row = [START, *(WORDS.index(w) if w in WORDS else 0 for w in prompt.split()), END]
    return torch.tensor([row + [END] * (LENGTH - len(row))])


def one_by_one(files, media, prompts, threshold=0.3):
    pixels = normalized(pil_cropped(media, SIDE, floor=True))
    scores = [
        reference(files[1], picture[None], ids_of(prompt), ids_of(CONDITION), threshold)
        for picture, prompt in zip(pixels, prompts, strict=True)
    ]
    return torch.cat(scores)


@pytest.mark.parametrize("threshold", [0.3, 0.01, 0.9])
def test_scores_are_those_of_the_reference_called_with_one_prompt(load, files, media, threshold):
    out = load(threshold=threshold)(media, PROMPTS)
    expected = one_by_one(files, media, PROMPTS, threshold)
    assert out.shape == (4,) and out.dtype == torch.float32 and expected.std() > 0.5
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=1e-4)


def test_the_threshold_decides_which_words_count(load, media):
    scores = [load(threshold=t)(media, PROMPTS) for t in (0.3, 0.9)]
    assert not torch.allclose(*scores, atol=0.01)


def test_a_word_counts_by_its_similarity_relative_to_the_best_word_of_its_own_prompt():
    """Similarities 4, 1, 2 and 0.4, 0.1, 0.2 to the nearer of two condition words.

    Relative to 4 and to 0.4 they are 1, 1/4, 1/2.
    """
    condition = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    words = torch.tensor([[[4.0, 0.0], [0.0, 1.0], [2.0, -3.0]]])
    both = torch.cat([words, words / 10])
    assert mps.counted(both, condition, 0.3).tolist() == [[True, False, True]] * 2
    assert mps.counted(both, condition, 0.01).tolist() == [[True] * 3] * 2
    # divided by the maximum of the whole call, as the reference does, the second prompt would lose
    # all its words: 0.4 / 4 < 0.3
    assert (both[1] @ condition.T).max() / (both[0] @ condition.T).max() < 0.3


def test_a_prompt_beyond_the_context_keeps_its_end_and_is_warned_about_once(
    load, media, monkeypatch, caplog
):
    reward, long = load(), "red " * 20
    monkeypatch.setattr(core_tokens, "_told", set())
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        reward.expect(["red", long, long, f"{long} red"])
    assert "mps reads 12 tokens of a prompt: 2 of 3 are longer (up to 23);" in caplog.text
    caplog.clear()
    monkeypatch.setattr(core_tokens, "_told", set())
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        first = reward(media[:1], [long])
        reward(media[:1], [long])
    said = [r.message for r in caplog.records if r.message.startswith("mps")]
    assert len(said) == 1 and said[0].startswith(
        "mps reads 12 tokens of a prompt: 1 of the first 1 are longer (up to 22);"
    )
    assert reward._tokens([long]).tolist() == [[START] + [1] * 10 + [END]]
    assert reward._tokens(["red"]).tolist() == [[START, 1] + [END] * 10]
    assert torch.equal(first, reward(media[:1], ["red " * 10]))


def test_lower_precision_keeps_the_angles_of_257_picture_tokens(load, files, media, tmp_path):
    """As many tokens as CLIP-H has. Angles in bf16 are off by half a radian there."""
    state, g = dict(files[1]), torch.Generator().manual_seed(2)
    places = 0.15 * torch.randn(257, PICTURE, generator=g)
    state["model.vision_model.embeddings.position_embedding.weight"] = places
    torch.save(state, tmp_path / "MPS_overall.pth")
    exact, half = (load(weights=str(tmp_path), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert exact.model.side == 16 * PATCH
    x = torch.randn(1, 257, HEADS * HEAD, generator=g)
    turned = half.model.cross[0]._turned(x.bfloat16()).float()
    expected = rotate(x.unflatten(2, (HEADS, HEAD)).transpose(1, 2)).transpose(1, 2).flatten(2)
    assert (turned - expected).abs().max() < 0.05
    assert (half(media, PROMPTS) - exact(media, PROMPTS)).abs().max() < 0.4


def test_without_rounding_the_gradient_is_that_of_finite_differences(load, media):
    reward = load(rounding=False)
    model, ids = reward.model.double(), reward._tokens(PROMPTS)
    words, sentence = model.words(ids)
    counts = mps.counted(words, model.words(reward.condition)[0][0], 0.3)

    def score(x):
        fused = model.fuse(normalized(cropped(x, SIDE)), words, counts)
        return F.cosine_similarity(fused, sentence)

    x = (0.2 + 0.6 * media).double().requires_grad_()
    gradient = torch.autograd.grad(score(x).sum(), x)[0]
    direction, h = torch.randn_like(x), 1e-6
    with torch.no_grad():
        numeric = (score(x + h * direction) - score(x - h * direction)).sum() / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-4, atol=1e-7)


def test_a_checkpoint_without_the_computed_frequencies_loads_too(load, files, media, tmp_path):
    computed = ("inv_freq", "position_ids")
    state = {key: value for key, value in files[1].items() if not key.endswith(computed)}
    torch.save(state, tmp_path / "MPS_overall.pth")
    found = load(weights=str(tmp_path))(media, PROMPTS)
    torch.testing.assert_close(found, load()(media, PROMPTS), atol=1e-4, rtol=1e-5)


# --- bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"weights": None},
            "needs MPS_overall.pth: download https://.*MPS_overall.pth and set reward.mps.weights=",
        ),
        (
            {"condition": None},
            "needs its model's own prompt text: save the condition sentence in"
            " eval_overall_mps_on_hpdv2.py",
        ),
        (
            {"condition": "/nowhere/c.txt"},
            "reward.mps.condition=/nowhere/c.txt: there is no such file",
        ),
        (
            {"tokenizer": "/nowhere/tokenizer.json"},
            "reward.mps.tokenizer=/nowhere/tokenizer.json: there is no such file",
        ),
        ({"threshold": 1.0}, "threshold=1.0: input should be less than 1"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_bad_settings_are_one_sentence(load, settings, said):
    with pytest.raises(ValueError, match=said):
        load(**settings)


def test_another_text_than_the_condition_is_refused(load, tmp_path):
    (tmp_path / "condition.txt").write_text("light colour shapes")
    with pytest.raises(ValueError, match="is not the text that the model was trained with: sha256"):
        load(condition=str(tmp_path / "condition.txt"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("cross_model.layers.1.0.fn.to_kv.weight"), "cross.1.attend.to_kv.weight"),
        (
            lambda s: s.pop("model.visual_projection.weight"),
            r"1 keys missing \(clip.visual_projection.weight\)",
        ),
        (lambda s: s.update(extra=torch.zeros(1)), r"1 unknown keys \(extra\)"),
        (
            lambda s: s.clear() or s.update(w=torch.zeros(1)),
            "is not a state dict of MPS: it has no clip.text_projection.weight",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_with_the_keys(
    load, files, tmp_path, change, said
):
    state = dict(files[1])
    change(state)
    torch.save(state, tmp_path / "MPS_overall.pth")
    with pytest.raises(ValueError, match=said):
        load(weights=str(tmp_path))


def test_the_released_pickle_of_a_whole_module_is_refused_with_the_way_out(load, tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "MPS_overall.pth")
    with pytest.raises(ValueError, match="could run code when opened; convert it once"):
        load(weights=str(tmp_path))


# --- published weights


@pytest.mark.hub
def test_published_weights_prefer_the_right_prompt_and_the_clean_picture():
    """Orders and the range: the model's authors publish accuracies, not scores."""
    from matplotlib import cbook
    from PIL import Image

    from flowrl.data.media import from_pil

    names = ("FLOWRL_MPS_WEIGHTS", "FLOWRL_MPS_CONDITION")
    weights, condition = (os.environ.get(name) for name in names)
    if not weights or not condition:
        pytest.skip("FLOWRL_MPS_WEIGHTS and FLOWRL_MPS_CONDITION name no files")
    reward = rewards.load("mps", weights=weights, condition=condition)
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = from_pil(Image.open(file))
    noisy = (photo + 0.5 * torch.randn_like(photo)).clamp(0, 1)
    portrait = "a portrait of a woman in navy uniform before a flag"
    prompts = [portrait, "a red sports car on a beach", portrait]
    right, wrong, spoilt = reward(torch.cat([photo, photo, noisy]), prompts).tolist()
    assert right > wrong + 1 and right > spoilt + 1 and 0 < right < 25
