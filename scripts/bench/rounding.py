"""What a policy in bf16 or fp16 makes of a pipeline, beside the pipeline itself in the same type.

    python scripts/bench/rounding.py [--models runs/shipped_models] [NAME ...]

Two things for each name of configs/model, with the small models of small_models.py and the shipped
arguments of the call. Coefficients: the guidance, the maps of latents and media and the schedule
that are inferred in bf16 and fp16 equal those of fp32 to 1e-6. Rounding, in units in the last place
of the largest value: velocities at the latents of a run, and media of its last latents, are at most
four units farther from the pipeline's than its own numbers are from each other when it is called
for two prompts at once and for each alone. Exit code 1 where one of the two does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import small_models
import torch
from torch import Tensor

import flowrl
from flowrl.config.load import load_config
from flowrl.policy.replaced import replaced
from flowrl.policy.replay.decode import Decoder
from flowrl.runtime.log import quiet

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPTS = ["a red circle", "two blue squares left of a green triangle", "a yellow square"]
WAYS = ([0, 1, 2], [0, 1], [0])  # of batching, as rows of PROMPTS: all see the first one
STEPS = 4
# In the last place, beyond the pipeline's own difference. Where a CPU computes a row alike beside
# any others, that is 0, and what is left is guidance, which a pipeline computes in its type: 3.8.
UNITS = 4.0
EXACT = 1e-6
LORA = {"rank": 2, "alpha": 2.0, "targets": None, "init": "gaussian"}
HEAD = (
    "| model | type | guidance | coefficients beside fp32 | velocity: replay, pipeline itself |"
    " media: replay, pipeline itself |"
)


@dataclass(frozen=True)
class Run:
    """A run of the pipeline."""

    samples: list[Tensor]  # (P, *L) latents that each of its scheduler's steps was given
    predictions: list[Tensor]  # (P, *L) outputs of the network that it was given
    last: Tensor  # (P, *L) latents after the last step
    decoded: Tensor  # what its VAE was given
    media: Tensor  # (P, ...) in [0, 1]


@dataclass(frozen=True)
class Measured:
    """What was measured of a model in a type. Differences are in units in the last place."""

    model: str  # name of configs/model
    type: str  # one of TYPES
    guidance: str  # the rule that was inferred, in words
    coefficients: dict[str, Tensor]  # every number that was inferred, by name
    velocity: tuple[float, float]  # difference of the replay, and the pipeline's own
    media: tuple[float, float]  # the same of media


def plain(folder: Path, dtype: torch.dtype) -> Any:
    """The pipeline itself, without flowrl."""
    from diffusers import DiffusionPipeline

    index = json.loads((folder / "model_index.json").read_text())
    absent = {k: None for k, entry in index.items() if isinstance(entry, list) and not entry[0]}
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, **absent)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def run(pipe: Any, rows: list[int], call: dict[str, Any]) -> Run:
    """The pipeline on some of PROMPTS, each with a seed of its own."""
    samples: list[Tensor] = []
    predictions: list[Tensor] = []
    last: list[Tensor] = []
    decoded: list[Tensor] = []
    step, decode = pipe.scheduler.step, pipe.vae.decode

    def stepped(prediction: Tensor, time: Any, sample: Tensor, *rest: Any, **how: Any) -> Any:
        samples.append(sample.clone())
        predictions.append(prediction.clone())
        made = step(prediction, time, sample, *rest, **how)
        last[:] = [made[0].clone()]
        return made

    def received(z: Tensor, *rest: Any, **how: Any) -> Any:
        decoded.append(z.clone())
        return decode(z, *rest, **how)

    with replaced(pipe.scheduler, step=stepped), replaced(pipe.vae, decode=received):
        made = pipe(
            [PROMPTS[row] for row in rows],
            num_inference_steps=STEPS,
            generator=[torch.Generator().manual_seed(row) for row in rows],
            output_type="pt",
            **call,
        )[0]
    return Run(samples, predictions, last[0], torch.cat(decoded), torch.as_tensor(made).float())


def units(a: Tensor, b: Tensor, dtype: torch.dtype, size: float) -> float:
    """Largest difference, in units in the last place of a number of this size."""
    return (a.double() - b.double()).abs().max().item() / (torch.finfo(dtype).eps * size)


def coefficients(policy: Any) -> Iterator[tuple[str, Tensor]]:
    """Every number that was inferred."""
    for r, regime in enumerate(policy.replay.regimes):
        yield f"guidance {r}", torch.tensor(regime.guidance.weights)
        for c, call in enumerate(regime.calls):
            for s, slot in enumerate(call.slots):
                yield f"slot {r}.{c}.{s}", slot.map.scale
    if isinstance(policy.decoder, Decoder):
        before, after = policy.decoder.before, policy.decoder.after
        yield "decoder's scale", before.scale
        if before.const is not None:
            yield "decoder's shift", before.const[0, 0]
        yield "pixels", torch.tensor([after.scale, after.shift])
    yield "sigmas", policy.schedule(STEPS).sigmas


def measure(name: str, folder: Path, kind: str) -> Measured:
    dtype, source = TYPES[kind], small_models.save(name, folder)
    words = [f"model={name}", "data=ocr", "reward=jpeg"]
    call = {**load_config(None, words).model.pipeline, **small_models.call_of(name)}
    policy = flowrl.load_policy(str(source), dtype=dtype, lora=LORA, **call)
    found = dict(coefficients(policy))
    policy.narrow_decoder()
    with quiet():
        pipe = plain(source, dtype)
        runs = [run(pipe, rows, call) for rows in WAYS]
        rules = dict.fromkeys(regime.guidance.describe() for regime in policy.replay.regimes)
        return Measured(
            name,
            kind,
            " or ".join(rules),
            found,
            velocities(policy, runs, dtype),
            media(policy, pipe, runs[0]),
        )


@torch.no_grad()
def velocities(policy: Any, runs: list[Run], dtype: torch.dtype) -> tuple[float, float]:
    """(replay's, pipeline's own) difference of predictions at the first latents of the first
    prompt; the replay's is that from the nearest way of batching."""
    first = [run.samples[0][:1] for run in runs]
    if not all(torch.equal(first[0], other) for other in first):
        raise ValueError("equal seeds gave other latents")
    coords, sigma = policy.coords, policy.schedule(STEPS).sigmas[0]
    x = first[0].float() / coords.scale(sigma).item()
    theirs = [coords.velocity(run.predictions[0][:1].float(), x, sigma) for run in runs]
    v = policy.velocity(x, sigma.item(), policy.encode(PROMPTS[:1]), torch.arange(1))
    zero, one = (coords.velocity(torch.full_like(x, k), x, sigma) for k in (0.0, 1.0))
    size = (one - zero).abs().max().item() * runs[0].predictions[0][:1].abs().max().item()
    own = max(units(a, b, dtype, size) for a, b in combinations(theirs, 2))
    return min(units(v, their, dtype, size) for their in theirs), own


