"""RL on Stable Diffusion 3 as published research code runs it: what flowrl is measured against.

After train_sd3.py of Flow-GRPO (arXiv:2505.05470) and train_nft_sd3.py of DiffusionNFT
(arXiv:2509.16117), without their logging. The pipeline's own loop samples, its scheduler making
another step; an update sends a micro-batch of samples at one step through the network at a time,
and the reference is the network with its adapter off. Samples share nothing. Two things are as
in flowrl, so that they do not count against these loops: prompts are encoded once an iteration,
and the layers' adapters are switched by an attribute of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

from flowrl.runtime.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a loop is run with."""

    prompts: list[str]  # of an iteration
    group: int  # samples a prompt
    steps: int  # of a rollout
    guidance: float  # 1: one branch
    micro: int  # samples in one forward
    call: dict[str, Any]  # further arguments of the pipeline's call
    rank: int  # of the LoRA
    alpha: float  # of the LoRA
    targets: list[str]  # ends of names of the layers that it adapts
    noisy: tuple[int, ...] = ()  # steps of a rollout that are SDE (GRPO)
    trained: tuple[int, ...] = ()  # steps whose log-probs are trained (GRPO)
    levels: int = 0  # noise levels trained of each sample (NFT)
    eta: float = 0.7  # noise of an SDE step
    kl_weight: float = 0.0  # weight of the KL to the network without adapter
    lr: float = 3e-4  # AdamW's learning rate
    decode: int = 32  # samples that are decoded together

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.group


