"""VQAScore: the likelihood of an answer, CLIP-FlanT5 in the reference's layout, and Qwen-VL."""

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
T5_SIZES = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "vocab_size": len(KNOWN_WORDS) + 3,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
}
TOWER_SIZES = {
    "hidden_size": 12,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives"
    " helpful, detailed, and polite answers to the user's questions. USER: "
)


def write_t5_tokenizer(folder):
    """What matters here of T5's: words as tokens, </s> after every text, <unk> for unknown ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(KNOWN_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
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


def write(root):
    """Settings of a tiny zhiqiulin/clip-flant5-xxl, with an unused copy of the tower in it."""
    from transformers import CLIPVisionConfig, CLIPVisionModel, T5Config, T5ForConditionalGeneration

    write_t5_tokenizer(root / "tokenizer")
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(T5Config(**T5_SIZES))
    tower = CLIPVisionModel(CLIPVisionConfig(**TOWER_SIZES))
    for parameter in [*t5.parameters(), *tower.parameters()]:
        nn.init.normal_(parameter, std=0.4)
    tower.save_pretrained(root / "tower")
    projector = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 16)).state_dict()
    state = dict(t5.state_dict())
    state |= {f"mm_projector.{key}": value for key, value in projector.items()}
    state["embed_tokens.weight"] = state["encoder.embed_tokens.weight"]
    state["vision_tower.vision_tower.vision_model.embeddings.class_embedding"] = torch.zeros(12)
    write_checkpoint(root / "model", state)
    places = {"weights": "model", "tokenizer": "tokenizer", "tower": "tower"}
    return {key: str(root / name) for key, name in places.items()} | {"dtype": "float32"}


def write_checkpoint(folder, state):
    """config.json of a clip_t5, and two .bin shards."""
    folder.mkdir()
    keys = sorted(state)
    torch.save({key: state[key] for key in keys[:20]}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({key: state[key] for key in keys[20:]}, folder / "pytorch_model-00002-of-00002.bin")
    extra = {
        "model_type": "clip_t5",
        "mm_vision_tower": "openai/clip-vit-large-patch14-336",
        "mm_vision_select_layer": -2,
        "mm_projector_type": "mlp2x_gelu",
        "mm_hidden_size": 12,
    }
    (folder / "config.json").write_text(json.dumps(T5_SIZES | extra))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("vqascore"))


@pytest.fixture
def load(files):
    return lambda **settings: rewards.load("vqascore", **files | settings)


@pytest.fixture
def media():
    return nn.functional.interpolate(torch.rand(3, 3, 4, 6), (40, 60), mode="bicubic").clamp(0, 1)


# --- the formula


def test_likelihood_is_the_geometric_mean_of_the_answers_tokens_by_hand():
    """Probabilities 1/2 and 1/8: exp(-(log 2 + log 8) / 2) = 1/4, and not their product 1/16."""
    sure = [[1.0, 1e-9, 1e-9], [1.0, 1e-9, 1e-9]]
    logits = torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]], sure]).log()
    both = vqascore.likelihood(logits, torch.tensor([0, 0]))
    assert torch.allclose(both, torch.tensor([0.25, 1.0]), atol=1e-6)
    shifted = vqascore.likelihood(logits + 5, torch.tensor([0, 1]))
    assert torch.allclose(shifted[:1], torch.tensor([(0.5 * 0.375) ** 0.5]))


# --- clip-flant5


def test_the_score_is_that_of_t5_decoding_yes_and_the_end_token_by_token(load, files, media):
    """P(Yes | start) and P(</s> | start, Yes) read from two decoder runs."""
    reward = load()
    t5, words = reward.model.t5, len(reward.model.tokenizer)
    assert t5.lm_head.out_features == words + 3  # the three do not count
    yes = reward.model.tokenizer("Yes")["input_ids"][0]
    expected = []
    for picture, prompt in zip(media, PROMPTS, strict=True):
        chat = chat_embeddings(reward.model, picture, prompt)
        one = t5(inputs_embeds=chat, decoder_input_ids=torch.tensor([[0]])).logits[0, 0]
        two = t5(inputs_embeds=chat, decoder_input_ids=torch.tensor([[0, yes]])).logits[0, 1]
        both = one[:words].softmax(-1)[yes] * two[:words].softmax(-1)[1]
        expected.append(both.sqrt())
    out = reward(media, PROMPTS)
    assert out.shape == (3,) and out.dtype == torch.float32 and bool(((out > 0) & (out < 1)).all())
    assert torch.allclose(out, torch.stack(expected), rtol=1e-4)
    assert out.unique().numel() == 3


def chat_embeddings(model, picture, prompt):
    """Chat, 4 patches and question put together a second time -> (1, L, d)."""
    canvas = Image.new("RGB", (60, 60), (122, 116, 104))
    canvas.paste(image_of(picture), (0, 10))
    pixels = F.to_tensor(canvas.resize((28, 28), Image.Resampling.BICUBIC))[None]
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    states = model.tower(F.normalize(pixels, mean, std), output_hidden_states=True).hidden_states
    question = f'\nDoes this figure show "{prompt}"? Please answer yes or no. ASSISTANT: '
    first, last = (
        model.tokenizer(text, return_tensors="pt")["input_ids"] for text in (SYSTEM, question)
    )
    assert first[0, -1] == last[0, -1] == 1 and 2 not in first
    patches = model.projector(states[2][:, 1:])
    return torch.cat([model.t5.shared(first), patches, model.t5.shared(last)], 1)


def image_of(picture):
    return Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy())


def test_picture_prompt_question_and_answer_matter(load, media):
    out = load()(media, PROMPTS)
    assert ((out - load()(media.flip(0), PROMPTS))[[0, 2]] / out[[0, 2]]).abs().min() > 1e-3
    assert (out - load()(media, PROMPTS[::-1]))[0].abs() / out[0] > 1e-3
    assert (out - load(question='image "{}"?')(media, PROMPTS))[0].abs() / out[0] > 1e-3
    assert (out - load(answer="no")(media, PROMPTS))[0].abs() / out[0] > 1e-3


def test_characters_that_t5_does_not_know_are_seen(load, media):
    """Against T5 itself with the unknown token in its mask (t2v_metrics since 1.2)."""
    reward = load()
    prompt = "a \u732b cat"
    assert torch.equal(reward(media[:1], [prompt]), reward(media[:1], ["a \U0001f431 cat"]))
    asked = f'\nDoes this figure show "{prompt}"? Please answer yes or no. ASSISTANT: '
    unknown = torch.tensor(reward.model.tokenizer(asked)["input_ids"]) == 2
    chat = chat_embeddings(reward.model, media[0], prompt)
    assert int(unknown.sum()) == 1
    mask = torch.ones(1, chat.shape[1]).long()
    labels = torch.tensor([reward.model.answer])
    logits = reward.model.t5(inputs_embeds=chat, attention_mask=mask, labels=labels).logits
    words = len(reward.model.tokenizer)
    assert torch.allclose(
        reward(media[:1], [prompt]), vqascore.likelihood(logits[..., :words], labels[0]), rtol=1e-4
    )
    assert (reward(media[:1], [prompt]) - reward(media[:1], ["a cat"])).abs() > 1e-6


def test_a_question_over_the_limit_is_cut_and_said(load, media, caplog):
    """Two videos of two frames, one with the long prompt, in chunks of one: one of two is cut."""
    from flowrl.rewards.core import tokens

    tokens._told.discard("vqascore")
    reward = load(chunk=1)
    reward.expect(["red " * 3000, "a cat", "a dog", "a cat"])
    assert "vqascore reads 2048 tokens of a prompt: 1 of 3 are longer" in caplog.text
    tokens._told.discard("vqascore")
    out = reward(media[[0, 0, 1, 1]].view(2, 2, 3, 40, 60), ["red " * 3000, "a cat"])
    assert "vqascore reads 2048 tokens of a prompt: 1 of the first 2 " in caplog.text
    assert torch.equal(out[:1], reward(media[:1], ["red " * 3500])) and bool(out.isfinite().all())


UNFETCHED = "needs nobody/nothing, .* could not be fetched .*set reward.vqascore"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"question": "no place"}, "question='no place': .*it must hold {} once, where the prompt"),
        ({"tokenizer": "nobody/nothing"}, f"{UNFETCHED}.tokenizer=/path/to/the folder"),
        ({"tower": "nobody/nothing"}, f"{UNFETCHED}.tower=/path/to/the folder"),
        (
            {"max_pixels": 28 * 28},
            "vqascore with model=clip-flant5 does not read max_pixels; leave out what belongs to"
            " the other model",
        ),
        ({"answer": "Perhaps"}, 'does not know the answer "Perhaps"; give one made of its tokens'),
    ],
)
def test_a_wrong_setting_is_one_sentence(load, settings, said):
    with pytest.raises(ValueError, match=said):
        load(**settings)


def test_a_checkpoint_that_does_not_fit_is_one_sentence(load, files, tmp_path):
    said = "expected config.json of a clip_t5 model .*found: None.*set reward.vqascore.model=qwen"
    with pytest.raises(ValueError, match=said):
        load(weights=str(tmp_path))
    folder, missing = vqascore.Path(files["weights"]), "decoder.final_layer_norm.weight"
    state = {}
    for file in sorted(folder.glob("*.bin")):
        state |= torch.load(file)
    del state[missing]
    torch.save(state, tmp_path / "pytorch_model.bin")
    shutil.copy(folder / "config.json", tmp_path)
    said = rf"does not fit T5ForConditionalGeneration: 1 keys missing \({missing}\)"
    with pytest.raises(ValueError, match=said):
        load(weights=str(tmp_path))


def test_a_tokenizer_that_is_not_the_networks_is_refused(load, tmp_path):
    """A configuration alone gives T5's hundred special tokens, to which every word is unknown."""
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    said = f"reward.vqascore.tokenizer={tmp_path} holds no vocabulary"
    with pytest.raises(ValueError, match=said):
        load(tokenizer=str(tmp_path))
    tokenizer = load().model.tokenizer
    count = tokenizer.add_tokens([f"more{i}" for i in range(4)]) + len(KNOWN_WORDS)
    tokenizer.save_pretrained(tmp_path / "large")
    counts = f"{count} tokens, and the network {count - 1}"
    with pytest.raises(ValueError, match=f"large has {counts}; give the network's own tokenizer"):
        load(tokenizer=str(tmp_path / "large"))


