"""The interface of all policies, whether the network is a diffusers pipeline or a plain module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowrl.policy.lora_read as lora_read
import flowrl.policy.weights.heads as heads
import flowrl.policy.weights.lora as lora
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import LastRows, Request
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.weights.compiled import Compiled, compile_blocks
from flowrl.policy.weights.offload import Turns
from flowrl.policy.weights.parts import TrainedParts
from flowrl.policy.weights.quantised import computing_type
from flowrl.samplers import keys
from flowrl.types import Transition, brief


class Policy:
    """A velocity field v(x, sigma | prompt), its trained parts, and the way to media and back.

    Subclasses give encode, _velocity, decode, encode_media and schedule. trained: the networks that
    are trained, by component name; None: `modules`. turns: decides which weights leave the device
    for a while; None: all stay.
    """

    state_dtype = torch.float32  # type of x, a state on the way from noise to data
    # whether states are grids of tokens, see flowrl/policy/tokens.py; `velocity` then gives logits
    unmasks = False

    def __init__(
        self,
        modules: dict[str, nn.Module],
        adapter: dict[str, Any] | None,
        shape: tuple[int, ...],
        trained: Mapping[str, nn.Module] | None = None,
        turns: Turns | None = None,
    ) -> None:
        # component name -> network to call; a trainer may put sharded or compiled ones in its place
        self.modules: dict[str, nn.Module] = dict(modules)
        self.networks = dict(modules)  # component name -> network as it was loaded, never wrapped
        self.latent_shape = tuple(shape)  # (*L) shape of one sample
        self.trainable = TrainedParts(dict(modules if trained is None else trained), adapter)
        self.turns = turns or Turns(_device_of(self.networks))
        self.compiled: Compiled | None = None  # the compiled blocks, see compile_blocks
        self.teachers: Any = None  # frozen teachers (policy/teachers.py), which a run may load
        self.calls = 0  # number of network rows so far: states x guidance branches
        self._rows = LastRows()
        # (prompts, features) of the newest call of `features`
        self._embedded: tuple[Cond, Tensor | None] | None = None

    def __repr__(self) -> str:
        parts = ", ".join(self.trainable.part_names)
        latent = f"latents (B, {', '.join(map(str, self.latent_shape))})"
        return brief(self, f"networks {', '.join(self.networks)}", f"trained: {parts}", latent)

    @property
    def device(self) -> torch.device:
        """The device on which the policy computes."""
        return self.turns.device if self.turns.used else _device_of(self.networks)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the networks' weights after loading. LoRA is always fp32, and so are all
        weights once they are trained in full mode."""
        return computing_type(next(iter(self.networks.values())))

    def branches(self, guidance: float | str) -> int:
        """Count the network rows that a state costs at this guidance (see velocity); ValueError for
        a guidance that the model does not know."""
        if not isinstance(guidance, str) and guidance != 1:
            raise ValueError(
                f"guidance={guidance}: this policy has no unconditional branch; use 'none'"
            )
        return 1

    def unread(self, guidances: Sequence[float | str], names: Iterable[str] = ()) -> list[str]:
        """Write sentences about arguments of the pipeline's call that change nothing if samples are
        made at these guidances. names: conditions that prompts bring, beside the arguments of all
        prompts."""
        return []

    def states(self, micro: int, guidance: float | str) -> int:
        """Count the states that fit into a forward of at most `micro` network rows; at least 1."""
        return max(1, micro // self.branches(guidance))

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        """Encode P prompts -> Cond of P rows; encode once, gather any rows in velocity.

        conditions: for each prompt its own arguments of the pipeline's call (a picture to edit, a
        mask, a negative prompt).
        """
        raise NotImplementedError

    def sized(self, height: int | None = None, width: int | None = None) -> Policy:
        """Return a policy of the same networks and trained weights whose samples have another size
        in pixels; None: the present one. ValueError if the model has one size alone."""
        if height is None and width is None:
            return self
        raise ValueError(
            "eval.height and eval.width ask for samples of another size, and those of this model"
            " have one; leave them out"
        )

    def say_cut(self, prompts: Iterable[str | None]) -> None:
        """Warn once about each prompt whose end the text encoders do not read."""

    def schedule(self, steps: int) -> Schedule:
        """Return sigmas and exact model times of a run with `steps` steps, from the pipeline's own
        scheduler."""
        raise NotImplementedError

    def velocity(
        self,
        x: Tensor,
        sigma: Tensor | float,
        cond: Cond,
        rows: Tensor,
        *,
        guidance: float | str = "pipeline",
        detach_uncond: bool = False,
    ) -> Tensor:
        """Predict v = eps_hat - x0_hat at x, differentiably.

        x (n, *L) fp32 flow coordinates; sigma (n,) or (), in [0, 1], may differ by row; rows (n,)
        int64 into cond. guidance: "pipeline" as recorded, "none" only the conditional branch, or a
        float g: u + g (c - u). detach_uncond: no gradient through u. Returns (n, *L) fp32.
        """
        n = x.shape[0]
        if tuple(x.shape[1:]) != self.latent_shape or rows.shape != (n,):
            raise ValueError(
                f"x {tuple(x.shape)} and rows {tuple(rows.shape)}; expected (n,"
                f" {', '.join(map(str, self.latent_shape))}) and (n,)"
            )
        if not isinstance(guidance, str):
            guidance = "none" if guidance == 1 else float(guidance)
        elif guidance not in ("pipeline", "none"):
            raise ValueError(f"guidance={guidance!r}; allowed are 'pipeline', 'none' or a number")
        # one sigma for all rows stays a number on the CPU: its time is found without the device
        s = torch.as_tensor(sigma, dtype=torch.float64)
        if s.ndim and s.device.type == "cpu" and bool((s == s[0]).all()):
            s = s[0]
        if s.ndim or s.device.type != "cpu":
            s = s.to(x.device, non_blocking=True).expand(n)
        request = Request(
            x=x.to(self.state_dtype),
            sigma=s,
            cond=cond,
            rows=self._rows.on(x.device, rows),
            guidance=guidance,
            detach_uncond=detach_uncond,
        )
        if self.compiled is None:
            v, network_rows = self._velocity(request)
        else:
            v, network_rows = self.compiled.run(self._velocity, request)
        self.calls += network_rows
        return v

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        """Return v (n, *L) fp32, and the network rows that it took."""
        raise NotImplementedError

    def noise(self, names: Tensor) -> Tensor:
        """Draw the noise of samples and steps by its keys: (n,) int64 -> (n, *L) fp32, standard
        normal."""
        return keys.gaussian(names, self.latent_shape, self.device)

    def init(
        self,
        noise: Tensor,
        sigma: float,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Turn noise (n, *L) into x at sigma, the first of a run, as the pipeline does (Stable
        Diffusion starts below sigma 1, with less noise). cond, rows (n,): the prompts of these
        rows, for pipelines that start from a noisy picture."""
        return noise

    def start(
        self,
        noise: Tensor,
        sigma: float,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Turn standard normal noise (n, *L) into x at sigma, where a sample begins: a head
        initial_noise first moves each row of the noise on its shell, then `init` scales it."""
        if heads.InitialNoise.name in self.trainable.heads:
            assert cond is not None and rows is not None
            noise = heads.on_shell(self.initial(cond, rows).sample(noise), noise)
        return self.init(noise, sigma, cond, rows)

    def initial(self, cond: Cond, rows: Tensor) -> Transition:
        """Return the Gaussian over the initial noise of rows (n,) of cond, before the noise is put
        on the shell."""
        head = self.trainable.head(heads.InitialNoise.name)
        return head(self.features(cond, rows), len(rows), self.device)

    def step_std(self, cond: Cond, sigma: Tensor, rows: Tensor, most: Tensor) -> Tensor:
        """Return the standard deviation (n, C, 1, ...) of steps from sigma (n,), at most `most`
        (n,)."""
        head, device = self.trainable.head(heads.StepNoise.name), self.device
        return head(sigma.to(device), self.features(cond, rows), most.to(device))

    def features(self, cond: Cond, rows: Tensor) -> Tensor | None:
        """Return the input of heads: an embedding (n, d) fp32 of the prompts of rows (n,), without
        gradient; None if the policy has none."""
        if self._embedded is None or self._embedded[0] is not cond:
            with torch.no_grad():
                self._embedded = (cond, self._embed(cond))
        found = self._embedded[1]
        return None if found is None else found[rows.to(found.device)]

    def _embed(self, cond: Cond) -> Tensor | None:
        """Compute the embeddings (P, d) fp32 of all prompts of cond."""
        return None

    def clean(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        """Turn x (n, *L) at sigma, () or (n,), where a run ends, into x0, which decode takes
        (Stable Diffusion ends above sigma 0)."""
        return x

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Decode x (n, *L), flow coordinates at sigma, to media fp32, differentiably: (n, 3, H, W)
        or (n, F, 3, H, W) in [0, 1], or, for a module, any (n, *D). cond, rows (n,): the prompts of
        these rows, for pipelines that decode with the prompt's own conditions (a first frame)."""
        raise NotImplementedError

    def narrow_decoder(self) -> None:
        """Decode in the networks' own type if no gradient passes: this takes less memory."""

    def tile_decoder(self) -> None:
        """Decode a tile at a time, to save memory. ValueError if the decoder cannot."""
        raise ValueError(
            "model.tiling=true: this model's decoder has no tiles; leave it out, and lower"
            " batch.decode to save memory"
        )

    def encode_media(self, media: Tensor) -> Tensor:
        """Encode media to x0 (n, *L), flow coordinates: the mode of the VAE's posterior."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------
    # trained parts

    @property
    def parts(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the trained weights and nothing else: {"denoiser": {name: parameter},
        "text_encoder": ..., and the heads}; fp32 (in full mode from the first call of this)."""
        return self.trainable.by_part()

    def view(self, name: str) -> AbstractContextManager[None]:
        """Compute with the weights of a view inside the block, see TrainedParts.view."""
        return self.trainable.view(name)

    def state(self, name: str = "default") -> dict[str, Tensor]:
        """Return the values of a view by parameter name, see TrainedParts.state."""
        return self.trainable.state(name)

    def same(self, a: str, b: str) -> bool:
        """Whether two views are equal, see TrainedParts.same."""
        return self.trainable.same(a, b)

    def compile_blocks(self, on: bool = True) -> None:
        """Compile the repeated blocks of the networks in place, and pad batches to sizes that were
        seen before (policy/weights/compiled.py); with on=False, run the blocks uncompiled."""
        if self.compiled is not None:
            self.compiled.off()
        self.compiled = compile_blocks(list(self.networks.values())) if on else None

    @property
    def has_lora_format(self) -> bool:
        """Whether a saved LoRA is in a format that `pipe.load_lora_weights` reads."""
        return False

    def save_lora(self, folder: str | Path) -> Path:
        """Write the adapter to `folder`; in diffusers' LoRA format if the pipeline has one."""
        from safetensors.torch import save

        self.trainable.needs_lora()
        return lora.write(Path(folder) / lora.FILE, save(lora.exported(self.trainable)))

    def load_lora(self, path: str | Path) -> None:
        """Load a LoRA (a folder or file), whoever trained it, into "default", so that it has the
        same effect as there. A LoRA that changes other things than our adapters do is refused."""
        self.trainable.needs_lora()
        pipe = getattr(self, "pipe", None)
        self.trainable.load("default", lora_read.read(self.trainable, path, pipe))

    def load_heads(self, folder: str | Path) -> None:
        """Load the heads that a run exported beside the policy: from then on, initial_noise acts in
        every sample."""
        made = heads.load(Path(folder), self.latent_shape)
        self.trainable.set_heads({name: head.to(self.device) for name, head in made.items()})


def _device_of(networks: Mapping[str, nn.Module]) -> torch.device:
    """Find the device of a policy's networks; the CPU if there are none."""
    network = next(iter(networks.values()), None)
    return torch.device("cpu") if network is None else next(network.parameters()).device
