"""MPS: a tiny random state dict in the published key names against a second statement of the
reference's forward, written here."""

import hashlib
import logging
import math
import os

import pytest
import torch
import torch.nn.functional as F

from flowrl import rewards
from flowrl.rewards import mps
from flowrl.rewards.core import tokens as core_tokens
from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped

WORDS = [
    "[UNK]",
    "red",
    "blue",
    "circle",
    "square",
    "a",
    "and",
    "light",
    "colour",
    "shape",
    "<start>",
    "<end>",
]  # <end> has the highest id
START, END = 10, 11
PROMPTS = ["a red circle", "a blue square and a red circle", "square", "unicorn"]
CONDITION = "light colour shape"
TEXT, PICTURE, DIM, LENGTH, SIDE, PATCH = (
    32,
    64,
    24,
    12,
    32,
    8,
)  # towers have 16 heads: of 2 and of 4 dims
HEADS, HEAD, LAYERS = 4, 8, 2  # of the cross model


def shapes():
    """Every key of MPS_overall.pth and its shape, at the tiny sizes."""
    linear = lambda name, out, inputs: {
        f"{name}.weight": (out, inputs),
        f"{name}.bias": (out,),
    }
    norm = lambda name, width: {f"{name}.weight": (width,), f"{name}.bias": (width,)}  # noqa: E731
    out = {"model.logit_scale": ()}
    for tower, width in (("text", TEXT), ("vision", PICTURE)):
        for i in range(2):
            b = f"model.{tower}_model.encoder.layers.{i}"
            for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                out |= linear(f"{b}.self_attn.{part}", width, width)
            out |= norm(f"{b}.layer_norm1", width) | norm(f"{b}.layer_norm2", width)
            out |= linear(f"{b}.mlp.fc1", 2 * width, width) | linear(
                f"{b}.mlp.fc2", width, 2 * width
            )
    e = "model.text_model.embeddings"
    out |= {
        f"{e}.token_embedding.weight": (len(WORDS), TEXT),
        f"{e}.position_embedding.weight": (LENGTH, TEXT),
    }
    out |= norm("model.text_model.final_layer_norm", TEXT)
    e = "model.vision_model.embeddings"
    out |= {
        f"{e}.class_embedding": (PICTURE,),
        f"{e}.patch_embedding.weight": (PICTURE, 3, PATCH, PATCH),
    }
    out |= {f"{e}.position_embedding.weight": (1 + (SIDE // PATCH) ** 2, PICTURE)}
    out |= norm("model.vision_model.pre_layrnorm", PICTURE) | norm(
        "model.vision_model.post_layernorm", PICTURE
    )
    out |= {
        "model.visual_projection.weight": (DIM, PICTURE),
        "model.text_projection.weight": (DIM, TEXT),
    }
    for i in range(LAYERS):
        b, inner, hidden = f"cross_model.layers.{i}", HEADS * HEAD, 4 * DIM
        out |= norm(f"{b}.0.fn.norm", DIM) | norm(f"{b}.1.fn.norm", DIM)
        out |= {
            f"{b}.0.fn.to_q.weight": (inner, DIM),
            f"{b}.0.fn.to_kv.weight": (2 * HEAD, DIM),
            f"{b}.0.fn.to_out.weight": (DIM, inner),
        }
        out |= {f"{b}.0.fn.ff.0.weight": (2 * hidden, DIM), f"{b}.0.fn.ff.2.weight": (DIM, hidden)}
        out |= {f"{b}.1.fn.fused_attn_ff_proj.weight": (inner + 2 * HEAD + 2 * hidden, DIM)}
        out |= {
            f"{b}.1.fn.attn_out.weight": (DIM, inner),
            f"{b}.1.fn.ff_out.1.weight": (DIM, hidden),
        }
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with MPS_overall.pth, tokenizer.json and condition.txt, and the state dict."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder, g = tmp_path_factory.mktemp("mps"), torch.Generator().manual_seed(1)
    state = {key: 0.15 * torch.randn(shape, generator=g) for key, shape in shapes().items()}
    for key in state:
        if "norm" in key:  # the cross model's LayerNorms have no bias: a buffer of zeros is stored
            state[key] = (
                state[key] + 1
                if key.endswith("weight")
                else state[key] * (not key.startswith("cross"))
            )
    state["model.logit_scale"] = torch.tensor(math.log(100.0))
    for i in range(LAYERS):
        state[f"cross_model.layers.{i}.1.fn.rotary_emb.inv_freq"] = 1 / 10000 ** (
            torch.arange(0, HEAD, 2) / HEAD
        )
    state["model.text_model.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    state["model.vision_model.embeddings.position_ids"] = torch.arange(1 + (SIDE // PATCH) ** 2)[
        None
    ]
    torch.save(state, folder / "MPS_overall.pth")
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $0 <end>", special_tokens=[("<start>", START), ("<end>", END)]
    )
    tokenizer.enable_truncation(5)  # as saved by someone else: must not be taken over
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "condition.txt").write_text(CONDITION + "\n")
    return folder, state


@pytest.fixture
def load(files, monkeypatch):
    monkeypatch.setattr(mps, "CONDITION", hashlib.sha256(CONDITION.encode()).hexdigest()[:16])
    folder = files[0]
    mine = {
        "weights": str(folder),
        "tokenizer": str(folder),
        "condition": str(folder / "condition.txt"),
    }
    return lambda **settings: rewards.load("mps", **{**mine, **settings})


@pytest.fixture
def media():
    return F.interpolate(torch.rand(4, 3, 6, 8), (40, 49), mode="bicubic").clamp(0, 1)


# --- the reference, stated a second time


def tower(state, name, x, causal):
    """Hidden states after the layers of a CLIP tower, (n, tokens, width)."""
    lin = lambda x, key: F.linear(x, state[f"{key}.weight"], state[f"{key}.bias"])  # noqa: E731
    norm = lambda x, key: F.layer_norm(
        x, x.shape[-1:], state[f"{key}.weight"], state[f"{key}.bias"]
    )
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
    return tokens, torch.stack(
        [row[list(i).index(END)] for row, i in zip(tokens, ids.tolist(), strict=True)]
    )


def picture_features(state, pixels):
    e = "model.vision_model.embeddings"
    x = (
        F.conv2d(pixels, state[f"{e}.patch_embedding.weight"], stride=PATCH)
        .flatten(2)
        .transpose(1, 2)
    )
    x = (
        torch.cat([state[f"{e}.class_embedding"].expand(len(x), 1, -1), x], 1)
        + state[f"{e}.position_embedding.weight"]
    )
    return tower(state, "vision", x, causal=False) @ state["model.visual_projection.weight"].T


def rotate(x):
    """Rotary positions in complex numbers: dims j and j + head / 2 of a head are one number, turned
    by position * 10000^(-2j / head)."""
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
        prefixes = (f"cross_model.layers.{i}.{j}.fn." for j in (0, 1))
        c, s = (
            {k.removeprefix(p): v for k, v in state.items() if k.startswith(p)} for p in prefixes
        )
        n = F.layer_norm(x, (DIM,), c["norm.weight"])
        q = (n @ c["to_q.weight"].T).unflatten(2, (HEADS, HEAD)).transpose(1, 2)
        k, v = (words @ c["to_kv.weight"].T).chunk(2, -1)
        weights = (torch.einsum("bhid,bjd->bhij", q, k) * HEAD**-0.5 + mask[:, None, None]).softmax(
            -1
        )
        out = (
            torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2)
            @ c["to_out.weight"].T
        )
        value, gate = (n @ c["ff.0.weight"].T).chunk(2, -1)
        x = x + out + (F.silu(gate) * value) @ c["ff.2.weight"].T
        n = F.layer_norm(x, (DIM,), s["norm.weight"])
        q, k, v, ff = (n @ s["fused_attn_ff_proj.weight"].T).split(
            (HEADS * HEAD, HEAD, HEAD, 8 * DIM), -1
        )
        q, k = rotate(q.unflatten(2, (HEADS, HEAD)).transpose(1, 2)), rotate(k)
        weights = (torch.einsum("bhid,bjd->bhij", q, k) * HEAD**-0.5).softmax(-1)
        out = (
            torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2)
            @ s["attn_out.weight"].T
        )
        value, gate = ff.chunk(2, -1)
        x = x + out + (F.silu(gate) * value) @ s["ff_out.1.weight"].T
    return state["model.logit_scale"].exp() * F.cosine_similarity(sentence, x[:, 0])


