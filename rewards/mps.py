"""MPS, the multi-dimensional preference score (Zhang et al., CVPR 2024).

The network is CLIP-H, and its picture tokens attend to the prompt's tokens. References:
github.com/Kwai-Kolors/MPS at be9027f (eval_overall_mps_on_hpdv2.py) and its state-dict conversion
in EasyAnimate (easyanimate/reward/MPS). A fixed condition sentence says which words of the prompt
count: a token counts if its similarity to the condition is more than `threshold` of that of the
prompt's most similar token. The score is exp(logit_scale) * cosine of prompt and fused picture.

Differences: the reference divides similarities by the maximum over the whole call, so that its
scores depend on batch mates; here each prompt has its own maximum, which is the reference called
with one prompt. fp32 unless `dtype` says otherwise (reference: fp16); rotary angles are always fp32
(the reference's are off by up to 0.1 radian). With rounding=False pictures are resized as tensors;
EasyAnimate's differentiable path stretches them to 224 x 224 and drops the logit scale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from flowrl.rewards.core.pictures import cropped, normalized, pil_cropped, rated
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.sizes import WIDTH
from flowrl.rewards.core.tokens import warn_cut
from flowrl.rewards.core.weights import fill, path_of, template, tensors
from flowrl.types import MediaContext

HEADS = 16  # attention heads in each layer of both towers of CLIP-H
NUMBERS = 1_104_614_913  # number of weights in CLIP-H and 4 layers of cross attention
CONDITION = "b9d60155529e0ad3"  # first digits of the sha256 of the overall condition, 182 bytes
ORIGIN = "the condition sentence in eval_overall_mps_on_hpdv2.py of github.com/Kwai-Kolors/MPS"
WHERE = (
    "https://pai-aigc-photog.oss-cn-hangzhou.aliyuncs.com/easyanimate/Third_Party/MPS_overall.pth"
)


class Settings(PictureSettings):
    weights: str | None = pydantic.Field(
        None, description="Weights: MPS_overall.pth, the state dict, or the folder that holds it."
    )
    tokenizer: str = pydantic.Field(
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        description="CLIP-H's tokenizer.json, a folder with it, or a hub id.",
    )
    condition: str | None = pydantic.Field(
        None,
        description="Text file with the condition sentence of the reference's evaluation script.",
    )
    threshold: float = pydantic.Field(
        0.3,
        ge=0,
        lt=1,
        description=(
            "Relative similarity above which a word counts: 0.3 in the evaluation scripts, 0.01 in"
            " training."
        ),
    )
    dtype: Literal["float32", "float16", "bfloat16"] = pydantic.Field(
        "float32", description="Type of the network's numbers; the reference uses float16."
    )
    chunk: int = pydantic.Field(32, ge=1, description="Most pictures in one forward.")


class Mps(Reward):
    """exp(logit scale), about 100, times a cosine: about 5 to 15.

    Two pictures of one prompt compare by the softmax of their scores.
    """

    Settings = Settings
    name = "mps"
    scale = "about 100 times the cosine of prompt and fused picture: about 5 to 15"
    quality = True
    reads_prompt = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        if s.weights is None:
            raise ValueError(
                f"reward mps needs MPS_overall.pth: download {WHERE} and set"
                " reward.mps.weights=/path/to/MPS_overall.pth"
            )
        path = path_of(s.weights, "MPS_overall.pth", reward="mps")
        condition = template(
            s.condition, sha256=CONDITION, reward="mps", setting="condition", origin=ORIGIN
        )
        self.tokenizer = load_tokenizer(s.tokenizer)
        self.model = load_network(path).to(getattr(torch, s.dtype))
        self.condition = self._tokens([condition])

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        return NUMBERS * WIDTH[settings.dtype]

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        # each prompt is read once: its words, the whole sentence, and which words count
        distinct = list(dict.fromkeys(prompts))
        words, sentences, counts = self._read(self._tokens(distinct).to(media.device))
        # row of each sample's prompt among these
        index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=media.device)
        scale = self.model.clip.logit_scale.float().exp()

        def rate(frames: Tensor, samples: Tensor) -> Tensor:
            rows = index[samples]
            fused = self.model.fuse(self._pixels(frames), words[rows], counts[rows])
            return scale * F.cosine_similarity(fused.float(), sentences[rows].float())

        return rated(self, media, rate)

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read ids (P, 77) -> words (P, 77, d), sentences (P, d), which words count (P, 77)."""
        condition, _ = self.model.words(self.condition.to(ids.device))
        chunks = map(self.model.words, ids.split(self.settings.chunk))
        words, sentences = (torch.cat(found) for found in zip(*chunks, strict=True))
        return words, sentences, counted(words, condition[0], self.settings.threshold)

    def _pixels(self, frames: Tensor) -> Tensor:
        resize = pil_cropped if self.settings.rounding else cropped
        return normalized(resize(frames, self.model.side, floor=True))

    def expect(self, prompts: Sequence[str]) -> None:
        self._encoded(list(dict.fromkeys(prompts)), known=True)

    def _encoded(self, texts: list[str], *, known: bool = False) -> list[list[int]]:
        """Tokens of each text between start and end, uncut."""
        found = [encoding.ids for encoding in self.tokenizer.encode_batch(texts)]
        warn_cut("mps", [len(ids) for ids in found], self.model.length, known=known)
        return found

    def _tokens(self, texts: list[str]) -> Tensor:
        """Token ids (B, 77): start, text, end; cut so that the end token stays, and padded with
        it."""
        found, length = self._encoded(texts), self.model.length
        cut = [ids if len(ids) <= length else [*ids[: length - 1], ids[-1]] for ids in found]
        return torch.tensor([ids + ids[-1:] * (length - len(ids)) for ids in cut])


