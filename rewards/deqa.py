"""DeQA-Score (arXiv:2501.11561): quality of a picture from 1 to 5, by mPLUG-Owl2 (LLaMA-2-7B).

Reference: github.com/zhiyuanyou/DeQA-Score, `src/evaluate/scorer.py`; network:
github.com/X-PLUG/mPLUG-Owl, `mPLUG-Owl2/mplug_owl2/model`. The picture, on a square of the mean
colour and 448 x 448, becomes 65 tokens; the model is asked for the quality and starts to answer;
the probabilities of "excellent", "good", "fair", "poor" and "bad" as the next word, renormalised,
weigh 5, 4, 3, 2 and 1. No prompt is read.

The published checkpoint asks to run its own Python (`trust_remote_code`), which only fits
transformers 4.36 to 4.46. None of it runs here: the network is written below on top of
transformers' LlamaModel, with the checkpoint's key names, every one of which is checked. mPLUG-Owl2
differs from LLaMA in having two sets of key, value and norm weights in each layer, one for text and
one for picture tokens. Departures: the softmax over the five words is fp32 (the reference: fp16);
Flow-GRPO's server also sends pictures as JPEG, which we do not.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn
from torch.nn import functional as f

from flowrl.rewards.core.pictures import CLIP_MEAN, cropped, normalized, pil_cropped, rated, rounded
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.weights import fill, path_of, tokenizer
from flowrl.rewards.networks import vlm
from flowrl.types import MediaContext

NUMBERS = {"zhiyuanyou/DeQA-Score-Mix3": 8_197_859_328}  # hub name -> number of weights
WORDS = ("excellent", "good", "fair", "poor", "bad")  # words for the scores 5, 4, 3, 2, 1
# The picture stands between these two texts.
QUESTION = (
    "USER: How would you rate the quality of this image?\n",
    "\nASSISTANT: The quality of the image is",
)


class Settings(vlm.Settings):
    weights: str = pydantic.Field(
        "zhiyuanyou/DeQA-Score-Mix3",
        description="Folder with config.json, tokenizer and weights, or its hub repository.",
    )
    scale: Literal["mos", "flow_grpo"] = pydantic.Field(
        "mos", description="Scale of the score: mos is 1 to 5; flow_grpo divides by 5."
    )
    dtype: Literal["bfloat16", "float16", "float32"] = pydantic.Field(
        "float16", description="Type of the network's numbers; the reference uses float16."
    )


class DeQA(Reward):
    """Expected opinion score of a picture, 1 (bad) to 5 (excellent); for a video, the mean over its
    frames."""

    Settings = Settings
    name = "deqa"
    networks = NUMBERS
    scale = "quality of the picture by DeQA-Score, 1 to 5"
    quality = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        folder = path_of(s.weights, reward="deqa", only=["*.json", "*.safetensors", "*.model"])
        self.words, question = _tokens(folder)
        self.network = load_network(folder, dtype=s.dtype)
        self.question = [torch.tensor(part) for part in question]
        self.factor = 1.0
        if s.scale == "flow_grpo":
            self.factor, self.scale = 0.2, f"{self.scale}, divided by 5"
        self.range = (self.factor, 5 * self.factor)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        return self.factor * rated(self, media, self._scores)

    def _scores(self, frames: Tensor, rows: Tensor) -> Tensor:
        """Opinion scores of pictures: (n, 3, H, W) in [0, 1] -> (n,) fp32 in [1, 5]."""
        side = self.network.side
        if self.settings.rounding:
            pixels = pil_cropped(vlm.squared(rounded(frames), CLIP_MEAN), side)
        else:
            pixels = cropped(vlm.squared(frames, CLIP_MEAN), side)
        before, after = (part.to(frames.device) for part in self.question)
        return opinion(self.network(before, normalized(pixels), after)[:, self.words])


def opinion(logits: Tensor) -> Tensor:
    """Logits of WORDS (n, 5) -> their softmax against 5, 4, 3, 2, 1: (n,) fp32 in [1, 5]."""
    return logits.float().softmax(-1) @ torch.arange(5.0, 0.0, -1.0, device=logits.device)


def _tokens(folder: Path) -> tuple[list[int], list[list[int]]]:
    """Ids of the five words, and of the question before (with <s>) and after the picture."""
    from transformers import LlamaTokenizer

    tokenize = tokenizer(LlamaTokenizer, str(folder), reward="deqa")
    start = tokenize.bos_token_id

    def ids(text: str) -> list[int]:
        found = tokenize(text, add_special_tokens=False)["input_ids"]
        return found[1:] if found[:1] == [start] else found

    words = [ids(word)[0] for word in WORDS]
    if len(set(words)) != len(WORDS):
        raise ValueError(
            f"{folder}: the tokenizer gives {', '.join(WORDS)} the first tokens {words}, which are"
            " not five different ones"
        )
    before, after = QUESTION
    return words, [[start, *ids(before)], ids(after)]


# --- the network


class Owl(nn.Module):
    """mPLUG-Owl2: a CLIP-like tower, an abstractor of 64 queries, and LLaMA with two-way weights.

    Key names are those of the checkpoint.
    """

    def __init__(self, config: Mapping[str, Any]):
        super().__init__()
        vision = SimpleNamespace(**config["visual_config"]["visual_model"])
        queries = SimpleNamespace(**config["visual_config"]["visual_abstractor"])
        self.side = vision.image_size
        self.model = _two_way_llama(config)
        llama = self.model.config
        places = (vision.image_size // vision.patch_size) ** 2 + 1
        self.model.vision_model = Tower(vision)
        self.model.visual_abstractor = Abstractor(queries, places, llama.hidden_size)
        self.lm_head = nn.Linear(llama.hidden_size, llama.vocab_size, bias=False)

    def forward(self, before: Tensor, pixels: Tensor, after: Tensor) -> Tensor:
        """Logits of the next token (n, vocabulary).

        before, after: token ids (L1,), (L2,). pixels: normalised pictures (n, 3, s, s).
        """
        table = self.model.embed_tokens
        seen = self.model.vision_model(pixels.to(table.weight.dtype))
        picture = self.model.visual_abstractor(seen)
        first, last = (table(ids).expand(len(pixels), -1, -1) for ids in (before, after))
        embeddings = torch.cat([first, picture, last], 1)
        place = torch.arange(embeddings.shape[1], device=pixels.device)
        visual = (place >= len(before)) & (place < len(before) + picture.shape[1])
        for module in self.model.modules():
            if isinstance(module, TwoWay):
                module.visual = visual
        states = self.model(inputs_embeds=embeddings, use_cache=False)[0]
        return self.lm_head(states[:, -1])


def _two_way_llama(config: Mapping[str, Any]) -> nn.Module:
    """LLaMA with a second set of norms, keys and values in each layer."""
    from transformers import LlamaConfig, LlamaModel

    not_of_llama = {"model_type", "auto_map", "visual_config", "architectures"}
    not_of_llama |= {"torch_dtype", "dtype", "transformers_version"}
    own = {key: value for key, value in config.items() if key not in not_of_llama}
    llama = LlamaModel(LlamaConfig(**own, attn_implementation="eager"))
    for layer in llama.layers:
        layer.input_layernorm = TwoWay(layer.input_layernorm)
        layer.post_attention_layernorm = TwoWay(layer.post_attention_layernorm)
        layer.self_attn.k_proj = TwoWay(layer.self_attn.k_proj)
        layer.self_attn.v_proj = TwoWay(layer.self_attn.v_proj)
    return llama


class TwoWay(nn.Module):
    """Two copies of a layer: the first for text, the second where `visual` (L,) is true."""

    visual: Tensor

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.multiway = nn.ModuleList([layer, copy.deepcopy(layer)])

    def forward(self, states: Tensor) -> Tensor:
        text, picture = self.multiway
        return torch.where(self.visual[:, None], picture(states), text(states))


class Tower(nn.Module):
    """ViT with a layer norm before and after; states of the class token and all patches."""

    def __init__(self, c: SimpleNamespace):
        super().__init__()
        d, count = c.hidden_size, (c.image_size // c.patch_size) ** 2 + 1
        self.embeddings = nn.Module()
        self.embeddings.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.embeddings.patch_embed = nn.Conv2d(3, d, c.patch_size, c.patch_size, bias=False)
        self.embeddings.position_embedding = nn.Parameter(torch.zeros(1, count, d))
        self.embeddings.pre_layernorm = nn.LayerNorm(d, eps=c.layer_norm_eps)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList([TowerLayer(c) for _ in range(c.num_hidden_layers)])
        self.post_layernorm = nn.LayerNorm(d, eps=c.layer_norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        e = self.embeddings
        patches = e.patch_embed(pixels).flatten(2).transpose(1, 2)
        states = torch.cat([e.cls_token.expand(len(pixels), -1, -1), patches], 1)
        states = e.pre_layernorm(states + e.position_embedding)
        for layer in self.encoder.layers:
            states = layer(states)
        return self.post_layernorm(states)


class TowerLayer(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        d, inner, self.heads = c.hidden_size, c.intermediate_size, c.num_attention_heads
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        self.self_attn.query_key_value, self.self_attn.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(d, inner), nn.Linear(inner, d)
        self.input_layernorm = nn.LayerNorm(d, eps=c.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(d, eps=c.layer_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        mixed = self.self_attn.query_key_value(self.input_layernorm(states))
        # the checkpoint stores query, key and value head by head
        by_head = mixed.unflatten(-1, (self.heads, 3, -1))
        query, key, value = by_head.permute(3, 0, 2, 1, 4)  # (n, heads, L, d / heads) each
        attended = f.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        states = states + self.self_attn.dense(attended)
        inner = self.mlp.fc1(self.post_attention_layernorm(states))
        return states + self.mlp.fc2(inner * torch.sigmoid(1.702 * inner))


class Abstractor(nn.Module):
    """Learned queries that attend to themselves and the tower's states.

    The output is (n, queries + 1, width of the language model).
    """

    def __init__(self, c: SimpleNamespace, places: int, width: int):
        super().__init__()
        self.query_embeds = nn.Parameter(torch.zeros(1, c.num_learnable_queries, c.hidden_size))
        self.vit_eos = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(
            [AbstractorLayer(c, places) for _ in range(c.num_hidden_layers)]
        )
        self.visual_fc = nn.Linear(c.hidden_size, width)

    def forward(self, picture: Tensor) -> Tensor:
        states = self.query_embeds.expand(len(picture), -1, -1)
        for layer in self.encoder.layers:
            states = layer(states, picture)
        return torch.cat([self.visual_fc(states), self.vit_eos.expand(len(picture), -1, -1)], 1)


class AbstractorLayer(nn.Module):
    def __init__(self, c: SimpleNamespace, places: int):
        super().__init__()
        d, inner, self.heads = c.hidden_size, c.intermediate_size, c.num_attention_heads
        own = self.crossattention = nn.Module()
        own.norm1, own.normk = nn.LayerNorm(d), nn.LayerNorm(d)
        attention = own.attention = nn.Module()
        attention.query = nn.Linear(d, d)
        attention.key = nn.Linear(c.encoder_hidden_size, d)
        attention.value = nn.Linear(c.encoder_hidden_size, d)
        # The checkpoint holds these sines, so they are read and not computed.
        attention.register_buffer("q_pos_embed", torch.zeros(c.num_learnable_queries, d))
        attention.register_buffer("k_pos_embed", torch.zeros(places, d))
        output = own.output = nn.Module()
        output.out_proj, output.norm2 = nn.Linear(d, d), nn.LayerNorm(d)
        mlp = output.mlp = nn.Module()
        mlp.w1, mlp.w2, mlp.w3 = nn.Linear(d, inner), nn.Linear(inner, d), nn.Linear(d, inner)
        mlp.ffn_ln = nn.LayerNorm(inner, eps=c.layer_norm_eps)

    def forward(self, states: Tensor, picture: Tensor) -> Tensor:
        own, output = self.crossattention, self.crossattention.output
        states = own.norm1(states)  # the residual starts after this norm
        states = states + output.out_proj(self._attended(states, own.normk(picture)))
        inner, mlp = output.norm2(states), output.mlp
        return states + mlp.w2(mlp.ffn_ln(f.silu(mlp.w1(inner)) * mlp.w3(inner)))

    def _attended(self, states: Tensor, picture: Tensor) -> Tensor:
        """Queries that attend to themselves and the picture -> (n, queries, d)."""
        attention = self.crossattention.attention
        both = torch.cat([states, picture], 1)
        places = torch.cat([attention.q_pos_embed, attention.k_pos_embed])
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (
                attention.query(states + attention.q_pos_embed),
                attention.key(both + places),
                attention.value(both),
            )
        )
        return f.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def load_network(folder: Path, *, dtype: str) -> Owl:
    """The network of a folder like zhiyuanyou/DeQA-Score-Mix3, frozen; every key is checked."""
    config = _config(folder)
    state = {
        key: value
        for key, value in vlm.folder_tensors(folder).items()
        if not key.endswith("rotary_emb.inv_freq")
    }
    with torch.device("meta"):  # a random network of this size would take minutes
        network = Owl(config)
    rotary = type(network.model.rotary_emb)(network.model.config)
    network.to(vlm.DTYPES[dtype]).to_empty(device="cpu")
    network.model.rotary_emb = rotary
    return fill(network, state, path=folder)  # type: ignore[return-value]


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if config.get("model_type") != "mplug_owl2":
        raise ValueError(
            f"reward.deqa.weights={folder}: expected config.json of an mplug_owl2 model (found:"
            f" {config.get('model_type')})"
        )
    return config


REWARD = DeQA
