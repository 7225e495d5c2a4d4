"""Every scheduler as a flow: x' = x / (a+b), s = b / (a+b), v = eps - x0, where x = a x0 + b eps are the pipeline's own latents.

Three kinds cover diffusers: "flow" (a = 1-s, b = s), "vp" (a^2 + b^2 = 1: DDIM, PNDM, DPM++...), "ve" (a = 1: Euler, Heun, LMS...). In
flow coordinates a variance-preserving network reads x' / r with r = sqrt((1-s)^2 + s^2), in all of them. Nothing is approximated at
either end of a schedule.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.record import UnreplayableError
from flowrl.types import expand


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Noise levels of one sampling run, from the pipeline's own scheduler.

    sigmas (T+1,) fp64, descending, in [0, 1]; times (T,) fp64: the exact model time of sigmas[:-1]; start: noise * start is x at
    sigmas[0].
    """

    sigmas: Tensor
    times: Tensor
    start: float = 1.0

    @property
    def steps(self) -> int:
        return self.times.numel()


def radius(s: Tensor) -> Tensor:
    """sqrt((1-s)^2 + s^2): norm of (a, b) in flow coordinates."""
    return torch.sqrt((1 - s) ** 2 + s**2)


@dataclass
class TimeMap:
    """sigma -> model time through sorted knots. A sigma within 2e-7 of a knot (fp32 rounding) gets the knot's exact time, others a
    float in between."""

    sigma: Tensor  # (K,) fp64, ascending
    time: Tensor  # (K,) fp64
    _lists: tuple[list[float], list[float]] | None = None

    def add(self, sigma: Tensor, time: Tensor) -> None:
        """Register grid members; they replace knots that are equal within 2e-7."""
        sigma, time = sigma.to(self.sigma), time.to(self.time)
        far = (self.sigma[:, None] - sigma).abs().amin(1) > 2e-7
        merged = torch.cat([self.sigma[far], sigma]), torch.cat([self.time[far], time])
        order = merged[0].argsort()
        self.sigma, self.time, self._lists = merged[0][order], merged[1][order], None

    def at(self, sigma: float) -> float:
        """Model time of one number, without touching a device."""
        if self._lists is None:
            self._lists = (self.sigma.tolist(), self.time.tolist())
        knots, times = self._lists
        right = min(max(bisect.bisect_left(knots, sigma), 1), len(knots) - 1)
        s0, s1, t0, t1 = knots[right - 1], knots[right], times[right - 1], times[right]
        weight = 1.0 if abs(sigma - s1) < 2e-7 else 0.0 if abs(sigma - s0) < 2e-7 else min(max((sigma - s0) / (s1 - s0), 0.0), 1.0)
        return t1 if weight == 1.0 else t0 + weight * (t1 - t0)

    def __call__(self, sigma: Tensor) -> Tensor:
        """Model time fp64 of sigma, any shape, on sigma's device."""
        if self.sigma.device != sigma.device:
            self.sigma, self.time = self.sigma.to(sigma.device), self.time.to(sigma.device)
        sigma = sigma.double().contiguous()
        right = torch.searchsorted(self.sigma, sigma).clamp(1, self.sigma.numel() - 1)
        s0, s1, t0, t1 = self.sigma[right - 1], self.sigma[right], self.time[right - 1], self.time[right]
        weight = (sigma - s0) / (s1 - s0)
        weight = torch.where((sigma - s1).abs() < 2e-7, torch.ones_like(weight), weight)
        weight = torch.where((sigma - s0).abs() < 2e-7, torch.zeros_like(weight), weight)
        return torch.where(weight == 1, t1, t0 + weight.clamp(0, 1) * (t1 - t0))


