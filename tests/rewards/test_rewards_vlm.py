"""Parts shared by rewards on vision-language models: picture sizes, patches, tokens, positions, the
head's place, checkpoint layouts."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from flowrl import rewards
from flowrl.rewards.core import pictures as core_pictures
from flowrl.rewards.networks import vlm as networks_vlm

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for content in"
    " message['content'] %}{% if content['type'] == 'image'"
    " %}<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video'"
    " %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ content['text'] }}{% endif %}{%"
    " endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " endif %}"
)


def byte_tokenizer(special=SPECIAL, **options):
    """A tokenizer of 256 bytes and some special tokens, made on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=special[0], **options)


def make_base(folder: Path, kind: str = "qwen2_vl", width: int = 32, embeddings: int = 300) -> Path:
    """A folder as Qwen/Qwen2-VL-7B-Instruct has it, tiny: configuration, tokenizer, processor, no
    weights."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "hidden_act": "silu",
    }
    if kind == "qwen2_vl":
        vision |= {
            "embed_dim": 32,
            "hidden_size": width,
            "mlp_ratio": 2,
            "hidden_act": "quick_gelu",
        }
    else:
        vision |= {
            "hidden_size": 32,
            "out_hidden_size": width,
            "intermediate_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        }
    config = {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": embeddings,
        "max_position_embeddings": 4096,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "image_token_id": 261,
        "video_token_id": 262,
        "vision_start_token_id": 259,
        "vision_end_token_id": 260,
        "tie_word_embeddings": False,
        "vision_config": vision,
    }
    tokenizer = byte_tokenizer(chat_template=CHAT)
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT
    )
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_state(base: Path, embeddings: int, *, old: bool = True, seed: int = 0) -> dict:
    """Random weights of the whole network by the names that transformers < 4.52 (old) or later
    wrote, language head included."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(base)
    config.text_config.vocab_size = embeddings
    network = AutoModelForImageTextToText.from_config(config)
    for parameter in network.parameters():  # a fresh network hardly depends on its input
        nn.init.normal_(parameter, std=0.3)
    state = {key: value.contiguous() for key, value in network.state_dict().items()}
    if not old:
        return state
    return {
        key.replace("model.visual.", "visual.").replace("model.language_model.", "model."): value
        for key, value in state.items()
    }


def make_head(prefix: str, width: int = 32, seed: int = 1) -> dict:
    """A ranknet head by its reference's names: Linear at 0, 3 and 5 of a Sequential, steeper than a
    fresh one."""
    torch.manual_seed(seed)
    layers = {0: nn.Linear(width, 1024), 3: nn.Linear(1024, 16), 5: nn.Linear(16, 2)}
    return {
        f"{prefix}{i}.{key}": 2.5 * value.detach()
        for i, layer in layers.items()
        for key, value in layer.state_dict().items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("base"))


TOKEN = "<|Reward|>"


@pytest.fixture(scope="module")
def vlm(base):
    state = networks_vlm.backbone_state(make_state(base, 264))
    return networks_vlm.load_vlm(
        str(base), state, tokens=[TOKEN], dtype="float32", path="here", reward="mine"
    )


def pictures(count=2, sides=(56, 84)):
    return [[torch.rand(1, 3, *sides)] for _ in range(count)]


# --- pictures


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ((448, 448), (448, 448)),
        ((512, 512), (448, 448)),
        ((1024, 1024), (448, 448)),
        ((64, 64), (448, 448)),
        ((832, 1216), (364, 532)),
        ((1216, 832), (532, 364)),
        ((720, 1280), (336, 588)),
        ((240, 416), (364, 616)),
    ],
)
def test_a_picture_of_any_size_gets_the_area_of_448_squared_in_sides_of_whole_28(sides, expected):
    """832 x 1216: beta = sqrt(832 * 1216 / 200704) = 2.2452, 832 / beta = 370.6 -> 364 = 13 * 28,
    1216 / beta = 541.6 -> 532 = 19 * 28."""
    assert tuple(networks_vlm.fitted(torch.rand(1, 3, *sides), by="float").shape[-2:]) == expected
    assert (
        expected[0] % 28 == expected[1] % 28 == 0
        and abs(expected[0] * expected[1] / networks_vlm.PIXELS - 1) < 0.13
    )