def one_by_one(files, media, prompts, threshold=0.3):
    state = files[1]
    rows = {
        p: [START, *(WORDS.index(w) if w in WORDS else 0 for w in p.split()), END]
        for p in [*prompts, CONDITION]
    }
    ids = {p: torch.tensor([row + [END] * (LENGTH - len(row))]) for p, row in rows.items()}
    pixels = normalized(pil_cropped(media, SIDE, floor=True))
    return torch.cat(
        [
            reference(state, pixels[i : i + 1], ids[p], ids[CONDITION], threshold)
            for i, p in enumerate(prompts)
        ]
    )


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
    """Similarities 4, 1, 2 and 0.4, 0.1, 0.2 to the nearer of two condition words: relative to 4
    and to 0.4 they are 1, 1/4, 1/2."""
    condition = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    words = torch.tensor([[[4.0, 0.0], [0.0, 1.0], [2.0, -3.0]]])
    both = torch.cat([words, words / 10])
    assert mps.counted(both, condition, 0.3).tolist() == [[True, False, True]] * 2
    assert mps.counted(both, condition, 0.01).tolist() == [[True] * 3] * 2
    # divided by the maximum of the whole call, as the reference does, the second prompt would lose
    # all its words: 0.4 / 4 < 0.3
    assert (both[1] @ condition.T).max() / (both[0] @ condition.T).max() < 0.3


