"""Tokenizers of the named models' text encoders, without a file of theirs.

CLIP's is the real one, whose vocabulary open_clip ships. Those of T5, UMT5 and Qwen stand in for
the real ones: their vocabularies are as large, and know CLIP's words by other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CLASSES = {  # class of a text encoder -> class of its tokenizer, as model_index.json names it
    "CLIPTextModel": "CLIPTokenizer",
    "CLIPTextModelWithProjection": "CLIPTokenizer",
    "T5EncoderModel": "T5TokenizerFast",
    "UMT5EncoderModel": "T5TokenizerFast",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2Tokenizer",
}


def tokenizer(component: str, encoder: str, config: Mapping[str, Any]) -> Any:
    """The tokenizer of this name in a pipeline; class and config of its text encoder."""
    name = CLASSES[encoder]
    size = int((config.get("text_config") or config)["vocab_size"])
    if name == "CLIPTokenizer":
        return clip(pad="!" if component == "tokenizer_2" else "<|endoftext|>")
    return qwen(size) if name == "Qwen2Tokenizer" else t5(size)


@cache
def _byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """CLIP's vocabulary and merges, out of open_clip's wheel."""
    from open_clip.tokenizer import SimpleTokenizer

    own = SimpleTokenizer()
    named = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocabulary = {named.get(word, word): place for word, place in own.encoder.items()}
    return vocabulary, sorted(own.bpe_ranks, key=own.bpe_ranks.__getitem__)


def words() -> list[str]:
    """Whole words among CLIP's tokens, the most frequent first."""
    whole = (word.removesuffix("</w>") for word in _byte_pairs()[0] if word.endswith("</w>"))
    return [word for word in whole if word.isascii() and word.isalpha()]


def clip(pad: str) -> Any:
    from transformers import CLIPTokenizer

    vocabulary, merges = _byte_pairs()
    return CLIPTokenizer(
        vocab=dict(vocabulary), merges=list(merges), pad_token=pad, model_max_length=77
    )


def t5(size: int) -> Any:
    """T5's layout: <pad>, </s>, <unk>, pieces, 100 extra tokens. Words have the highest numbers, so
    that an embedding's last rows are read."""
    from transformers import T5TokenizerFast

    first = ["<pad>", "</s>", "<unk>"]
    extra = [f"<extra_id_{place}>" for place in range(99, -1, -1)]
    letters = [chr(place) for place in range(33, 127)] + ["▁"]
    room = size - len(first) - len(extra) - len(letters)
    pieces = ["▁" + word for word in words()][:room]
    unused = [f"▁unused{place}" for place in range(room - len(pieces))]
    scored = [(piece, 0.0) for piece in first] + [(piece, -20.0) for piece in unused]
    scored += [(piece, -9.0) for piece in letters] + [(piece, -8.0) for piece in pieces[::-1]]
    scored += [(piece, 0.0) for piece in extra]
    return T5TokenizerFast(vocab=scored, extra_ids=100, model_max_length=512)


def qwen(size: int) -> Any:
    """Qwen's layout: byte pairs, then special tokens; merges are learned from CLIP's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=30_000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learned.train_from_iterator((f" {word} {word}" for word in words()), trainer)
    model = json.loads(learned.to_str())["model"]
    known = sorted(model["vocab"], key=model["vocab"].__getitem__)
    room = size - len(QWEN_SPECIAL) - len(known)
    tokens = [f"<|unused{place}|>" for place in range(room)] + known + list(QWEN_SPECIAL)
    made = Qwen2Tokenizer(
        vocab={token: place for place, token in enumerate(tokens)},
        merges=[tuple(pair) for pair in model["merges"]],
        model_max_length=131_072,
    )
    made.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL[1:])})
    return made