def test_the_exact_way_is_pils_bicubic_and_the_others_stay_within_two_bytes():
    smooth = nn.functional.interpolate(torch.rand(2, 3, 5, 7), (100, 140), mode="bicubic").clamp(
        0, 1
    )
    picture = Image.fromarray((smooth[0] * 255).round().byte().permute(1, 2, 0).numpy())
    own = (
        torch.tensor(list(picture.resize((532, 392), Image.Resampling.BICUBIC).tobytes()))
        .view(392, 532, 3)
        .permute(2, 0, 1)
        / 255
    )
    exact = networks_vlm.fitted(smooth)
    assert torch.allclose(exact[0], own, atol=1e-6)
    assert (exact - networks_vlm.fitted(smooth, by="float")).abs().max() < 2 / 255
    assert (exact - networks_vlm.fitted(smooth, by="bytes")).abs().max() < 2 / 255


def test_patches_and_normalisation_are_those_of_qwens_own_processor(base):
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    own = Qwen2VLImageProcessor()
    frame = (torch.rand(3, 56, 84) * 255).round()
    expected = own(
        Image.fromarray(frame.byte().permute(1, 2, 0).numpy()), return_tensors="pt", do_resize=False
    )
    rows, grid = networks_vlm.patches(networks_vlm.normalized(frame[None] / 255))
    assert torch.allclose(rows, expected["pixel_values"], atol=1e-5) and grid.tolist() == expected[
        "image_grid_thw"
    ][0].tolist() == [
        1,
        4,
        6,
    ]
    clip = (torch.rand(5, 3, 56, 84) * 255).round().byte()
    video = Qwen2VLVideoProcessor()(
        clip, return_tensors="pt", do_resize=False, do_sample_frames=False
    )
    rows, grid = networks_vlm.patches(networks_vlm.normalized(clip.float() / 255))
    assert grid.tolist() == video["video_grid_thw"][0].tolist() == [3, 4, 6]
    assert torch.allclose(rows, video["pixel_values_videos"], atol=1e-5)


@pytest.mark.parametrize(("sides", "corner"), [((6, 10), (2, 0)), ((10, 7), (0, 1))])
def test_a_picture_is_centred_on_a_square_of_the_mean_colour(sides, corner):
    frames = torch.rand(2, 3, *sides)
    out = networks_vlm.squared(frames, (0.48145466, 0.4578275, 0.40821073))
    top, left = corner
    assert out.shape == (2, 3, 10, 10) and torch.equal(
        out[..., top : top + sides[0], left : left + sides[1]], frames
    )
    border = out[0, :, -1, -1] * 255
    assert torch.allclose(border, torch.tensor([122.0, 116.0, 104.0]), atol=1e-4)


# --- the network


def test_the_hidden_state_is_read_at_the_special_token(vlm, monkeypatch):
    """A language model that returns its own input gives the embedding of the token that is read:
    any other place would differ."""
    seen = {}

    def echo(*, inputs_embeds, attention_mask, position_ids, use_cache):
        seen.update(mask=attention_mask, positions=position_ids)
        return (inputs_embeds,)

    monkeypatch.setattr(vlm.backbone.language_model, "forward", echo)
    row = vlm.processor.tokenizer.convert_tokens_to_ids(TOKEN)
    out = vlm.hidden(pictures(3), [f"a{TOKEN}", f"{TOKEN} some longer text", f"b {TOKEN} c"])
    planted = vlm.backbone.get_input_embeddings().weight[row]
    assert row == 263 and out.shape == (3, 1, 32) and torch.equal(out, planted.expand(3, 1, 32))
    length = seen["mask"].shape[1]
    assert torch.equal(seen["positions"], torch.arange(length).expand(3, 3, length))
    assert seen["mask"][:, 0].all() and seen["mask"][1].all() and not seen["mask"][0, -1]


def test_rows_of_different_length_and_batch_mates_do_not_change_a_state(vlm):
    texts = [
        f"a cat {TOKEN}",
        f"a much longer text about two red circles {TOKEN} and more",
        f"{TOKEN}",
    ]
    visuals = [[torch.rand(1, 3, 56, 56)], [torch.rand(1, 3, 28, 84)], [torch.rand(1, 3, 84, 84)]]
    whole = vlm.hidden(visuals, texts)
    alone = torch.cat(
        [vlm.hidden([visual], [text]) for visual, text in zip(visuals, texts, strict=True)]
    )
    assert torch.allclose(whole, alone, atol=1e-5) and (whole[0] - whole[1]).abs().max() > 0.1