def test_every_key_of_the_tower_is_checked_and_those_beside_it_are_left_out(load, files, tmp_path):
    whole = tiny_clip.clip_folder(tmp_path / "whole")
    theirs = load_file(whole / "model.safetensors")
    ours = vqascore._tower(str(whole), torch.float32).state_dict()
    name = "encoder.layers.1.mlp.fc2.weight"
    weight = next(value for key, value in ours.items() if key.endswith(name))
    assert torch.equal(weight, theirs[f"vision_model.{name}"])
    folder = tmp_path / "part"
    shutil.copytree(files["tower"], folder)
    drop_first_layer(folder)
    said = r"part does not fit CLIPVisionModel: 16 keys missing \(.*layers.0"
    with pytest.raises(ValueError, match=said):
        load(tower=str(folder))


def drop_first_layer(folder):
    """Rewrite a checkpoint without the tensors of layer 0."""
    file = folder / "model.safetensors"
    state = {key: value for key, value in load_file(file).items() if "layers.0." not in key}
    save_file(state, file, metadata={"format": "pt"})


# --- qwen


def write_qwen(root):
    """Settings of a tiny Qwen2-VL as its repository holds it, named as by transformers < 4.52.

    Its tokens are bytes, so the answer is one of a single letter.
    """
    folder = make_base(root)
    save_file(make_state(folder, 300), folder / "model.safetensors", metadata={"format": "pt"})
    return {
        "model": "qwen",
        "weights": str(folder),
        "dtype": "float32",
        "max_pixels": 9 * 28 * 28,
        "answer": "Y",
    }


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("qwen"))


