"""Text encoders and VAE encoders of a pipeline, asked the same thing once.

Probing and re-entry run the pipeline from its beginning many times, with the same few prompts; a
training run asks for the same prompts again. Answers of text encoders may be kept on disk, too
(replay/prompt_cache.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from flowrl.policy.replay.prompt_cache import PromptCache

LARGEST = 2**29  # bytes of answers that are kept
KINDS = ("cpu", "cuda")  # of devices, whose autocast changes answers


class Answers:
    """Outputs of frozen networks by the content of their arguments, the latest ones.

    A text encoder of transformers treats the rows of its batch apart, so each row is asked for
    once, whichever rows are beside it. disk: where its answers are stored and looked for as well.
    """

    def __init__(self, disk: PromptCache | None = None) -> None:
        self.disk = disk
        self.kept: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self.size = 0
        self.paused = False  # in the loop, networks beside the denoiser see other latents each time

    def __call__(self, name: str, real: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """real(*args, **kwargs), or its answer to equal arguments; a copy, since callers edit."""
        try:
            key = _key(name, args, kwargs)
        except TypeError:  # an argument that cannot be compared
            return real(*args, **kwargs)
        if key not in self.kept:
            answer = real(*args, **kwargs)
            if not self._keep(key, answer):
                return answer
        return self._kept(key)

    def rowwise(
        self, name: str, network: nn.Module, real: Callable[..., Any], args: tuple, kwargs: dict
    ) -> Any:
        """The same of a text encoder, with an answer for each row of the tokens, which is asked for
        alone: the last bits of a row depend on how many are computed with it, and a resumed run,
        which knows no answers yet, would compute others together."""
        try:
            rows = _rows_of_tokens((args, kwargs))
            each = [_at((args, kwargs), [row], rows) for row in range(rows)]
            keys = [_key(name, *given) for given in each]
        except TypeError:
            return self(name, real, args, kwargs)
        first = {key: row for row, key in reversed([*enumerate(keys)])}
        device = next(_tensors((args, kwargs))).device
        known = {key: self._kept(key) for key in first if key in self.kept}
        for key, row in first.items():
            if key in known:
                continue
            stored = self._stored(name, network, each[row])
            answer = stored.get()
            if answer is None:
                own_args, own_kwargs = each[row]
                try:
                    answer = _at(_without_caches(real(*own_args, **own_kwargs)), [0], 1)
                except TypeError:  # it holds something without rows
                    return self(name, real, args, kwargs)
                stored.put(answer)
            # the states of all layers, of which pipelines read one or two, wait in host memory
            known[key] = _changed(answer, Tensor.cpu)
            self._keep(key, known[key])
        return _joined([known[key] for key in keys], device)

    def _stored(self, name: str, network: nn.Module, row: tuple[tuple, dict]) -> Stored:
        """The place of an answer on disk, if it has one."""
        if self.disk is None:
            return Stored()
        device = next(_tensors(row)).device
        method = name.rpartition(".")[2]  # not the component: pipelines share their encoders
        own = _key(method, *row, where=device.type)
        return Stored(self.disk, self.disk.key(network, method, own, device), device)

    def _keep(self, key: tuple[Any, ...], answer: Any) -> bool:
        size = sum(t.numel() * t.element_size() for t in _tensors(answer))
        if any(t.requires_grad for t in _tensors(answer)) or size > LARGEST:
            return False
        self.kept[key] = (copy.deepcopy(answer), size)
        self.size += size
        while self.size > LARGEST:
            self.size -= self.kept.popitem(last=False)[1][1]
        return key in self.kept

    def _kept(self, key: tuple[Any, ...]) -> Any:
        self.kept.move_to_end(key)
        return copy.deepcopy(self.kept[key][0])

    def clear(self) -> None:
        self.kept.clear()
        self.size = 0

    @contextlib.contextmanager
    def of(self, networks: dict[str, nn.Module]) -> Iterator[None]:
        """Inside, `forward` and `encode` of these networks are answered from here."""
        with contextlib.ExitStack() as stack:
            for name, module in networks.items():
                if any(p.requires_grad for p in module.parameters()):
                    continue  # it is trained: its answers change
                for method in ("forward", "encode"):
                    if hasattr(module, method):
                        stack.enter_context(self._patched(name, module, method))
            yield

    @contextlib.contextmanager
    def _patched(self, name: str, module: nn.Module, method: str) -> Iterator[None]:
        had, real = module.__dict__.get(method), getattr(module, method)
        text = isinstance(module, PreTrainedModel)
        asked = functools.partial(self.rowwise, network=module) if text else self

        @functools.wraps(real)  # pipelines read its signature
        def answered(*args: Any, **kwargs: Any) -> Any:
            if self.paused or _followed((args, kwargs)):
                return real(*args, **kwargs)
            return asked(f"{name}.{method}", real=real, args=args, kwargs=kwargs)

        module.__dict__[method] = answered
        try:
            yield
        finally:
            module.__dict__.pop(method, None)
            if had is not None:
                module.__dict__[method] = had


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer's place on disk; without a disk it holds nothing."""

    disk: PromptCache | None = None
    key: str = ""
    device: torch.device | None = None

    def get(self) -> Any | None:
        return None if self.disk is None else self.disk.get(self.key, self.device)

    def put(self, answer: Any) -> None:
        if self.disk is not None and not any(t.requires_grad for t in _tensors(answer)):
            self.disk.put(self.key, answer)


