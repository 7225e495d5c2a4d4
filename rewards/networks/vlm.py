"""Shared parts of the rewards that run a vision-language model through transformers and read it
without generating text.

A reward of this kind takes the hidden state at a special token of the prompt and puts a small head
on it. What follows was checked against MizzenAI/HPSv3, TIGER-AI-Lab/EditReward and
KwaiVGI/VideoAlign, whose forward functions agree on three points that are easily missed:

* The language model gets plain positions 0, 1, 2, ... on all three rotary axes, never Qwen2-VL's
  positions by time, row and column: their forward hands over embeddings without token ids, and
  there transformers counts. Calling the whole model would shift every score.
* The network was trained after `model.to(bfloat16)`, which rounds the rotary frequencies too; so do
  we.
* A picture is resized once: to the sides that `fitted` chooses, by PIL where the reference reads
  files.

Departures: only the special tokens' hidden states go through the head, in fp32 (the references put
every position through it), and prompts that hold a special token are refused, where the references
would read the wrong position or fail in a reshape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as F

from flowrl.data.media import to_uint8
from flowrl.rewards.core.pictures import by_pil, normalized
from flowrl.rewards.core.reward import Settings as Base
from flowrl.rewards.core.weights import fill, tensors

PIXELS = 256 * 28 * 28  # 200,704, the area of a 448 x 448 picture
TOKEN = "<|Reward|>"  # where HPSv3 and EditReward read the score
SUFFIX = (  # what both put after their rubric
    f"\nPlease provide the overall ratings of this image: {TOKEN}\n\nEND\n"
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Settings(Base):
    dtype: Literal["bfloat16", "float16", "float32"] = pydantic.Field(
        "bfloat16", description="Type of the network; the head is fp32."
    )
    rounding: bool = pydantic.Field(
        True, description="Score what a saved PNG would show; false lets the gradient through."
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
    """Frames (n, 3, H, W) in [0, 1] resized to sides of whole 28 pixels and an area of low to high
    pixels, aspect nearly kept.

    by: PIL's bicubic (pictures read from files), torchvision's on bytes (videos), or on floats,
    which a gradient passes.
    """
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    height, width = smart_resize(*frames.shape[-2:], factor=28, min_pixels=low, max_pixels=high)
    if by == "pil":
        return by_pil(
            frames,
            lambda image: F.to_tensor(image.resize((width, height), Image.Resampling.BICUBIC)),
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
    colour = torch.tensor(
        [int(value * 255) / 255 for value in mean], device=frames.device, dtype=frames.dtype
    )
    canvas = colour.view(3, 1, 1).expand(len(frames), 3, side, side).clone()
    canvas[..., top : top + height, left : left + width] = frames
    return canvas


def patches(
    frames: Tensor, *, patch: int = 14, merge: int = 2, temporal: int = 2
) -> tuple[Tensor, Tensor]:
    """One picture or video (T, 3, h, w), normalised -> rows (t * y * x, 3 * temporal * patch^2) as
    Qwen2-VL orders them, and (t, y, x).

    The last frame is repeated until T divides by `temporal`; rows of one merge x merge block are
    neighbours.
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

    backbone: transformers' Qwen2VLModel or Qwen2_5_VLModel. processor: its AutoProcessor, special
    tokens added. tokens: those to read.
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
        merge = self.processor.image_processor.merge_size
        counts = (grid.prod(1) // merge**2).tolist()
        ids, mask, where = self._tokens(texts, [len(sample) for sample in visuals], counts, kind)
        ids, mask, where = ids.to(grid.device), mask.to(grid.device), where.to(grid.device)
        embeddings = self.backbone.get_input_embeddings()(ids)
        found = self.backbone.get_image_features(torch.cat(rows).to(embeddings.dtype), grid)
        features = torch.cat(tuple(getattr(found, "pooler_output", found))).to(embeddings.dtype)
        slots = (ids == self._id(kind))[..., None].expand_as(embeddings)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        states = self.backbone.language_model(
            inputs_embeds=embeddings.masked_scatter(slots, features),
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
        )[0]
        return states.gather(1, where[..., None].expand(-1, -1, states.shape[-1])).float()

    def _patches(self, visual: Tensor) -> tuple[Tensor, Tensor]:
        own = self.processor.image_processor
        pixels = normalized(visual, tuple(own.image_mean), tuple(own.image_std))
        return patches(
            pixels, patch=own.patch_size, merge=own.merge_size, temporal=own.temporal_patch_size
        )

    def _id(self, kind: str) -> int:
        return getattr(self.backbone.config, f"{kind}_token_id")

    def _tokens(
        self, texts: Sequence[str], visuals: Sequence[int], counts: Sequence[int], kind: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ids, mask (B, L), padded on the right, and places of the special tokens (B, K)."""
        tokenizer = self.processor.tokenizer
        pad, counts = tokenizer.convert_ids_to_tokens(self._id(kind)), list(counts)
        filled = []
        for text, number in zip(texts, visuals, strict=True):
            content = [*({"type": kind} for _ in range(number)), {"type": "text", "text": text}]
            chat = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
            parts = chat.split(pad)
            if len(parts) != number + 1:
                raise ValueError(
                    f"a prompt holds {pad}, which is the model's mark for a picture or video; leave"
                    f" it out: {text[-200:]!r}"
                )
            filled.append(
                "".join(
                    part + pad * (counts.pop(0) if i < number else 0)
                    for i, part in enumerate(parts)
                )
            )
        batch = tokenizer(filled, padding=True, return_tensors="pt")
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

    processor = pretrained(AutoProcessor, base, reward=reward, setting=setting)
    processor.tokenizer.padding_side = "right"
    processor.tokenizer.add_tokens(list(tokens), special_tokens=True)
    return processor


def load_vlm(
    base: str,
    state: Mapping[str, Tensor],
    *,
    tokens: Sequence[str],
    dtype: str,
    path: object,
    reward: str,
) -> Vlm:
    """The network that `state` holds (see `backbone_state`), with configuration, tokenizer and chat
    template of `base`.

    The number of embeddings is the checkpoint's: the references cut Qwen's padded table to the
    tokenizer's length.
    """
    from transformers import AutoConfig, Qwen2_5_VLModel, Qwen2VLModel

    config = pretrained(AutoConfig, base, reward=reward)
    kinds = {"qwen2_vl": Qwen2VLModel, "qwen2_5_vl": Qwen2_5_VLModel}
    if config.model_type not in kinds:
        raise ValueError(
            f"reward.{reward}.base={base} is a {config.model_type}; expected one of"
            f" {', '.join(kinds)}"
        )
    processor = processor_of(base, reward=reward, tokens=tokens)
    table = state.get("language_model.embed_tokens.weight")
    if table is not None:
        config.text_config.vocab_size = len(table)
        last = max(processor.tokenizer.convert_tokens_to_ids(list(tokens)))
        if last >= len(table):
            raise ValueError(
                f"{path} has {len(table)} embeddings, and {tokens[-1]} is token {last} of {base}:"
                f" they do not belong together; set reward.{reward}.base to the model that the"
                " checkpoint was tuned from"
            )
    backbone = from_state(kinds[config.model_type], config, state, dtype=dtype, path=path)
    return Vlm(backbone, processor, tokens)


def from_state(
    cls: Any, config: Any, state: Mapping[str, Tensor], *, dtype: str, path: object
) -> Any:
    """A transformers model of class cls with the tensors of state, frozen, in eval mode; every key
    is checked.

    transformers loads it, rather than we, because it does without a random network first and leaves
    no buffer unset.
    """
    with torch.device("meta"):
        fill(cls(config), {key: value.to("meta") for key, value in state.items()}, path=path)
    model = cls.from_pretrained(None, config=config, state_dict=dict(state), dtype=DTYPES[dtype])
    return model.to(DTYPES[dtype]).eval().requires_grad_(False)


def backbone_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys of Qwen2VLModel out of a whole checkpoint; language head and reward heads are left
    out.

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
    """The head under `prefix` of a checkpoint, fp32: hidden -> 1024 -> 16 -> (mu, log sigma), ReLU
    between, sizes as found there."""
    own = {
        key.removeprefix(prefix): value.float()
        for key, value in state.items()
        if key.startswith(prefix)
    }
    if own.keys() != {f"{layer}.{part}" for layer in (0, 3, 5) for part in ("weight", "bias")}:
        raise ValueError(
            f"{path} holds no head {prefix}0, {prefix}3, {prefix}5 (found:"
            f" {', '.join(sorted(own)) or 'nothing'})"
        )
    first, second, last = (nn.Linear(*own[f"{layer}.weight"].shape[::-1]) for layer in (0, 3, 5))
    return fill(
        nn.Sequential(first, nn.ReLU(), nn.Dropout(0.05), second, nn.ReLU(), last), own, path=path
    )  # type: ignore[return-value]


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's .safetensors files, else of its .bin files; none -> ValueError."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    if not files:
        raise ValueError(f"{folder} holds no weights: neither .safetensors nor .bin files")
    return {key: value for file in files for key, value in tensors(file).items()}


def pretrained(
    auto: Any, source: str, *, reward: str, setting: str = "base", **options: Any
) -> Any:
    """auto.from_pretrained(source, ...), from a folder or the hub; ValueError that says what to
    fetch and where to put it."""
    try:
        return auto.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward.{reward}.{setting}={source}: {auto.__name__} finds no such model there"
            f" ({str(error).splitlines()[0]}); download it from https://huggingface.co/{source} and"
            f" set reward.{reward}.{setting}=/path/to/the folder"
        ) from error
