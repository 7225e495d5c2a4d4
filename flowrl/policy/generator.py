"""A function of prompts and noise as a policy: a generator whose inside is unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.base import Policy
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Schedule
from flowrl.runtime.copies import own
from flowrl.samplers import keys

Generator = Callable[[list[str], Tensor], Tensor]
PROMPTS = ("a", "b")  # prompts that are used if the caller gives none


@dataclass(frozen=True)
class GeneratorCheck:
    """The result of the self-check of a generator."""

    media: tuple[int, ...]  # shape of one sample's media
    notes: tuple[str, ...] = ()  # always empty: SelfCheck has a field of this name

    def __str__(self) -> str:
        return f"equal noise made equal media {self.media}, other noise others"


class GeneratorPolicy(Policy):
    """f(prompts, noise (n, *L)) -> media (n, *D), without a gradient: a service, a game, another
    library. Only its initial noise can be trained (algorithm=dsrl).

    shape: *L of the noise, standard normal and fp32 on the CPU. f must be a function of its
    arguments: equal noise gives equal media, each row on its own. embed: prompts -> (P, d), input
    of the noise policy; None: the same noise policy for all prompts. Media as in ModulePolicy.
    """

    def __init__(
        self,
        generator: Generator,
        shape: tuple[int, ...],
        embed: Callable[[list[str]], Tensor] | None = None,
    ) -> None:
        if not callable(generator):
            raise ValueError(
                f"generator is a {type(generator).__name__}; it should be a function of a list of"
                " prompts and their noise"
            )
        if not isinstance(shape, tuple) or not all(type(k) is int and k > 0 for k in shape):
            raise ValueError(
                f"shape={shape!r} should be whole numbers above 0, such as (4, 64, 64)"
            )
        if embed is not None and not callable(embed):
            raise ValueError(f"embed is a {type(embed).__name__}; it should be a function")
        super().__init__({}, None, shape)
        self.generator, self.embedder = generator, embed

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def describe(self) -> str:
        """Write in a line which function is called."""
        name = getattr(self.generator, "__name__", type(self.generator).__name__)
        return f"media = {name}(prompts, noise (n, {', '.join(map(str, self.latent_shape))}))"

    def self_check(self, prompts: Sequence[str] | None = None) -> GeneratorCheck:
        """Try it on two prompts: equal noise must make equal media, also for a row alone, and other
        noise must make other media. A failure -> ValueError."""
        texts = list(prompts or PROMPTS)[:2]
        cond, rows = self.encode(texts), torch.arange(len(texts))
        noise = keys.gaussian(keys.key("generator", torch.arange(len(texts))), self.latent_shape)
        media, again = (self.decode(noise, 0.0, cond, rows) for _ in range(2))
        alone = self.decode(noise[:1], 0.0, cond, rows[:1])
        wrong = None
        if not torch.equal(media, again) or not torch.allclose(media[:1], alone, atol=1e-3):
            wrong = "other media for equal noise: it should depend on its arguments alone, by rows"
        elif torch.equal(media, self.decode(-noise, 0.0, cond, rows)):
            wrong = "the same media for any noise, so that there is nothing to learn"
        if wrong:
            raise ValueError(f"the generator made {wrong}")
        return GeneratorCheck(tuple(media.shape[1:]))

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        value = None if self.embedder is None else own(self.embedder(list(prompts)))
        if value is not None and (value.ndim < 1 or len(value) != len(prompts)):
            raise ValueError(
                f"embed returned {tuple(value.shape)} for {len(prompts)} prompts; it should be a"
                " tensor whose first axis is the prompts"
            )
        return Cond.of(prompts, {("cond",): value})

    def _embed(self, cond: Cond) -> Tensor | None:
        value = cond.groups[0].kept[0][0][("cond",)]
        return None if value is None else value.float().flatten(1)

    def schedule(self, steps: int) -> Schedule:
        """Return a schedule of one step, whatever `steps` is: the generator samples by itself."""
        sigmas = torch.tensor([1.0, 0.0], dtype=torch.float64)
        return Schedule(sigmas=sigmas, times=sigmas[:-1])

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        """Return 0, so that `decode` gets the initial noise."""
        return torch.zeros_like(request.x), 0

    def unread(self, guidances: Sequence[float | str], names: Iterable[str] = ()) -> list[str]:
        return ["steps, guidance and solver have no effect: a generator samples in its own way"]

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        if cond is None or rows is None:
            raise ValueError("a generator needs the prompts of what it makes: give cond and rows")
        prompts = [str(cond.prompts[row]) for row in rows.tolist()]
        with torch.no_grad():
            media = self.generator(*own((prompts, x.detach())))
        if not isinstance(media, Tensor) or not media.ndim or len(media) != len(prompts):
            got = tuple(media.shape) if isinstance(media, Tensor) else type(media).__name__
            raise ValueError(
                f"the generator made {got} of {len(prompts)} prompts; it should be a tensor whose"
                " first axis is the samples"
            )
        self.calls += len(prompts)
        return own(media.detach().float())

    def encode_media(self, media: Tensor) -> Tensor:
        raise ValueError(
            "a generator has no way back from media to noise, so media from files cannot be"
            " trained on"
        )
