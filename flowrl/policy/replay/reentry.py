"""Re-entry: run the pipeline's own loop body for one step. It infers nothing but output shapes, so
it referees the Replay, and combines guidance that has no closed form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.policy.replay.coords import Coords
from flowrl.policy.replay.probe import Prober
from flowrl.policy.replay.record import Halt, first_tensor, like_output


def reenter(
    prober: Prober,
    coords: Coords,
    steps: int,
    x: Tensor,
    s: Tensor,
    prompts: list[str],
    outputs: dict[tuple[str, int], Tensor] | None = None,
) -> Tensor:
    """The pipeline's combined prediction at flow coordinates x (P, *L), one sigma s () fp64 for all
    rows, row i with prompts[i].

    The second iteration of a run is ours: its time is set after set_timesteps, its latents are
    returned by the first step. outputs[(component, n-th call)]: answers of the networks, in place
    of the real ones (differentiable either way).
    """
    runner, pad = prober.runner, len(prober.runner.pad)
    t = coords.time(s.reshape(1)).item()
    latents = (x * coords.scale(s).to(x)).to(x.dtype)
    latents = torch.cat([latents, latents[:1].expand(pad, *x.shape[1:])])
    state: dict[str, Any] = {"j": 0, "calls": {}}

    def on_times(scheduler) -> None:
        times = scheduler.timesteps
        first = (
            (times[0] + times[1]) / 2 if times.is_floating_point() else (times[0] + times[1]) // 2
        )
        if t != int(t) and not times.is_floating_point():
            times = times.double()
        times = times.clone()
        if abs(times[0].item() - t) < 1e-6:
            times[0] = first  # schedulers look their index up by time: the two must differ
        times[1] = t
        scheduler.timesteps = times
        sigmas = getattr(scheduler, "sigmas", None)
        if isinstance(sigmas, Tensor) and sigmas.numel() == times.numel() + 1:
            sigmas = sigmas.clone()
            sigmas[1] = (s if coords.kind == "flow" else s / (1 - s)).item()
            scheduler.sigmas = sigmas

    def on_call(name, args, real):
        key = (name, state["calls"].get(name, 0))
        state["calls"][name] = key[1] + 1
        if state["j"] == 1 and outputs is None:
            return real()
        template, rows = prober.templates[key]
        first = first_tensor(template)
        if state["j"] == 1 and outputs is not None:
            return like_output(template, outputs[key])
        return like_output(
            template,
            first.new_ones(first.shape[0] * (len(prompts) + pad) // rows, *first.shape[1:]),
        )

    def on_step(prediction, time, sample):
        if state["j"] == 1:
            state["prediction"] = prediction
            raise Halt
        state.update(j=1, calls={})
        return latents.to(sample.dtype)

    runner.run(
        [*prompts, *runner.pad],
        steps,
        on_call=on_call,
        on_step=on_step,
        on_times=on_times,
        grad=torch.is_grad_enabled(),
        skip_step=coords.kind
        == "vp",  # its step looks integer times up in a table, and ours may be a float
    )
    return state["prediction"][: len(prompts)].float()
