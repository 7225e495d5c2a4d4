"""The loss on held-out media or pairs (data.validation), at noise that never changes.

Each row is noised at one noise level of every quarter of the distribution that training draws from.
Levels and noise are functions of eval.seed, the file's name and the prompt, so that two values,
of one run or of two, differ by the weights alone. Every prompt is read as it is (no dropout), and
the weights are the averaged ones, as in evaluations.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.common.forward import CONTINUOUS
from flowrl.data.prompts import select
from flowrl.rollouts import from_files
from flowrl.runtime.ledger import CountedPolicy, Ledger
from flowrl.runtime.memory import during
from flowrl.samplers import keys
from flowrl.training.records import RunParts
from flowrl.types import Columns

QUARTERS = 4


def losses(parts: RunParts) -> dict[str, float]:
    """Return validation/*, means over all rows of data.validation; {} if there are none."""
    source, held = parts.source, parts.validation
    if not held.items:
        return {}
    # in each forward all processes gather split weights, so that each then makes all rows
    split = bool(parts.setup.cfg.train.shard)
    mine = torch.arange(len(held.items))
    mine = mine if split else mine[source.world.share(len(mine))]
    policy = CountedPolicy(source.policy, Ledger(source.policy.device), autocast=source.autocast)
    sums: dict[str, Tensor] = {}
    most = max(1, parts.setup.states // len(held.items[0]))
    with during("validation"), parts.weights.ema.swapped(), source.policy.view("default"):
        for start in range(0, len(mine), most):
            for name, value in summed(parts, policy, mine[start : start + most]).items():
                sums[name] = sums.get(name, 0) + value
    total = {k: v.item() for k, v in sums.items()} if split else source.world.sum_metrics(sums)
    weight = total.pop("weight")
    quarter = {name: QUARTERS if "/q" in name else 1 for name in total}
    return {f"validation/{k}": quarter[k] * value / weight for k, value in total.items()}


@torch.no_grad()
def summed(parts: RunParts, policy: CountedPolicy, ids: Tensor) -> dict[str, Tensor]:
    """Sum the loss and its metrics over rows `ids` (n,) and their noise levels -> () fp64 by name,
    "weight" is the sum of the rows' weights."""
    source, held, cfg = parts.source, parts.validation, parts.setup.cfg
    judge = fixed(parts.setup.algorithm)
    with source.autocast():
        rollout, rewards = from_files.rollout(
            source.policy,
            select(held.prompts, ids),
            [held.items[i] for i in ids.tolist()],
            parts.setup.plan,
            weights={},
            crop=cfg.data.crop,
            cache=source.latents,
        )
    advantages = judge.advantages(rollout, judge.leaf_advantages(rewards, rollout.group))
    seed = keys.key(cfg.eval.seed, "validation")
    rows = judge.columns(rollout, advantages, seed=seed, iteration=0)
    if "text" in rows.data:
        rows = Columns({**rows.data, "text": rows.prompt})
    rows, out = rows.brought_near(), dict[str, Tensor]()
    # a quarter at a time: a forward then has a row for each file, and pairs stay whole
    for quarter in range(QUARTERS):
        part = rows[torch.nonzero(rows.unit % QUARTERS == quarter).flatten()]
        found = judge.loss(judge.score(policy, rollout, part), part)
        metrics = {k.removeprefix("policy/"): v for k, v in found.metrics.items()}
        metrics.pop("error", None)  # the loss itself, or a mean of winners and losers
        metrics |= {"loss": found.loss, f"loss/q{quarter + 1}": found.loss}
        for name, value in (metrics | {"weight": part.weight.sum()}).items():
            out[name] = out.get(name, 0) + value.double()
    return out


def fixed(algorithm: Any) -> Any:
    """Copy a method on the forward process: with a level of each quarter, and without a KL."""
    config, judge = algorithm.config, copy(algorithm)
    levels = config.levels if config.levels in CONTINUOUS else "logit_normal"
    judge.config = config.model_copy(update={"levels": levels, "steps": QUARTERS, "kl_weight": 0.0})
    return judge
