"""A memory for the answers of a pipeline's text encoders and VAE encoder, so that equal calls are
computed once.

Probing and re-entry run the pipeline from its beginning many times, with the same few prompts; a
training run encodes the same prompts again. Only tensors that the pipeline reads from an answer are
kept (the states of one layer, no logits). Answers of text encoders can be kept on disk as well
(replay/prompt_cache.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from transformers import Cache, PreTrainedModel

from flowrl.policy.replaced import replaced
from flowrl.policy.replay.arguments import Path, tensors_in
from flowrl.policy.replay.errors import Unknown
from flowrl.policy.replay.prompt_cache import PromptCache
from flowrl.policy.replay.unread import LOGITS, leaves, mapped, row_axis, unread

LARGEST = 2**29  # most bytes of answers that are kept
KINDS = ("cpu", "cuda")  # kinds of devices: whether autocast is on for one of them changes answers
METHODS = ("forward", "encode", "generate")
# argument of language models that says for how many of the last tokens they compute logits
FEW_LOGITS = "logits_to_keep"

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class EncoderCall:
    """A call of an encoder, or one row of such a call."""

    network: nn.Module  # network that is called
    name: str  # "<component>.<method>"
    real: Callable[..., Any]  # the network's own method, not the one that answers in its place
    args: tuple  # positional arguments of the call, or one row of them
    kwargs: dict[str, Any]  # keyword arguments of the call, or one row of them
    tokens: bool  # whether it is a text encoder, whose answer waits in host memory
    key: Key  # hash of the call, equal for equal calls

    def other(self, given: tuple[tuple, dict[str, Any]]) -> EncoderCall:
        """Return this call with other arguments; TypeError if one cannot be compared."""
        return replace(self, args=given[0], kwargs=given[1], key=_key(self.name, *given))

    @property
    def device(self) -> torch.device | None:
        return next((t.device for t in tensors_in((self.args, self.kwargs))), None)

    def ask(self, only: set[Path] | None, *, logits: bool) -> Any:
        """Call the network. only: paths of tensors whose values are kept (None: all). logits:
        whether the logits of all tokens are read; else the network computes those of one token."""
        given, generates = self.kwargs, self.name.endswith(".generate")
        known = () if logits or generates else inspect.signature(self.real).parameters
        few = FEW_LOGITS in known and FEW_LOGITS not in given
        if few:
            given = {**given, FEW_LOGITS: 1}
        devices = [self.device] if self.device is not None and self.device.type == "cuda" else []
        # fork: the random numbers of a row must not depend on the rows before it
        with torch.random.fork_rng(devices, enabled=generates):
            answer = _without_caches(self.real(*self.args, **given))

        def kept(path: Path, t: Tensor) -> Tensor:
            if (few and path == LOGITS) or (only is not None and path not in only):
                return t.detach().to("meta")
            return t.detach().to("cpu" if self.tokens else t.device, copy=True)

        return mapped(kept, answer)


class Answers:
    """The latest outputs of frozen networks, by the content of their arguments.

    A text encoder of transformers treats the rows of its batch separately, so each row is computed
    once, and alone, whichever rows are beside it: the last bits of a row depend on how many rows
    are computed with it, and a resumed run, which starts without answers, would compute it beside
    other rows.
    """

    def __init__(self, disk: PromptCache | None = None) -> None:
        self.disk = disk  # where answers are stored and looked for; None: in memory only
        # call -> answer; tensors whose values are not kept are on the meta device
        self.kept: OrderedDict[Key, Any] = OrderedDict()
        # "<component>.<method>" -> tensors of its answers that the pipeline has read: once it read
        # some, others are not kept, and the network is called again if one is read after all
        self.read: dict[str, set[Path]] = {}
        # calls whose answers may hold more tensors than are read
        self.fresh: dict[Key, EncoderCall] = {}
        self.runs = 0  # number of runs in progress, one within another
        # no answers from memory: in the loop, networks beside the denoiser see new latents
        self.paused = False
        # in the loop: whether nobody looks at what the denoisers are given now, so that a network
        # of diffusers beside them computes once for each set of shapes; None: somebody looks
        self.unseen: Callable[[], bool] | None = None
        self.shaped: dict[Key, Any] = {}  # its answers in this run by the shapes of its arguments
        self.closed = False  # whether a call with a new key is an error, Unknown
        # None, or a list that collects all calls; then trained networks answer from memory, too
        self.heard: list[EncoderCall] | None = None

    @property
    def size(self) -> int:
        """Count the bytes of all kept answers."""
        return sum(map(_bytes, self.kept.values()))

    def __call__(
        self, name: str, network: nn.Module, real: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """Return real(*args, **kwargs), or its answer to equal arguments: a copy, since callers
        edit their results."""
        try:
            questions = self._questions(name, network, real, args, kwargs)
        except TypeError:  # an argument cannot be compared
            return real(*args, **kwargs)
        if self.heard is not None:
            self.heard += questions
        answers = [self._answer(question) for question in questions]
        found = [questions[0].device, *(t.device for t in leaves(answers[0]).values())]
        device = next((device for device in found if device), torch.device("cpu"))

        def look(path: Path) -> Tensor:
            self.read.setdefault(name, set()).add(path)
            parts = [self._value(question, path) for question in questions]
            axis = row_axis(parts[0])
            if len(parts) > 1 and (axis is None or len({part.shape for part in parts}) > 1):
                # the answer has no axis of rows: ask for the whole batch
                parts = [self._value(questions[0].other((args, kwargs)), path)]
            return (
                torch.cat(parts, axis).to(device) if parts[1:] else parts[0].to(device, copy=True)
            )

        return unread(answers, device, look)

    def _questions(
        self, name: str, network: nn.Module, real: Callable[..., Any], args: tuple, kwargs: dict
    ) -> list[EncoderCall]:
        """Split a call into questions: one for each row of tokens, or a single one."""
        given = (args, kwargs)
        rows = _rows(given) if isinstance(network, PreTrainedModel) else 1
        one = EncoderCall(network, name, real, *given, tokens=_has_tokens(given), key=())
        each = [_row(given, k, rows) for k in range(rows)] if rows > 1 else [given]
        return [one.other(own) for own in each]

    def _answer(self, question: EncoderCall) -> Any:
        """Return the kept answer to a question; the network is asked if there is none."""
        key = question.key
        if key not in self.kept:
            stored = self._stored(question)
            answer = self.disk.get(stored) if self.disk and stored else None
            if answer is None:
                answer = self._asked(question)
                self.fresh[key] = question
            else:  # keep in the file what another pipeline read from this answer
                self.read.setdefault(question.name, set()).update(_held(answer))
            self.kept[key] = answer
        self.kept.move_to_end(key)
        return self.kept[key]

    def _stored(self, question: EncoderCall) -> str | None:
        """Return the name of the answer on disk; None if it is not stored."""
        # the name leaves out the component, because pipelines share their encoders
        method, device = question.name.rpartition(".")[2], question.device
        if self.disk is None or device is None or not question.tokens or method == "generate":
            return None
        content = _key(method, question.args, question.kwargs, where=device.type)
        return self.disk.key(question.network, method, content, device)

    def _asked(self, question: EncoderCall) -> Any:
        if self.closed:
            raise Unknown
        read = self.read.get(question.name)
        # paused: networks that the network calls are not asked from memory
        before, self.paused = self.paused, True
        try:
            return question.ask(read, logits=LOGITS in (read or ()))
        finally:
            self.paused = before

    def _value(self, question: EncoderCall, path: Path) -> Tensor:
        """Return a tensor of the answer to a question."""
        old = leaves(self._answer(question))
        if old[path].is_meta:
            answer = mapped(lambda at, t: t if old[at].is_meta else old[at], self._asked(question))
            self.kept[question.key], self.fresh[question.key] = answer, question
            old = leaves(answer)
        return old[path]

    def _ended(self) -> None:
        """After a run, keep tensors that were read, and drop the oldest answers over LARGEST."""
        self.runs -= 1
        self.shaped.clear()
        if self.runs or not self.fresh:
            return
        for key, question in list(self.fresh.items()):
            if not (read := self.read.get(question.name)):
                continue  # the pipeline failed before it read anything
            answer = mapped(lambda path, t: t if path in read else t.to("meta"), self.kept[key])
            self.kept[key] = answer
            if self.disk and (stored := self._stored(question)):
                self.disk.put(stored, answer)
            del self.fresh[key]
            if _bytes(answer) > LARGEST:
                del self.kept[key]
        size = self.size
        while size > LARGEST:
            key, answer = self.kept.popitem(last=False)
            self.fresh.pop(key, None)
            size -= _bytes(answer)

    def _in_loop(self, name: str, real: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Answer a call that is made after the loop has begun."""
        if self.unseen is None or not self.unseen() or not name.endswith(".forward"):
            return real(*args, **kwargs)
        entries, structure = tree_flatten((args, kwargs))
        shapes = [(e.shape, e.dtype) if isinstance(e, Tensor) else type(e) for e in entries]
        key = (name, str(structure), *shapes)
        if key not in self.shaped:
            self.shaped[key] = mapped(lambda path, t: t.detach(), real(*args, **kwargs))
        return mapped(lambda path, t: t.clone(), self.shaped[key])

    @contextlib.contextmanager
    def of(self, networks: dict[str, nn.Module]) -> Iterator[None]:
        """Inside, calls to METHODS of these networks are answered from memory."""
        self.runs += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._ended)
            for name, module in networks.items():
                trained = any(p.requires_grad for p in module.parameters())
                if trained and self.heard is None:
                    continue  # a trained network's answers change
                for method in METHODS:
                    if hasattr(module, method):
                        stack.enter_context(self._patched(name, module, method))
            yield

    def _patched(self, name: str, module: nn.Module, method: str) -> AbstractContextManager[None]:
        real = getattr(module, method)

        @functools.wraps(real)  # wraps, because pipelines read its signature
        def answered(*args: Any, **kwargs: Any) -> Any:
            if self.paused and not isinstance(module, PreTrainedModel):
                return self._in_loop(f"{name}.{method}", real, args, kwargs)
            if self.paused or _followed((args, kwargs)):
                return real(*args, **kwargs)
            return self(f"{name}.{method}", module, real, args, kwargs)

        return replaced(module, **{method: answered})


