"""Two pipelines that diffusers does not have, as a user writes them in a file of their own.

`usual`: component names as in diffusers, guidance in two calls. `unusual`: its network is called
"field", which `HINTS` says; a plain nn.Module, called once for both branches.
"""

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch import nn

HINTS = {"denoisers": ["field"]}
WIDTH = 6  # of a text


def letters(texts):
    """(P, WIDTH): how often letters occur in each text."""
    counts = [[text.count(c) / 4 for c in "aeioru"] for text in texts]
    return torch.tensor(counts)


class Net(ModelMixin, ConfigMixin):
    """Latents (B, 4, 4, 4), a time of 0..1000 and a text -> v."""

    @register_to_config
    def __init__(self, width: int = 16):
        super().__init__()
        self.to_q = nn.Linear(4 * 16 + WIDTH + 1, width)
        self.to_out = nn.Linear(width, 4 * 16)

    def forward(self, hidden_states, timestep, encoder_hidden_states, return_dict=True):
        time = timestep.reshape(-1, 1).expand(len(hidden_states), 1) / 1000
        told = torch.cat([hidden_states.flatten(1), encoder_hidden_states, time], 1)
        out = self.to_out(torch.tanh(self.to_q(told))).view_as(hidden_states)
        return (out,)


class Decoder(ModelMixin, ConfigMixin):
    """Latents (B, 4, 4, 4) -> pictures (B, 3, 16, 16) in [-1, 1]."""

    @register_to_config
    def __init__(self, scaling_factor: float = 0.5):
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 4, stride=4)

    def decode(self, z, return_dict=True, generator=None):
        return (torch.tanh(self.up(z)),)


class UsualPipeline(DiffusionPipeline):
    def __init__(self, transformer, scheduler, vae):
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)

    @torch.no_grad()
    def __call__(
        self,
        prompt,
        negative_prompt="",
        num_inference_steps=8,
        guidance_scale=3.0,
        generator=None,
        latents=None,
        output_type="pil",
        return_dict=True,
    ):
        prompt = [prompt] if isinstance(prompt, str) else prompt
        text, nothing = letters(prompt), letters([negative_prompt] * len(prompt))
        if latents is None:
            latents = torch.randn(len(prompt), 4, 4, 4, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.progress_bar(self.scheduler.timesteps):
            time = t.expand(len(latents))
            v = self.transformer(latents, time, text)[0]
            if guidance_scale > 1:
                base = self.transformer(latents, time, nothing)[0]
                v = base + guidance_scale * (v - base)
            latents = self.scheduler.step(v, t, latents, return_dict=False)[0]
        if output_type == "latent":
            return (latents,)
        image = self.vae.decode(latents / self.vae.config.scaling_factor, return_dict=False)[0]
        image = (image / 2 + 0.5).clamp(0, 1)
        return (image if output_type == "pt" else self.numpy_to_pil(pixels(image)),)


def pixels(image):
    return image.permute(0, 2, 3, 1).numpy()


class Field(nn.Module):
    """As Net, with other names of everything."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4 * 16 + WIDTH + 1, 16), nn.Linear(16, 4 * 16)

    def forward(self, state, words, clock):
        told = torch.cat([state.flatten(1), words, clock.reshape(-1, 1).expand(len(state), 1)], 1)
        return self.last(torch.tanh(self.first(told))).view_as(state)


class UnusualPipeline(DiffusionPipeline):
    def __init__(self, field, scheduler, vae):
        super().__init__()
        self.register_modules(field=field, scheduler=scheduler, vae=vae)

    @torch.no_grad()
    def __call__(
        self, prompt, num_inference_steps=8, strength=2.0, output_type="pil", return_dict=True
    ):
        words = letters([*prompt, *[""] * len(prompt)])
        state = torch.randn(len(prompt), 4, 4, 4)
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            out, empty = self.field(torch.cat([state] * 2), words, t / 1000).chunk(2)
            v = empty + strength * (out - empty)
            state = self.scheduler.step(v, t, state, return_dict=False)[0]
        if output_type == "latent":
            return (state,)
        image = self.vae.decode(state, return_dict=False)[0] / 2 + 0.5
        return (image if output_type == "pt" else self.numpy_to_pil(pixels(image)),)


def usual():
    torch.manual_seed(0)
    return UsualPipeline(drawn(Net()), FlowMatchEulerDiscreteScheduler(shift=2.0), Decoder())


def unusual():
    torch.manual_seed(1)
    return UnusualPipeline(drawn(Field()), FlowMatchEulerDiscreteScheduler(), Decoder())


def drawn(net):
    """The network, with weights at which the text matters."""
    for p in net.parameters():
        nn.init.normal_(p, std=0.4)
    return net
