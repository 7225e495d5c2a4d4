"""A plain nn.Module f(x, t, cond) as a policy: toy problems, tests, networks outside diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.base import Policy
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.coords import Coords, Schedule
from flowrl.policy.replay.request import Request

KINDS = {"flow": "flow", "eps": "epsilon", "epsilon": "epsilon", "x0": "sample", "sample": "sample"}


class ModulePolicy(Policy):
    """f(x (n, *L), t (n,) = sigma, cond (n, ...)) -> prediction (n, *L), in flow coordinates. Media
    are the latents themselves.

    kind: what f predicts: "flow" v = eps - x0, "eps" the noise, "x0" the data. cond: prompts -> (P,
    ...) tensor; None passes None to f.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        kind: str = "flow",
        cond: Callable[[list[str]], Tensor] | None = None,
        lora: dict[str, Any] | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}; allowed are {', '.join(KINDS)}")
        super().__init__({"module": module}, lora, shape)
        self.coords = Coords.plain(KINDS[kind])
        self.cond = cond

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        value = None if self.cond is None else self.cond(list(prompts)).to(self.device)
        if value is not None and value.shape[0] != len(prompts):
            raise ValueError(
                f"cond returned {tuple(value.shape)} for {len(prompts)} prompts; its first axis"
                " must be the prompts"
            )
        return Cond.of(prompts, {("cond",): value})

    def schedule(self, steps: int) -> Schedule:
        """Evenly spaced from 1 to 0; the model time is sigma."""
        sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return Schedule(sigmas=sigmas, times=sigmas[:-1])

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        x, sigma, cond = request.x, request.sigma, request.cond.groups[0].kept[0][0][("cond",)]
        if not isinstance(request.guidance, str):
            raise ValueError(
                f"guidance={request.guidance}: a module policy has no unconditional branch; use"
                " 'none', or mix inside the module"
            )
        cond = None if cond is None else cond.index_select(0, request.rows)
        prediction = self.modules["module"](x, sigma.to(x).expand(x.shape[0]), cond)
        return self.coords.velocity(prediction.float(), x, sigma), x.shape[0]

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        return x

    def encode_media(self, media: Tensor) -> Tensor:
        return media
