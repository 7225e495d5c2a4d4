"""Every scheduler as a flow: x' = x / (a+b), s = b / (a+b), v = eps - x0.

There x = a x0 + b eps are the pipeline's own latents. Three kinds cover diffusers: "flow" (a = 1-s,
b = s), "vp" (a^2 + b^2 = 1: DDIM, PNDM, DPM++...), "ve" (a = 1: Euler, Heun, LMS...). In flow
coordinates a variance-preserving network reads x' / r with r = sqrt((1-s)^2 + s^2), in all of them.
Nothing is approximated at either end of a schedule.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.record import UnreplayableError
from flowrl.types import expand


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Noise levels of one sampling run, from the pipeline's own scheduler.

    sigmas (T+1,) fp64, descending, in [0, 1]; times (T,) fp64: the exact model time of sigmas[:-1];
    start: noise * start is x at sigmas[0].
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


class TimeMap:
    """sigma -> model time: linear between the knots of the scheduler's own curve, and the exact
    time at members of registered schedules, which are found within 2e-7 (fp32 rounding).
    Registering one changes no other time.
    """

    def __init__(self, sigma: Tensor, time: Tensor) -> None:
        """The curve: sigma (K,) ascending, time (K,)."""
        self.sigma, self.time = sigma.double().cpu(), time.double().cpu()
        self.members = torch.empty(2, 0, dtype=torch.float64)  # sigma ascending, time
        self._placed: dict[torch.device, tuple[Tensor, ...]] = {}
        self._known: dict[float, float] = {}  # answers of `at`

    def add(self, sigma: Tensor, time: Tensor) -> None:
        """Register members of a schedule; those that are known stay as they are."""
        new = torch.stack([sigma.double().cpu(), time.double().cpu()])
        off = (self._between(new[0], self.sigma, self.time) - new[1]).abs().max().item()
        # integer times are up to one of 1000 off
        if off > 2e-3 * (self.time.max() - self.time.min()).item():
            raise UnreplayableError(
                f"time: the scheduler's model times lie up to {off:g} beside its noise curve;"
                " others cannot be told"
            )
        fresh = (new[0][:, None] != self.members[0]).all(1)
        merged = torch.cat([self.members, new[:, fresh]], 1)
        self.members, self._placed = merged[:, merged[0].argsort()], {}
        self._known.clear()

    @staticmethod
    def _between(sigma: Tensor, knots: Tensor, times: Tensor) -> Tensor:
        """Linear interpolation of times at knots."""
        right = torch.searchsorted(knots, sigma).clamp(1, knots.numel() - 1)
        s0, s1, t0, t1 = knots[right - 1], knots[right], times[right - 1], times[right]
        return t0 + ((sigma - s0) / (s1 - s0)).clamp(0, 1) * (t1 - t0)

    def at(self, sigma: float) -> float:
        """Model time of one number, without touching a device."""
        if sigma not in self._known:
            self._known[sigma] = self(torch.tensor(sigma, dtype=torch.float64)).item()
        return self._known[sigma]

    def __call__(self, sigma: Tensor) -> Tensor:
        """Model time fp64 of sigma, any shape, on sigma's device."""
        if sigma.device not in self._placed:
            self._placed[sigma.device] = tuple(
                v.contiguous().to(sigma.device) for v in (self.sigma, self.time, *self.members)
            )
        knots, times, members, exact = self._placed[sigma.device]
        sigma = sigma.double().contiguous()
        between = self._between(sigma, knots, times)
        if not members.numel():
            return between
        after = torch.searchsorted(members, sigma).clamp(max=members.numel() - 1)
        before = (after - 1).clamp(min=0)
        nearer = (members[after] - sigma).abs() < (members[before] - sigma).abs()
        near = torch.where(nearer, after, before)
        return torch.where((members[near] - sigma).abs() < 2e-7, exact[near], between)


