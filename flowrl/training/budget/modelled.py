"""A pipeline as a policy on the meta device: shapes without values, so that any size fits.

A policy infers its calls by probing its pipeline; here they are written down for the pipelines of
configs/model (call_shapes.py). The rest is the run's own code: the same Replay calls the same
networks with the same LoRA, and the same Decoder decodes. A test compares the calls with those that
are inferred from tiny pipelines of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.policy.base import Policy
from flowrl.policy.replay.arguments import Affine, CallPlan, Cond, Group, Path, Rows, Slot, Time
from flowrl.policy.replay.call import Regime, Replay, Request
from flowrl.policy.replay.coords import Coords, Schedule
from flowrl.policy.replay.decode import Decoder
from flowrl.policy.replay.guidance import Guidance
from flowrl.policy.replay.items import PromptItem
from flowrl.policy.replay.pixels import Pixels
from flowrl.training.budget.architecture import Architecture
from flowrl.training.budget.call_shapes import CallShapes, Encoder, NetworkCall, call_shapes

META = torch.device("meta")


class ModelledPolicy(Policy):
    """A policy of meta tensors. call: arguments of the pipeline's call; decoder: dtype of the VAE;
    dtype: dtype of all other parts."""

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
        network = self.shapes.network
        module = architecture.build(network, dtype)
        with torch.random.fork_rng():
            super().__init__({network: module}, lora, self.shapes.latent)
        module.to(META)  # peft makes adapters on the CPU
        self.replay = replay_of(self.shapes, dtype)
        self.vae = architecture.build("vae", decoder)
        self.decoder = decoder_of(self.shapes, self.vae)
        others = {network, "vae"}
        self.others = {
            part: architecture.build(part, dtype)
            for part in architecture.parts
            if part not in others
        }

    def branches(self, guidance: float | str) -> int:
        return self.replay.regimes[0].guidance.branches(guidance)

    def schedule(self, steps: int) -> Schedule:
        return evenly(steps)

    def encode(
        self, prompts: list[str], conditions: Sequence[Mapping[str, Any]] | None = None
    ) -> Cond:
        """Make the arguments that are bound for each prompt; `encode_one` runs the encoders."""
        return cond_of(self.shapes, prompts, self.dtype, META)

    def encode_one(self) -> list[Tensor]:
        """Run one prompt through every text encoder, as in a run -> the part of each answer that a
        run keeps, the states of a layer or of all layers."""
        return [_encoded(self.others[e.part], e) for e in self.shapes.encoders]

    def _velocity(self, request: Request) -> tuple[Tensor, int]:
        prediction, network_rows = self.replay.predict(self.modules, request)
        return self.replay.coords.velocity(prediction, request.x, request.sigma), network_rows

    def decode(
        self,
        x: Tensor,
        sigma: float = 0.0,
        cond: Cond | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        return self.decoder(x)

    def tile_decoder(self, on: bool = True) -> None:
        """See Policy.tile_decoder. on: False decodes whole media again."""
        vae: Any = self.vae
        if on and not hasattr(vae, "enable_tiling"):
            super().tile_decoder()
        if hasattr(vae, "enable_tiling"):
            (vae.enable_tiling if on else vae.disable_tiling)()


def evenly(steps: int) -> Schedule:
    """Make a schedule of even steps: costs depend on their number, not on where they lie."""
    sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return Schedule(sigmas=sigmas, times=sigmas[:-1])


def _encoded(module: Any, encoder: Encoder) -> Tensor:
    """Compute the states that a text encoder makes from a row of tokens."""
    tokens = torch.zeros(1, encoder.tokens, dtype=torch.int64, device=META)
    # this branch is for Qwen2.5-VL
    if hasattr(module, "model") and hasattr(module.model, "language_model"):
        inner = module.model.language_model
        places = torch.zeros(3, 1, encoder.tokens, dtype=torch.int64, device=META)
        # no mask: how one is made depends on its values, and meta tensors have none
        answer = inner(
            inputs_embeds=inner.embed_tokens(tokens),
            position_ids=places,
            output_hidden_states=encoder.hidden_states,
            use_cache=False,
        )
    else:
        answer = module(tokens, output_hidden_states=encoder.hidden_states)
    if encoder.joined:
        return torch.cat(answer.hidden_states[1:], -1)
    return answer.hidden_states[-1] if encoder.hidden_states else answer[0]


def replay_of(shapes: CallShapes, dtype: torch.dtype) -> Replay:
    """Make the Replay that a policy would infer from its pipeline."""
    plans = [
        CallPlan(
            module=shapes.network,
            blocks=call.blocks,
            slots=[_slot(call, shapes, dtype)],
            times=[_time(call, shapes.time_dtype or dtype)],
            rows=[
                Rows(path, 0, call.blocks, 1, is_list=isinstance(value, list))
                for path, value in call.rows.items()
            ],
            shared=_shared(call, dtype),
            out=_affine(shapes.latent, drops=call.appended > 0),
        )
        for call in shapes.calls
    ]
    rule = Guidance(shapes.rule, shapes.weights, round(sum(shapes.weights)), shapes.cond)
    return Replay(
        regimes=[Regime(plans, rule)],
        boundaries=[],
        coords=Coords.plain(shapes.prediction),
        shape=shapes.latent,
        pipeline=shapes.pipeline,
    )


def _affine(shape: tuple[int, ...], *, drops: bool = False, adds: bool = False) -> Affine:
    """Make a map to `shape` that copies its input. drops: the input has more numbers than that;
    adds: it has fewer, and the others are a constant of the prompt's own."""
    numbers = torch.Size(shape).numel()
    index = torch.empty(numbers, dtype=torch.int64, device=META) if drops or adds else None
    scale = torch.empty(numbers, device=META) if adds else torch.tensor(1.0).double()
    return Affine(blocks=1, repeats=1, shape=shape, index=index, scale=scale, const=None)