def load_tokenizer(source: str) -> Tokenizer:
    """CLIP-H's tokenizer, which neither pads nor cuts."""
    file = path_of(source, "tokenizer.json", reward="mps", setting="tokenizer")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def load_network(path: Path) -> MpsNetwork:
    """The network of a state dict in the reference's names, frozen, in eval mode."""
    state = renamed(tensors(path))
    try:
        network = MpsNetwork(state)
    except KeyError as error:  # sizes are read off the tensors
        raise ValueError(
            f"{path} is not a state dict of MPS: it has no {error.args[0]}; {WHERE} is one"
        ) from error
    ignore = tuple(f"clip.{tower}_model.embeddings.position_ids" for tower in ("text", "vision"))
    return fill(network, state, path=path, ignore=ignore)


def counted(words: Tensor, condition: Tensor, threshold: float) -> Tensor:
    """Which tokens of a prompt count: words (B, L, d), condition (M, d) -> (B, L) bool.

    The most similar token always counts.
    """
    similarity = (words @ condition.T).amax(2)
    return similarity / similarity.amax(1, keepdim=True) > threshold


class MpsNetwork(nn.Module):
    """CLIP with all tokens projected, and layers in which picture tokens attend to words."""

    def __init__(self, state: Mapping[str, Tensor]):
        """state: tensors under this module's names (see renamed), which give the sizes."""
        super().__init__()
        from transformers import CLIPConfig, CLIPModel

        dim = len(state["clip.text_projection.weight"])
        text, vision = _text_sizes(state, dim), _vision_sizes(state, dim)
        self.length, self.side = text["max_position_embeddings"], vision["image_size"]
        self.clip = CLIPModel(
            CLIPConfig(text_config=text, vision_config=vision, projection_dim=dim)
        )
        layers = {key.split(".")[1] for key in state if key.startswith("cross.")}
        self.cross = nn.ModuleList(Layer(state, f"cross.{i}.") for i in range(len(layers)))

    def words(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Project every token of ids (B, L) -> (B, L, d), and the token of the text's end (B,
        d)."""
        tokens = self.clip.text_projection(self.clip.text_model(input_ids=ids).last_hidden_state)
        ends = ids.argmax(1)  # first place of the end token, which has the highest id
        return tokens, tokens[torch.arange(len(ids), device=ids.device), ends]

    def fuse(self, pixels: Tensor, words: Tensor, counts: Tensor) -> Tensor:
        """The picture's class token after attending to the words that count -> (n, d).

        pixels (n, 3, side, side), words (n, L, d), counts (n, L).
        """
        # CLIP's LayerNorm before its projection is left out, as in the reference
        states = self.clip.vision_model(pixel_values=pixels.to(words.dtype)).last_hidden_state
        tokens = self.clip.visual_projection(states)
        for layer in self.cross:
            tokens = layer(tokens, words, counts)
        return tokens[:, 0]


def _text_sizes(state: Mapping[str, Tensor], dim: int) -> dict[str, Any]:
    """The text tower's configuration; dim: width to which both towers are projected."""
    embeddings = "clip.text_model.embeddings"
    vocabulary, width = state[f"{embeddings}.token_embedding.weight"].shape
    length = len(state[f"{embeddings}.position_embedding.weight"])
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": length}
    return _tower_sizes(state, "text", width, dim) | sizes