def test_batch_mates_chunks_and_order_do_not_change_a_score(load, media):
    reward = load()
    whole = reward(media, PROMPTS)
    alone = torch.cat([reward(media[i : i + 1], PROMPTS[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(whole, alone, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(whole, load(chunk=3)(media, PROMPTS), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(
        reward(media.flip(0), PROMPTS[::-1]), whole.flip(0), atol=1e-4, rtol=1e-5
    )
    assert not torch.allclose(reward(media, PROMPTS[::-1]), whole, atol=0.1)
    repeated = reward(media[[0, 0, 1]], [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    torch.testing.assert_close(repeated[0], whole[0], atol=1e-4, rtol=1e-5)


def test_a_video_has_the_mean_of_its_frames(load, media):
    reward = load()
    frames = reward(media, [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]])
    torch.testing.assert_close(
        reward(media.view(2, 2, 3, 40, 49), PROMPTS[:2]),
        frames.view(2, 2).mean(1),
        atol=1e-4,
        rtol=1e-5,
    )


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


def test_lower_precision_keeps_the_score_to_its_rounding(load, media):
    exact, half = load()(media, PROMPTS), load(dtype="bfloat16")(media, PROMPTS)
    assert half.dtype == torch.float32 and 0 < (half - exact).abs().max() < 0.4


def test_lower_precision_keeps_the_angles_of_257_picture_tokens(load, files, media, tmp_path):
    """As many tokens as CLIP-H has. Angles in bf16 are off by half a radian there."""
    state, g = dict(files[1]), torch.Generator().manual_seed(2)
    state["model.vision_model.embeddings.position_embedding.weight"] = 0.15 * torch.randn(
        257, PICTURE, generator=g
    )
    torch.save(state, tmp_path / "MPS_overall.pth")
    exact, half = (load(weights=str(tmp_path), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert exact.model.side == 16 * PATCH
    x = torch.randn(1, 257, HEADS * HEAD, generator=g)
    turned = half.model.cross[0]._turned(x.bfloat16()).float()
    assert (
        turned - rotate(x.unflatten(2, (HEADS, HEAD)).transpose(1, 2)).transpose(1, 2).flatten(2)
    ).abs().max() < 0.05
    assert (half(media, PROMPTS) - exact(media, PROMPTS)).abs().max() < 0.4


def test_without_rounding_the_gradient_is_that_of_finite_differences(load, media):
    reward = load(rounding=False)
    assert reward.differentiable and not load().differentiable
    with pytest.raises(
        ValueError, match="mps as it is loaded .* gives no gradient; load it with rounding=False"
    ):
        load()(media.clone().requires_grad_(), PROMPTS)
    model, ids = reward.model.double(), reward._tokens(PROMPTS)
    words, sentence = model.words(ids)
    counts = mps.counted(words, model.words(reward.condition)[0][0], 0.3)
    score = lambda x: F.cosine_similarity(
        model.fuse(normalized(cropped(x, SIDE)), words, counts), sentence
    )
    x = (0.2 + 0.6 * media).double().requires_grad_()
    gradient = torch.autograd.grad(score(x).sum(), x)[0]
    assert bool((gradient.abs().amax((1, 2, 3)) > 0).all()) and all(
        p.grad is None for p in model.parameters()
    )
    direction, h = torch.randn_like(x), 1e-6
    with torch.no_grad():
        numeric = (score(x + h * direction) - score(x - h * direction)).sum() / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-4, atol=1e-7)


def test_a_checkpoint_without_the_computed_frequencies_loads_too(load, files, media, tmp_path):
    state = {
        key: value
        for key, value in files[1].items()
        if not key.endswith(("inv_freq", "position_ids"))
    }
    torch.save(state, tmp_path / "MPS_overall.pth")
    torch.testing.assert_close(
        load(weights=str(tmp_path))(media, PROMPTS), load()(media, PROMPTS), atol=1e-4, rtol=1e-5
    )


# --- bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"weights": None},
            (
                r"needs MPS_overall.pth: download https://.*MPS_overall.pth and set"
                r" reward.mps.weights="
            ),
        ),
        (
            {"weights": "/nowhere/MPS_overall.pth"},
            "reward.mps.weights=/nowhere/MPS_overall.pth: there is no such file",
        ),
        (
            {"condition": None},
            (
                "needs its model's own prompt text: save the condition sentence in"
                " eval_overall_mps_on_hpdv2.py"
            ),
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
    """Needs FLOWRL_MPS_WEIGHTS and FLOWRL_MPS_CONDITION. The model's authors publish accuracies and
    no scores: orders and the range."""
    from matplotlib import cbook
    from PIL import Image

    from flowrl.data.media import from_pil

    weights, condition = (
        os.environ.get("FLOWRL_MPS_WEIGHTS"),
        os.environ.get("FLOWRL_MPS_CONDITION"),
    )
    if not weights or not condition:
        pytest.skip("FLOWRL_MPS_WEIGHTS and FLOWRL_MPS_CONDITION name no files")
    reward = rewards.load("mps", weights=weights, condition=condition)
    with cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = from_pil(Image.open(file))
    noisy = (photo + 0.5 * torch.randn_like(photo)).clamp(0, 1)
    portrait, other = (
        "a portrait of a woman in navy uniform before a flag",
        "a red sports car on a beach",
    )
    right, wrong, spoilt = reward(
        torch.cat([photo, photo, noisy]), [portrait, other, portrait]
    ).tolist()
    assert right > wrong + 1 and right > spoilt + 1 and 0 < right < 25
