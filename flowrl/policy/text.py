"""Trained text encoders (TexForce, arXiv:2311.15657): the current weights encode the prompts.

The encoding of a prompt changes with the weights of its encoder and with the active view, and needs
a gradient in a loss. So a policy whose text encoders are trained keeps no encoding longer than the
weights that made it; the unconditional branch, which is a prompt as well, changes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from flowrl.policy.replay.arguments import Cond, tensors_in
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.errors import UnreplayableError
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.record import Encoding
from flowrl.policy.weights.lora import placed_in
from flowrl.policy.weights.parts import TEXT, TrainedParts

KEPT = 3  # most encodings of the same prompts that are kept: by the old policy, the reference, ...

# (prompts, whether with a gradient) -> their encoding
Encode = Callable[[Sequence[PromptItem], bool], Cond]


def text_encoders(pipe: Any) -> dict[str, nn.Module]:
    """Find the text encoders to train: those whose LoRA has a place in the pipeline's own file (in
    Stable Diffusion 3 the two CLIP models), or all if none has one."""
    found = {
        name: part
        for name, part in pipe.components.items()
        if name.startswith(TEXT) and isinstance(part, nn.Module)
    }
    if not found:
        raise ValueError(
            f"{type(pipe).__name__} has no text encoder (a component named text_encoder*) to train;"
            ' leave "text_encoder" out of train.parts'
        )
    placed = placed_in(pipe)
    return {name: part for name, part in found.items() if name in placed} or found


def check_tokenizers(pipe: Any) -> None:
    """ValueError for a text encoder whose tokenizer is None, and for a tokenizer without words: its
    files lacked them, and it would give the same tokens for all texts."""
    parts = pipe.components
    for name, part in parts.items():
        if name.startswith(TEXT) and part is not None:
            own = name.replace(TEXT, "tokenizer")
            if parts.get(own, part) is None:
                raise ValueError(
                    f"{type(pipe).__name__} has a {name} and no {own}; give it the tokenizer that"
                    " the encoder was trained with"
                )
        if isinstance(part, PreTrainedTokenizerBase) and set(part.get_vocab()) <= set(
            part.all_special_tokens
        ):
            raise ValueError(
                f"the {name} of this {type(pipe).__name__} knows no words, so all texts would be"
                " the same; fetch its files (tokenizer.json, or vocab.json and merges.txt) again"
            )


def check_encoded(names: Iterable[str]) -> None:
    """ValueError for arguments of the call that hold a prompt which is encoded already."""
    for name in names:
        if "embeds" in name:
            raise ValueError(
                f"{name} holds prompts that were encoded before, and train.parts trains the text"
                ' encoder: give the prompts as text, or leave "text_encoder" out'
            )


def check_staying(encoding: Encoding) -> None:
    """ValueError if trained text encoders would leave the device."""
    if encoding.leave:
        raise ValueError(
            "model.encoders=leave is for frozen text encoders, and train.parts trains them: they"
            " are needed in every forward; use model.encoders=stay"
        )


class Encodings:
    """Encodes prompts by the current weights.

    parts: all trained weights; modules: the text encoders among them.
    """

    def __init__(self, parts: TrainedParts, modules: dict[str, nn.Module], encode: Encode) -> None:
        self.parts, self.modules, self.encode = parts, modules, encode

    def new(self, items: Sequence[PromptItem]) -> Cond:
        """Encode prompts without a gradient."""
        return replace(self.encode(items, False), weights=self._weights())

    def request(self, request: Request) -> Request:
        """Return the request with its prompts encoded by the current weights: with a gradient if
        the caller takes one, else once for as long as these weights stay."""
        cond, weights = request.cond, self._weights()
        if torch.is_grad_enabled() and self.parts.active == "default":
            rows, at = request.rows.unique(return_inverse=True)
            own = self.encode([cond.items[row] for row in rows.tolist()], True)
            return replace(request, cond=own, rows=at)
        if cond.weights == weights:
            return request
        if weights not in cond.others:
            while len(cond.others) >= KEPT:
                cond.others.pop(next(iter(cond.others)))
            cond.others[weights] = self.new(cond.items)
        return replace(request, cond=cond.others[weights])

    def check(self, items: Sequence[PromptItem]) -> None:
        """UnreplayableError if encodings have no gradient, because the pipeline removes it."""
        made = self.encode(items, True)
        kept: list[Tensor] = [t for group in made.groups for t in tensors_in(group.kept)]
        if kept and not any(t.requires_grad for t in kept):
            raise UnreplayableError(
                "the pipeline encodes its prompts without a gradient, so its text encoder cannot be"
                ' trained; leave "text_encoder" out of train.parts'
            )

    def _weights(self) -> tuple[Any, ...]:
        """Make a key of the current weights, which changes with them: where they lie, and how often
        they were written."""
        view = self.parts.active
        if view == "reference" and self.parts.lora is not None:
            return (view,)
        # in full mode the values of a view are put into the parameters themselves
        named = self.parts.named("default" if self.parts.lora is None else view)
        own = [p for name, p in named.items() if name.split(".", 1)[0] in self.modules]
        return (view, *((p.data_ptr(), p._version) for p in own))
