"""VQAScore (arXiv:2404.01291): the probability that a model answers "Yes" when asked whether the
picture shows the prompt.

Reference: github.com/linzhiqiu/t2v_metrics. Two variants, whose values are not comparable:

`clip-flant5` (the paper's, `clip_t5_model.py` of the releases before 3.0): FlanT5 reads 576
projected CLIP-L/14-336 patches in the middle of a chat, and the score is exp(-mean cross-entropy of
the answer's tokens, "Yes" and the end token). transformers has no class for it, so T5, the CLIP
tower and the two-layer projector are put together here. Kept from the reference: each half of the
chat ends with T5's end token (the tokenizer adds it twice), and the padding token is the unknown
one, so that characters that T5 does not know are masked out. The tower is taken from its own
repository: the reference never trains it, and copies of it in a checkpoint are not read.

`qwen` (`qwen2vl_model.py` since 3.0): the probability of "Yes" as the first word of the reply of a
Qwen2-VL or Qwen2.5-VL model, over its whole vocabulary. The reference reads it from `generate`,
where Qwen2.5's repetition penalty of 1.05 also acts on words of the prompt; here it is the plain
softmax. This variant gives no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
from torch import Tensor, nn
from torch.nn import functional as f

from flowrl.data.media import to_pil
from flowrl.rewards.core import pictures as core_pictures
from flowrl.rewards.core.pictures import (
    CLIP_MEAN,
    cropped,
    frames_of,
    mean_of_frames,
    normalized,
    pil_cropped,
    rounded,
)
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.tokens import warn_cut
from flowrl.rewards.core.weights import fill, network, path_of, tokenizer
from flowrl.rewards.networks import vlm
from flowrl.types import MediaContext

# The chat that FlanT5 was tuned with (Vicuna's): before the picture, and after it with the
# question.
START = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. USER: "
)
END = "\n{} ASSISTANT: "
QUESTIONS = {
    "clip-flant5": 'Does this figure show "{}"? Please answer yes or no.',
    "qwen": 'Does this image show "{}"?',
}
WEIGHTS = {"clip-flant5": "zhiqiulin/clip-flant5-xxl", "qwen": "Qwen/Qwen2.5-VL-7B-Instruct"}
LIMIT = 2048  # tokens that the reference keeps of a question
OTHERS = {
    "clip-flant5": {"max_pixels"},
    "qwen": {"tokenizer", "tower"},
}  # settings that a model does not read


class Settings(vlm.Settings):
    model: Literal["clip-flant5", "qwen"] = pydantic.Field(
        "clip-flant5", description="The paper's model, or a Qwen-VL chat model."
    )
    weights: str | None = pydantic.Field(
        None,
        description=(
            f"Folder or hub repository; null: {WEIGHTS['clip-flant5']} (-xl is smaller) or"
            f" {WEIGHTS['qwen']}."
        ),
    )
    tokenizer: str = pydantic.Field(
        "google/flan-t5-xxl", description="Tokenizer of clip-flant5: a folder or hub repository."
    )
    tower: str = pydantic.Field(
        "openai/clip-vit-large-patch14-336",
        description="CLIP tower of clip-flant5: a folder or hub repository.",
    )
    question: str | None = pydantic.Field(
        None, description="What is asked, {} for the prompt; null: the model's own question."
    )
    answer: str = pydantic.Field(
        "Yes",
        min_length=1,
        description="The answer whose probability is the score; qwen: one token.",
    )
    max_pixels: int = pydantic.Field(
        16384 * 28 * 28,
        ge=28 * 28,
        description="Largest area that qwen sees; larger pictures are reduced.",
    )

    @pydantic.field_validator("question")
    @classmethod
    def _one_place(cls, value: str | None) -> str | None:
        if value is not None and value.count("{}") != 1:
            raise ValueError("it must hold {} once, where the prompt goes")
        return value


class VQAScore(Reward):
    """Probability of the answer "Yes" to whether the picture shows the prompt, 0 to 1; of a video,
    the mean over frames."""

    Settings = Settings
    name = "vqascore"
    scale = 'probability of the answer "Yes" to whether the picture shows the prompt, 0 to 1'
    range = (0.0, 1.0)
    reads_prompt = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        if foreign := sorted(OTHERS[s.model] & s.model_fields_set):
            raise ValueError(
                f"vqascore with model={s.model} does not read {', '.join(foreign)}; leave out what"
                " is of the other model"
            )
        if s.model == "qwen" and not s.rounding:
            raise ValueError(
                "vqascore with model=qwen always rounds pictures; leave rounding=False out, or load"
                " it with model=clip-flant5"
            )
        self.model = ClipT5(s) if s.model == "clip-flant5" else Qwen(s)
        self.question = s.question or QUESTIONS[s.model]
        self.differentiable = s.model == "clip-flant5" and not s.rounding

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        if self.settings.model == "qwen" and media.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "vqascore with model=qwen gives no gradient; load it with model=clip-flant5,"
                " rounding=False"
            )
        core_pictures.refuse_gradient(self, media)
        frames = frames_of(media)
        questions = [
            question
            for question in self._asked(prompts)
            for _ in range(len(frames) // len(prompts))
        ]
        return mean_of_frames(self.answer(frames, questions), media)

    def expect(self, prompts: Sequence[str]) -> None:
        self._warn_cut(self._asked(prompts), known=True)

    def _asked(self, prompts: Sequence[str]) -> list[str]:
        before, after = self.question.split("{}")
        return [before + prompt + after for prompt in prompts]

    def _warn_cut(self, questions: Sequence[str], *, known: bool = False) -> None:
        if isinstance(self.model, ClipT5):
            warn_cut(
                "vqascore", self.model.lengths(list(dict.fromkeys(questions))), LIMIT, known=known
            )

    def answer(self, media: Tensor, questions: Sequence[str]) -> Tensor:
        """A question about each of (n, 3, H, W) -> (n,) fp32, how likely the answer is yes; as
        `checklist` asks."""
        size = self.settings.chunk
        self._warn_cut(questions)
        return torch.cat(
            [
                self.model(media[i : i + size], list(questions[i : i + size]))
                for i in range(0, len(media), size)
            ]
        )


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (n, L, vocabulary) of the answer's L tokens, labels (L,) -> exp(-mean cross-entropy),
    (n,) fp32: their geometric mean."""
    return (
        logits.float()
        .log_softmax(-1)
        .gather(2, labels.expand(len(logits), -1)[..., None])[..., 0]
        .mean(1)
        .exp()
    )


