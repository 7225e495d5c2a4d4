"""What every policy offers, whether its network is a diffusers pipeline or a plain module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.policy import lora
from flowrl.policy.parts import Parts
from flowrl.policy.replay.arguments import Cond
from flowrl.policy.replay.coords import Schedule
from flowrl.policy.replay.request import Request


class Policy:
    """A velocity field v(x, sigma | prompt) with trainable parts.

    Subclasses give encode, _velocity, decode, encode_media and schedule. modules: component name ->
    network that is called; a trainer may put wrapped networks (sharded, compiled) in their place.
    calls: network rows so far (states x guidance branches). latent_shape: (*L).
    """

    def __init__(
        self, modules: dict[str, nn.Module], adapter: dict[str, Any] | None, shape: tuple[int, ...]
    ) -> None:
        self.modules: dict[str, nn.Module] = dict(modules)
        self.latent_shape = tuple(shape)
        self.trainable = Parts(dict(modules), adapter)
        self.calls = 0
        self._rows: tuple[Tensor, Tensor] | None = None  # the last CPU rows, where they were put

    @property
    def device(self) -> torch.device:
        return next(next(iter(self.trainable.modules.values())).parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights as loaded. LoRA is always fp32, and so are all weights once they are
        trained in full mode."""
        first = next(iter(self.trainable.modules.values()))
        return next(p.dtype for name, p in first.named_parameters() if "lora_" not in name)

    def branches(self, guidance: float | str) -> int:
        """Network rows that a state costs at this guidance (see velocity).

        A guidance that the model does not know -> ValueError."""
        if not isinstance(guidance, str) and guidance != 1:
            raise ValueError(
                f"guidance={guidance}: this policy has no unconditional branch; use 'none'"
            )
        return 1

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

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Inside, prompts are encoded as if none had been before.

        An encoder's answers are kept, and their last bits depend on the prompts that were beside
        them the first time; a resumed run starts without them.
        """
        yield

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
            s = s.to(x.device).expand(n)
        rows = self._placed(rows, x.device)
        v, network_rows = self._velocity(
            Request(
                x=x.float(),
                sigma=s,
                cond=cond,
                rows=rows,
                guidance=guidance,
                detach_uncond=detach_uncond,
            )
        )
        self.calls += network_rows
        return v

    def _placed(self, rows: Tensor, device: torch.device) -> Tensor:
        """rows on the device; the same tensor again for equal CPU rows, so that what is gathered by
        them is gathered once."""
        if rows.device.type != "cpu":
            return rows
        known = self._rows
        if known is None or known[1].device != device or not torch.equal(known[0], rows):
            known = self._rows = (rows.clone(), rows.to(device, copy=True))
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

    def encode_media(self, media: Tensor) -> Tensor:
        """media -> x0 (n, *L) flow coordinates: the mode of the VAE's posterior."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------
    # trained parts

    @property
    def parts(self) -> dict[str, dict[str, nn.Parameter]]:
        """{"denoiser": {name: parameter}}: what is trained, and nothing else; fp32 (in full mode
        from the first time it is asked for)."""
        return {"denoiser": self.trainable.named()}

    def add_view(self, name: str) -> None:
        """A copy of the trainable weights under another name ("old"; in full mode also
        "reference"), for use with view()."""
        self.trainable.add_view(name)

    def copy_view(self, src: str = "default", dst: str = "old", decay: float = 0.0) -> None:
        """dst = decay * dst + (1 - decay) * src."""
        self.trainable.copy(src, dst, decay)

    def same(self, a: str, b: str) -> bool:
        """Whether two views of LoRA weights are equal bit for bit, so that one forward serves both
        (in full mode: not compared, False)."""
        return self.trainable.lora is not None and self.trainable.equal(a, b)

    @contextlib.contextmanager
    def view(self, name: str) -> Iterator[None]:
        """Compute with the weights of a view: "default", an added one, or "reference" (adapters
        off)."""
        with self.trainable.view(name):
            yield

    def state(self, name: str = "default") -> dict[str, Tensor]:
        """Values of a view by parameter name, copied to the CPU."""
        return {k: v.cpu().clone() for k, v in self.trainable.tensors(name).items()}

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        """Strict inverse of state."""
        self.trainable.load(name, state)

    def gradient_checkpointing(self, on: bool = True) -> None:
        """Recompute activations in the backward pass, for networks that can (diffusers models)."""
        for module in self.trainable.modules.values():
            if not hasattr(module, "enable_gradient_checkpointing"):
                continue
            if on:
                module.enable_gradient_checkpointing()
            else:
                module.disable_gradient_checkpointing()

    def save_lora(self, folder: str | Path) -> Path:
        """Write the adapter to `folder`; diffusers' LoRA format where the pipeline has one."""
        from safetensors.torch import save

        self._needs_lora()
        weights = {name: value.contiguous() for name, value in self.state().items()}
        content = save(weights, lora.metadata(self.trainable.options))
        return lora.write(Path(folder) / lora.FILE, content)

    def load_lora(self, path: str | Path) -> None:
        """Load an adapter written by save_lora (a folder or file) into "default". Strict, rank and
        alpha included."""
        from safetensors.torch import load_file

        self._needs_lora()
        path = Path(path)
        path = path / lora.FILE if path.is_dir() else path
        lora.check(path, self.trainable.options)
        self.load_state("default", load_file(str(path)))

    def _needs_lora(self) -> None:
        if self.trainable.lora is None:
            raise ValueError(
                "this policy has no LoRA adapter; load it with lora={'rank': ..., 'alpha': ...}"
            )