def _followed(given: Any) -> bool:
    """Whether a gradient passes through the call: the output of a trained encoder must be computed
    anew."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(given))


def _key(name: str, args: tuple, kwargs: dict, *, where: str | None = None) -> tuple[Any, ...]:
    """Make a key that is equal for equal calls; TypeError if an argument cannot be compared. where:
    replaces the devices of tensors, whose numbers differ between processes."""
    entries, structure = tree_flatten((args, dict(sorted(kwargs.items()))))
    cast = [
        (kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind)
    ]
    return (name, str(structure), *(_content(entry, where) for entry in entries), *cast)


def _content(value: Any, where: str | None) -> Any:
    """Make a hashable that is equal for equal values; TypeError if there is none."""
    if isinstance(value, Tensor):
        # a copy, because the strides of an expanded tensor stay even where it is contiguous
        raw = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
        raw = raw.view(torch.uint8).numpy()
        digest = hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
        return ("tensor", tuple(value.shape), value.dtype, where or value.device, digest)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    raise TypeError(type(value).__name__)


def _rows(given: Any) -> int:
    """Count the rows of a batch of token ids (n, L), if all other tensors of the call have as many
    rows or are the same for each (pictures); else 1. Without tokens: count the equal rows."""
    found = [t.transpose(0, 1) if _of_axes(t, given) else t for t in tensors_in(given)]
    tokens = _has_tokens(given)
    counts = [len(t) for t in found if t.ndim and (_is_tokens(t) or not tokens)]
    rows = min(counts, default=1)
    return rows if rows and all(_has_rows(t, rows, same=not tokens) for t in found) else 1


def _is_tokens(t: Tensor) -> bool:
    return t.ndim == 2 and not t.is_floating_point()


def _has_tokens(given: Any) -> bool:
    return any(map(_is_tokens, tensors_in(given)))


def _of_axes(t: Tensor, given: Any) -> bool:
    """Whether a tensor holds places of tokens on several axes, (axes, n, L), beside tokens (n, L):
    its rows are the second axis."""
    shapes = {one.shape for one in tensors_in(given) if _is_tokens(one)}
    return t.ndim == 3 and not t.is_floating_point() and t.shape[1:] in shapes


def _has_rows(t: Tensor, rows: int, *, same: bool) -> bool:
    """Whether a tensor has one entry for each row, or the same entries for each. same: only the
    latter counts."""
    if t.ndim == 0 or len(t) % rows:
        return False
    parts = t.reshape(rows, -1)
    return (len(t) == rows and not same) or bool((parts == parts[:1]).all())


def _row(given: tuple[tuple, dict], k: int, rows: int) -> tuple[tuple, dict]:
    """Take the arguments of row k of a batch."""

    def own(path: Path, t: Tensor) -> Tensor:
        if _of_axes(t, given):
            return t[:, k : k + 1].clone()
        size = len(t) // rows
        return t[k * size : (k + 1) * size].clone()

    return mapped(own, given)


def _held(answer: Any) -> dict[Path, Tensor]:
    """Find the tensors of an answer whose values are kept."""
    return {path: t for path, t in leaves(answer).items() if not t.is_meta}


def _bytes(answer: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _held(answer).values())


def _without_caches(answer: Any) -> Any:
    """Drop the keys and values for a next token from an answer; a pipeline does not use them."""
    if not isinstance(answer, dict) or not any(isinstance(v, Cache) for v in answer.values()):
        return answer
    return type(answer)(**{k: v for k, v in answer.items() if not isinstance(v, Cache)})
