"""VQAScore (arXiv:2404.01291): does the picture show the prompt?

It is the probability that a model answers "Yes" to that question. Reference:
github.com/linzhiqiu/t2v_metrics. Two variants, whose values are not comparable:

`clip-flant5` (the paper's, `clip_t5_model.py` of the releases before 3.0): FlanT5 reads 576
projected CLIP-L/14-336 patches in the middle of a chat, and the score is exp(-mean cross-entropy of
the answer's tokens, "Yes" and the end token). transformers has no class for it, so T5, the CLIP
tower and the two-layer projector are put together here. Kept from the reference: each half of the
chat ends with T5's end token (the tokenizer adds it twice), and padding alone is masked. Up to 1.1
the padding token was the unknown one, so that characters that T5 does not know (Chinese, emoji)
were masked too. The tower is taken from its own repository: the reference never
trains it, and copies of it in a checkpoint are not read.

`qwen` (`qwen2vl_model.py` since 3.0): the probability of "Yes" as the first word of the reply of a
Qwen2-VL or Qwen2.5-VL model, over its whole vocabulary. The reference reads it from `generate`,
where Qwen2.5's repetition penalty of 1.05 also acts on words of the prompt; here it is the plain
softmax. This variant gives no gradient.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowrl.data.media import to_pil
from flowrl.rewards.core.pictures import (
    CLIP_MEAN,
    cropped,
    in_chunks,
    normalized,
    pil_cropped,
    rated,
    rounded,
)
from flowrl.rewards.core.reward import Reward
from flowrl.rewards.core.sizes import published
from flowrl.rewards.core.tokens import warn_cut
from flowrl.rewards.core.weights import fill, network, path_of, tokenizer
from flowrl.rewards.networks import vlm
from flowrl.types import MediaContext

# The chat that FlanT5 was tuned with (Vicuna's), before the picture and after it.
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
NUMBERS = {  # hub name -> number of weights; for clip-flant5 with the projector and CLIP's tower
    "clip-flant5": {
        "zhiqiulin/clip-flant5-xxl": 11_459_819_520,
        "zhiqiulin/clip-flant5-xl": 3_159_560_192,
    },
    "qwen": {
        "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
        "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    },
}
LIMIT = 2048  # most tokens of a question, as in the reference
OTHERS = {  # model -> settings that it never reads
    "clip-flant5": {"max_pixels"},
    "qwen": {"tokenizer", "tower"},
}


class Settings(vlm.Settings):
    model: Literal["clip-flant5", "qwen"] = pydantic.Field(
        "clip-flant5", description="Kind of network: the paper's model, or a Qwen-VL chat model."
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
        None,
        description=(
            "Question that is asked, with {} for the prompt; null: the model's own question."
        ),
    )
    answer: str = pydantic.Field(
        "Yes",
        min_length=1,
        description="Answer whose probability is the score; for qwen it must be one token.",
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
    """Probability of the answer "Yes" to whether the picture shows the prompt, 0 to 1.

    A video gets the mean over its frames.
    """

    Settings = Settings
    name = "vqascore"
    scale = 'probability of the answer "Yes" to whether the picture shows the prompt, 0 to 1'
    range = (0.0, 1.0)
    reads_prompt = True

    def __init__(self, settings: Any = None):
        super().__init__(settings)
        s = self.settings
        _check_settings(s)
        self.model = ClipT5(s) if s.model == "clip-flant5" else Qwen(s)
        self.question = s.question or QUESTIONS[s.model]
        self.differentiable = s.model == "clip-flant5" and not s.rounding

    @classmethod
    def network_bytes(cls, settings: Any) -> float | None:
        source = settings.weights or WEIGHTS[settings.model]
        return published(NUMBERS[settings.model], source, settings.dtype)

    def __call__(
        self, media: Tensor, prompts: list[str], context: MediaContext | None = None
    ) -> Tensor:
        if self.settings.model == "qwen" and media.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "vqascore with model=qwen gives no gradient; load it with model=clip-flant5,"
                " rounding=False"
            )
        questions = self._asked(prompts)
        self._warn_cut(questions)

        def rate(frames: Tensor, rows: Tensor) -> Tensor:
            return self.model(frames, [questions[i] for i in rows.tolist()])

        return rated(self, media, rate)

    def expect(self, prompts: Sequence[str]) -> None:
        self._warn_cut(self._asked(prompts), known=True)

    def _asked(self, prompts: Sequence[str]) -> list[str]:
        before, after = self.question.split("{}")
        return [before + prompt + after for prompt in prompts]

    def _warn_cut(self, questions: Sequence[str], *, known: bool = False) -> None:
        if isinstance(self.model, ClipT5):
            lengths = self.model.lengths(list(dict.fromkeys(questions)))
            warn_cut("vqascore", lengths, LIMIT, known=known)

    def answer(self, media: Tensor, questions: Sequence[str]) -> Tensor:
        """Ask a question about each of (n, 3, H, W) -> (n,) fp32, how likely the answer is yes.

        `checklist` asks its questions here.
        """
        self._warn_cut(questions)
        return in_chunks(self.model, media, list(questions), chunk=self.settings.chunk)


def _check_settings(s: Settings) -> None:
    """Raise ValueError for settings that the chosen model would not honour."""
    if foreign := sorted(OTHERS[s.model] & s.model_fields_set):
        raise ValueError(
            f"vqascore with model={s.model} does not read {', '.join(foreign)}; leave out what"
            " belongs to the other model"
        )
    if s.model == "qwen" and not s.rounding:
        raise ValueError(
            "vqascore with model=qwen always rounds pictures; leave rounding=False out, or load"
            " it with model=clip-flant5"
        )


def likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    """exp(-mean cross-entropy), the geometric mean of the tokens' probabilities -> (n,) fp32.

    logits (n, L, vocabulary) of the answer's L tokens, labels (L,).
    """
    logp = logits.float().log_softmax(-1)
    return logp.gather(2, labels.expand(len(logits), -1)[..., None])[..., 0].mean(1).exp()


class ClipT5(nn.Module):
    """CLIP-FlanT5: T5 whose encoder reads text, projected patches of a picture, text."""

    def __init__(self, s: Settings):
        super().__init__()
        from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

        dtype = vlm.DTYPES[s.dtype]
        folder = path_of(s.weights or WEIGHTS["clip-flant5"], reward="vqascore")
        own = _config(folder)
        foreign = ("mm_", "model_type")
        config = T5Config.from_dict({k: own[k] for k in own if not k.startswith(foreign)})
        self.rounding, self.layer = s.rounding, own.get("mm_vision_select_layer", -2)
        self.tokenizer = tokenizer(
            AutoTokenizer, s.tokenizer, reward="vqascore", setting="tokenizer"
        )
        self.answer = self._answer(s, config.vocab_size)
        self.tower = _tower(s.tower, dtype)
        t5, projector = _t5_and_projector(vlm.folder_tensors(folder))
        self.t5 = vlm.from_state(T5ForConditionalGeneration, config, t5, dtype=s.dtype, path=folder)
        layers = _projector(self.tower.config.hidden_size, config.d_model)
        self.projector = fill(layers, projector, path=folder)
        self.to(dtype).eval().requires_grad_(False)

    def _answer(self, s: Settings, vocabulary: int) -> list[int]:
        """Tokens of the answer, with the end token; another network's tokenizer -> ValueError."""
        if len(self.tokenizer) > vocabulary:
            raise ValueError(
                f"reward.vqascore.tokenizer={s.tokenizer} has {len(self.tokenizer)} tokens, and the"
                f" network {vocabulary}; give the network's own tokenizer"
            )
        ids = self.tokenizer(s.answer)["input_ids"]
        if self.tokenizer.unk_token_id in ids:
            raise ValueError(
                f'reward.vqascore.tokenizer={s.tokenizer} does not know the answer "{s.answer}";'
                " give one made of its tokens"
            )
        return ids

    def lengths(self, questions: list[str]) -> list[int]:
        """Tokens of the text around the picture for each question, before anything is cut.

        The picture counts as one.
        """
        start = len(self.tokenizer(START)["input_ids"])
        ends = (self.tokenizer(END.format(question))["input_ids"] for question in questions)
        return [start + 1 + len(end) for end in ends]

    def forward(self, frames: Tensor, questions: list[str]) -> Tensor:
        """Pictures (n, 3, H, W) in [0, 1] and n questions -> (n,) fp32."""
        patches = self.projector(self._states(frames))
        embeddings, mask = self._encoder_input(patches, questions)
        labels = torch.tensor(self.answer, device=frames.device)
        logits = self.t5(
            inputs_embeds=embeddings, attention_mask=mask, labels=labels.repeat(len(frames), 1)
        ).logits
        # the tokens that pad T5's vocabulary are left out, as in the reference
        return likelihood(logits[..., : len(self.tokenizer)], labels)

    def _states(self, frames: Tensor) -> Tensor:
        """The tower's patches (n, 576, d), without the class token."""
        resize = pil_cropped if self.rounding else cropped
        squares = vlm.squared(rounded(frames) if self.rounding else frames, CLIP_MEAN)
        pixels = normalized(resize(squares, self.tower.config.image_size)).to(self.t5.dtype)
        return self.tower(pixels, output_hidden_states=True).hidden_states[self.layer][:, 1:]

    def _encoder_input(self, patches: Tensor, questions: list[str]) -> tuple[Tensor, Tensor]:
        """(n, L, d) embeddings of chat and picture, (n, L) mask; short rows end in masked zeros."""
        start = self.tokenizer(START)["input_ids"]
        ends = [self.tokenizer(END.format(question))["input_ids"] for question in questions]
        found = [self._row(*one, start) for one in zip(patches, ends, strict=True)]
        longest = max(len(row) for row, _ in found)
        rows = [F.pad(row, (0, 0, 0, longest - len(row))) for row, _ in found]
        masks = [F.pad(mask, (0, longest - len(mask))) for _, mask in found]
        return torch.stack(rows), torch.stack(masks).long()

    def _row(self, patch: Tensor, end: list[int], start: list[int]) -> tuple[Tensor, Tensor]:
        """Embeddings (L, d) of the chat with a picture's patches (p, d) in it, and mask (L,)."""
        text = torch.tensor([*start, *end[: LIMIT - 1 - len(start)]], device=patch.device)
        parts = [len(start), len(text) - len(start)]
        first, last = self.t5.get_input_embeddings()(text).split(parts)
        seen_first, seen_last = (text != self.tokenizer.pad_token_id).split(parts)
        mask = torch.cat([seen_first, seen_first.new_ones(len(patch)), seen_last])
        return torch.cat([first, patch, last]), mask