class ClipT5(nn.Module):
    """CLIP-FlanT5: T5 whose encoder reads text, projected patches of a picture, text."""

    def __init__(self, s: Settings):
        super().__init__()
        from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

        folder = path_of(s.weights or WEIGHTS["clip-flant5"], reward="vqascore")
        own = self._config(folder)
        config = T5Config.from_dict(
            {
                key: value
                for key, value in own.items()
                if not key.startswith("mm_") and key != "model_type"
            }
        )
        self.rounding, self.layer = s.rounding, own.get("mm_vision_select_layer", -2)
        self.tokenizer = tokenizer(
            AutoTokenizer, s.tokenizer, reward="vqascore", setting="tokenizer"
        )
        self.answer = self._answer(s, config.vocab_size)
        self.tower = _tower(s.tower, vlm.DTYPES[s.dtype])
        state = {
            key: value
            for key, value in vlm.folder_tensors(folder).items()
            if not key.startswith(("vision_tower.", "embed_tokens."))
        }
        projector = {
            key.removeprefix("mm_projector."): state.pop(key)
            for key in list(state)
            if key.startswith("mm_projector.")
        }
        for stack in ("encoder", "decoder"):  # tied to shared.weight, which some files hold alone
            state.setdefault(
                f"{stack}.embed_tokens.weight", state.get("shared.weight", torch.empty(0))
            )
        self.t5 = vlm.from_state(
            T5ForConditionalGeneration, config, state, dtype=s.dtype, path=folder
        )
        width = self.tower.config.hidden_size
        layers = nn.Sequential(
            nn.Linear(width, config.d_model), nn.GELU(), nn.Linear(config.d_model, config.d_model)
        )
        self.projector = fill(layers, projector, path=folder).to(vlm.DTYPES[s.dtype])
        self.to(vlm.DTYPES[s.dtype]).eval().requires_grad_(False)

    def _config(self, folder: Path) -> dict[str, Any]:
        file = folder / "config.json"
        config = json.loads(file.read_text()) if file.is_file() else {}
        kind, projector = config.get("model_type"), config.get("mm_projector_type", "mlp2x_gelu")
        if kind != "clip_t5" or projector != "mlp2x_gelu":
            raise ValueError(
                f"reward.vqascore.weights={folder}: expected config.json of a clip_t5 model with an"
                f" mlp2x_gelu projector (found: {kind}, {projector}); for a Qwen-VL model set"
                " reward.vqascore.model=qwen"
            )
        return config

    def _answer(self, s: Settings, vocabulary: int) -> list[int]:
        """Tokens of the answer, end token included; ValueError where the tokenizer is not the
        network's."""
        if len(self.tokenizer) > vocabulary:
            count = f"{len(self.tokenizer)} tokens, and the network {vocabulary}"
            raise ValueError(
                f"reward.vqascore.tokenizer={s.tokenizer} has {count}; give the network's own"
                " tokenizer"
            )
        ids = self.tokenizer(s.answer)["input_ids"]
        if self.tokenizer.unk_token_id in ids:
            raise ValueError(
                f'reward.vqascore.tokenizer={s.tokenizer} does not know the answer "{s.answer}";'
                " give one made of its tokens"
            )
        return ids

    def lengths(self, questions: list[str]) -> list[int]:
        """Tokens of the text around the picture for each question, before anything is cut; the
        picture counts as one."""
        start = len(self.tokenizer(START)["input_ids"])
        return [
            start + 1 + len(self.tokenizer(END.format(question))["input_ids"])
            for question in questions
        ]

    def forward(self, frames: Tensor, questions: list[str]) -> Tensor:
        """Pictures (n, 3, H, W) in [0, 1] and n questions -> (n,) fp32."""
        side = self.tower.config.image_size
        pictures = vlm.squared(rounded(frames) if self.rounding else frames, CLIP_MEAN)
        pixels = normalized((pil_cropped if self.rounding else cropped)(pictures, side)).to(
            self.t5.dtype
        )
        states = self.tower(pixels, output_hidden_states=True).hidden_states[self.layer]
        patches = self.projector(states[:, 1:])  # without the class token
        embeddings, mask = self._encoder_input(patches, questions)
        labels = torch.tensor(self.answer, device=frames.device)
        logits = self.t5(
            inputs_embeds=embeddings, attention_mask=mask, labels=labels.repeat(len(frames), 1)
        ).logits
        return likelihood(
            logits[..., : len(self.tokenizer)], labels
        )  # the reference cuts T5's padded vocabulary to the tokenizer's

    def _encoder_input(self, patches: Tensor, questions: list[str]) -> tuple[Tensor, Tensor]:
        """(n, L, d) embeddings of chat and picture and (n, L) mask; shorter rows end in masked
        zeros."""
        start = self.tokenizer(START)["input_ids"]
        ends = [self.tokenizer(END.format(question))["input_ids"] for question in questions]
        table, unknown, rows, masks = (
            self.t5.get_input_embeddings(),
            self.tokenizer.unk_token_id,
            [],
            [],
        )
        for patch, ids in zip(patches, ends, strict=True):
            text = torch.tensor([*start, *ids[: LIMIT - 1 - len(start)]], device=patch.device)
            first, last = table(text).split([len(start), len(text) - len(start)])
            known = text != unknown
            rows.append(torch.cat([first, patch, last]))
            masks.append(
                torch.cat([known[: len(start)], known.new_ones(len(patch)), known[len(start) :]])
            )
        longest = max(map(len, rows))
        embeddings = torch.stack([f.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
        return (
            embeddings,
            torch.stack([f.pad(mask, (0, longest - len(mask))) for mask in masks]).long(),
        )


def _tower(source: str, dtype: torch.dtype) -> Any:
    """The picture tower of a CLIP; the repository's text tower and projections are left out."""
    from transformers import CLIPVisionModel

    other = ("text_model.", "text_projection.", "visual_projection.", "logit_scale")
    return network(
        CLIPVisionModel, source, reward="vqascore", setting="tower", ignore=other, dtype=dtype
    )


class Qwen(nn.Module):
    """A Qwen2-VL or Qwen2.5-VL chat model, read at the first word of its reply."""

    def __init__(self, s: Settings):
        super().__init__()
        from transformers import AutoModelForImageTextToText

        source = s.weights or WEIGHTS["qwen"]
        self.processor = vlm.processor_of(source, reward="vqascore", setting="weights")
        self.network = network(
            AutoModelForImageTextToText, source, reward="vqascore", dtype=vlm.DTYPES[s.dtype]
        )
        if (kind := self.network.config.model_type) not in ("qwen2_vl", "qwen2_5_vl"):
            raise ValueError(
                f"reward.vqascore.weights={source} is a {kind}; expected one of qwen2_vl,"
                " qwen2_5_vl"
            )
        ids = self.processor.tokenizer(s.answer)["input_ids"]
        if len(ids) != 1:
            raise ValueError(
                f'reward.vqascore.answer="{s.answer}" is {len(ids)} tokens, and with model=qwen the'
                " score is the probability of one; give a shorter answer"
            )
        self.answer = ids[0]
        self.size = {"shortest_edge": 4 * 28 * 28, "longest_edge": s.max_pixels}

    def forward(self, frames: Tensor, questions: list[str]) -> Tensor:
        """Pictures (n, 3, H, W) in [0, 1] and n questions -> (n,) fp32."""
        chats = [
            self.processor.apply_chat_template(
                [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": question}],
                    }
                ],
                tokenize=False,
                add_generation_prompt=True,
            )
            for question in questions
        ]
        pictures = [[picture] for picture in to_pil(frames)]
        batch = self.processor(
            text=chats, images=pictures, padding=True, return_tensors="pt", size=self.size
        ).to(frames.device)
        places, row = (batch["attention_mask"].sum(1) - 1).unique(
            return_inverse=True
        )  # where the replies begin
        logits = self.network(**batch, use_cache=False, logits_to_keep=places).logits
        return logits[torch.arange(len(frames)), row].float().softmax(-1)[:, self.answer]


REWARD = VQAScore