class Coords:
    """Change of coordinates between a scheduler's latents and predictions and flow coordinates."""

    def __init__(self, scheduler: Any) -> None:
        cfg = scheduler.config
        prediction = cfg.get("prediction_type") or "flow"
        flow = "FlowMatch" in type(scheduler).__name__ or cfg.get("use_flow_sigmas") or prediction.startswith("flow")
        self.prediction = "flow" if flow else prediction
        if self.prediction not in ("flow", "epsilon", "v_prediction", "sample"):
            raise UnreplayableError(f"{type(scheduler).__name__} predicts {prediction!r}; known are flow, epsilon, v_prediction, sample")
        self.train_times = int(cfg.get("num_train_timesteps", 1000))
        self.kind = "flow" if flow else self._diffusion_kind(scheduler)
        if flow:
            self.time = TimeMap(
                torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([0.0, float(self.train_times)], dtype=torch.float64)
            )
        else:
            s = self._from_alphas(scheduler.alphas_cumprod)
            self.time = TimeMap(s, torch.arange(s.numel(), dtype=torch.float64))

    @classmethod
    def plain(cls, prediction: str) -> Coords:
        """Flow coordinates without a scheduler: the model time is sigma."""
        new = cls.__new__(cls)
        new.kind, new.prediction, new.train_times = "flow", prediction, 1
        unit = torch.tensor([0.0, 1.0], dtype=torch.float64)
        new.time = TimeMap(unit, unit)
        return new

    @staticmethod
    def _diffusion_kind(scheduler: Any) -> str:
        """ "ve" where the scheduler rescales the model's input, as Euler does; else "vp"."""
        if not hasattr(scheduler, "alphas_cumprod"):
            raise UnreplayableError(f"{type(scheduler).__name__} has neither flow sigmas nor alphas_cumprod: its noise levels are unknown")
        import copy

        probe = copy.deepcopy(scheduler)
        probe.set_timesteps(10)
        if not hasattr(probe, "scale_model_input"):
            return "vp"
        scaled = probe.scale_model_input(torch.ones(1), probe.timesteps[0])
        return "vp" if torch.allclose(scaled, torch.ones(1)) else "ve"

    @staticmethod
    def _from_alphas(alphas_cumprod: Tensor) -> Tensor:
        a, b = alphas_cumprod.double().sqrt(), (1 - alphas_cumprod.double()).sqrt()
        return b / (a + b)

    def scale(self, s: Tensor) -> Tensor:
        """a + b: the pipeline's latents are x' * scale(s)."""
        if self.kind == "flow":
            return torch.ones_like(s)
        return 1 / radius(s) if self.kind == "vp" else 1 / (1 - s)

    def sigmas_of(self, scheduler: Any, times: Tensor) -> Tensor:
        """(T+1,) fp64 flow sigmas of the run's model times (T,), in the pipeline's order, with the level after the last step."""
        sigmas: Any = getattr(scheduler, "sigmas", None)
        if self.kind == "flow" or (isinstance(sigmas, Tensor) and sigmas.numel() == scheduler.timesteps.numel() + 1):
            level = sigmas.double().cpu()
            first = int((scheduler.timesteps.double().cpu() - times[0]).abs().argmin())  # img2img runs start late
            level = level[first : first + times.numel() + 1]
            return level if self.kind == "flow" else level / (1 + level)
        train = self._from_alphas(scheduler.alphas_cumprod.cpu())
        final = self._from_alphas(torch.as_tensor(getattr(scheduler, "final_alpha_cumprod", 1.0)).reshape(1).cpu())
        return torch.cat([train[times.long()], final])

    def coefficients(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """(p, q) with v = p * prediction + q * x'. fp64 in, fp64 out."""
        r2 = (1 - s) ** 2 + s**2
        if self.prediction == "epsilon":
            return 1 / (1 - s), -1 / (1 - s)
        if self.prediction == "sample":
            return -1 / s, 1 / s
        if self.prediction == "v_prediction":
            return 1 / r2.sqrt(), (2 * s - 1) / r2
        return torch.ones_like(s), torch.zeros_like(s)

    def velocity(self, prediction: Tensor, x: Tensor, s: Tensor) -> Tensor:
        """v = eps_hat - x0_hat of the model's prediction at x (n, *L) flow coordinates; s () or (n,) fp64."""
        if self.prediction == "flow":
            return prediction
        p, q = self.coefficients(s)
        return expand(p.to(x), x) * prediction + expand(q.to(x), x) * x

    def to_prediction(self, v: Tensor, x: Tensor, s: Tensor) -> Tensor:
        """Inverse of velocity."""
        if self.prediction == "flow":
            return v
        p, q = self.coefficients(s)
        return (v - expand(q.to(x), x) * x) / expand(p.to(x), x)
