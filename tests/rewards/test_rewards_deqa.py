"""DeQA: the arithmetic of five words, mPLUG-Owl2's parts against independent implementations, the
reference's layout and key names."""

import json

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
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


def reference_state(seed=0):
    """Random tensors by the names and shapes of MPLUGOwl2LlamaForCausalLM, written out by hand."""
    shapes = {
        "model.embed_tokens.weight": (64, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (64, WIDTH),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{key}_proj.weight": (WIDTH, WIDTH) for key in "qo"}
        shapes |= {
            f"{layer}.self_attn.{key}_proj.multiway.{way}.weight": (WIDTH, WIDTH)
            for key in "kv"
            for way in (0, 1)
        }
        shapes |= {f"{layer}.mlp.{key}_proj.weight": (48, WIDTH) for key in ("gate", "up")} | {
            f"{layer}.mlp.down_proj.weight": (WIDTH, 48)
        }
        shapes |= {
            f"{layer}.{norm}_layernorm.multiway.{way}.weight": (WIDTH,)
            for norm in ("input", "post_attention")
            for way in (0, 1)
        }
        tower = f"model.vision_model.encoder.layers.{i}"
        for key, (rows, columns) in {
            "self_attn.query_key_value": (48, 16),
            "self_attn.dense": (16, 16),
            "mlp.fc1": (24, 16),
            "mlp.fc2": (16, 24),
        }.items():
            shapes |= {f"{tower}.{key}.weight": (rows, columns), f"{tower}.{key}.bias": (rows,)}
        shapes |= {
            f"{tower}.{norm}.{part}": (16,)
            for norm in ("input_layernorm", "post_attention_layernorm")
            for part in ("weight", "bias")
        }
        cross = f"model.visual_abstractor.encoder.layers.{i}.crossattention"
        for key, (rows, columns) in {
            "attention.query": (16, 16),
            "attention.key": (16, 16),
            "attention.value": (16, 16),
            "output.out_proj": (16, 16),
            "output.mlp.w1": (20, 16),
            "output.mlp.w2": (16, 20),
            "output.mlp.w3": (20, 16),
        }.items():
            shapes |= {f"{cross}.{key}.weight": (rows, columns), f"{cross}.{key}.bias": (rows,)}
        norms = {"norm1": 16, "normk": 16, "output.norm2": 16, "output.mlp.ffn_ln": 20}
        shapes |= {
            f"{cross}.{norm}.{part}": (size,)
            for norm, size in norms.items()
            for part in ("weight", "bias")
        }
        shapes |= {
            f"{cross}.attention.q_pos_embed": (QUERIES, 16),
            f"{cross}.attention.k_pos_embed": (5, 16),
        }
    vision = "model.vision_model"
    shapes |= {
        f"{vision}.embeddings.cls_token": (1, 1, 16),
        f"{vision}.embeddings.patch_embed.weight": (16, 3, PATCH, PATCH),
    }
    shapes |= {f"{vision}.embeddings.position_embedding": (1, 5, 16)}
    shapes |= {
        f"{vision}.{norm}.{part}": (16,)
        for norm in ("embeddings.pre_layernorm", "post_layernorm")
        for part in ("weight", "bias")
    }
    shapes |= {
        "model.visual_abstractor.query_embeds": (1, QUERIES, 16),
        "model.visual_abstractor.vit_eos": (1, 1, WIDTH),
    }
    shapes |= {
        "model.visual_abstractor.visual_fc.weight": (WIDTH, 16),
        "model.visual_abstractor.visual_fc.bias": (WIDTH,),
    }
    torch.manual_seed(seed)
    return {key: 0.4 * torch.randn(shape) + ("norm.weight" in key) for key, shape in shapes.items()}


def write_tokenizer(folder, merges=(("▁", "e"), ("▁", "g"), ("▁", "f"), ("▁", "p"), ("▁", "b"))):
    """A tokenizer.json as LLaMA's: pieces with a marked space, bytes for a line feed, no merges but
    those given."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "▁",
        *"abcdefghilmnopqrstuvwxyAEHINRSTU:?",
        *("".join(pair) for pair in merges),
    ]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=list(merges),
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return {piece: i for i, piece in enumerate(pieces)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint as zhiyuanyou/DeQA-Score-Mix3: two shards, config with auto_map (which
    nobody runs), old rotary buffers."""
    place = tmp_path_factory.mktemp("deqa")
    state = reference_state()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    keys = sorted(state)
    save_file({key: state[key] for key in keys[:40]}, place / "model-00001-of-00002.safetensors")
    save_file({key: state[key] for key in keys[40:]}, place / "model-00002-of-00002.safetensors")
    (place / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(place)
    return place


@pytest.fixture
def load(folder):
    return lambda **settings: rewards.load(
        "deqa", **{"weights": str(folder), "dtype": "float32"} | settings
    )


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
    assert (
        torch.allclose(deqa.opinion(logits + 7), deqa.opinion(logits))
        and deqa.opinion(logits.half()).dtype == torch.float32
    )


def test_a_stub_language_model_that_prefers_a_word_gives_its_number(
    load, media, folder, monkeypatch
):
    """The ids of "excellent" ... "bad" are read off the tokenizer; a planted logit of 50 on one of
    them gives 5 ... 1."""
    reward = load()
    pieces = {"▁e": 5.0, "▁g": 4.0, "▁f": 3.0, "▁p": 2.0, "▁b": 1.0}
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert reward.words == [vocabulary[piece] for piece in pieces]
    for piece, value in pieces.items():
        planted = torch.zeros(3, 64)
        planted[:, vocabulary[piece]], planted[:, 0] = (
            50.0,
            99.0,
        )  # a word that is none of the five has no say
        monkeypatch.setattr(reward.network, "forward", lambda *a, planted=planted: planted)
        assert torch.allclose(reward(media, [""] * 3), torch.full((3,), value))
        assert torch.allclose(
            load(scale="flow_grpo").factor * reward(media, [""] * 3), torch.full((3,), value / 5)
        )


def test_scores_lie_between_one_and_five_and_flow_grpo_divides_them(load, media):
    out = load()(media, ["", "", ""])
    assert (
        out.shape == (3,)
        and out.dtype == torch.float32
        and bool(((out > 1) & (out < 5)).all())
        and out.unique().numel() == 3
    )
    reward = load(scale="flow_grpo")
    assert torch.allclose(reward(media, [""] * 3), out / 5) and reward.scale.endswith(
        "divided by 5"
    )


# --- the network


def test_the_tower_is_clips_vision_tower_with_projections_laid_out_head_by_head():
    """transformers' CLIPVisionModel with the same weights: q, k, v of head h are rows h * 3 * 8 +
    (0..7, 8..15, 16..23)."""
    from transformers import CLIPVisionConfig, CLIPVisionModel

    state, prefix = reference_state(), "model.vision_model."
    tower = deqa.Tower(deqa.SimpleNamespace(**CONFIG["visual_config"]["visual_model"]))
    tower.load_state_dict(
        {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    )
    clip = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
            hidden_act="quick_gelu",
            layer_norm_eps=1e-6,
        )
    )
    own = dict(clip.named_parameters())
    root = next(key for key in own if key.endswith("embeddings.class_embedding")).removesuffix(
        "embeddings.class_embedding"
    )
    values = {
        "embeddings.class_embedding": state[f"{prefix}embeddings.cls_token"].flatten(),
        "embeddings.patch_embedding.weight": state[f"{prefix}embeddings.patch_embed.weight"],
        "embeddings.position_embedding.weight": state[f"{prefix}embeddings.position_embedding"][0],
    }
    for part in ("weight", "bias"):
        values[f"pre_layrnorm.{part}"] = state[f"{prefix}embeddings.pre_layernorm.{part}"]
        values[f"post_layernorm.{part}"] = state[f"{prefix}post_layernorm.{part}"]
        for i in range(2):
            layer = f"{prefix}encoder.layers.{i}."
            mixed = state[f"{layer}self_attn.query_key_value.{part}"].unflatten(0, (2, 3, 8))
            names = {"out_proj": state[f"{layer}self_attn.dense.{part}"]}
            names |= {f"{key}_proj": mixed[:, j].flatten(0, 1) for j, key in enumerate("qkv")}
            values |= {
                f"encoder.layers.{i}.self_attn.{key}.{part}": value for key, value in names.items()
            }
            values |= {
                f"encoder.layers.{i}.mlp.{key}.{part}": state[f"{layer}mlp.{key}.{part}"]
                for key in ("fc1", "fc2")
            }
            values[f"encoder.layers.{i}.layer_norm1.{part}"] = state[
                f"{layer}input_layernorm.{part}"
            ]
            values[f"encoder.layers.{i}.layer_norm2.{part}"] = state[
                f"{layer}post_attention_layernorm.{part}"
            ]
    assert {root + key for key in values} == own.keys()
    with torch.no_grad():
        for key, value in values.items():
            own[root + key].copy_(value)
    pixels = torch.randn(2, 3, SIDE, SIDE)
    states = clip(pixels).last_hidden_state
    norm = f.layer_norm(
        states, (16,), values["post_layernorm.weight"], values["post_layernorm.bias"], 1e-6
    )
    assert torch.allclose(tower(pixels), norm, atol=1e-4)


def test_an_abstractor_layer_is_torchs_cross_attention_over_queries_and_picture():
    """nn.MultiheadAttention, same weights: sines on queries and keys only, both normed, residual
    from the normed queries, SwiGLU."""
    state, prefix = reference_state(), "model.visual_abstractor.encoder.layers.0."
    layer = deqa.AbstractorLayer(
        deqa.SimpleNamespace(**CONFIG["visual_config"]["visual_abstractor"]), 5
    )
    layer.load_state_dict(
        {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    )
    w = {
        key.removeprefix(f"{prefix}crossattention."): value
        for key, value in state.items()
        if key.startswith(prefix)
    }
    queries, picture = torch.randn(2, QUERIES, 16), torch.randn(2, 5, 16)
    q = f.layer_norm(queries, (16,), w["norm1.weight"], w["norm1.bias"])
    both = torch.cat([q, f.layer_norm(picture, (16,), w["normk.weight"], w["normk.bias"])], 1)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        attention.in_proj_weight.copy_(
            torch.cat([w[f"attention.{key}.weight"] for key in ("query", "key", "value")])
        )
        attention.in_proj_bias.copy_(
            torch.cat([w[f"attention.{key}.bias"] for key in ("query", "key", "value")])
        )
        attention.out_proj.weight.copy_(w["output.out_proj.weight"])
        attention.out_proj.bias.copy_(w["output.out_proj.bias"])
    places = torch.cat([w["attention.q_pos_embed"], w["attention.k_pos_embed"]])
    middle = q + attention(q + w["attention.q_pos_embed"], both + places, both)[0]
    inner = f.layer_norm(middle, (16,), w["output.norm2.weight"], w["output.norm2.bias"])
    gate, up = (
        f.linear(inner, w[f"output.mlp.{key}.weight"], w[f"output.mlp.{key}.bias"])
        for key in ("w1", "w3")
    )
    hidden = f.layer_norm(
        f.silu(gate) * up, (20,), w["output.mlp.ffn_ln.weight"], w["output.mlp.ffn_ln.bias"], 1e-6
    )
    expected = middle + f.linear(hidden, w["output.mlp.w2.weight"], w["output.mlp.w2.bias"])
    assert torch.allclose(layer(queries, picture), expected, atol=1e-4)


def test_text_and_picture_tokens_use_their_own_weights():
    two = deqa.TwoWay(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        two.multiway[0].weight.copy_(torch.eye(4))
        two.multiway[1].weight.copy_(2 * torch.eye(4))
    two.visual = torch.tensor([False, True, True, False])
    assert torch.equal(two(torch.ones(1, 4, 4))[0, :, 0], torch.tensor([1.0, 2.0, 2.0, 1.0]))


def test_the_language_model_is_llama_where_both_ways_are_equal(load):
    """With the text weights in both ways, the logits are transformers' LlamaForCausalLM on text, 3
    queries + 1 end embedding, text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    network, state = load().network, reference_state()
    same = {key: state[key.replace("multiway.1", "multiway.0")] for key in state}
    network.load_state_dict(same)
    plain = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
        )
    ).eval()
    plain.load_state_dict(
        {
            key.replace(".multiway.0", ""): value
            for key, value in same.items()
            if not ("multiway.1" in key or "model.vis" in key)
        }
    )
    pixels, before, after = (
        torch.randn(2, 3, SIDE, SIDE),
        torch.tensor([1, 9, 8]),
        torch.tensor([7, 6]),
    )
    picture = network.model.visual_abstractor(network.model.vision_model(pixels))
    assert picture.shape == (2, QUERIES + 1, WIDTH)
    table = plain.get_input_embeddings()
    embeddings = torch.cat(
        [table(before).expand(2, -1, -1), picture, table(after).expand(2, -1, -1)], 1
    )
    expected = plain(inputs_embeds=embeddings).logits[:, -1]
    assert torch.allclose(network(before, pixels, after), expected, atol=1e-4)
    network.load_state_dict(state)
    assert (network(before, pixels, after) - expected).abs().max() > 1e-2


# --- the reward


def test_the_picture_is_squared_with_the_mean_colour_and_the_question_surrounds_it(
    load, folder, media, monkeypatch
):
    reward, seen = load(), {}
    monkeypatch.setattr(
        reward.network,
        "forward",
        lambda *a: seen.update(zip("bpa", a, strict=True)) or torch.zeros(3, 64),
    )
    reward(media, [""] * 3)
    pictures = []
    for m in media:
        canvas = Image.new("RGB", (60, 60), (122, 116, 104))
        canvas.paste(Image.fromarray((m * 255).round().byte().permute(1, 2, 0).numpy()), (0, 10))
        pictures.append(F.to_tensor(canvas.resize((SIDE, SIDE), Image.Resampling.BICUBIC)))
    expected = F.normalize(
        torch.stack(pictures),
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    )
    assert torch.allclose(seen["p"], expected, atol=1e-5)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = {i: piece for piece, i in vocabulary.items()}
    before, after = ("".join(pieces[int(i)] for i in seen[key]).replace("▁", " ") for key in "ba")
    assert before == "<s> USER: How would you rate the quality of this image?<0x0A>"
    assert after == " <0x0A>ASSISTANT: The quality of the image is"


def test_batch_mates_chunks_and_videos(load, media):
    reward = load()
    whole = reward(media, [""] * 3)
    assert torch.allclose(
        whole, torch.cat([reward(media[i : i + 1], [""]) for i in range(3)]), atol=1e-5
    )
    assert torch.allclose(whole, load(chunk=2)(media, [""] * 3), atol=1e-5)
    assert torch.allclose(reward(media[None], [""]), whole.mean()[None], atol=1e-5)
    assert torch.equal(whole, reward(media, ["a cat"] * 3))


def test_without_rounding_the_gradient_reaches_the_pixels(load, media):
    x = media[:1].clone().requires_grad_()
    load(rounding=False)(x, [""]).sum().backward()
    assert float((x.grad.abs().amax(1) > 0).float().mean()) > 0.9
    with pytest.raises(
        ValueError, match="deqa as it is loaded rounds pictures and gives no gradient"
    ):
        load()(x, [""])


def test_half_precision_stays_close(load, media):
    assert torch.allclose(
        load(dtype="bfloat16")(media, [""] * 3), load()(media, [""] * 3), atol=0.1
    )
    network = load(dtype="bfloat16").network
    assert (
        network.lm_head.weight.dtype == torch.bfloat16
        and network.model.rotary_emb.inv_freq.dtype == torch.float32
    )


def test_what_is_wrong_is_one_sentence(load, folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"expected config.json of an mplug_owl2 model \(found: None\)"
    ):
        write_tokenizer(tmp_path)
        load(weights=str(tmp_path))
    write_tokenizer(tmp_path, merges=())
    with pytest.raises(
        ValueError,
        match=(
            "the tokenizer gives excellent, good, fair, poor, bad the first tokens .* not five"
            " different ones"
        ),
    ):
        load(weights=str(tmp_path))
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="holds no weights"):
        load(weights=str(tmp_path))
    state = reference_state()
    state.pop("model.layers.1.self_attn.k_proj.multiway.1.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=(
            r"does not fit Owl: 1 keys missing"
            r" \(model.layers.1.self_attn.k_proj.multiway.1.weight\)"
        ),
    ):
        load(weights=str(tmp_path))


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
    assert rewards.load("deqa", dtype="float32")(picture, [""]).item() == pytest.approx(
        1.94, abs=0.03
    )
