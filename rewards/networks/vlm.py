"""Shared parts of rewards that read a vision-language model without generating text.

A reward of this kind takes the hidden state at a special token of the prompt and puts a small head
on it. This file was checked against MizzenAI/HPSv3, TIGER-AI-Lab/EditReward and KwaiVGI/VideoAlign,
whose forward functions agree on three points that are easily missed:

* The language model gets plain positions 0, 1, 2, ... on all three rotary axes, never Qwen2-VL's
  positions by time, row and column: given embeddings without token ids, transformers counts.
  Calling the whole model would shift every score.
* The network was trained after `model.to(bfloat16)`, which rounds the rotary frequencies too, as
  here.
* A picture is resized once: to the sides that `fitted` chooses, by PIL where the reference reads
  files.

Departures: only the special tokens' hidden states go through the head, in fp32 (the references put
every position through it), and prompts that hold a special token are refused, where the references
would read the wrong position or fail in a reshape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from flowrl.data.media import to_uint8
from flowrl.rewards.core.pictures import by_pil, normalized
from flowrl.rewards.core.settings import PictureSettings
from flowrl.rewards.core.weights import fill, from_folder_or_hub, tensors

PIXELS = 256 * 28 * 28  # 200,704, the area of a 448 x 448 picture
TOKEN = "<|Reward|>"  # token at which HPSv3 and EditReward read the score
SUFFIX = (  # text that both put after their rubric
    f"\nPlease provide the overall ratings of this image: {TOKEN}\n\nEND\n"
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


Tuned = Annotated[  # setting `base` of a reward whose network is such a model, tuned
    str,
    pydantic.Field(
        description="Configuration, tokenizer and chat template of the tuned model; no weights."
    ),
]


class Settings(PictureSettings):
    dtype: Literal["bfloat16", "float16", "float32"] = pydantic.Field(
        "bfloat16", description="Type of the network's numbers; the head is fp32."
    )
    chunk: int = pydantic.Field(8, ge=1, description="Most samples in one forward.")


# --- pictures


def fitted(
    frames: Tensor,
    *,
    low: int = PIXELS,
    high: int = PIXELS,
    by: Literal["pil", "bytes", "float"] = "pil",
) -> Tensor:
    """Frames (n, 3, H, W) in [0, 1], resized to an area of low to high pixels, aspect nearly kept.

    Sides are multiples of 28 pixels. by: PIL's bicubic (pictures read from files), torchvision's on
    bytes (videos), or on floats, which a gradient passes.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(*frames.shape[-2:], factor=28, min_pixels=low, max_pixels=high)
    if by == "pil":
        size = (width, height)
        return by_pil(
            frames, lambda image: F.to_tensor(image.resize(size, Image.Resampling.BICUBIC))
        )
    pixels = to_uint8(frames) if by == "bytes" else frames
    resized = F.resize(pixels, [height, width], InterpolationMode.BICUBIC, antialias=True)
    return resized.float() / 255 if by == "bytes" else resized.clamp(0, 1)