class Stepper(FlowMatchEulerDiscreteScheduler):
    """The pipeline's scheduler with Flow-GRPO's SDE step where it is noisy, and Euler's elsewhere;
    it keeps the states that it went through."""

    noisy: tuple[int, ...] = ()
    eta = 0.7

    def begin(self) -> None:
        """Before a run of the pipeline."""
        self.states: list[Tensor] = []
        self.log_probs: list[Tensor | None] = []

    def step(self, model_output: Any, timestep: Any, sample: Any, **unused: Any) -> Any:
        if self.step_index is None:
            self._init_step_index(timestep)
        i = self.step_index
        x, v = sample.float(), model_output.float()
        self.states.append(x)
        if i in self.noisy:
            mean, std = sde_step(v, x, *self.at(i), self.eta)
            y = mean + std * torch.randn_like(mean)
            self.log_probs.append(log_prob(y, mean, std))
        else:
            sigma, sigma_next, _ = self.at(i)
            y = x + (sigma_next - sigma) * v
            self.log_probs.append(None)
        self._step_index += 1
        return (y.to(sample.dtype),)

    def at(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Noise levels of step i, and what stands in for a first one of 1."""
        return self.sigmas[i], self.sigmas[i + 1], self.sigmas[1]


def sde_step(
    v: Tensor, x: Tensor, sigma: Tensor, sigma_next: Tensor, cap: Tensor, eta: float
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of Flow-GRPO's step, as its sde_step_with_logprob has them."""
    dt = sigma_next - sigma
    std = torch.sqrt(sigma / (1 - torch.where(sigma == 1, cap, sigma))) * eta
    mean = x * (1 + std**2 / (2 * sigma) * dt)
    mean = mean + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std * torch.sqrt(-dt)


def log_prob(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Mean log-density over latent dims, (n,)."""
    density = -((y.detach() - mean) ** 2) / (2 * std**2) - torch.log(std)
    return (density - math.log(math.sqrt(2 * math.pi))).mean(dim=(1, 2, 3))


class Loop:
    """What both methods share. rows: samples that went through the network by phase, and branch."""

    copies: tuple[str, ...] = ()  # further adapters

    def __init__(self, pipe: Any, settings: Settings) -> None:
        self.pipe, self.settings = pipe, settings
        self.net, self.device = pipe.transformer, pipe.transformer.device
        pipe.scheduler = self.stepper = Stepper.from_config(pipe.scheduler.config)
        self.stepper.noisy, self.stepper.eta = settings.noisy, settings.eta
        for part in (pipe.transformer, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
            part.requires_grad_(False)
        lora = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            init_lora_weights="gaussian",
            target_modules=settings.targets,
        )
        for name in ("default", *self.copies):
            self.net.add_adapter(lora, adapter_name=name)
        self.layers = [m for m in self.net.modules() if isinstance(m, BaseTunerLayer)]
        for layer in self.layers:
            layer.set_adapter("default")
        # trained weights are fp32 whatever the network's type is
        for name, weight in self.net.named_parameters():
            if "lora_" in name:
                weight.data = weight.data.float()
        self.weights = self.of("default")
        for name in self.copies:
            for copy, weight in zip(self.of(name), self.weights, strict=True):
                copy.data.copy_(weight.data)
        self.optimizer = torch.optim.AdamW(self.weights, lr=settings.lr, weight_decay=1e-4)
        self.ema = [weight.detach().clone() for weight in self.weights]
        self.ledger = Ledger(self.device)
        self.rows = {"rollout": 0, "reference": 0, "update": 0}
        low = self.net.dtype != torch.float32
        self.autocast = (
            partial(torch.autocast, self.device.type, dtype=self.net.dtype) if low else nullcontext
        )

    def of(self, adapter: str) -> list[Tensor]:
        """Weights of an adapter."""
        return [p for name, p in self.net.named_parameters() if f".{adapter}." in name]

    @cached_property
    def branches(self) -> int:
        return 2 if self.settings.guidance > 1 else 1

    @contextmanager
    def adapter(self, name: str | None) -> Iterator[None]:
        """Another adapter inside; None: the network without any."""
        self._switch(name)
        try:
            yield
        finally:
            self._switch("default")

    def _switch(self, name: str | None) -> None:
        for layer in self.layers:
            layer._disable_adapters = name is None
            layer._active_adapter = [name or "default"]

    @torch.no_grad()
    def encode(self) -> None:
        """Embeddings of the prompts of an iteration."""
        s = self.settings
        length = {k: v for k, v in s.call.items() if k == "max_sequence_length"}
        made = self.pipe.encode_prompt(
            prompt=s.prompts,
            prompt_2=None,
            prompt_3=None,
            negative_prompt=[""] * len(s.prompts),
            do_classifier_free_guidance=self.branches > 1,
            device=self.device,
            **length,
        )
        each = [None if e is None else e.repeat_interleave(s.group, 0) for e in made]
        self.text, self.no_text, self.pooled, self.no_pooled = each

    @torch.no_grad()
    def sample(self) -> None:
        """The pipeline's own loop, a micro-batch of samples at a time."""
        s = self.settings
        states, log_probs = [], []
        for rows in torch.arange(s.samples, device=self.device).split(s.micro):
            self.stepper.begin()
            done = self.pipe(
                prompt_embeds=self.text[rows],
                pooled_prompt_embeds=self.pooled[rows],
                negative_prompt_embeds=None if self.no_text is None else self.no_text[rows],
                negative_pooled_prompt_embeds=None
                if self.no_pooled is None
                else self.no_pooled[rows],
                num_inference_steps=s.steps,
                guidance_scale=s.guidance,
                output_type="latent",
                **s.call,
            )
            states.append([*self.stepper.states, done.images.float()])
            log_probs.append([p for p in self.stepper.log_probs if p is not None])
            self.rows["rollout"] += len(rows) * s.steps * self.branches
        self.states = [torch.cat(parts) for parts in zip(*states, strict=True)]
        self.log_probs = [torch.cat(parts) for parts in zip(*log_probs, strict=True)]
        self.times = self.stepper.timesteps

    @torch.no_grad()
    def decode(self) -> Tensor:
        """Pictures of the samples, on the host."""
        vae, config = self.pipe.vae, self.pipe.vae.config
        made = []
        for x in self.states[-1].split(self.settings.decode):
            z = (x / config.scaling_factor + config.shift_factor).to(vae.dtype)
            media = vae.decode(z, return_dict=False)[0]
            made.append(self.pipe.image_processor.postprocess(media, output_type="pt").cpu())
        return torch.cat(made)

    def advantages(self) -> Tensor:
        """(B,): random rewards, normalised within their groups."""
        reward = torch.rand(len(self.settings.prompts), self.settings.group, device=self.device)
        spread = reward.std(1, keepdim=True, correction=0)
        return ((reward - reward.mean(1, keepdim=True)) / (spread + 1e-4)).flatten()

    def predict(self, x: Tensor, time: Tensor, rows: Tensor, *, phase: str) -> Tensor:
        """Velocity of samples `rows` at x (n, *L), time (n,), as compute_log_prob asks for it."""
        text, pooled = self.text[rows], self.pooled[rows]
        if guided := self.branches > 1:
            text = torch.cat([self.no_text[rows], text])
            pooled = torch.cat([self.no_pooled[rows], pooled])
            x, time = torch.cat([x, x]), torch.cat([time, time])
        self.rows[phase] += len(x)
        v = self.net(
            hidden_states=x.to(self.net.dtype),
            timestep=time,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        if guided:
            uncond, cond = v.chunk(2)
            v = uncond + self.settings.guidance * (cond - uncond)
        return v.float()

    def iterate(self, *, decode: bool = True) -> dict[str, float]:
        """One iteration -> seconds, memory and rows, as a Ledger names them. decode: also make
        pictures."""
        self.rows = dict.fromkeys(self.rows, 0)
        ledger = self.ledger
        ledger.reset()
        with ledger.phase("encode"):
            self.encode()
        with ledger.phase("rollout"), self.autocast():
            self.sample()
        if decode:
            with ledger.phase("decode"):
                self.decode()
        with ledger.phase("update"):
            with self.autocast():
                self.update(self.advantages())
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.follow()
        return ledger.iteration() | {f"nfe/{name}": float(n) for name, n in self.rows.items()}

    def set_micro(self, samples: int) -> None:
        """At most `samples` samples in a forward from now on."""
        self.settings = replace(self.settings, micro=samples)

    def update(self, advantages: Tensor) -> None:
        """Add up the gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def follow(self) -> None:
        """Averaged weights."""
        for average, weight in zip(self.ema, self.weights, strict=True):
            average.lerp_(weight, 0.1)


class GRPO(Loop):
    """Flow-GRPO: every trained step of every sample is recomputed, one step of a micro-batch at a
    time."""

    def update(self, advantages: Tensor) -> None:
        s, clip = self.settings, 1e-4
        chunks = torch.randperm(s.samples, device=self.device).split(s.micro)
        share = s.samples * len(s.trained)
        for rows in chunks:
            for place, i in enumerate(s.trained):
                adv, old = advantages[rows], self.log_probs[place][rows]
                time = self.times[i].expand(len(rows))
                x, y = self.states[i][rows], self.states[i + 1][rows]
                v = self.predict(x, time, rows, phase="update")
                mean, std = sde_step(v, x, *self.stepper.at(i), s.eta)
                ratio = torch.exp(log_prob(y, mean, std) - old)
                loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).sum()
                if s.kl_weight:
                    with torch.no_grad(), self.adapter(None):
                        v_ref = self.predict(x, time, rows, phase="reference")
                    other, _ = sde_step(v_ref, x, *self.stepper.at(i), s.eta)
                    kl = ((mean - other) ** 2).mean(dim=(1, 2, 3)) / (2 * std**2)
                    loss = loss + s.kl_weight * kl.sum()
                (loss / share).backward()


class NFT(Loop):
    """DiffusionNFT: samples of the old policy are noised again; three forwards a row, of the new,
    the old and the untrained weights."""

    copies = ("old",)
    optimizer_steps = 0

    def sample(self) -> None:
        with self.adapter("old"):
            super().sample()

    def update(self, advantages: Tensor) -> None:
        s, n = self.settings, self.settings.samples
        r = (advantages.clamp(-5, 5) / 10 + 0.5).clamp(0, 1)
        x0_all = self.states[-1]
        order = torch.rand(n, s.steps, device=self.device).argsort(1)[
            :, : s.levels
        ]  # levels of each sample
        share = n * s.levels
        for k in range(s.levels):
            for rows in torch.randperm(n, device=self.device).split(s.micro):
                at = order[rows, k].to(self.stepper.sigmas.device)
                x0 = x0_all[rows]
                sigma = self.stepper.sigmas[at].to(x0)[:, None, None, None]
                x = (1 - sigma) * x0 + sigma * torch.randn_like(x0)
                time = self.times[at]
                v = self.predict(x, time, rows, phase="update")
                with torch.no_grad():
                    with self.adapter("old"):
                        v_old = self.predict(x, time, rows, phase="reference")
                    with self.adapter(None):
                        v_ref = self.predict(x, time, rows, phase="reference")
                good = x0_error(x - sigma * v, x0)  # beta = 1: the new policy, and its mirror
                bad = x0_error(x - sigma * (2 * v_old - v), x0)
                loss = 5 * (r[rows] * good + (1 - r[rows]) * bad)
                loss = loss + 1e-4 * ((v - v_ref) ** 2).mean(dim=(1, 2, 3))
                (loss.sum() / share).backward()

    @torch.no_grad()
    def follow(self) -> None:
        super().follow()
        self.optimizer_steps += 1
        decay = min(self.optimizer_steps * 0.001, 0.5)
        for old, weight in zip(self.of("old"), self.weights, strict=True):
            old.lerp_(weight, 1 - decay)


def x0_error(x0_hat: Tensor, x0: Tensor) -> Tensor:
    """Square error over its own size, (n,)."""
    with torch.no_grad():
        size = (x0_hat.double() - x0.double()).abs().mean(dim=(1, 2, 3)).clamp(min=1e-5)
    return ((x0_hat - x0) ** 2 / size.float()[:, None, None, None]).mean(dim=(1, 2, 3))


LOOPS: dict[str, Callable[[Any, Settings], Loop]] = {"grpo": GRPO, "nft": NFT}
