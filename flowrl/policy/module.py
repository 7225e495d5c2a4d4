"""A plain nn.Module f(x, t, cond) as a policy: toy problems, tests, networks outside diffusers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.base import Policy
from flowrl.policy.check_module import ModuleCheck, self_check
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Coords, Schedule
from flowrl.runtime.copies import own

KINDS = {"flow": "flow", "eps": "epsilon", "epsilon": "epsilon", "x0": "sample", "sample": "sample"}


class ModulePolicy(Policy):
    """f(x (n, *L), t (n,) = sigma, cond (n, ...)) -> prediction (n, *L), in flow coordinates.

    kind: prediction of f: "flow" v = eps - x0, "eps" the noise, "x0" the data. cond: prompts -> (P,
    ...) tensor; None passes None to f. decode: latents (n, *L) -> media (n, *D) fp32, row by row,
    differentiable if rewards need it; None: media are the latents themselves. All three functions
    get copies, which they may change, and may use their returned tensors again. Media (n, 3, H, W)
    and (n, F, 3, H, W) are pictures and videos in [0, 1], all others arrays.
    """

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...],
        kind: str = "flow",
        cond: Callable[[list[str]], Tensor] | None = None,
        lora: Any = None,
        decode: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}; allowed are {', '.join(KINDS)}")
        if not isinstance(shape, tuple) or not all(type(k) is int and k > 0 for k in shape):
            raise ValueError(f"shape={shape!r} should be whole numbers above 0, such as (64, 2)")
        if not any(True for _ in module.parameters()):
            raise ValueError(
                f"{type(module).__name__} has no parameters; there is nothing to train"
            )
        for name, given in (("cond", cond), ("decode", decode)):
            if given is not None and not callable(given):
                raise ValueError(f"{name} is a {type(given).__name__}; it should be a function")
        super().__init__({"module": module}, lora, shape)
        self.coords = Coords.plain(KINDS[kind])
        self.cond, self.decoder = cond, decode

    def self_check(self, prompts: Sequence[str] | None = None) -> ModuleCheck:
        """Try the conditions of training, see flowrl/policy/check_module.py. prompts: two that cond
        knows."""
        return self_check(self, prompts)

    def describe(self) -> str:
        """Write in two lines which function is called."""
        name, shape = type(self.modules["module"]).__name__, ", ".join(map(str, self.latent_shape))
        cond = "None" if self.cond is None else "cond(prompts)[rows]"
        lines = [f"{self.coords.prediction} = {name}(x (n, {shape}), t (n,) = sigma, {cond})"]
        return "\n".join([*lines, f"media = {'x' if self.decoder is None else 'decode(x)'}"])

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        value = None if self.cond is None else self._conditions(prompts)
        return Cond.of(prompts, {("cond",): value})

    def _conditions(self, prompts: list[str]) -> Tensor:
        """Return cond of the prompts, (P, ...), checked."""
        assert self.cond is not None
        try:
            value = self.cond(list(prompts))
        except Exception as error:  # a user's function may raise anything
            shown = ", ".join(f'"{text}"' for text in prompts[:2])
            raise ValueError(
                f"cond failed on the prompts {shown} ({type(error).__name__}: {error}); it takes a"
                " list of any texts that the policy is used with; policy.self_check([...]) and"
                " flowrl check --prompts take two that it knows"
            ) from error
        if not isinstance(value, Tensor) or not value.ndim or value.shape[0] != len(prompts):
            got = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"cond returned {got} for {len(prompts)} prompts; it should be a tensor whose first"
                " axis is the prompts"
            )
        return own(value).to(self.device)

    def schedule(self, steps: int) -> Schedule:
        """Return sigmas that are evenly spaced from 1 to 0; the model time is sigma."""
        sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        return Schedule(sigmas=sigmas, times=sigmas[:-1])

    def trial_states(self, n: int, cond: Cond) -> Tensor:
        """States (n, *L) for the self-check."""
        generator = torch.Generator().manual_seed(5)
        return torch.randn(n, *self.latent_shape, generator=generator).to(self.device)

    def _embed(self, cond: Cond) -> Tensor | None:
        value = cond.groups[0].kept[0][0][("cond",)]
        return None if value is None else value.float().flatten(1)

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        x, sigma, cond = request.x, request.sigma, request.cond.groups[0].kept[0][0][("cond",)]
        if not isinstance(request.guidance, str):
            raise ValueError(
                f"guidance={request.guidance}: a module policy has no unconditional branch; use"
                " 'none', or mix inside the module"
            )
        cond = None if cond is None else cond.index_select(0, request.rows)
        prediction = self.modules["module"](*own((x, sigma.to(x).expand(x.shape[0]), cond)))
        if not isinstance(prediction, Tensor) or prediction.shape != x.shape:
            is_tensor = isinstance(prediction, Tensor)
            got = tuple(prediction.shape) if is_tensor else f"a {type(prediction).__name__}"
            raise ValueError(
                f"{type(self.modules['module']).__name__} made {got} of x {tuple(x.shape)}; its"
                " prediction should have the shape of x"
            )
        return self.coords.velocity(prediction.float(), x, sigma), x.shape[0]

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        return x if self.decoder is None else own(self.decoder(own(x)))

    def encode_media(self, media: Tensor) -> Tensor:
        if self.decoder is not None:
            raise ValueError(
                "this policy has a decode of its own and no way back, so media from files cannot be"
                " trained on"
            )
        return media