def _vision_sizes(state: Mapping[str, Tensor], dim: int) -> dict[str, Any]:
    """The picture tower's configuration; dim: width to which both towers are projected."""
    embeddings = "clip.vision_model.embeddings"
    width, *_, patch = state[f"{embeddings}.patch_embedding.weight"].shape
    # one position belongs to the class token
    patches = len(state[f"{embeddings}.position_embedding.weight"]) - 1
    sizes = {"image_size": round(patches**0.5) * patch, "patch_size": patch}
    return _tower_sizes(state, "vision", width, dim) | sizes


def _tower_sizes(state: Mapping[str, Tensor], tower: str, width: int, dim: int) -> dict[str, Any]:
    """The part that the configurations of both towers share."""
    prefix = f"clip.{tower}_model.encoder.layers."
    layers = {key.split(".")[4] for key in state if key.startswith(prefix)}
    return {
        "hidden_size": width,
        "intermediate_size": len(state[f"{prefix}0.mlp.fc1.weight"]),
        "num_hidden_layers": len(layers),
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
        "projection_dim": dim,
    }


class Layer(nn.Module):
    """Cross attention to the words, then self attention, each beside its feed-forward.

    All heads share one key and value, as in PaLM.
    """

    def __init__(self, state: Mapping[str, Tensor], prefix: str):
        super().__init__()
        inner, dim = state[f"{prefix}attend.to_q.weight"].shape
        head = len(state[f"{prefix}attend.to_kv.weight"]) // 2
        hidden = state[f"{prefix}attend.ff.2.weight"].shape[1]
        attend = {
            "norm": nn.LayerNorm(dim),
            "to_q": _linear(dim, inner),
            "to_kv": _linear(dim, 2 * head),
            "to_out": _linear(inner, dim),
            "ff": nn.Sequential(_linear(dim, 2 * hidden), SwiGlu(), _linear(hidden, dim)),
        }
        self.parts = (inner, head, head, 2 * hidden)
        block = {
            "norm": nn.LayerNorm(dim),
            "fused_attn_ff_proj": _linear(dim, sum(self.parts)),
            "attn_out": _linear(inner, dim),
            "ff_out": nn.Sequential(SwiGlu(), _linear(hidden, dim)),
        }
        self.attend, self.block = nn.ModuleDict(attend), nn.ModuleDict(block)

    def forward(self, x: Tensor, words: Tensor, counts: Tensor) -> Tensor:
        """Attend from x (n, tokens, d) to words (n, L, d) that count (n, L) -> (n, tokens, d)."""
        a, b = self.attend, self.block
        normal = a["norm"](x)
        key, value = a["to_kv"](words).chunk(2, dim=-1)
        seen = _attention(a["to_q"](normal), key, value, counts[:, None, None])
        x = x + a["to_out"](seen) + a["ff"](normal)
        query, key, value, ff = b["fused_attn_ff_proj"](b["norm"](x)).split(self.parts, dim=-1)
        query, key = self._turned(query), self._turned(key)
        return x + b["attn_out"](_attention(query, key, value)) + b["ff_out"](ff)

    def _turned(self, x: Tensor) -> Tensor:
        """x (n, tokens, heads * head) with rotary positions (arXiv:2104.09864).

        The pairs that turn are the halves of a head, not neighbours.
        """
        head = self.parts[1]
        heads = x.unflatten(2, (-1, 2, head // 2))
        # fp32 whatever the network's type: bf16 would turn the 257th token half a radian wrongly
        even = torch.arange(0, head, 2, device=x.device, dtype=torch.float32)
        frequency = 10000.0 ** -(even / head)
        angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None] * frequency
        cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
        first, second = heads.unbind(3)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.stack(turned, dim=3).flatten(2)


class SwiGlu(nn.Module):
    """silu(second half) * first half (arXiv:2002.05202)."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of query (n, q, heads * head) to one key and value (n, k, head), which all heads
    share -> (n, q, heads * head)."""
    heads = query.unflatten(2, (-1, key.shape[-1])).transpose(1, 2)
    key, value = (one[:, None].expand(-1, heads.shape[1], -1, -1) for one in (key, value))
    out = F.scaled_dot_product_attention(heads, key, value, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's state dict (model.*, cross_model.layers.I.{0,1}.fn.*) in Network's names.

    Rotary frequencies are left out: Network computes them.
    """
    out = {}
    for key, value in state.items():
        if re.fullmatch(r"cross_model\.layers\.\d+\.1\.fn\.rotary_emb\.inv_freq", key):
            continue
        key = re.sub(r"^model\.", "clip.", key)
        key = re.sub(r"^cross_model\.layers\.(\d+)\.0\.fn\.", r"cross.\1.attend.", key)
        out[re.sub(r"^cross_model\.layers\.(\d+)\.1\.fn\.", r"cross.\1.block.", key)] = value
    return out


REWARD = Mps