def test_qwen_gives_the_probability_of_yes_as_generates_first_token(chat, media):
    reward = rewards.load("vqascore", **chat)
    yes = reward.model.processor.tokenizer("Y")["input_ids"][0]
    pairs = zip(media, PROMPTS, strict=True)
    expected = [generated(reward.model, *pair).softmax(-1)[yes] for pair in pairs]
    out = reward(media, PROMPTS)
    assert out.shape == (3,) and out.dtype == torch.float32
    assert torch.allclose(out, torch.stack(expected), rtol=1e-3, atol=1e-8)
    assert out.unique().numel() == 3 and not reward.differentiable
    said = "model=qwen gives no gradient; load it with model=clip-flant5, rounding=False"
    with pytest.raises(ValueError, match=f"vqascore with {said}"):
        reward(media.clone().requires_grad_(), PROMPTS)


def generated(model, picture, prompt):
    """Scores of the first token that `generate` makes, over the vocabulary."""
    content = [{"type": "image"}, {"type": "text", "text": f'Does this image show "{prompt}"?'}]
    text = model.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 9 * 28 * 28}
    batch = model.processor(text=[text], images=[image_of(picture)], return_tensors="pt", size=size)
    options = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    return model.network.generate(**batch, max_new_tokens=1, **options).scores[0][0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"tokenizer": "x", "tower": "y"},
            "vqascore with model=qwen does not read tokenizer, tower; leave out what belongs to the"
            " other model",
        ),
        (
            {"rounding": False},
            "vqascore with model=qwen always rounds pictures; leave rounding=False out",
        ),
        (
            {"answer": "Yes"},
            'answer="Yes" is 3 tokens, and with model=qwen the score is the probability of one;'
            " give a shorter answer",
        ),
    ],
)
def test_qwen_refuses_what_it_would_not_read_and_answers_of_several_tokens(chat, settings, said):
    with pytest.raises(ValueError, match=said):
        rewards.load("vqascore", **chat | settings)