def test_picture_and_text_both_matter(vlm):
    visual, text = pictures(1), [f"a cat {TOKEN}"]
    state = vlm.hidden(visual, text)
    assert (state - vlm.hidden(pictures(1), text)).abs().max() > 1e-3
    assert (state - vlm.hidden(visual, [f"a dog {TOKEN}"])).abs().max() > 1e-3


def test_the_state_is_that_of_the_whole_network_with_plain_positions_and_not_with_qwens_own(
    vlm, base
):
    """Built independently by transformers' processor and model class; the model's own positions
    (rows, columns) give another state."""
    picture = (torch.rand(3, 56, 84) * 255).round().byte()
    chat = vlm.processor.apply_chat_template(
        [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": f"a {TOKEN} b"}],
            }
        ],
        tokenize=False,
        add_generation_prompt=True,
    )
    batch = vlm.processor(
        text=[chat], images=[Image.fromarray(picture.permute(1, 2, 0).numpy())], return_tensors="pt"
    )
    length = batch["input_ids"].shape[1]
    at = batch["input_ids"][0].tolist().index(263)
    own = vlm.backbone(**batch).last_hidden_state[:, at]
    plain = vlm.backbone(
        **batch, position_ids=torch.arange(length).expand(3, 1, length)
    ).last_hidden_state[:, at]
    out = vlm.hidden([[picture[None] / 255]], [f"a {TOKEN} b"])[:, 0]
    assert torch.allclose(out, plain, atol=1e-4) and (out - own).abs().max() > 1e-2


def test_a_gradient_reaches_the_pixels_and_no_weight(vlm):
    picture = torch.rand(1, 3, 56, 56, requires_grad=True)
    vlm.hidden([[picture]], [TOKEN])[0, 0, :8].sum().backward()
    assert bool((picture.grad.abs().amax(1) > 0).float().mean() > 0.9)
    assert all(parameter.grad is None for parameter in vlm.parameters())


def test_several_pictures_a_sample_and_several_tokens_come_in_order(base):
    tokens = ["<|A|>", "<|B|>"]
    vlm = networks_vlm.load_vlm(
        str(base),
        networks_vlm.backbone_state(make_state(base, 265)),
        tokens=tokens,
        dtype="float32",
        path="here",
        reward="mine",
    )
    first, second = torch.rand(1, 3, 56, 56), torch.rand(1, 3, 28, 56)
    one = vlm.hidden([[first, second]], ["<|B|> x <|A|>"])
    other = vlm.hidden([[second, first]], ["<|B|> x <|A|>"])
    assert one.shape == (1, 2, 32) and (one - other).abs().max() > 1e-3
    # B comes first in the text: what follows it changes A's state only
    tail = vlm.hidden([[first, second]], ["<|B|> y <|A|>"])
    assert (
        torch.allclose(one[:, 1], tail[:, 1], atol=1e-5)
        and (one[:, 0] - tail[:, 0]).abs().max() > 1e-3
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no token at all", r"holds one of the tokens <\|Reward\|>, where the score is read"),
        (f"{TOKEN} and {TOKEN}", r"holds one of the tokens <\|Reward\|>"),
        (
            f"<|image_pad|> {TOKEN}",
            r"holds <\|image_pad\|>, which is the model's mark for a picture or video",
        ),
    ],
)
def test_a_prompt_that_holds_a_special_token_is_refused(vlm, text, said):
    with pytest.raises(ValueError, match=said):
        vlm.hidden(pictures(1), [text])


# --- loading


def test_old_and_new_key_names_give_the_same_network(base, vlm):
    new = networks_vlm.backbone_state(make_state(base, 264, old=False))
    old = networks_vlm.backbone_state(make_state(base, 264, old=True))
    assert old.keys() == new.keys() == vlm.backbone.state_dict().keys()
    assert all(torch.equal(old[key], value) for key, value in vlm.backbone.state_dict().items())


def test_bfloat16_rounds_the_rotary_frequencies_as_the_references_training_did(base):
    state = networks_vlm.backbone_state(make_state(base, 264))
    vlm = networks_vlm.load_vlm(
        str(base), state, tokens=[TOKEN], dtype="bfloat16", path="here", reward="mine"
    )
    own = vlm.backbone.language_model.rotary_emb.inv_freq.float()
    exact = 1 / 1000000.0 ** (torch.arange(0, 16, 2) / 16)
    assert torch.equal(own, exact.bfloat16().float()) and not torch.equal(own, exact)
    assert not vlm.backbone.training and not any(
        parameter.requires_grad for parameter in vlm.parameters()
    )