class Coords:
    """Change of coordinates between a scheduler's latents and predictions and flow coordinates."""

    def __init__(self, scheduler: Any) -> None:
        cfg = scheduler.config
        prediction = cfg.get("prediction_type") or "flow"
        flow = cfg.get("use_flow_sigmas") or prediction.startswith("flow")
        flow = flow or "FlowMatch" in type(scheduler).__name__
        self.prediction = "flow" if flow else prediction
        if self.prediction not in ("flow", "epsilon", "v_prediction", "sample"):
            raise UnreplayableError(
                f"{type(scheduler).__name__} predicts {prediction!r}; known are flow, epsilon,"
                " v_prediction, sample"
            )
        self.kind = "flow" if flow else self._diffusion_kind(scheduler)
        if flow:
            end = float(cfg.get("num_train_timesteps", 1000))
            self.time = TimeMap(torch.tensor([0.0, 1.0]), torch.tensor([0.0, end]))
        else:
            s = self._from_alphas(scheduler.alphas_cumprod)
            self.time = TimeMap(s, torch.arange(s.numel()))

    @classmethod
    def plain(cls, prediction: str) -> Coords:
        """Flow coordinates without a scheduler: the model time is sigma."""
        new = cls.__new__(cls)
        new.kind, new.prediction = "flow", prediction
        new.time = TimeMap(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
        return new

    @staticmethod
    def _diffusion_kind(scheduler: Any) -> str:
        """ "ve" where the scheduler rescales the model's input, as Euler does; else "vp"."""
        if not hasattr(scheduler, "alphas_cumprod"):
            raise UnreplayableError(
                f"{type(scheduler).__name__} has neither flow sigmas nor alphas_cumprod: its noise"
                " levels are unknown"
            )
        probe = copy.deepcopy(scheduler)
        probe.set_timesteps(10)
        if not hasattr(probe, "scale_model_input"):
            return "vp"
        scaled = probe.scale_model_input(torch.ones(1), probe.timesteps[0])
        return "vp" if torch.allclose(scaled, torch.ones(1)) else "ve"

    @staticmethod
    def _from_alphas(alphas_cumprod: Tensor) -> Tensor:
        """Flow sigmas fp64 of a variance-preserving scheduler."""
        a, b = alphas_cumprod.double().sqrt(), (1 - alphas_cumprod.double()).sqrt()
        return b / (a + b)

    def scale(self, s: Tensor) -> Tensor:
        """a + b: the pipeline's latents are x' * scale(s)."""
        if self.kind == "flow":
            return torch.ones_like(s)
        return 1 / radius(s) if self.kind == "vp" else 1 / (1 - s)

    def start(self, sigma: float, seen: Schedule) -> float:
        """Factor from standard normal noise to x at sigma, where a run starts. `seen`, any schedule
        of the pipeline, tells which of the schedulers' rules is its own: in the pipeline's units
        sqrt(1 + sigma^2) or sigma ("ve"), else the same number for every sigma.
        """
        s, s0 = torch.tensor(sigma, dtype=torch.float64), seen.sigmas[0]
        for rule in (radius, torch.clone) if self.kind == "ve" else ():
            if abs(seen.start / rule(s0).item() - 1) < 1e-5:
                return rule(s).item()
        return seen.start * (self.scale(s0) / self.scale(s)).item()

    def sigmas_of(self, scheduler: Any, times: Tensor) -> Tensor:
        """(T+1,) fp64 flow sigmas of the run's model times (T,), in the pipeline's order, with the
        level after the last step."""
        sigmas: Any = getattr(scheduler, "sigmas", None)
        told = isinstance(sigmas, Tensor) and sigmas.numel() == scheduler.timesteps.numel() + 1
        if self.kind == "flow" or told:
            # img2img runs start late
            first = int((scheduler.timesteps.double().cpu() - times[0]).abs().argmin())
            level = sigmas.double().cpu()[first : first + times.numel() + 1]
            return level if self.kind == "flow" else level / (1 + level)
        last = torch.as_tensor(getattr(scheduler, "final_alpha_cumprod", 1.0)).reshape(1).cpu()
        train = self._from_alphas(scheduler.alphas_cumprod.cpu())
        return torch.cat([train[times.long()], self._from_alphas(last)])

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
        """v = eps_hat - x0_hat of the model's prediction at x (n, *L) flow coordinates; s () or
        (n,) fp64."""
        if self.prediction == "flow":
            return prediction
        p, q = self.coefficients(s)
        return expand(p.to(x), x) * prediction + expand(q.to(x), x) * x