def _config(folder: Path) -> dict[str, Any]:
    """Read config.json of CLIP-FlanT5; that of another network -> ValueError."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kind, projector = config.get("model_type"), config.get("mm_projector_type", "mlp2x_gelu")
    if kind != "clip_t5" or projector != "mlp2x_gelu":
        raise ValueError(
            f"reward.vqascore.weights={folder}: expected config.json of a clip_t5 model with an"
            f" mlp2x_gelu projector (found: {kind}, {projector}); for a Qwen-VL model set"
            " reward.vqascore.model=qwen"
        )
    return config


def _t5_and_projector(
    state: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a checkpoint under T5's names, and under those of the projector."""
    prefix, foreign = "mm_projector.", ("mm_projector.", "vision_tower.", "embed_tokens.")
    t5 = {key: value for key, value in state.items() if not key.startswith(foreign)}
    # both are tied to shared.weight, and some files hold only that
    for stack in ("encoder", "decoder"):
        t5.setdefault(f"{stack}.embed_tokens.weight", t5.get("shared.weight", torch.empty(0)))
    projector = {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }
    return t5, projector


def _projector(width: int, dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim))


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
        chats = [self._chat(question) for question in questions]
        pictures = [[picture] for picture in to_pil(frames)]
        batch = self.processor(
            text=chats, images=pictures, padding=True, return_tensors="pt", size=self.size
        ).to(frames.device)
        # last token of the chat, whose logits give the first word of the reply
        last = batch["attention_mask"].sum(1) - 1
        places, row = last.unique(return_inverse=True)
        logits = self.network(**batch, use_cache=False, logits_to_keep=places).logits
        return logits[torch.arange(len(frames)), row].float().softmax(-1)[:, self.answer]

    def _chat(self, question: str) -> str:
        """A picture and a question in the model's chat template, up to where it replies."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        return self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )


REWARD = VQAScore
