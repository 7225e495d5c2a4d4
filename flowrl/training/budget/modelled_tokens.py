"""A masked generator as a policy on the meta device: its own code (flowrl/policy/amused.py) runs on
tensors without values. Pipelines of flows are in modelled.py."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowrl.policy import amused
from flowrl.policy.tokens import TokenPolicy
from flowrl.training.budget.architecture import Architecture
from flowrl.training.budget.call_shapes import call_shapes
from flowrl.training.budget.modelled import META, ModelledPolicy


class ModelledTokens(TokenPolicy):
    """A policy of tokens without values. The arguments are those of ModelledPolicy."""

    def __init__(
        self,
        architecture: Architecture,
        call: Mapping[str, Any],
        *,
        lora: dict[str, Any] | None,
        dtype: torch.dtype,
        decoder: torch.dtype,
    ) -> None:
        self.architecture, self.shapes = architecture, call_shapes(architecture, call)
        self.vae = architecture.build("vqvae", decoder)
        self.others = {"text_encoder": architecture.build("text_encoder", dtype)}
        pipe = SimpleNamespace(
            transformer=architecture.build("transformer", dtype),
            vqvae=self.vae,
            vae_scale_factor=self.shapes.image[-1] // self.shapes.latent[-1],
            # where it lies in the vocabulary changes no cost
            scheduler=SimpleNamespace(config=SimpleNamespace(mask_token_id=self.shapes.vocabulary)),
        )
        known = amused.arguments(pipe, call)
        with torch.random.fork_rng():
            super().__init__(**known, cond=self._read, lora=lora)
        self.networks["module"].to(META)  # peft makes adapters on the CPU

    def encode_one(self) -> list[Tensor]:
        """Run one prompt through the text encoder; a run keeps no answer for another iteration."""
        self._read(["a"])
        return []

    def _read(self, texts: list[str]) -> Tensor:
        (encoder,) = self.shapes.encoders
        ids = torch.zeros(len(texts), encoder.tokens, dtype=torch.int64, device=META)
        return amused.read(self.others["text_encoder"], ids)

    def tile_decoder(self, on: bool = True) -> None:
        """See Policy.tile_decoder; the VQ autoencoder has no tiles."""
        if on:
            super().tile_decoder()


Modelled = ModelledPolicy | ModelledTokens


def modelled(architecture: Architecture, call: Mapping[str, Any], **options: Any) -> Modelled:
    """Make the policy of an architecture on the meta device. options: see ModelledPolicy."""
    tokens = architecture.pipeline == amused.CLASS
    return (ModelledTokens if tokens else ModelledPolicy)(architecture, call, **options)