@torch.no_grad()
def media(policy: Any, pipe: Any, together: Run) -> tuple[float, float]:
    """(replay's, pipeline's own) difference of media, in [0, 1], of the same latents."""
    rows = torch.arange(len(PROMPTS))
    made = policy.decode(together.last.float(), 0.0, policy.encode(PROMPTS), rows)
    kind = together.decoded.dtype
    whole = pipe.vae.to(kind).decode(together.decoded, return_dict=False)[0]
    parts = [pipe.vae.decode(z, return_dict=False)[0] for z in together.decoded.split(1)]
    own = units(torch.cat(parts) / 2, whole / 2, kind, 1.0)
    return units(made, together.media, kind, 1.0), own


# ---------------------------------------------------------------------- all of them


def rows(name: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A line of the table for each type, and what does not hold in it."""
    exact: dict[str, Tensor] = {}
    for kind in TYPES:
        m = measure(name, folder, kind)
        exact = exact or m.coefficients
        far = {key: distance(m.coefficients.get(key), exact[key]) for key in exact}
        worst = max(far, key=far.__getitem__)
        wrong = [
            f"{name} in {kind}: {key} differs from fp32 by {off:.1e}"
            for key, off in far.items()
            if off > EXACT
        ]
        for what, (ours, own) in (("velocity", m.velocity), ("media", m.media)):
            if ours > own + UNITS:
                wrong.append(
                    f"{name} in {kind}: {what} is {ours:.2f} units off, the pipeline {own:.2f}"
                )
        pairs = [f"{ours:.2f}, {own:.2f}" for ours, own in (m.velocity, m.media)]
        yield f"| {name} | {kind} | {m.guidance} | {far[worst]:.0e} | {' | '.join(pairs)} |", wrong


def distance(found: Tensor | None, exact: Tensor) -> float:
    """Largest difference of coefficients, as a share of the largest; infinite for another shape."""
    if found is None or found.shape != exact.shape:
        return float("inf")
    return ((found - exact).abs().max() / exact.abs().max().clamp(min=1e-12)).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--models", type=Path, default=Path("runs/shipped_models"))
    given = parser.parse_args()
    print(HEAD, "|---|---|---|---|---|---|", sep="\n")
    wrong: list[str] = []
    for name in given.names or small_models.names():
        for line, more in rows(name, given.models):
            print(line, flush=True)
            wrong += more
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