def test_a_checkpoint_that_does_not_fit_names_keys_and_shapes(base):
    state = networks_vlm.backbone_state(make_state(base, 264))
    state.pop("language_model.norm.weight")
    state["language_model.extra"] = torch.zeros(1)
    state["visual.merger.ln_q.weight"] = torch.zeros(3)
    with pytest.raises(ValueError) as error:
        networks_vlm.load_vlm(
            str(base), state, tokens=[TOKEN], dtype="float32", path="file", reward="mine"
        )
    said = str(error.value)
    assert (
        "file does not fit Qwen2VLModel: 1 keys missing (language_model.norm.weight); 1 unknown"
        " keys (language_model.extra)" in said
    )
    assert "visual.merger.ln_q.weight (3,) instead of (32,)" in said


def test_a_base_of_another_model_is_one_sentence(base, tmp_path):
    with pytest.raises(
        ValueError,
        match=(
            r"has 200 embeddings, and <\|Reward\|> is token 263 of .*: they do not belong together"
        ),
    ):
        small = networks_vlm.backbone_state(make_state(base, 264))
        small["language_model.embed_tokens.weight"] = small["language_model.embed_tokens.weight"][
            :200
        ]
        networks_vlm.load_vlm(
            str(base), small, tokens=[TOKEN], dtype="float32", path="here", reward="mine"
        )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(
        ValueError, match=r"reward.mine.base=.* is a t5; expected one of qwen2_vl, qwen2_5_vl"
    ):
        networks_vlm.load_vlm(
            str(tmp_path), {}, tokens=[TOKEN], dtype="float32", path="here", reward="mine"
        )
    with pytest.raises(
        ValueError,
        match=(
            "reward mine needs nobody/nothing, which is not on this machine .* download it from"
            " https://huggingface.co/nobody/nothing and set reward.mine.base=/path"
        ),
    ):
        networks_vlm.load_vlm(
            "nobody/nothing", {}, tokens=[TOKEN], dtype="float32", path="here", reward="mine"
        )


def test_the_head_is_two_hidden_layers_of_relu_by_hand():
    """Widths 1024 and 16 with weights 1/32, 1/1024 and 1: x = (2, 0, ..) -> relu(2/32) ->
    relu(mean) = 1/16 -> sum of 16 = 1."""
    state = {
        "h.0.weight": torch.full((1024, 32), 1 / 32),
        "h.0.bias": torch.zeros(1024),
        "h.3.weight": torch.full((16, 1024), 1 / 1024),
        "h.3.bias": torch.zeros(16),
        "h.5.weight": torch.stack([torch.ones(16), -torch.ones(16)]).bfloat16(),
        "h.5.bias": torch.zeros(2),
    }
    head = networks_vlm.ranknet(state, "h.", path="here")
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0] = 2, -2
    assert (
        torch.allclose(head(x), torch.tensor([[1.0, -1.0], [0.0, 0.0]]))
        and head[0].weight.dtype == torch.float32
    )
    with pytest.raises(ValueError, match=r"here holds no head g.0, g.3, g.5 \(found: nothing\)"):
        networks_vlm.ranknet(state, "g.", path="here")


def test_weights_of_a_folder_come_from_all_its_files(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(ValueError, match="holds no weights: neither .safetensors nor .bin"):
        networks_vlm.folder_tensors(tmp_path)
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.ones(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert networks_vlm.folder_tensors(tmp_path).keys() == {"a", "b"}
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")
    assert networks_vlm.folder_tensors(tmp_path).keys() == {"c"}


def test_a_reward_that_rounds_refuses_to_pretend_it_has_a_gradient():
    reward = rewards.Reward()
    reward.name = "mine"
    with pytest.raises(
        ValueError,
        match=(
            "mine as it is loaded rounds pictures and gives no gradient; load it with"
            " rounding=False"
        ),
    ):
        core_pictures.refuse_gradient(reward, torch.rand(1, 3, 8, 8, requires_grad=True))
    core_pictures.refuse_gradient(reward, torch.rand(1, 3, 8, 8))