def squared(frames: Tensor, mean: Sequence[float]) -> Tensor:
    """Frames (n, 3, H, W) centred on a square of the mean colour (truncated to bytes), as LLaVA's
    `expand2square`."""
    height, width = frames.shape[-2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    levels = [int(value * 255) / 255 for value in mean]
    colour = torch.tensor(levels, device=frames.device, dtype=frames.dtype)
    canvas = colour.view(3, 1, 1).expand(len(frames), 3, side, side).clone()
    canvas[..., top : top + height, left : left + width] = frames
    return canvas


def patches(
    frames: Tensor, *, patch: int = 14, merge: int = 2, temporal: int = 2
) -> tuple[Tensor, Tensor]:
    """Patches of one picture or video (T, 3, h, w), normalised, as Qwen2-VL orders them.

    The result is rows (t * y * x, 3 * temporal * patch^2), and (t, y, x). The last frame is
    repeated until T is divisible by `temporal`; rows of one merge x merge block are neighbours.
    """
    if missing := -len(frames) % temporal:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    t, y, x = len(frames) // temporal, frames.shape[-2] // patch, frames.shape[-1] // patch
    cells = frames.reshape(t, temporal, 3, y // merge, merge, patch, x // merge, merge, patch)
    rows = cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * y * x, 3 * temporal * patch**2)
    return rows, torch.tensor([t, y, x], device=frames.device)


# --- the network


class Vlm(nn.Module):
    """A Qwen2-VL or Qwen2.5-VL network without its language head, read at special tokens.

    backbone: transformers' Qwen2VLModel or Qwen2_5_VLModel. processor: its AutoProcessor with the
    special tokens. tokens: the special tokens that are read.
    """

    def __init__(self, backbone: Any, processor: Any, tokens: Sequence[str]):
        super().__init__()
        self.backbone, self.processor, self.tokens = backbone, processor, tuple(tokens)

    def hidden(
        self,
        visuals: Sequence[Sequence[Tensor]],
        texts: Sequence[str],
        kind: Literal["image", "video"] = "image",
    ) -> Tensor:
        """Last hidden states at the special tokens -> (B, K, d) fp32, in the order of `tokens`.

        visuals: for each of B samples its pictures, (T, 3, h, w) in [0, 1] with sides of whole 28
        pixels. texts: B user turns that follow them. A text must hold each special token once.
        """
        rows, grids = zip(
            *(self._patches(visual) for sample in visuals for visual in sample), strict=True
        )
        grid = torch.stack(grids)
        counts = (grid.prod(1) // self.processor.image_processor.merge_size**2).tolist()
        filled = self._filled(texts, [len(sample) for sample in visuals], counts, kind)
        ids, mask, where = (found.to(grid.device) for found in self._tokens(filled))
        embeddings = self.backbone.get_input_embeddings()(ids)
        found = self.backbone.get_image_features(torch.cat(rows).to(embeddings.dtype), grid)
        features = torch.cat(tuple(getattr(found, "pooler_output", found))).to(embeddings.dtype)
        slots = (ids == self._id(kind))[..., None].expand_as(embeddings)
        states = self._read(embeddings.masked_scatter(slots, features), mask)
        return states.gather(1, where[..., None].expand(-1, -1, states.shape[-1])).float()

    def _read(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states (B, L, d) of the language model, at positions 0, 1, 2, ..."""
        batch, length, _ = embeddings.shape
        positions = torch.arange(length, device=embeddings.device).expand(3, batch, length)
        return self.backbone.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, use_cache=False
        )[0]

    def _patches(self, visual: Tensor) -> tuple[Tensor, Tensor]:
        own = self.processor.image_processor
        pixels = normalized(visual, tuple(own.image_mean), tuple(own.image_std))
        return patches(
            pixels, patch=own.patch_size, merge=own.merge_size, temporal=own.temporal_patch_size
        )

    def _id(self, kind: str) -> int:
        return getattr(self.backbone.config, f"{kind}_token_id")

    def _filled(
        self, texts: Sequence[str], visuals: Sequence[int], counts: Sequence[int], kind: str
    ) -> list[str]:
        """Chats of texts (B,), in which each of a sample's visuals has as many pads as tokens.

        visuals: how many each sample has. counts: tokens of each, of all samples in a row.
        """
        pad = self.processor.tokenizer.convert_ids_to_tokens(self._id(kind))
        left, out = iter(counts), []
        for text, number in zip(texts, visuals, strict=True):
            parts = self._chat(text, number, kind).split(pad)
            if len(parts) != number + 1:
                raise ValueError(
                    f"a prompt holds {pad}, which is the model's mark for a picture or video; leave"
                    f" it out: {text[-200:]!r}"
                )
            before = [part + pad * next(left) for part in parts[:-1]]
            out.append("".join([*before, parts[-1]]))
        return out

    def _chat(self, text: str, visuals: int, kind: str) -> str:
        """A user turn of so many visuals and a text, by the model's template."""
        content = [*({"type": kind} for _ in range(visuals)), {"type": "text", "text": text}]
        turn = {"role": "user", "content": content}
        return self.processor.apply_chat_template(
            [turn], tokenize=False, add_generation_prompt=True
        )

    def _tokens(self, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and mask (B, L), padded on the right, and places of the special tokens (B,
        K)."""
        tokenizer = self.processor.tokenizer
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        special = torch.tensor(tokenizer.convert_tokens_to_ids(list(self.tokens)))
        at = batch["input_ids"][:, None, :] == special[:, None]  # (B, K, L)
        if not bool((at.sum(2) == 1).all()):
            raise ValueError(
                f"a prompt holds one of the tokens {', '.join(self.tokens)}, where the score is"
                " read; leave them out"
            )
        return batch["input_ids"], batch["attention_mask"], at.int().argmax(2)


def processor_of(
    base: str, *, reward: str, setting: str = "base", tokens: Sequence[str] = ()
) -> Any:
    """The AutoProcessor in a folder or of a hub's repository, padding on the right, with special
    tokens added."""
    from transformers import AutoProcessor

    load = AutoProcessor.from_pretrained
    processor = from_folder_or_hub(load, base, reward=reward, setting=setting)
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.add_tokens(list(tokens), special_tokens=True)
    return processor


def load_vlm(
    base: str,
    state: Mapping[str, Tensor],
    *,
    tokens: Sequence[str] = (TOKEN,),
    dtype: str,
    path: object,
    reward: str,
) -> Vlm:
    """The network that `state` holds (see `backbone_state`), with configuration, tokenizer and chat
    template of `base`."""
    from transformers import AutoConfig

    load = AutoConfig.from_pretrained
    config = from_folder_or_hub(load, base, reward=reward, setting="base")
    cls = _backbone_class(config.model_type, f"reward.{reward}.base={base}")
    processor = processor_of(base, reward=reward, tokens=tokens)
    table = state.get("language_model.embed_tokens.weight")
    if table is not None:
        # The size is the checkpoint's: the references cut Qwen's padded table to the tokenizer's
        # length.
        config.text_config.vocab_size = len(table)
        last = max(processor.tokenizer.convert_tokens_to_ids(list(tokens)))
        if last >= len(table):
            raise ValueError(
                f"{path} has {len(table)} embeddings, and {tokens[-1]} is token {last} of {base}:"
                f" they do not belong together; set reward.{reward}.base to the model that the"
                " checkpoint was tuned from"
            )
    backbone = from_state(cls, config, state, dtype=dtype, path=path)
    return Vlm(backbone, processor, tokens)


def _backbone_class(kind: str, given: str) -> Any:
    """Class of the network without its language head, by transformers' model_type; ValueError for
    other types."""
    from transformers import Qwen2_5_VLModel, Qwen2VLModel

    kinds = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel}
    if kind not in kinds:
        raise ValueError(f"{given} is a {kind}; expected one of {', '.join(kinds)}")
    return kinds[kind]


def from_state(
    cls: Any, config: Any, state: Mapping[str, Tensor], *, dtype: str, path: object
) -> Any:
    """A transformers model of class cls with the tensors of state, frozen, in eval mode.

    Every key is checked. transformers loads it, rather than we, because it makes no random network
    first and leaves no buffer unset.
    """
    with torch.device("meta"):
        fill(cls(config), {key: value.to("meta") for key, value in state.items()}, path=path)
    model = cls.from_pretrained(None, config=config, state_dict=dict(state), dtype=DTYPES[dtype])
    return model.to(DTYPES[dtype]).eval().requires_grad_(False)


def backbone_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys of Qwen2VLModel out of a whole checkpoint, without language head and reward heads.

    transformers < 4.52 wrote visual.* and model.*; later versions model.visual.* and
    model.language_model.*.
    """
    out = {}
    for key, value in state.items():
        if key.startswith("visual."):
            out[key] = value
        elif key.startswith(("model.visual.", "model.language_model.")):
            out[key.removeprefix("model.")] = value
        elif key.startswith("model."):
            out[f"language_model.{key.removeprefix('model.')}"] = value
    return out


def ranknet(state: Mapping[str, Tensor], prefix: str, *, path: object) -> nn.Sequential:
    """The head under `prefix` of a checkpoint, fp32: hidden -> 1024 -> 16 -> (mu, log sigma).

    ReLU stands between the layers; their sizes are those of the checkpoint.
    """
    named = {key: value for key, value in state.items() if key.startswith(prefix)}
    own = {key.removeprefix(prefix): value.float() for key, value in named.items()}
    if own.keys() != {f"{layer}.{part}" for layer in (0, 3, 5) for part in ("weight", "bias")}:
        found = ", ".join(sorted(own)) or "nothing"
        raise ValueError(f"{path} holds no head {prefix}0, {prefix}3, {prefix}5 (found: {found})")
    first, second, last = (nn.Linear(*own[f"{layer}.weight"].shape[::-1]) for layer in (0, 3, 5))
    layers = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.05), second, nn.ReLU(), last)
    return fill(layers, own, path=path)  # type: ignore[return-value]


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's .safetensors files, else of its .bin files; none -> ValueError."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise ValueError(f"{folder} holds no weights: neither .safetensors nor .bin files")
    return {key: value for file in files for key, value in tensors(file).items()}
