"""The last resort: a pipeline's own loop body, entered anew in every call.

It serves loops that call networks or compute between scheduler and denoiser (ControlNet) in a way
that no recorded call can express. It is slower, since the pipeline begins from its prompts each
time, one noise level at a time; and guidance is the pipeline's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flowrl.policy.replay.call import Replay, Request, together
from flowrl.policy.replay.coords import place_of
from flowrl.policy.replay.places import Places
from flowrl.policy.replay.probe import always
from flowrl.policy.replay.record import prediction_of
from flowrl.policy.replay.reentry import reenter

STEPS = 8


@dataclass(eq=False)
class BodyReplay(Replay):
    """A Replay without regimes: every prediction is one iteration of the pipeline's own loop."""

    places: Places = field(kw_only=True)  # where each noise level lies in the loop
    why: str = field(kw_only=True)  # a sentence that says what could not be inferred
    branches: int = field(kw_only=True)  # number of network rows that a state costs

    def predict(self, modules: Mapping[str, nn.Module], request: Request) -> tuple[Tensor, int]:
        self.check(request.guidance)
        if request.detach_uncond and self.branches > 1:
            raise ValueError(
                f"{self.pipeline} is run by its own loop body: its unconditional branch cannot be"
                " detached"
            )
        sigma = request.sigma.expand(len(request.x)).cpu()
        levels = sigma.unique()
        at = [(sigma == level).nonzero().flatten().to(request.x.device) for level in levels]
        return together(
            (own, self._at(request.take(own), level)) for own, level in zip(at, levels, strict=True)
        )

    def _at(self, request: Request, level: Tensor) -> tuple[Tensor, int]:
        items = [request.cond.items[row] for row in request.rows.tolist()]
        place = self.places.of(level.item())
        made = reenter(self.places.prober, self.coords, place, request.x, level, items)
        return made, len(items) * self.branches

    def check(self, guidance: float | str) -> None:
        """ValueError if the guidance is not the pipeline's own."""
        if guidance == "pipeline" or (guidance in ("none", 1) and self.branches == 1):
            return
        raise ValueError(
            f"guidance={guidance}: {self.pipeline} is run by its own loop body, whose guidance is"
            " fixed when it is loaded; use guidance='pipeline', and load it with the"
            " guidance_scale that is to hold (1 for none), or with a guider that has it"
        )


def body_replay(places: Places, why: str) -> tuple[Replay, int]:
    """Return a BodyReplay, and the number of steps of its recording.

    why: a sentence about what could not be inferred."""
    prober = places.prober
    x = torch.zeros(prober.count + len(prober.runner.pad), *prober.shape)
    iterations = prober.run(prober.rows(prober.count), STEPS, latents=always(x), unseen=True)
    prober.begin = place_of(prober.runner.pipe.scheduler, iterations[0].time)
    outputs = prober.templates.values()
    each = [len(prediction_of(out, prober.runner.streams)) / rows for out, rows in outputs]
    replay = BodyReplay(
        regimes=[],
        boundaries=[],
        coords=places.coords,
        shape=prober.shape,
        pipeline=type(prober.runner.pipe).__name__,
        places=places,
        why=why,
        branches=max(1, round(sum(each))),
    )
    return replay, STEPS
