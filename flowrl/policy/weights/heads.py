"""Heads: small networks that are trained beside a policy's own, for the noise of its steps or its
initial noise.

A head reads sinusoids of sigma and an embedding of the prompt, which fixed random directions bring
to one width for all models. All its weights are trained, in fp32, without any gradient into the
policy. Its last layer starts at 0.

step_noise: std of each channel of a step (ReinFlow, arXiv:2505.22094). initial_noise: a Gaussian
over x_T (DSRL, arXiv:2506.15799).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy.weights.lora import write
from flowrl.samplers import keys
from flowrl.types import Transition

WIDTH = 64  # width of the hidden layers, and of an embedded prompt
WAVES = 6  # number of sinusoids of sigma


def channel_axis(shape: tuple[int, ...]) -> int:
    """Find the axis of latents (*L) that holds channels: the last of two (tokens, poses), else the
    first."""
    return 1 if len(shape) == 2 else 0


class PolicyHead(nn.Module):
    """A network sigma (n,), prompts (n, d) -> (n, outputs), which is 0 at the start."""

    name = ""

    def __init__(self, outputs: int, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        super().__init__()
        self.shape, self.options = tuple(shape), options
        self.layers = nn.Sequential(
            nn.Linear(1 + 2 * WAVES + WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.SiLU(),
            nn.Linear(WIDTH, outputs),
        )
        last: Any = self.layers[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.directions: dict[int, Tensor] = {}  # width of prompts d -> (d, 64) directions

    def outputs(self, sigma: Tensor, prompt: Tensor | None) -> Tensor:
        waves = torch.pi * sigma[:, None] * 2.0 ** torch.arange(WAVES, device=sigma.device)
        inputs = torch.cat([sigma[:, None], waves.sin(), waves.cos()], 1)
        # without autocast, so that outputs are equal in rollout and loss
        with torch.autocast(inputs.device.type, enabled=False):
            nothing = inputs.new_zeros(len(inputs), WIDTH)
            embedded = nothing if prompt is None else self.embedded(prompt)
            return self.layers(torch.cat([inputs, embedded], 1))

    def embedded(self, prompt: Tensor) -> Tensor:
        """Project embeddings (n, d) to (n, 64), with root mean square 1 or less."""
        size = prompt.shape[1]
        if size not in self.directions:
            drawn = keys.gaussian(keys.key("features", torch.arange(size)), (WIDTH,))
            self.directions[size] = (drawn / size**0.5).to(prompt.device)
        scale = prompt.square().mean(1, keepdim=True).sqrt().clamp(min=1)
        return (prompt / scale) @ self.directions[size]


class StepNoise(PolicyHead):
    """Standard deviation of a sampling step, by sigma, prompt and channel; it stays in [least,
    most] for any weights."""

    name = "step_noise"

    def __init__(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        self.axis = channel_axis(shape)
        super().__init__(shape[self.axis], shape, options)

    def forward(self, sigma: Tensor, prompt: Tensor | None, most: Tensor) -> Tensor:
        """Compute std (n, C, 1, ...), with C on the axis of channels; most (n,): its upper bound.

        log std^2 = low + (high - low) (tanh(h) + 1) / 2, with low and high from the bounds; h = 0
        is their geometric mean.
        """
        h = self.outputs(sigma.float(), prompt)
        low = 2 * torch.tensor(self.options["least"], device=h.device).log()
        high = 2 * most.float().log()[:, None]
        log_var = low + (high - low) * (h.tanh() + 1) / 2
        ones = [1] * len(self.shape)
        ones[self.axis] = self.shape[self.axis]
        return (log_var / 2).exp().reshape(len(h), *ones)


class InitialNoise(PolicyHead):
    """A Gaussian over the initial noise, N(0, 1) at the start: mean in [-offset, offset] and std in
    [1 / spread, spread], constant within `cells` cells of each axis but the channels'."""

    name = "initial_noise"

    def __init__(self, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        axis, cells = channel_axis(shape), options["cells"]
        self.grid = tuple(k if i == axis else min(k, cells) for i, k in enumerate(shape))
        super().__init__(2 * torch.Size(self.grid).numel(), shape, options)

    def forward(self, prompt: Tensor | None, rows: int, device: torch.device) -> Transition:
        """Return the Gaussian of `rows` samples: mean and std (n, *L)."""
        at_noise = torch.ones(rows, device=device)
        # softsign approaches its bounds so slowly that no output gets stuck at one
        bounded = nn.functional.softsign(self.outputs(at_noise, prompt))
        mean, log_std = bounded.chunk(2, 1)
        spread = torch.tensor(self.options["spread"], device=device).log()
        return Transition(
            mean=self.spread_out(self.options["offset"] * mean),
            std=self.spread_out((spread * log_std).exp()),
        )

    def spread_out(self, cells: Tensor) -> Tensor:
        """Give each entry the value of its cell: (n, all cells) -> (n, *L)."""
        value = cells.reshape(len(cells), *self.grid)
        for axis, (size, count) in enumerate(zip(self.shape, self.grid, strict=True), start=1):
            if size != count:
                place = torch.arange(size, device=value.device) * count // size
                value = value.index_select(axis, place)
        return value


KINDS: dict[str, type[StepNoise | InitialNoise]] = {k.name: k for k in (StepNoise, InitialNoise)}


def make(
    options: dict[str, dict[str, Any]], shape: tuple[int, ...], seed: int
) -> dict[str, PolicyHead]:
    """Make heads, by name; their first values are functions of the seed and their names."""
    made: dict[str, PolicyHead] = {}
    for name, own in options.items():
        with torch.random.fork_rng():
            torch.manual_seed(keys.key("head", seed, name) % 2**63)
            made[name] = KINDS[name](shape, own)
    return made


def on_shell(z: Tensor, noise: Tensor) -> Tensor:
    """Scale z (n, *L) to the norms of noise (n, *L): a generator expects noise of norm about
    sqrt(D)."""
    axes = tuple(range(1, z.ndim))
    sizes = (torch.linalg.vector_norm(t, dim=axes, keepdim=True) for t in (noise, z))
    wanted, own = sizes
    return z * (wanted / own.clamp(min=torch.finfo(z.dtype).tiny))


# ---------------------------------------------------------------------------
# files


def save(heads: Mapping[str, nn.Module], folder: Path) -> list[Path]:
    """Write each head's weights to a file, with the options that make the head."""
    from safetensors.torch import save as packed

    files = []
    for name, head in heads.items():
        weights = {k: p.detach().cpu().contiguous() for k, p in head.named_parameters()}
        header = {"head": json.dumps({"shape": head.shape, "options": head.options})}
        files.append(write(folder / f"{name}.safetensors", packed(weights, header)))
    return files


def load(folder: Path, shape: tuple[int, ...]) -> dict[str, PolicyHead]:
    """Load the heads of a folder that `save` wrote, for latents of this shape."""
    from safetensors import safe_open

    found = {name: file for name in KINDS if (file := folder / f"{name}.safetensors").is_file()}
    if not found:
        raise ValueError(
            f"{folder} has no head ({', '.join(f'{name}.safetensors' for name in KINDS)}); give the"
            " folder heads of a finished run"
        )
    made: dict[str, PolicyHead] = {}
    for name, file in found.items():
        with safe_open(str(file), "pt") as opened:
            header = json.loads((opened.metadata() or {}).get("head", "{}"))
            weights = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        if tuple(header.get("shape", ())) != tuple(shape):
            raise ValueError(
                f"{file} is of latents {tuple(header.get('shape', ()))}, and this policy's are"
                f" {tuple(shape)}; load the policy as it was trained"
            )
        head = make({name: header["options"]}, shape, 0)[name]
        head.load_state_dict(weights)
        made[name] = head
    return made
