"""What every policy offers, whether its network is a diffusers pipeline or a plain module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flowrl.policy.lora_read as lora_read
import flowrl.policy.weights.heads as heads
import flowrl.policy.weights.lora as lora
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.call import Request
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.weights.compiled import Compiled, compile_blocks
from flowrl.policy.weights.offload import Turns
from flowrl.policy.weights.parts import TrainedParts
from flowrl.policy.weights.quantised import computing_type
from flowrl.policy.weights.recompute import Recompute
from flowrl.runtime.log import logger
from flowrl.runtime.processes import shares
from flowrl.types import Transition


class Policy:
    """A velocity field v(x, sigma | prompt) with trainable parts.

    Subclasses give encode, _velocity, decode, encode_media and schedule. modules: component name ->
    network that is called; a trainer may put wrapped networks (sharded, compiled) in their place.
    calls: network rows so far (states x guidance branches). latent_shape: (*L). trained: what is
    trained by component name, if that is not just these networks.
    """

    turns: Turns | None = None  # what leaves the device for a while

    def __init__(
        self,
        modules: dict[str, nn.Module],
        adapter: dict[str, Any] | None,
        shape: tuple[int, ...],
        trained: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.modules: dict[str, nn.Module] = dict(modules)
        self.networks = dict(modules)  # as loaded, never wrapped
        self.latent_shape = tuple(shape)
        self.trainable = TrainedParts(dict(modules if trained is None else trained), adapter)
        self.heads = TrainedParts({}, None)  # small networks beside it, see policy/weights/heads.py
        self.compiled: Compiled | None = None  # blocks, see compile_blocks
        self.calls = 0
        self._rows: tuple[Tensor, Tensor] | None = None  # the last CPU rows, where they were put
        self._embedded: tuple[Cond, Tensor | None] | None = None  # the last prompts' features

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        if self.turns is not None and self.turns.used:
            return self.turns.device
        return next(next(iter(self.networks.values())).parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights as loaded. LoRA is always fp32, and so are all weights once they are
        trained in full mode."""
        return computing_type(next(iter(self.networks.values())))

    def branches(self, guidance: float | str) -> int:
        """Network rows that a state costs at this guidance (see velocity).

        A guidance that the model does not know -> ValueError."""
        if not isinstance(guidance, str) and guidance != 1:
            raise ValueError(
                f"guidance={guidance}: this policy has no unconditional branch; use 'none'"
            )
        return 1

    def unread(self, guidances: Sequence[float | str], names: Iterable[str] = ()) -> list[str]:
        """Sentences about arguments that were given in vain, where samples are made at these
        guidances. names: conditions that prompts bring, beside the arguments of all."""
        return []

    def states(self, micro: int, guidance: float | str) -> int:
        """How many states fit into a forward of at most `micro` network rows; at least 1."""
        return max(1, micro // self.branches(guidance))

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        """P prompts -> Cond of P rows; encode once, gather any rows in velocity.

        conditions: for each prompt its own arguments of the pipeline's call (a picture to edit, a
        mask, a negative prompt).
        """
        raise NotImplementedError

    def say_cut(self, prompts: Iterable[str | None]) -> None:
        """Warn of prompts whose ends are not read, of each once."""

    def say_unread(self, guidances: Sequence[float | str], names: Iterable[str] = ()) -> None:
        """Warn of arguments of the pipeline's call that change nothing (see unread)."""
        for sentence in self.unread(guidances, names):
            logger.warning(sentence)

    def readers(self) -> Sequence[Any]:
        """The text encoders, and how much of a prompt each of them reads, in words."""
        return ()

    def schedule(self, steps: int) -> Schedule:
        """Sigmas and exact model times of a run with `steps` steps, from the pipeline's own
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
        """v = eps_hat - x0_hat at x, differentiable.

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
            x=x.float(),
            sigma=s,
            cond=cond,
            rows=self._placed(rows, x.device),
            guidance=guidance,
            detach_uncond=detach_uncond,
        )
        size = n if self.compiled is None else self.compiled.size(n)
        if size > n:  # the first rows again, whose results nobody reads
            request = request.take(torch.arange(size, device=x.device) % n)
        try:
            v, network_rows = self._velocity(request)
        except Exception as error:
            if self.compiled is None or not self.compiled.gives_up(error):
                raise
            v, network_rows = self._velocity(request)
        if self.compiled is not None:
            self.compiled.check()
        self.calls += network_rows
        return v if size == n else v[:n]

    def _placed(self, rows: Tensor, device: torch.device) -> Tensor:
        """rows on the device; the same tensor again for equal CPU rows, so that what is gathered by
        them is gathered once."""
        if rows.device.type != "cpu":
            return rows
        known = self._rows
        if known is None or known[1].device != device or not torch.equal(known[0], rows):
            known = self._rows = (rows.clone(), rows.to(device, non_blocking=True, copy=True))
        return known[1]

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        """v (n, *L) fp32, and the network rows that it took."""
        raise NotImplementedError

    def init(
        self,
        noise: Tensor,
        sigma: float,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """noise (n, *L) -> x at sigma, the first of a run, as the pipeline starts (Stable
        Diffusion: below sigma 1, with less noise). cond, rows (n,): whose runs they are, for
        pipelines that start from a noisy picture."""
        return noise

    def start(
        self,
        noise: Tensor,
        sigma: float,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Standard normal noise (n, *L) -> x at sigma, where a sample begins: `init` of the noise,
        which a head initial_noise moves first, each row on its shell."""
        if heads.InitialNoise.name in self.heads.modules:
            assert cond is not None and rows is not None
            noise = heads.on_shell(self.initial(cond, rows).sample(noise), noise)
        return self.init(noise, sigma, cond, rows)

    def initial(self, cond: Cond, rows: Tensor) -> Transition:
        """The Gaussian over initial noise, before it is put on the shell, of rows (n,) of cond."""
        head, device = self._head(heads.InitialNoise.name), self.device
        return head(self.features(cond, rows), len(rows), device)

    def step_std(self, cond: Cond, sigma: Tensor, rows: Tensor, most: Tensor) -> Tensor:
        """Standard deviation (n, C, 1, ...) of steps from sigma (n,), at most `most` (n,)."""
        head, device = self._head(heads.StepNoise.name), self.device
        return head(sigma.to(device), self.features(cond, rows), most.to(device))

    def _head(self, name: str) -> nn.Module:
        if name not in self.heads.modules:
            raise ValueError(
                f"this policy has no head {name}; add it to train.parts, or train with a method"
                " that needs none"
            )
        return self.heads.modules[name]

    def features(self, cond: Cond, rows: Tensor) -> Tensor | None:
        """An embedding (n, d) fp32 of the prompts of rows (n,), without gradient; None where the
        policy has none. What heads read."""
        if self._embedded is None or self._embedded[0] is not cond:
            with torch.no_grad():
                self._embedded = (cond, self._embed(cond))
        found = self._embedded[1]
        return None if found is None else found[rows.to(found.device)]

    def _embed(self, cond: Cond) -> Tensor | None:
        """(P, d) fp32 of all prompts of cond."""
        return None

    def clean(self, x: Tensor, sigma: Tensor | float) -> Tensor:
        """x (n, *L) at sigma, () or (n,), where a run ends -> x0, as decode takes it (Stable
        Diffusion ends above sigma 0)."""
        return x

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x (n, *L) flow coordinates at sigma -> media fp32, differentiable: (n, 3, H, W) or
        (n, F, 3, H, W) in [0, 1], or of a module any (n, *D). cond, rows (n,): whose latents they
        are, for pipelines that decode them with the prompt's own conditions (a first frame)."""
        raise NotImplementedError

    def narrow_decoder(self) -> None:
        """Decode in the networks' own type, where no gradient passes."""

    def tile_decoder(self) -> None:
        """Decode a tile at a time, to save memory. ValueError where the decoder cannot."""
        raise ValueError(
            "model.tiling=true: this model's decoder has no tiles; leave it out, and lower"
            " batch.decode to save memory"
        )

    def offload_denoiser(self, *, scorers: bool = False) -> None:
        """Let the frozen weights of the networks wait in host memory from `rest` to their next
        forward. scorers: networks of rewards take turns with them (RewardSet.beside). ValueError
        where they cannot."""
        if not self.networks:
            raise ValueError(
                "model.offload: the model is a generator, which has no weights to move;"
                " leave it out"
            )
        self.turns = self.turns or Turns(self.device)
        if self.turns.denoisers is None:  # of a run before, of the same live policy
            self.turns.send_denoisers(self.networks)
        self.turns.takes_scorers = scorers

    def rest(self) -> None:
        """The networks are not needed for a while, and no gradient through them is to come."""
        if self.turns is not None:
            self.turns.rest()

    def encode_media(self, media: Tensor) -> Tensor:
        """media -> x0 (n, *L) flow coordinates: the mode of the VAE's posterior."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------
    # trained parts

    @property
    def parts(self) -> dict[str, dict[str, nn.Parameter]]:
        """{"denoiser": {name: parameter}, "text_encoder": ..., and the heads}: what is trained, and
        nothing else; fp32 (in full mode from the first time it is asked for)."""
        out: dict[str, dict[str, nn.Parameter]] = {}
        for name, weight in self.trainable.named().items():
            out.setdefault(self._part(name.partition(".")[0]), {})[name] = weight
        for name, weight in self.heads.named().items():
            out.setdefault(name.partition(".")[0], {})[name] = weight
        return out

    @property
    def trained(self) -> list[str]:
        """Names of the parts that are the policy's own."""
        return list(dict.fromkeys(self._part(name) for name in self.trainable.modules))

    def _part(self, component: str) -> str:
        return "denoiser" if component in self.networks else "text_encoder"

    def freeze(self, on: bool = True) -> None:
        """Train none of the network's own weights (on), or as before."""
        self.trainable.freeze(on)

    def set_heads(self, made: Mapping[str, nn.Module] | None) -> None:
        """Train these small networks beside the policy's own weights, in place of others; their
        present values are the view "reference". None: no heads."""
        modules = {name: head.to(self.device) for name, head in (made or {}).items()}
        self.heads = TrainedParts(modules, None)
        self.heads.add_view("reference")

    def add_view(self, name: str) -> None:
        """A copy of the trainable weights under another name ("old"; in full mode also
        "reference"), for use with view()."""
        if self.turns is not None:
            self.turns.summon()  # a new adapter is made where the weights are
        self.trainable.add_view(name)
        if not self.heads.has(name):
            self.heads.add_view(name)

    def copy_view(self, src: str = "default", dst: str = "old", decay: float = 0.0) -> None:
        """dst = decay * dst + (1 - decay) * src."""
        self.trainable.copy(src, dst, decay)
        if not self.heads.has(dst):  # heads that are younger than the view
            self.heads.add_view(dst)
        self.heads.copy(src, dst, decay)

    def same(self, a: str, b: str) -> bool:
        """Whether two views of LoRA weights are equal bit for bit, so that one forward serves both
        (in full mode: not compared, False)."""
        own = self.trainable
        return own.lora is not None and own.equal(a, b) and self.heads.equal(a, b)

    @contextlib.contextmanager
    def view(self, name: str) -> Iterator[None]:
        """Compute with the weights of a view: "default", an added one, or "reference" (adapters
        off, heads as they began)."""
        with self.trainable.view(name), self.heads.view(name):
            yield

    def tensors(self, name: str = "default") -> dict[str, Tensor]:
        """Values of a view by parameter name, sharing storage with it; shares, where the trained
        weights are split over processes."""
        return {**self.trainable.tensors(name), **self.heads.tensors(name)}

    def state(self, name: str = "default") -> dict[str, Tensor]:
        """Values of a view by parameter name, copied to the CPU; where the trained weights are
        split, all processes ask together."""
        return {k: shares.whole(v).cpu().clone() for k, v in self.tensors(name).items()}

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Strict inverse of state."""
        small = self.heads.tensors(name)
        self.trainable.load(name, {k: v for k, v in state.items() if k not in small})
        self.heads.load(name, {k: v for k, v in state.items() if k in small})

    def gradient_checkpointing(self, on: bool | float = True) -> None:
        """Recompute activations in the backward pass, for networks that can (diffusers models). on:
        of this share of the blocks, in (0, 1); true: of all, false: of none."""
        for module in self.networks.values():
            if not hasattr(module, "enable_gradient_checkpointing"):
                continue
            if on is True:
                module.enable_gradient_checkpointing()
            elif on:
                module.enable_gradient_checkpointing(Recompute(on))
            else:
                module.disable_gradient_checkpointing()

    def compile_blocks(self, on: bool = True) -> None:
        """Compile the repeated blocks of the networks in place, and pad batches to sizes that were
        seen before (policy/weights/compiled.py); or run them as they are."""
        if self.compiled is not None:
            self.compiled.off()
        self.compiled = compile_blocks(list(self.networks.values())) if on else None

    def save_lora(self, folder: str | Path) -> Path:
        """Write the adapter to `folder`; diffusers' LoRA format where the pipeline has one."""
        from safetensors.torch import save

        weights = lora.exported(self._needs_lora())
        return lora.write(Path(folder) / lora.FILE, save(weights))

    def load_lora(self, path: str | Path) -> None:
        """Load a LoRA (a folder or file), whoever trained it, into "default", so that it does what
        it did there. What it cannot do, or has no adapter for, is refused."""
        parts = self._needs_lora()
        parts.load("default", lora_read.read(parts, path, getattr(self, "pipe", None)))

    def save_heads(self, folder: str | Path) -> list[Path]:
        """Write each head to a file of `folder`."""
        return heads.save(self.heads, Path(folder))

    def load_heads(self, folder: str | Path) -> None:
        """Put the heads that save_heads wrote beside the policy: initial_noise acts in every
        sample from then on."""
        self.set_heads(heads.load(Path(folder), self.latent_shape))

    def _needs_lora(self) -> TrainedParts:
        if self.trainable.lora is None or self.trainable.frozen:
            raise ValueError(
                "this policy has no LoRA adapter; load it with lora={'rank': ..., 'alpha': ...}"
            )
        return self.trainable
