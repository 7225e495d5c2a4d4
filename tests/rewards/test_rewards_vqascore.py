"""VQAScore: the likelihood of an answer, CLIP-FlanT5 put together in the reference's layout, and
the Qwen-VL variant."""

import json
import shutil

import pytest
import tiny_clip
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_rewards_vlm import make_base, make_state
from torch import nn
from torchvision.transforms import functional as F

from flowrl import rewards
from flowrl.runtime.registry import find

vqascore = find("flowrl.rewards", "vqascore", what="reward")
PROMPTS = ["a cat", "two red circles and a blue square", "a dog"]
KNOWN = (
    "A chat between a curious user and an artificial intelligence assistant . The gives helpful ,"
    " detailed polite answers to ' s questions USER : the Does this figure show image \" ? Please"
    " answer yes or no ASSISTANT Yes cat dog two red circles blue square"
)
KNOWN_WORDS = ["<pad>", "</s>", "<unk>", *dict.fromkeys(KNOWN.split())]


def write_t5_tokenizer(folder):
    """Words as tokens, </s> after every text, <unk> for what is not known: what matters here of
    T5's tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(KNOWN_WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Settings of a tiny zhiqiulin/clip-flant5-xxl: config.json of a clip_t5, .bin shards with T5,
    projector and an unused tower copy."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, T5Config, T5ForConditionalGeneration

    root = tmp_path_factory.mktemp("vqascore")
    write_t5_tokenizer(root / "tokenizer")
    torch.manual_seed(0)
    shared = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 2,
    }
    shared |= {"vocab_size": len(KNOWN_WORDS) + 3}
    shared |= {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.1,
    }
    t5 = T5ForConditionalGeneration(T5Config(**shared))
    tower = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=12,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
    )
    for parameter in [*t5.parameters(), *tower.parameters()]:
        nn.init.normal_(parameter, std=0.4)
    tower.save_pretrained(root / "tower")
    projector = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16))
    state = dict(t5.state_dict()) | {
        f"mm_projector.{key}": value for key, value in projector.state_dict().items()
    }
    state["embed_tokens.weight"] = state["encoder.embed_tokens.weight"]
    state["vision_tower.vision_tower.vision_model.embeddings.class_embedding"] = torch.zeros(12)
    keys = sorted(state)
    folder = root / "model"
    folder.mkdir()
    torch.save({key: state[key] for key in keys[:20]}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({key: state[key] for key in keys[20:]}, folder / "pytorch_model-00002-of-00002.bin")
    extra = {
        "model_type": "clip_t5",
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
        "mm_vision_select_layer": -2,
    }
    (folder / "config.json").write_text(
        json.dumps(shared | extra | {"mm_projector_type": "mlp2x_gelu", "mm_hidden_size": 12})
    )
    return {
        "weights": str(folder),
        "tokenizer": str(root / "tokenizer"),
        "tower": str(root / "tower"),
        "dtype": "float32",
    }


@pytest.fixture
def load(files):
    return lambda **settings: rewards.load("vqascore", **files | settings)


@pytest.fixture
def media():
    return nn.functional.interpolate(torch.rand(3, 3, 4, 6), (40, 60), mode="bicubic").clamp(0, 1)


# --- the formula


def test_likelihood_is_the_geometric_mean_of_the_answers_tokens_by_hand():
    """Two tokens with probabilities 1/2 and 1/8: exp(-(log 2 + log 8) / 2) = 1/4, and not their
    product 1/16."""
    logits = torch.log(
        torch.tensor(
            [[[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]], [[1.0, 1e-9, 1e-9], [1.0, 1e-9, 1e-9]]]
        )
    )
    assert torch.allclose(
        vqascore.likelihood(logits, torch.tensor([0, 0])), torch.tensor([0.25, 1.0]), atol=1e-6
    )
    assert torch.allclose(
        vqascore.likelihood(logits + 5, torch.tensor([0, 1]))[:1],
        torch.tensor([(0.5 * 0.375) ** 0.5]),
    )


# --- clip-flant5


def test_the_score_is_that_of_t5_decoding_yes_and_the_end_token_by_token(load, files, media):
    """Chat, 4 patches and question put together here; P(Yes | start) and P(</s> | start, Yes) read
    from two decoder runs."""
    reward = load()
    t5, tokenizer, tower = reward.model.t5, reward.model.tokenizer, reward.model.tower
    system = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant"
        " gives helpful, detailed, and polite answers to the user's questions. USER: "
    )
    expected = []
    for picture, prompt in zip(media, PROMPTS, strict=True):
        canvas = Image.new("RGB", (60, 60), (122, 116, 104))
        canvas.paste(
            Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy()), (0, 10)
        )
        pixels = F.to_tensor(canvas.resize((28, 28), Image.Resampling.BICUBIC))[None]
        pixels = F.normalize(
            pixels, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        )
        patches = reward.model.projector(
            tower(pixels, output_hidden_states=True).hidden_states[2][:, 1:]
        )
        first = tokenizer(system, return_tensors="pt")["input_ids"]
        last = tokenizer(
            f'\nDoes this figure show "{prompt}"? Please answer yes or no. ASSISTANT: ',
            return_tensors="pt",
        )["input_ids"]
        assert first[0, -1] == last[0, -1] == 1 and 2 not in first.tolist()[0] + last.tolist()[0]
        embeddings = torch.cat([t5.shared(first), patches, t5.shared(last)], 1)
        yes, words = (
            tokenizer("Yes")["input_ids"][0],
            len(tokenizer),
        )  # the network has three more outputs, which do not count
        assert t5.lm_head.out_features == words + 3
        one = (
            t5(inputs_embeds=embeddings, decoder_input_ids=torch.tensor([[0]]))
            .logits[0, 0, :words]
            .softmax(-1)[yes]
        )
        two = (
            t5(inputs_embeds=embeddings, decoder_input_ids=torch.tensor([[0, yes]]))
            .logits[0, 1, :words]
            .softmax(-1)[1]
        )
        expected.append((one * two).sqrt())
    out = reward(media, PROMPTS)
    assert out.shape == (3,) and out.dtype == torch.float32 and bool(((out > 0) & (out < 1)).all())
    assert torch.allclose(out, torch.stack(expected), rtol=1e-4)
    assert out.unique().numel() == 3


def test_rows_of_different_length_and_batch_mates_do_not_change_a_score(load, media):
    reward = load()
    whole = reward(media, PROMPTS)
    alone = torch.cat([reward(media[i : i + 1], PROMPTS[i : i + 1]) for i in range(3)])
    assert torch.allclose(whole, alone, atol=1e-6) and torch.allclose(
        whole, load(chunk=2)(media, PROMPTS), atol=1e-6
    )
    assert torch.equal(whole, reward(media, PROMPTS)) and torch.allclose(
        reward(media.flip(0), PROMPTS[::-1]).flip(0), whole, atol=1e-6
    )


def test_picture_prompt_question_and_answer_matter(load, media):
    out = load()(media, PROMPTS)
    assert ((out - load()(media.flip(0), PROMPTS))[[0, 2]] / out[[0, 2]]).abs().min() > 1e-3
    assert (out - load()(media, PROMPTS[::-1]))[0].abs() / out[0] > 1e-3
    assert (out - load(question='image "{}"?')(media, PROMPTS))[0].abs() / out[0] > 1e-3
    assert (out - load(answer="no")(media, PROMPTS))[0].abs() / out[0] > 1e-3


def test_words_that_t5_does_not_know_are_masked_as_in_the_reference(load, media):
    """Its padding token is the unknown one, and padding is masked: which unknown word stands there
    makes no difference."""
    reward = load()
    assert torch.equal(reward(media[:1], ["a xyzzy cat"]), reward(media[:1], ["a plugh cat"]))
    assert (reward(media[:1], ["a xyzzy cat"]) - reward(media[:1], ["a red cat"])).abs() / reward(
        media[:1], ["a red cat"]
    ) > 1e-3


def test_a_video_has_the_mean_of_its_frames(load, media):
    reward = load()
    assert torch.allclose(
        reward(media[None], ["a cat"]), reward(media, ["a cat"] * 3).mean()[None], atol=1e-6
    )


def test_a_question_over_the_limit_is_cut_and_said(load, media, caplog):
    """A video of two frames with the long prompt beside two with the short one, in chunks of one:
    the prompts are two, and one is long."""
    from flowrl.rewards.core import tokens

    tokens._told.discard("vqascore")
    reward = load(chunk=1)
    reward.expect(["red " * 3000, "a cat", "a dog", "a cat"])
    assert "vqascore reads 2048 tokens of a prompt: 1 of 3 are longer" in caplog.text
    tokens._told.discard("vqascore")
    out = reward(media[[0, 0, 1, 1]].view(2, 2, 3, 40, 60), ["red " * 3000, "a cat"])
    assert "vqascore reads 2048 tokens of a prompt: 1 of the first 2 " in caplog.text
    assert torch.equal(out[:1], reward(media[:1], ["red " * 3500])) and bool(out.isfinite().all())


def test_without_rounding_the_gradient_reaches_the_pixels(load, media):
    x = media[:1].clone().requires_grad_()
    load(rounding=False)(x, ["a cat"]).log().sum().backward()
    assert float((x.grad.abs().amax(1) > 0).float().mean()) > 0.9
    with pytest.raises(
        ValueError, match="vqascore as it is loaded rounds pictures and gives no gradient"
    ):
        load()(x, ["a cat"])


def test_what_is_wrong_is_one_sentence(load, files, tmp_path, media):
    with pytest.raises(
        ValueError, match=r"question='no place': .*it must hold {} once, where the prompt goes"
    ):
        load(question="no place")
    with pytest.raises(
        ValueError,
        match=(
            r"expected config.json of a clip_t5 model .*found: None.*set reward.vqascore.model=qwen"
        ),
    ):
        load(weights=str(tmp_path))
    with pytest.raises(
        ValueError,
        match=(
            r"needs nobody/nothing, .* could not be fetched .*set"
            r" reward.vqascore.tokenizer=/path/to/the folder"
        ),
    ):
        load(tokenizer="nobody/nothing")
    with pytest.raises(
        ValueError,
        match=(
            r"needs nobody/nothing, .* could not be fetched .*set"
            r" reward.vqascore.tower=/path/to/the folder"
        ),
    ):
        load(tower="nobody/nothing")
    with pytest.raises(
        ValueError,
        match=(
            "vqascore with model=clip-flant5 does not read max_pixels; leave out what belongs"
            " to the other model"
        ),
    ):
        load(max_pixels=28 * 28)
    shards = [torch.load(file) for file in sorted(vqascore.Path(files["weights"]).glob("*.bin"))]
    state = {
        key: value
        for shard in shards
        for key, value in shard.items()
        if key != "decoder.final_layer_norm.weight"
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(
        (vqascore.Path(files["weights"]) / "config.json").read_text()
    )
    with pytest.raises(
        ValueError,
        match=(
            r"does not fit T5ForConditionalGeneration: 1 keys missing"
            r" \(decoder.final_layer_norm.weight\)"
        ),
    ):
        load(weights=str(tmp_path))
    with pytest.raises(
        ValueError, match='"vqascore" reads the prompt, and that of sample 1 is empty'
    ):
        rewards.score(media, ["a", " ", "b"], {"vqascore": {"reward": load()}})


def test_a_tokenizer_that_is_not_the_networks_is_refused(load, files, tmp_path):
    """A folder with a configuration alone gives T5's hundred special tokens, to which every word is
    unknown."""
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(
        ValueError, match=f"reward.vqascore.tokenizer={tmp_path} holds no vocabulary"
    ):
        load(tokenizer=str(tmp_path))
    with pytest.raises(
        ValueError, match='does not know the answer "Perhaps"; give one made of its tokens'
    ):
        load(answer="Perhaps")
    tokenizer = load().model.tokenizer
    count = tokenizer.add_tokens([f"more{i}" for i in range(4)]) + len(KNOWN_WORDS)
    tokenizer.save_pretrained(tmp_path / "large")
    with pytest.raises(
        ValueError,
        match=(
            f"large has {count} tokens, and the network {count - 1}; give the network's own"
            " tokenizer"
        ),
    ):
        load(tokenizer=str(tmp_path / "large"))


def test_every_key_of_the_tower_is_checked_and_those_beside_it_are_left_out(load, files, tmp_path):
    whole = tiny_clip.clip_folder(tmp_path / "whole")
    ours, theirs = (
        vqascore._tower(str(whole), torch.float32).state_dict(),
        load_file(whole / "model.safetensors"),
    )
    name = "encoder.layers.1.mlp.fc2.weight"
    assert torch.equal(
        next(value for key, value in ours.items() if key.endswith(name)),
        theirs[f"vision_model.{name}"],
    )
    folder = tmp_path / "part"
    shutil.copytree(files["tower"], folder)
    state = {
        key: value
        for key, value in load_file(folder / "model.safetensors").items()
        if "layers.0." not in key
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"part does not fit CLIPVisionModel: 16 keys missing \(.*layers.0"
    ):
        load(tower=str(folder))


# --- qwen


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A tiny Qwen2-VL as its repository holds it: configuration, processor, safetensors with the
    names of transformers < 4.52.

    Its tokens are bytes, so the answer is one of a single letter.
    """
    folder = make_base(tmp_path_factory.mktemp("qwen"))
    save_file(make_state(folder, 300), folder / "model.safetensors", metadata={"format": "pt"})
    return {
        "model": "qwen",
        "weights": str(folder),
        "dtype": "float32",
        "max_pixels": 9 * 28 * 28,
        "answer": "Y",
    }


