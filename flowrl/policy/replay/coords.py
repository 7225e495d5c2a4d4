"""Every scheduler as a flow: x' = x / (a+b), s = b / (a+b), v = eps - x0.

There x = a x0 + b eps are the pipeline's own latents. Five kinds cover diffusers: "flow" (a = 1-s,
b = s), "rising" (the same, whose scheduler counts from noise 0 to data 1), "vp" (a^2 + b^2 = 1:
DDIM, PNDM, DPM++...), "ve" (a = 1: Euler, Heun, LMS...), "trig" (a = d cos t, b = d sin t for a
time t from 0 to pi/2 and the data's deviation d: SCM). In flow coordinates a variance-preserving
network reads x' / r with r = sqrt((1-s)^2 + s^2), in all of them. Nothing is approximated at either
end of a schedule.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.errors import UnreplayableError
from flowrl.types import expand


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Noise levels of one sampling run, from the pipeline's own scheduler."""

    sigmas: Tensor  # (T+1,) fp64 noise levels, descending, in [0, 1]
    times: Tensor  # (T,) fp64, exact model times of sigmas[:-1]
    start: float = 1.0  # factor from noise to x at sigmas[0]

    @property
    def steps(self) -> int:
        return self.times.numel()


def radius(s: Tensor) -> Tensor:
    """Compute sqrt((1-s)^2 + s^2), the norm of (a, b) in flow coordinates."""
    return torch.sqrt((1 - s) ** 2 + s**2)


def _of_angle(angle: Tensor) -> Tensor:
    """Compute s fp64 of an angle t from the data (0) to noise (pi/2), which schedulers may round
    up: s = sin t / (sin t + cos t)."""
    sin, cos = torch.sin(angle.double()), torch.cos(angle.double()).clamp(min=0)
    return sin / (sin + cos)


