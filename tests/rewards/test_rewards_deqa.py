"""DeQA: the arithmetic of five words, mPLUG-Owl2 against other implementations, key names."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from shape_tables import linear, norm
from torch import nn
from torch.nn import functional as f
from torchvision.transforms import functional as F

from flowrl import rewards
from flowrl.runtime.registry import find

deqa = find("flowrl.rewards", "deqa", what="reward")
WIDTH, SIDE, PATCH, QUERIES = 32, 28, 14, 3
CONFIG = {
    "model_type": "mplug_owl2",
    "auto_map": {"AutoModelForCausalLM": "modeling.X"},
    "architectures": ["MPLUGOwl2LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "visual_config": {
        "visual_model": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "layer_norm_eps": 1e-6,
        },
        "visual_abstractor": {
            "num_learnable_queries": QUERIES,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 20,
            "encoder_hidden_size": 16,
            "layer_norm_eps": 1e-6,
        },
    },
}


def language_layer(i):
    layer, square = f"model.layers.{i}", (WIDTH, WIDTH)
    out = {f"{layer}.self_attn.{key}_proj.weight": square for key in "qo"}
    out |= {f"{layer}.mlp.{key}_proj.weight": (48, WIDTH) for key in ("gate", "up")}
    out |= {f"{layer}.mlp.down_proj.weight": (WIDTH, 48)}
    for way in ("multiway.0", "multiway.1"):
        out |= {f"{layer}.self_attn.{key}_proj.{way}.weight": square for key in "kv"}
        for place in ("input", "post_attention"):
            out[f"{layer}.{place}_layernorm.{way}.weight"] = (WIDTH,)
    return out


def tower_layer(i):
    layer = f"model.vision_model.encoder.layers.{i}"
    return (
        linear(f"{layer}.self_attn.query_key_value", 48, 16)
        | linear(f"{layer}.self_attn.dense", 16, 16)
        | linear(f"{layer}.mlp.fc1", 24, 16)
        | linear(f"{layer}.mlp.fc2", 16, 24)
        | norm(f"{layer}.input_layernorm", 16)
        | norm(f"{layer}.post_attention_layernorm", 16)
    )


def abstractor_layer(i):
    layer = f"model.visual_abstractor.encoder.layers.{i}.crossattention"
    out = {f"{layer}.attention.q_pos_embed": (QUERIES, 16)}
    out |= {f"{layer}.attention.k_pos_embed": (5, 16)}
    for key in ("attention.query", "attention.key", "attention.value", "output.out_proj"):
        out |= linear(f"{layer}.{key}", 16, 16)
    for key, sizes in {"w1": (20, 16), "w2": (16, 20), "w3": (20, 16)}.items():
        out |= linear(f"{layer}.output.mlp.{key}", *sizes)
    widths = {"norm1": 16, "normk": 16, "output.norm2": 16, "output.mlp.ffn_ln": 20}
    for key, width in widths.items():
        out |= norm(f"{layer}.{key}", width)
    return out


def reference_state(seed=0):
    """Random tensors by the names and shapes of MPLUGOwl2LlamaForCausalLM, written out by hand."""
    vision, abstractor = "model.vision_model", "model.visual_abstractor"
    shapes = {
        "model.embed_tokens.weight": (64, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (64, WIDTH),
        f"{vision}.embeddings.cls_token": (1, 1, 16),
        f"{vision}.embeddings.patch_embed.weight": (16, 3, PATCH, PATCH),
        f"{vision}.embeddings.position_embedding": (1, 5, 16),
        f"{abstractor}.query_embeds": (1, QUERIES, 16),
        f"{abstractor}.vit_eos": (1, 1, WIDTH),
    }
    shapes |= norm(f"{vision}.embeddings.pre_layernorm", 16)
    shapes |= norm(f"{vision}.post_layernorm", 16) | linear(f"{abstractor}.visual_fc", WIDTH, 16)
    for i in range(2):
        shapes |= language_layer(i) | tower_layer(i) | abstractor_layer(i)
    torch.manual_seed(seed)
    return {key: 0.4 * torch.randn(shape) + ("norm.weight" in key) for key, shape in shapes.items()}


def under(prefix, state):
    """The keys that start with `prefix`, without it."""
    return {k.removeprefix(prefix): value for k, value in state.items() if k.startswith(prefix)}


def write_tokenizer(folder, merged="egfpb"):
    """A tokenizer.json as LLaMA's: pieces with a marked space, bytes for a line feed.

    merged: letters that form one token with the space before them.
    """
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    letters, merges = "abcdefghilmnopqrstuvwxyAEHINRSTU:?", [("▁", letter) for letter in merged]
    pieces = [*special.values(), "<0x0A>", "▁", *letters, *(f"▁{letter}" for letter in merged)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)


def write(place):
    """A tiny checkpoint like zhiyuanyou/DeQA-Score-Mix3: two shards, an auto_map that is not run,
    old rotary buffers."""
    state = reference_state()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    keys = sorted(state)
    save_file({key: state[key] for key in keys[:40]}, place / "model-00001-of-00002.safetensors")
    save_file({key: state[key] for key in keys[40:]}, place / "model-00002-of-00002.safetensors")
    (place / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(place)
    return {"weights": str(place), "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(write(tmp_path_factory.mktemp("deqa"))["weights"])


@pytest.fixture
def load(folder):
    mine = {"weights": str(folder), "dtype": "float32"}
    return lambda **settings: rewards.load("deqa", **mine | settings)


@pytest.fixture
def media():
    return nn.functional.interpolate(torch.rand(3, 3, 4, 6), (40, 60), mode="bicubic").clamp(0, 1)


# --- the scale


def test_five_words_weigh_five_to_one_by_hand():
    """Equal logits: (5 + 4 + 3 + 2 + 1) / 5 = 3. log(3, 1, 0+, 0+, 0+): (3 * 5 + 1 * 4) / 4 = 4.75.
    Other offsets do not matter."""
    logits = torch.tensor(
        [
            [0.0] * 5,
            [torch.tensor(3.0).log(), 0, -200, -200, -200],
            [100, 0, 0, 0, 0],
            [0, 0, 0, 0, 100],
        ]
    )
    assert torch.allclose(deqa.opinion(logits), torch.tensor([3.0, 4.75, 5.0, 1.0]), atol=1e-6)
    assert torch.allclose(deqa.opinion(logits + 7), deqa.opinion(logits))
    assert deqa.opinion(logits.half()).dtype == torch.float32


def test_a_planted_word_gives_its_number(load, media, folder, monkeypatch):
    """The ids of "excellent" ... "bad" are read off the tokenizer; a planted logit of 50 on one of
    them gives 5 ... 1."""
    reward = load()
    pieces = {"▁e": 5.0, "▁g": 4.0, "▁f": 3.0, "▁p": 2.0, "▁b": 1.0}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert reward.words == [vocabulary[piece] for piece in pieces]
    for piece, value in pieces.items():
        planted = torch.zeros(3, 64)
        planted[:, vocabulary[piece]] = 50.0
        planted[:, 0] = 99.0  # a word that is none of the five does not count
        monkeypatch.setattr(reward.network, "forward", lambda *a, planted=planted: planted)
        out = reward(media, [""] * 3)
        assert torch.allclose(out, torch.full((3,), value))
        assert torch.allclose(load(scale="flow_grpo").factor * out, torch.full((3,), value / 5))


def test_scores_lie_between_one_and_five_and_flow_grpo_divides_them(load, media):
    out = load()(media, ["", "", ""])
    assert out.shape == (3,) and out.dtype == torch.float32
    assert bool(((out > 1) & (out < 5)).all()) and out.unique().numel() == 3
    reward = load(scale="flow_grpo")
    assert torch.allclose(reward(media, [""] * 3), out / 5)
    assert reward.scale == "quality of the picture by DeQA-Score, 1 to 5, divided by 5"


# --- the network


CLIP_LAYER = {
    "self_attn.out_proj": "self_attn.dense",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
    "layer_norm1": "input_layernorm",
    "layer_norm2": "post_attention_layernorm",
}


def clips_names(state):
    """DeQA's tower under the names of transformers' CLIPVisionModel, without their common root.

    q, k, v of head h are rows h * 3 * 8 + (0..7, 8..15, 16..23) of the projection.
    """
    embeddings = {
        "class_embedding": state["embeddings.cls_token"].flatten(),
        "patch_embedding.weight": state["embeddings.patch_embed.weight"],
        "position_embedding.weight": state["embeddings.position_embedding"][0],
    }
    out = {f"embeddings.{key}": value for key, value in embeddings.items()}
    for part in ("weight", "bias"):
        out[f"pre_layrnorm.{part}"] = state[f"embeddings.pre_layernorm.{part}"]
        out[f"post_layernorm.{part}"] = state[f"post_layernorm.{part}"]
        for i in range(2):
            layer = f"encoder.layers.{i}"
            mixed = state[f"{layer}.self_attn.query_key_value.{part}"].unflatten(0, (2, 3, 8))
            for j, key in enumerate("qkv"):
                out[f"{layer}.self_attn.{key}_proj.{part}"] = mixed[:, j].flatten(0, 1)
            for theirs, ours in CLIP_LAYER.items():
                out[f"{layer}.{theirs}.{part}"] = state[f"{layer}.{ours}.{part}"]
    return out


def test_the_tower_is_clips_vision_tower_with_projections_laid_out_head_by_head():
    from transformers import CLIPVisionConfig, CLIPVisionModel

    state = under("model.vision_model.", reference_state())
    sizes = CONFIG["visual_config"]["visual_model"]
    tower = deqa.Tower(SimpleNamespace(**sizes))
    tower.load_state_dict(state)
    clip = CLIPVisionModel(CLIPVisionConfig(**sizes, hidden_act="quick_gelu"))
    own, end = dict(clip.named_parameters()), "embeddings.class_embedding"
    root = next(key for key in own if key.endswith(end)).removesuffix(end)
    values = clips_names(state)
    assert {root + key for key in values} == own.keys()
    with torch.no_grad():
        for key, value in values.items():
            own[root + key].copy_(value)
    pixels = torch.randn(2, 3, SIDE, SIDE)
    states = clip(pixels).last_hidden_state
    weight, bias = values["post_layernorm.weight"], values["post_layernorm.bias"]
    expected = f.layer_norm(states, (16,), weight, bias, 1e-6)
    assert torch.allclose(tower(pixels), expected, atol=1e-4)


def torchs_attention(w):
    """nn.MultiheadAttention with the weights of an abstractor layer."""
    out = nn.MultiheadAttention(16, 2, batch_first=True)
    keys = ("attention.query", "attention.key", "attention.value")
    with torch.no_grad():
        out.in_proj_weight.copy_(torch.cat([w[f"{key}.weight"] for key in keys]))
        out.in_proj_bias.copy_(torch.cat([w[f"{key}.bias"] for key in keys]))
        out.out_proj.weight.copy_(w["output.out_proj.weight"])
        out.out_proj.bias.copy_(w["output.out_proj.bias"])
    return out


def test_an_abstractor_layer_is_torchs_cross_attention_over_queries_and_picture():
    """Sines on queries and keys only, both normed, residual from the normed queries, SwiGLU."""
    state = under("model.visual_abstractor.encoder.layers.0.", reference_state())
    layer = deqa.AbstractorLayer(SimpleNamespace(**CONFIG["visual_config"]["visual_abstractor"]), 5)
    layer.load_state_dict(state)
    w = under("crossattention.", state)

    def normed(x, name, eps=1e-5):
        return f.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def through(x, name):
        return f.linear(x, w[f"output.mlp.{name}.weight"], w[f"output.mlp.{name}.bias"])

    queries, picture = torch.randn(2, QUERIES, 16), torch.randn(2, 5, 16)
    q = normed(queries, "norm1")
    both = torch.cat([q, normed(picture, "normk")], 1)
    places = torch.cat([w["attention.q_pos_embed"], w["attention.k_pos_embed"]])
    middle = q + torchs_attention(w)(q + w["attention.q_pos_embed"], both + places, both)[0]
    inner = normed(middle, "output.norm2")
    gated = f.silu(through(inner, "w1")) * through(inner, "w3")
    expected = middle + through(normed(gated, "output.mlp.ffn_ln", 1e-6), "w2")
    assert torch.allclose(layer(queries, picture), expected, atol=1e-4)


def test_text_and_picture_tokens_use_their_own_weights():
    two = deqa.TwoWay(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        two.multiway[0].weight.copy_(torch.eye(4))
        two.multiway[1].weight.copy_(2 * torch.eye(4))
    two.visual = torch.tensor([False, True, True, False])
    assert torch.equal(two(torch.ones(1, 4, 4))[0, :, 0], torch.tensor([1.0, 2.0, 2.0, 1.0]))


def plain_llama(state):
    """transformers' LlamaForCausalLM with the text weights of a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {key: value for key, value in CONFIG.items() if isinstance(value, int | float)}
    text = {
        key.replace(".multiway.0", ""): value
        for key, value in state.items()
        if not ("multiway.1" in key or "model.vis" in key)
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    llama.load_state_dict(text)
    return llama


def test_the_language_model_is_llama_where_both_ways_are_equal(load):
    """The tokens are text, 3 queries + 1 end embedding, text."""
    network, state = load().network, reference_state()
    same = {key: state[key.replace("multiway.1", "multiway.0")] for key in state}
    network.load_state_dict(same)
    plain = plain_llama(same)
    pixels, before, after = torch.randn(2, 3, SIDE, SIDE), torch.tensor([1, 9]), torch.tensor([7])
    picture = network.model.visual_abstractor(network.model.vision_model(pixels))
    assert picture.shape == (2, QUERIES + 1, WIDTH)
    first, last = (plain.get_input_embeddings()(ids).expand(2, -1, -1) for ids in (before, after))
    expected = plain(inputs_embeds=torch.cat([first, picture, last], 1)).logits[:, -1]
    assert torch.allclose(network(before, pixels, after), expected, atol=1e-4)
    network.load_state_dict(state)
    assert (network(before, pixels, after) - expected).abs().max() > 1e-2


# --- the reward


@pytest.fixture
def fed(load, media, monkeypatch):
    """What the network is given: tokens before, pixels, tokens after."""
    reward, seen = load(), []

    def forward(*inputs):
        seen.extend(inputs)
        return torch.zeros(3, 64)

    monkeypatch.setattr(reward.network, "forward", forward)
    reward(media, [""] * 3)
    return seen


def test_the_picture_is_squared_with_the_mean_colour(fed, media):
    pictures = []
    for picture in media:
        canvas = Image.new("RGB", (60, 60), (122, 116, 104))
        levels = (picture * 255).round().byte().permute(1, 2, 0).numpy()
        canvas.paste(Image.fromarray(levels), (0, 10))
        pictures.append(F.to_tensor(canvas.resize((SIDE, SIDE), Image.Resampling.BICUBIC)))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    assert torch.allclose(fed[1], F.normalize(torch.stack(pictures), mean, std), atol=1e-5)


def test_the_question_surrounds_the_picture(fed, folder):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = {i: piece for piece, i in vocabulary.items()}
    before, after = ("".join(pieces[int(i)] for i in ids).replace("▁", " ") for ids in fed[::2])
    assert before == "<s> USER: How would you rate the quality of this image?<0x0A>"
    assert after == " <0x0A>ASSISTANT: The quality of the image is"


def test_half_precision_is_of_weights_and_not_of_angles(load):
    half = load(dtype="bfloat16")
    assert half.network.lm_head.weight.dtype == torch.bfloat16
    assert half.network.model.rotary_emb.inv_freq.dtype == torch.float32


def test_what_is_wrong_is_one_sentence(load, folder, tmp_path):
    def refuse(said):
        with pytest.raises(ValueError, match=said):
            load(weights=str(tmp_path))

    write_tokenizer(tmp_path)
    refuse(r"expected config.json of an mplug_owl2 model \(found: None\)")
    write_tokenizer(tmp_path, merged="")
    five = "excellent, good, fair, poor, bad"
    refuse(f"the tokenizer gives {five} the first tokens .* not five different ones")
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuse("holds no weights")
    state, lost = reference_state(), "model.layers.1.self_attn.k_proj.multiway.1.weight"
    state.pop(lost)
    save_file(state, tmp_path / "model.safetensors")
    refuse(rf"does not fit Owl: 1 keys missing \({lost}\)")


@pytest.mark.hub
def test_deqa_gives_the_published_score_of_the_example_picture(tmp_path):
    """The reference's README scores its singapore_flyer.jpg 1.9404 (fp16 on a GPU)."""
    import urllib.request

    url = "https://raw.githubusercontent.com/zhiyuanyou/DeQA-Score/main/fig/singapore_flyer.jpg"
    try:
        urllib.request.urlretrieve(url, tmp_path / "picture.jpg")
    except OSError as error:
        pytest.skip(f"the picture cannot be fetched: {error}")
    picture = F.to_tensor(Image.open(tmp_path / "picture.jpg").convert("RGB"))[None]
    score = rewards.load("deqa", dtype="float32")(picture, [""]).item()
    assert score == pytest.approx(1.94, abs=0.03)