def _slot(call: NetworkCall, shapes: CallShapes, dtype: torch.dtype) -> Slot:
    """Make the argument that holds the latents."""
    own = _affine(call.listed or _read(call, shapes), adds=call.appended > 0)
    return Slot((call.latents,), own, call.scaled, dtype, is_list=bool(call.listed))


def _read(call: NetworkCall, shapes: CallShapes) -> tuple[int, ...]:
    """Return the shape of what the network reads of a row: its latents, and a picture's tokens."""
    first, *others = shapes.latent
    return (first + call.appended, *others)


def _time(call: NetworkCall, dtype: torch.dtype) -> Time:
    """Make the argument that holds the time, of a row or of each token or frame."""
    each = (torch.ones(call.times), torch.zeros(call.times)) if call.times else ()
    return Time((call.timestep,), call.time, dtype, *each)


def cond_of(
    shapes: CallShapes, prompts: Sequence[str], dtype: torch.dtype, device: torch.device
) -> Cond:
    """Bind prompts to the calls, as tensors without values."""

    def kept(value: Any, blocks: int) -> Any:
        if isinstance(value, list):
            entries = [_on_meta(entry, dtype) for entry in value]
            return [[list(entries) for _ in prompts] for _ in range(blocks)]
        size, own = value
        return torch.empty(blocks, len(prompts), 1, *size, dtype=own or dtype, device=device)

    rows = [
        {path: kept(value, call.blocks) for path, value in call.rows.items()}
        for call in shapes.calls
    ]
    for each, call in zip(rows, shapes.calls, strict=True):
        if call.appended:  # the picture's tokens are a constant that is added to the latents
            numbers = torch.Size(_read(call, shapes)).numel()
            each[call.latents,] = torch.empty(1, len(prompts), numbers, device=device)
    # branches that make the same call share its tensors, as in a run, where they are joined to one
    made = {id(call): _shared(call, dtype) for call in shapes.calls}
    shared = [made[id(call)] for call in shapes.calls]
    items = tuple(PromptItem(prompt) for prompt in prompts)
    return Cond(items, [Group([rows], [shared])], [(0, k) for k in range(len(items))])


def _shared(call: NetworkCall, dtype: torch.dtype) -> dict[Path, Any]:
    """Make a call's arguments that all rows share: a Size becomes a tensor."""
    shared = {path: _on_meta(value, dtype) for path, value in call.shared.items()}
    return {**shared, ("return_dict",): False}


def _on_meta(value: Any, dtype: torch.dtype) -> Any:
    """Make a tensor of a Size; return any other value."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple):
        return torch.empty(value[0], dtype=value[1] or dtype, device=META)
    return value


def decoder_of(shapes: CallShapes, vae: Any) -> Decoder:
    """Make the Decoder that a policy would infer from its pipeline."""
    numbers = torch.Size(shapes.latent).numel()
    packed = shapes.latent != shapes.z
    before = Affine(
        blocks=1,
        repeats=1,
        shape=shapes.z,
        index=torch.empty(numbers, dtype=torch.int64, device=META) if packed else None,
        scale=torch.empty(numbers, device=META) if packed else torch.tensor(0.5).double(),
        const=torch.empty(1, 1, numbers, device=META) if shapes.shifted else None,
    )
    after = Pixels(shapes.image, shapes.media, shapes.axes, 0.5, 0.5)
    return Decoder(vae, before, after, shapes.latent)
