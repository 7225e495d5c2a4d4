"""Tiny random diffusers pipelines, built in memory, and a toy flow with a known answer.

One factory an architecture part (denoiser, VAE, text encoder, tokenizer), then ten to twenty-five
lines a pipeline. Every weight is redrawn from a seed: diffusers starts gates, modulations and
output layers at zero, and with those two prompts or two times give equal outputs, so every check
passes.
"""

from __future__ import annotations

import math

import diffusers
import torch
from tiny_parts import (
    clip_text,
    flux_transformer,
    image_vae,
    qwen_text,
    qwen_transformer,
    qwen_vae,
    sd3_transformer,
    t5_text,
    tokenizer,
    unet,
    wan_transformer,
    wan_vae,
)
from torch import Tensor, nn

PROMPTS = ["two red circles", "a blue square left of a green triangle"]
FLOW_IMAGES = {"height": 16, "width": 16}
# name -> keyword arguments of the pipeline's own call
CALLS: dict[str, dict] = {
    "sd15": FLOW_IMAGES,
    "sdxl": FLOW_IMAGES,
    "sd3": FLOW_IMAGES,
    "flux": {**FLOW_IMAGES, "max_sequence_length": 12},
    "qwenimage": {**FLOW_IMAGES, "max_sequence_length": 24},
    "wan21": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 12},
    "wan22": {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 12},
}
NAMES = list(CALLS)


# ---------------------------------------------------------------------------
# pipelines


def sd15(scheduler=None):
    tok = tokenizer()
    ddim = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    return diffusers.StableDiffusionPipeline(
        vae=image_vae(),
        text_encoder=clip_text(tok),
        tokenizer=tok,
        unet=unet(16),
        scheduler=scheduler or ddim,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(scheduler=None):
    tok = tokenizer()
    euler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    return diffusers.StableDiffusionXLPipeline(
        vae=image_vae(),
        text_encoder=clip_text(tok),
        text_encoder_2=clip_text(tok, True, seed=12),
        tokenizer=tok,
        tokenizer_2=tok,
        unet=unet(32, xl=True),
        scheduler=scheduler or euler,
        add_watermarker=False,
    )


def sd3(scheduler=None):
    tok, t5 = tokenizer(), tokenizer("t5")
    return diffusers.StableDiffusion3Pipeline(
        transformer=sd3_transformer(),
        scheduler=scheduler or diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(1.5, 0.06),
        text_encoder=clip_text(tok, True),
        tokenizer=tok,
        text_encoder_2=clip_text(tok, True, seed=12),
        tokenizer_2=tok,
        text_encoder_3=t5_text(t5, width=32),
        tokenizer_3=t5,
    )


def flux(scheduler=None):
    tok, t5 = tokenizer(), tokenizer("t5")
    return diffusers.FluxPipeline(
        scheduler=scheduler
        or diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=image_vae(0.4, 0.1),
        text_encoder=clip_text(tok),
        tokenizer=tok,
        text_encoder_2=t5_text(t5),
        tokenizer_2=t5,
        transformer=flux_transformer(),
    )


def qwenimage(scheduler=None):
    tok = tokenizer("qwen", 2048)
    shift = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    return diffusers.QwenImagePipeline(
        scheduler=scheduler or shift,
        vae=qwen_vae(),
        text_encoder=qwen_text(tok),
        tokenizer=tok,
        transformer=qwen_transformer(),
    )


def wan21(scheduler=None):
    tok = tokenizer("t5", 64)
    unipc = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return diffusers.WanPipeline(
        tokenizer=tok,
        text_encoder=t5_text(tok, umt5=True),
        vae=wan_vae(),
        scheduler=scheduler or unipc,
        transformer=wan_transformer(),
    )


def wan22(scheduler=None):
    pipe = wan21(scheduler)
    return type(pipe)(
        **pipe.components | {"transformer_2": wan_transformer(seed=13)}, boundary_ratio=0.875
    )


FACTORIES = {
    "sd15": sd15,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "qwenimage": qwenimage,
    "wan21": wan21,
    "wan22": wan22,
}


def pipeline(name: str, scheduler=None):
    """A fresh tiny pipeline by name; scheduler replaces its usual one."""
    return FACTORIES[name](scheduler)


def policy(name: str, *, lora: dict | None = None, scheduler=None, **changes):
    """load_policy on a tiny pipeline, with the call arguments that keep it tiny."""
    from flowrl.policy import load_policy

    return load_policy(pipeline(name, scheduler), lora=lora, **{**CALLS[name], **changes})


# ---------------------------------------------------------------------------
# a toy


class ToyFlow(nn.Module):
    """A small MLP v = f(x, t, cond) over latents of any shape, for learning tests; t in [0, 1],
    cond (B, C)."""

    def __init__(
        self, shape: tuple[int, ...] = (2,), cond: int = 2, width: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        size = math.prod(shape)
        torch.manual_seed(seed)
        self.net = nn.Sequential(
            nn.Linear(size + cond + 2, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, size),
        )

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        time = torch.stack([t, t.square()], -1).to(x.dtype)
        return self.net(torch.cat([x.flatten(1), time, cond], -1)).reshape(x.shape)


class GaussianFlow(nn.Module):
    """The exact velocity of x0 ~ N(cond, std^2): closed form, no weights but a shift that learning
    moves. cond (B, D), x (B, D)."""

    def __init__(self, dim: int = 2, std: float = 0.5) -> None:
        super().__init__()
        self.shift, self.std = nn.Parameter(torch.zeros(dim)), std

    def forward(self, x: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        t, mean = t.reshape(-1, *[1] * (x.ndim - 1)).to(x.dtype), cond + self.shift
        var = (1 - t) ** 2 * self.std**2 + t**2
        score = (x - (1 - t) * mean) / var  # eps_hat / t and (mean - x0_hat) / ((1 - t) std^2)
        return t * score - (mean + (1 - t) * self.std**2 * score)


def toy_cond(prompts: list[str], dim: int = 2) -> Tensor:
    """(P, dim) numbers in [-1, 1] that depend on the text alone."""
    codes = [sum((i + 1) * ord(c) for i, c in enumerate(p)) for p in prompts]
    return torch.tensor([[math.sin(code * (k + 1)) for k in range(dim)] for code in codes])


def pretrain_toy(
    flow: ToyFlow,
    mean: float = 0.0,
    std: float = 1.0,
    steps: int = 300,
    batch: int = 256,
    seed: int = 0,
    cond_dim: int = 2,
) -> ToyFlow:
    """Fit flow to N(mean, std^2) whatever the condition, by flow matching; well under two
    seconds."""
    generator, optimizer = (
        torch.Generator().manual_seed(seed),
        torch.optim.Adam(flow.parameters(), lr=3e-3),
    )
    for _ in range(steps):
        x0 = mean + std * torch.randn(batch, 2, generator=generator)
        eps, t = torch.randn(batch, 2, generator=generator), torch.rand(batch, generator=generator)
        cond = 2 * torch.rand(batch, cond_dim, generator=generator) - 1
        loss = (
            (flow((1 - t[:, None]) * x0 + t[:, None] * eps, t, cond) - (eps - x0)).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return flow