class TimeMap:
    """sigma -> model time: linear between the knots of the scheduler's own curve, and the exact
    time at members of registered schedules, which are found within 2e-7 (fp32 rounding).
    Registering one changes no other time.
    """

    def __init__(self, sigma: Tensor, time: Tensor) -> None:
        """Take the knots of the curve: sigma (K,) ascending, time (K,)."""
        self.sigma, self.time = sigma.double().cpu(), time.double().cpu()
        self.members = torch.empty(2, 0, dtype=torch.float64)  # (2, members): sigma ascending, time
        self._placed: dict[torch.device, tuple[Tensor, ...]] = {}
        self._known: dict[float, float] = {}  # sigma -> answer of `at`

    def add(self, sigma: Tensor, time: Tensor) -> None:
        """Register members of a schedule; those that are known stay as they are."""
        new = torch.stack([sigma.double().cpu(), time.double().cpu()])
        if not self.holds(*new):
            raise UnreplayableError(
                f"time: the scheduler's model times lie up to {self._off(*new):g} beside its noise"
                " curve; others cannot be told"
            )
        fresh = (new[0][:, None] != self.members[0]).all(1)
        merged = torch.cat([self.members, new[:, fresh]], 1)
        self.members, self._placed = merged[:, merged[0].argsort()], {}
        self._known.clear()

    def holds(self, sigma: Tensor, time: Tensor) -> bool:
        """Whether these times lie on the curve; integer times are up to one of 1000 off."""
        return self._off(sigma, time) <= 2e-3 * (self.time.max() - self.time.min()).item()

    def _off(self, sigma: Tensor, time: Tensor) -> float:
        return (self._between(sigma.double(), self.sigma, self.time) - time).abs().max().item()

    @staticmethod
    def _between(sigma: Tensor, knots: Tensor, times: Tensor) -> Tensor:
        """Interpolate linearly between the times at knots."""
        right = torch.searchsorted(knots, sigma).clamp(1, knots.numel() - 1)
        s0, s1, t0, t1 = knots[right - 1], knots[right], times[right - 1], times[right]
        return t0 + ((sigma - s0) / (s1 - s0)).clamp(0, 1) * (t1 - t0)

    def at(self, sigma: float) -> float:
        """Return the model time of one sigma, without the use of a device."""
        if sigma not in self._known:
            self._known[sigma] = self(torch.tensor([sigma], dtype=torch.float64)).item()
        return self._known[sigma]

    def whole(self, sigma: float) -> float:
        """Find the sigma near this one whose model time is a whole number."""
        time = round(self.at(sigma))
        order = self.time.argsort()
        right = int(torch.searchsorted(self.time[order], time).clamp(1, len(order) - 1))
        t0, t1 = self.time[order[right - 1]], self.time[order[right]]
        s0, s1 = self.sigma[order[right - 1]], self.sigma[order[right]]
        return (s0 + (s1 - s0) * (time - t0) / (t1 - t0)).item()

    def __call__(self, sigma: Tensor) -> Tensor:
        """Return the model times fp64 of sigma, any shape, on sigma's device."""
        if sigma.ndim == 0 and sigma.device.type == "cpu":
            return torch.tensor(self.at(sigma.item()), dtype=torch.float64)
        if sigma.device not in self._placed:
            self._placed[sigma.device] = tuple(
                v.contiguous().to(sigma.device, non_blocking=True)
                for v in (self.sigma, self.time, *self.members)
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


FLOWS = ("flow", "rising")
ANGLES = 4097  # knots of the curve of angles; between them it is straight to 2e-8
# (kind, prediction) pairs to try, in this order, if a scheduler's step differs from its config
KNOWN = (
    ("flow", "flow"),
    ("rising", "backward"),
    ("ve", "epsilon"),
    ("ve", "sample"),
    ("ve", "v_prediction"),
    ("vp", "epsilon"),
    ("vp", "sample"),
    ("vp", "v_prediction"),
    ("flow", "epsilon"),
    ("flow", "sample"),
)


class Coords:
    """Change of coordinates between a scheduler's latents and predictions and flow coordinates.

    kind: "flow", "rising", "vp", "ve" or "trig". prediction: "flow" eps - x0, "backward" x0 - eps,
    "epsilon", "sample" x0, "v_prediction" a eps - b x0 for a^2 + b^2 = 1, "trigflow" d times that.
    """

    data = 1.0  # d, the deviation of the data in the pipeline's units ("trig")

    def __init__(self, scheduler: Any) -> None:
        cfg = scheduler.config
        prediction = cfg.get("prediction_type") or "flow"
        flow = cfg.get("use_flow_sigmas") or prediction.startswith("flow")
        flow = flow or "FlowMatch" in type(scheduler).__name__
        self.prediction = "flow" if flow else prediction
        if self.prediction not in ("flow", "epsilon", "v_prediction", "sample", "trigflow"):
            raise UnreplayableError(
                f"{type(scheduler).__name__} predicts {prediction!r}; known are flow, epsilon,"
                " v_prediction, sample, trigflow"
            )
        if self.prediction == "trigflow":
            self.kind, self.data = "trig", float(cfg.get("sigma_data", 1.0))
        else:
            self.kind = "flow" if flow else self._diffusion_kind(scheduler)
        self._end = float(cfg.get("num_train_timesteps", 1000))
        self.time = self._curve(scheduler)

    def _curve(self, scheduler: Any) -> TimeMap:
        """Make the curve of model times by noise level from the scheduler's training levels."""
        ends = torch.tensor([0.0, 1.0])
        if self.kind == "flow":
            return TimeMap(ends, ends * self._end)
        if self.kind == "trig":
            angles = torch.linspace(0, math.pi / 2, ANGLES, dtype=torch.float64)
            return TimeMap(_of_angle(angles), angles)
        if self.kind == "rising" or not hasattr(scheduler, "alphas_cumprod"):
            return TimeMap(ends, (1 - ends) * self._end)
        s = self._from_alphas(scheduler.alphas_cumprod)
        return TimeMap(s, torch.arange(s.numel()))

    def settle(self, scheduler: Any, extra: Mapping[str, Any]) -> None:
        """Take the first of KNOWN that describes the step of a scheduler, whose timesteps are set,
        if its config does not. extra: further arguments of step."""
        if self._fits(scheduler, extra) is not False:
            return
        stated = self.kind, self.prediction
        for self.kind, self.prediction in KNOWN:
            if self._fits(scheduler, extra):
                self.time = self._curve(scheduler)
                return
        self.kind, self.prediction = stated

    def _fits(self, scheduler: Any, extra: Mapping[str, Any]) -> bool | None:
        """Whether its first-order steps are Euler steps in these coordinates; None if it draws
        noise or cannot be asked."""
        times = scheduler.timesteps
        levels: Any = getattr(scheduler, "sigmas", None)
        if self.kind == "vp" and not hasattr(scheduler, "alphas_cumprod"):
            return False
        if self.kind in FLOWS and isinstance(levels, Tensor):
            falls = bool(levels[0] > levels[-1])
            if levels.max() > 1 + 1e-6 or falls != (self.kind == "flow"):
                return False
        generator = torch.Generator().manual_seed(0)
        sample, prediction = torch.randn(2, 1, 4, 4, 4, generator=generator)
        try:
            sigmas = self.sigmas_of(scheduler, times.double().cpu())
            for j in {0, len(times) // 2}:
                # latents lie on the timesteps' device in a run, too
                latents = sample.to(times.device)
                made = first_order(scheduler, j, prediction.to(times.device), latents, extra)
                if made is None:
                    return None
                made = made.cpu()
                x = sample / self.scale(sigmas[j]).item()
                v = self.velocity(prediction, x, sigmas[j])
                ours = x + v * (sigmas[j + 1] - sigmas[j]).item()
                gap = ours * self.scale(sigmas[j + 1]).item() - made
                if not gap.abs().max() < 1e-3 * made.abs().max():
                    return False
        except (ValueError, IndexError, AttributeError, TypeError, RuntimeError):
            return None
        return True

    @classmethod
    def plain(cls, prediction: str) -> Coords:
        """Flow coordinates without a scheduler: the model time is sigma."""
        new = cls.__new__(cls)
        new.kind, new.prediction, new._end = "flow", prediction, 1.0
        new.time = TimeMap(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
        return new

    @staticmethod
    def _diffusion_kind(scheduler: Any) -> str:
        """ "ve" where the scheduler rescales the model's input, as Euler does; else "vp"."""
        if not hasattr(scheduler, "alphas_cumprod"):
            if isinstance(getattr(scheduler, "sigmas", None), Tensor):
                return "ve"
            raise UnreplayableError(
                f"{type(scheduler).__name__} has neither sigmas nor alphas_cumprod: its noise"
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
        """Compute flow sigmas fp64 of a variance-preserving scheduler."""
        a, b = alphas_cumprod.double().sqrt(), (1 - alphas_cumprod.double()).sqrt()
        return b / (a + b)

    def scale(self, s: Tensor) -> Tensor:
        """Return a + b: the pipeline's latents are x' * scale(s)."""
        if self.kind in FLOWS:
            return torch.ones_like(s)
        return 1 / (1 - s) if self.kind == "ve" else self.data / radius(s)

    def level(self, s: Tensor) -> Tensor:
        """Return the value of the scheduler's own `sigmas` at s; `_from_level` inverts it."""
        if self.kind in FLOWS:
            return s if self.kind == "flow" else 1 - s
        return s / (1 - s)

    def _from_level(self, level: Tensor) -> Tensor:
        if self.kind in FLOWS:
            return level if self.kind == "flow" else 1 - level
        return level / (1 + level)

    def start(self, sigma: float, seen: Schedule) -> float:
        """Return the factor from standard normal noise to x at sigma, where a run starts. `seen`,
        any schedule of the pipeline, tells which of the schedulers' rules is its own: in the
        pipeline's units sqrt(1 + sigma^2) or sigma ("ve"), else the same number for every sigma.
        """
        s, s0 = torch.tensor(sigma, dtype=torch.float64), seen.sigmas[0]
        for rule in (radius, torch.clone) if self.kind == "ve" else ():
            if abs(seen.start / rule(s0).item() - 1) < 1e-5:
                return rule(s).item()
        return seen.start * (self.scale(s0) / self.scale(s)).item()

    def sigmas_of(self, scheduler: Any, times: Tensor) -> Tensor:
        """Return (T+1,) fp64 flow sigmas of the run's model times (T,), in the pipeline's order,
        with the level after the last step."""
        if self.kind == "trig":  # its last time is that of the data
            first = place_of(scheduler, times[0])
            return _of_angle(scheduler.timesteps.double().cpu()[first : first + times.numel() + 1])
        sigmas: Any = getattr(scheduler, "sigmas", None)
        whole = isinstance(sigmas, Tensor) and sigmas.numel() == scheduler.timesteps.numel() + 1
        if self.kind in FLOWS or whole:
            first = place_of(scheduler, times[0])
            return self._from_level(sigmas.double().cpu()[first : first + times.numel() + 1])
        last = torch.as_tensor(getattr(scheduler, "final_alpha_cumprod", 1.0)).reshape(1).cpu()
        train = self._from_alphas(scheduler.alphas_cumprod.cpu())
        return torch.cat([train[times.long()], self._from_alphas(last)])

    def coefficients(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Return (p, q) fp64 of s fp64, with v = p * prediction + q * x'."""
        r2 = (1 - s) ** 2 + s**2
        if self.prediction == "epsilon":
            return 1 / (1 - s), -1 / (1 - s)
        if self.prediction == "sample":
            return -1 / s, 1 / s
        if self.prediction in ("v_prediction", "trigflow"):
            return 1 / (self.data * r2.sqrt()), (2 * s - 1) / r2
        sign = -1 if self.prediction == "backward" else 1
        return sign * torch.ones_like(s), torch.zeros_like(s)

    def velocity(self, prediction: Tensor, x: Tensor, s: Tensor) -> Tensor:
        """Compute v = eps_hat - x0_hat from the model's prediction at x (n, *L) flow coordinates; s
        () or (n,) fp64."""
        if self.prediction == "flow":
            return prediction
        p, q = self.coefficients(s)
        p, q = (value.to(x, non_blocking=True) for value in (p, q))
        return expand(p, x) * prediction + expand(q, x) * x


# config fields that bound a step's estimate of the clean latents
LIMITS = ("clip_sample", "thresholding")


GIVEN = ("self", "model_output", "timestep", "sample", "return_dict", "generator", "eta")


class FirstStep:
    """Keeps a scheduler as it is at the first step of a run, as some loops edit its sigmas."""

    def __init__(self) -> None:
        self.scheduler: Any = None  # a copy whose step is not recorded
        self.extra: dict[str, Any] = {}  # further arguments of the newest call to step

    def __call__(self, given: dict[str, Any]) -> None:
        """Look at the arguments of a call to step; it is an `on_raw` of Runner.run."""
        if self.scheduler is None:
            self.scheduler = copy.deepcopy(given["self"])
            self.scheduler.__dict__.pop("_recorded_by", None)
        self.extra = {k: v for k, v in given.items() if k not in GIVEN}


def place_of(scheduler: Any, time: Tensor) -> int:
    """Find the place of a model time among the scheduler's timesteps: loops that start from a
    picture start late."""
    return int((scheduler.timesteps.double().cpu() - time).abs().argmin())


def started(scheduler: Any, at: int = 0) -> Any:
    """Copy a scheduler, and put the copy at one of its steps."""
    own = copy.deepcopy(scheduler)
    if hasattr(own, "set_begin_index"):
        own.set_begin_index(at)
    return own


def first_order(
    scheduler: Any, at: int, prediction: Tensor, sample: Tensor, extra: Mapping[str, Any]
) -> Tensor | None:
    """Return the latents that a fresh scheduler makes at its step `at`, without its limits; the
    first step of a multistep solver is first order. None when it draws noise."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        own = started(scheduler, at)
        own.register_to_config(**{k: False for k in LIMITS if own.config.get(k)})
        time = own.timesteps[at]
        if hasattr(own, "scale_model_input"):
            own.scale_model_input(sample, time)
        given = {k: prediction if isinstance(v, Tensor) else v for k, v in extra.items()}
        made.append(own.step(prediction, time, sample, **given, return_dict=False)[0])
    return made[0] if torch.equal(*made) else None