def _followed(given: Any) -> bool:
    """Whether a gradient is to pass: what comes from a trained encoder is not answered."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(given))


def _key(name: str, args: tuple, kwargs: dict, *, where: str | None = None) -> tuple[Any, ...]:
    """Of a call; TypeError where an argument cannot be compared. where: stands for the devices of
    tensors, which processes number otherwise."""
    content = functools.partial(_content, where=where)
    cast = [
        (kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind)
    ]
    return (name, content(args), content(sorted(kwargs.items())), *cast)


def _content(value: Any, *, where: str | None = None) -> Any:
    """Something hashable that is equal for equal arguments; TypeError where there is none."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest = hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
        return ("tensor", tuple(value.shape), value.dtype, where or value.device, digest)
    content = functools.partial(_content, where=where)
    if isinstance(value, list | tuple):
        return (type(value), *map(content, value))
    if isinstance(value, dict):
        return (dict, *((key, content(entry)) for key, entry in sorted(value.items())))
    return _plain(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in an output: nested containers and attributes of plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _rows_of_tokens(given: Any) -> int:
    """Rows of a batch of token ids (n, L); TypeError where there are none, or another tensor has
    other rows."""
    found = list(_tensors(given))
    rows = {len(t) if t.ndim else 0 for t in found}
    if len(rows) != 1 or not any(t.ndim == 2 and not t.is_floating_point() for t in found):
        raise TypeError("no batch of tokens")
    return rows.pop()


def _at(value: Any, rows: list[int], n: int) -> Any:
    """The same structure with some rows of its tensors; TypeError where one has not n rows."""
    if isinstance(value, Tensor):
        if value.ndim == 0 or len(value) != n:
            raise TypeError("a tensor without rows")
        return value[rows]
    if isinstance(value, dict):
        return type(value)(**{key: _at(entry, rows, n) for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_at(entry, rows, n) for entry in value)
    return _plain(value)


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)(**{key: _changed(entry, change) for key, entry in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(_changed(entry, change) for entry in value)
    return value


def _without_caches(answer: Any) -> Any:
    """An answer without keys and values for a next token, for which a pipeline has no use."""
    if not isinstance(answer, dict):
        return answer
    return type(answer)(**{k: v for k, v in answer.items() if not isinstance(v, Cache)})


def _plain(value: Any) -> Any:
    """A value that has no rows; TypeError for one that cannot be compared."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    raise TypeError(type(value).__name__)


def _joined(parts: list[Any], device: torch.device) -> Any:
    """Answers to single rows as one answer, on this device."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts).to(device)
    if isinstance(first, dict):
        each = {key: [part[key] for part in parts] for key in first}
        return type(first)(**{key: _joined(own, device) for key, own in each.items()})
    if isinstance(first, list | tuple):
        return type(first)(_joined(list(own), device) for own in zip(*parts, strict=True))
    return first