def test_qwen_takes_rounding_that_is_on(chat):
    assert rewards.load("vqascore", **chat, rounding=True).settings.rounding


def test_every_key_of_a_qwen_checkpoint_is_checked(chat, tmp_path):
    shutil.copytree(chat["weights"], tmp_path / "part")
    drop_first_layer(tmp_path / "part")
    said = r"AutoModelForImageTextToText: 12 keys missing \(model.language_model.layers.0"
    with pytest.raises(ValueError, match=f"part does not fit {said}"):
        rewards.load("vqascore", **chat | {"weights": str(tmp_path / "part")})


@pytest.mark.hub
@pytest.mark.parametrize("model", ["clip-flant5", "qwen"])
def test_vqascore_knows_a_red_square_from_an_old_man(model):
    own = {
        "clip-flant5": {"weights": "zhiqiulin/clip-flant5-xl", "tokenizer": "google/flan-t5-xl"},
        "qwen": {"weights": "Qwen/Qwen2-VL-2B-Instruct"},
    }[model]
    reward = rewards.load("vqascore", model=model, **own)
    red = torch.zeros(2, 3, 512, 512)
    red[:, 0] = 0.9
    right, wrong = reward(red, ["a plain red square", "an old man reading a newspaper"]).tolist()
    assert right > 0.5 > wrong