def test_qwen_gives_the_probability_of_yes_as_generates_first_token(chat, media):
    reward = rewards.load("vqascore", **chat)
    network, processor = reward.model.network, reward.model.processor
    out, expected = reward(media, PROMPTS), []
    for picture, prompt in zip(media, PROMPTS, strict=True):
        image = Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())
        content = [{"type": "image"}, {"type": "text", "text": f'Does this image show "{prompt}"?'}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 9 * 28 * 28}
        batch = processor(text=[text], images=[image], return_tensors="pt", size=size)
        made = network.generate(
            **batch,
            max_new_tokens=1,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        expected.append(made.scores[0][0].softmax(-1)[processor.tokenizer("Y")["input_ids"][0]])
    assert (
        out.shape == (3,)
        and out.dtype == torch.float32
        and torch.allclose(out, torch.stack(expected), rtol=1e-3, atol=1e-8)
    )
    assert out.unique().numel() == 3 and not reward.differentiable
    with pytest.raises(
        ValueError,
        match=(
            "vqascore with model=qwen gives no gradient; load it with model=clip-flant5,"
            " rounding=False"
        ),
    ):
        reward(media.clone().requires_grad_(), PROMPTS)


def test_qwen_scores_do_not_depend_on_batch_mates(chat, media):
    reward = rewards.load("vqascore", **chat)
    alone = torch.cat([reward(media[i : i + 1], PROMPTS[i : i + 1]) for i in range(3)])
    assert torch.allclose(reward(media, PROMPTS), alone, rtol=1e-3, atol=1e-8)


def test_qwen_refuses_settings_that_it_would_not_read_and_answers_of_several_tokens(chat):
    for setting, said in (
        (
            {"tokenizer": "x", "tower": "y"},
            (
                "vqascore with model=qwen does not read tokenizer, tower; leave out what belongs"
                " other model"
            ),
        ),
        (
            {"rounding": False},
            "vqascore with model=qwen always rounds pictures; leave rounding=False out",
        ),
        (
            {"answer": "Yes"},
            (
                'answer="Yes" is 3 tokens, and with model=qwen the score is the probability of one;'
                " give a shorter answer"
            ),
        ),
    ):
        with pytest.raises(ValueError, match=said):
            rewards.load("vqascore", **chat | setting)
    assert rewards.load("vqascore", **chat, rounding=True).settings.rounding


def test_every_key_of_a_qwen_checkpoint_is_checked(chat, tmp_path):
    shutil.copytree(chat["weights"], tmp_path / "part")
    state = load_file(tmp_path / "part" / "model.safetensors")
    save_file(
        {key: value for key, value in state.items() if "layers.0." not in key},
        tmp_path / "part" / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(
        ValueError,
        match=(
            r"part does not fit AutoModelForImageTextToText: 12 keys missing"
            r" \(model.language_model.layers.0"
        ),
    ):
        rewards.load("vqascore", **chat | {"weights": str(tmp_path / "part")})


@pytest.mark.hub
@pytest.mark.parametrize("model", ["clip-flant5", "qwen"])
def test_vqascore_knows_a_red_square_from_an_old_man(model):
    weights = {"clip-flant5": "zhiqiulin/clip-flant5-xl", "qwen": "Qwen/Qwen2-VL-2B-Instruct"}[
        model
    ]
    own = {"tokenizer": "google/flan-t5-xl"} if model == "clip-flant5" else {}
    reward = rewards.load("vqascore", model=model, weights=weights, **own)
    red = torch.zeros(2, 3, 512, 512)
    red[:, 0] = 0.9
    right, wrong = reward(red, ["a plain red square", "an old man reading a newspaper"]).tolist()
    assert right > 0.5 > wrong
