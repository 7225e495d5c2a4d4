"""The work of a run before its first iteration: its weights are read, its pipeline is probed and
its replay checked, its rewards are tried on a few samples, and the untrained policy is evaluated.

Probing reads values, which a budget's tensors do not have. So its calls are written down here, as
flowrl/policy/replay and flowrl/policy/check.py make them for a pipeline that takes prompts
together; tests/training/test_start.py counts them in real starts. The other calls are the run's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flowrl.config.schema import Config
from flowrl.data import hf
from flowrl.data.prompts import load_prompts
from flowrl.policy.replay.encoders import LARGEST
from flowrl.runtime import registry
from flowrl.training.budget.call_costs import Costs
from flowrl.training.budget.from_small import tried
from flowrl.training.budget.rehearsal import PolicyCall
from flowrl.training.budget.weight_costs import WeightCosts
from flowrl.training.budget.whole_run import evaluation, images_of, networks

RECORD = 3  # number of prompts of probing runs: two that differ, and one that is overlong


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of one process in a part of a run's start."""

    rows: int = 0  # number of network rows, those of all branches of guidance
    encodes: int = 0  # number of texts that encoders read, counted for each encoder
    decodes: int = 0  # number of media that the VAE decodes
    seconds: float = 0.0  # modelled seconds, without those of rewards

    def __add__(self, other: Work) -> Work:
        return Work(
            rows=self.rows + other.rows,
            encodes=self.encodes + other.encodes,
            decodes=self.decodes + other.decodes,
            seconds=self.seconds + other.seconds,
        )


class Start:
    """The parts of a run's start on one of so many processes."""

    def __init__(self, cfg: Config, costs: Costs, weights: WeightCosts, gpus: int) -> None:
        self.cfg, self.costs, self.weights, self.gpus = cfg, costs, weights, gpus
        self.shapes = costs.policy.shapes

    def all(self, loading: float) -> dict[str, Work]:
        """Return the work of each part, in order. loading: seconds in which weights are read."""
        cfg = self.cfg
        # a size of evaluations is probed and checked, too; its texts are known already
        own = bool(cfg.eval.height or cfg.eval.width)
        found = {"loading": Work(seconds=loading)}
        if not self.shapes.vocabulary:
            texts = PolicyCall(what="encode", rows=self.texts)
            found["probing"] = self.done([texts, *(1 + own) * self.probing()])
        if cfg.model.self_check:
            again = own and not cfg.train.shard
            checking = self.trying() if self.shapes.vocabulary else self.checking()
            found["self-check"] = self.done((1 + again) * checking)
        if cfg.guard.check_rewards:
            found["trial of rewards"] = self.done(tried(cfg, self.shapes))
        if cfg.eval.at_start and cfg.data.eval is not None:
            found["evaluation"] = self.evaluated()
        return found

    @property
    def texts(self) -> int:
        """Count the texts that probing encodes."""
        guided = self.costs.policy.branches("pipeline") > 1
        return RECORD + (guided and self.shapes.negative)

    def probing(self) -> list[PolicyCall]:
        """List the calls that find out what a pipeline does: its loop is run many times, and all
        but the first answers of the network and of the VAE are made up."""
        return [self.velocity(2), PolicyCall(what="decode", rows=1)]

    def checking(self) -> list[PolicyCall]:
        """List the calls of `self_check` (flowrl/policy/check.py), whose texts are known."""
        # rows that give all texts of a run one length: an overlong one, and a short one beside it
        overlong, both = (1, 2) if self.shapes.longest else (0, 0)
        rows = [2 + overlong] * 2  # the pipeline, at two of its steps
        rows += [2, 2, 1]  # their replay, and a row of one of them with the other prompt
        rows += [2, 2 + both]  # a noise level between steps: the replay, and the pipeline's body
        rows += [2, 1]  # two noise levels in one call, and one of its rows alone
        media = 2 + both + 2  # those of the pipeline, and those of the replay, one by one
        decodes = [PolicyCall(what="decode", rows=1)] * media
        return [*map(self.velocity, rows), *decodes]

    def trying(self) -> list[PolicyCall]:
        """List the calls of a masked generator's `self_check` (flowrl/policy/check_module.py)."""
        rows = [1]  # the size of the vocabulary
        rows += [4, 4, 4, 1]  # four rows twice, at a noise level of their own and at one, and a row
        rows += [4] * 4  # each noise level by itself
        rows += [4, 4]  # swapped prompts, and a gradient
        decodes = [PolicyCall(what="decode", rows=n) for n in (1, 4)]
        texts = PolicyCall(what="encode", rows=3)  # two, and the empty one
        return [texts, *map(self.velocity, rows), *decodes]

    def velocity(self, rows: int) -> PolicyCall:
        """Make a forward of the network with the pipeline's own guidance."""
        branches = self.costs.policy.branches("pipeline")
        return PolicyCall(
            what="velocity",
            rows=rows,
            branches=branches,
            guidance="guided" if branches > 1 else "none",
        )

    def done(self, calls: Iterable[PolicyCall]) -> Work:
        """Return the work of calls."""
        return sum(map(self.work, calls), Work())

    def work(self, call: PolicyCall) -> Work:
        """Return the work of a call."""
        device, cost = self.costs.device, self.costs.of(call, self.cfg)[0]
        if call.what == "velocity":
            cost = self.weights.paid(cost, device, 1.0, backward=False)
        counted = {
            "velocity": {"rows": call.rows * call.branches},
            "encode": {"encodes": call.rows * len(self.shapes.encoders)},
            "decode": {"decodes": call.rows},
        }
        return Work(seconds=device.call(cost.seconds, cost.operators), **counted[call.what])

    def evaluated(self) -> Work:
        """Return the work of the evaluation before training, and of the one with guidance."""
        cfg, policy = self.cfg, self.costs.policy
        images, prompts = images_of(cfg, self.gpus), self.held_out()
        empty = bool(self.shapes.vocabulary)  # a masked generator reads an empty text, too
        encoded = self.work(PolicyCall(what="encode", rows=prompts + empty))
        found = encoded
        for guidance in [cfg.eval.guidance, *filter(None, [cfg.eval.baseline_guidance])]:
            rows = images * networks(cfg) * policy.branches(guidance)
            seconds = evaluation(cfg, guidance, self.costs, self.weights, self.gpus)
            found += Work(rows=rows, decodes=images, seconds=seconds)
        # texts are encoded again where no answers are kept, or too many to be
        kept = 0 < prompts * self.costs.answers <= LARGEST
        if cfg.eval.baseline_guidance and not kept:
            found += encoded
        return found

    def held_out(self) -> int:
        """Count the different prompts of an evaluation, which samples the first of a file or of
        those that ship; others are taken to differ."""
        source, images = str(self.cfg.data.eval), images_of(self.cfg, self.gpus)
        if registry.is_live(source) or hf.is_dataset(source) or registry.is_place(source):
            return images
        prompts = load_prompts(source, self.cfg.data.columns)
        return len({prompt["prompt"] for prompt in prompts[:images]})
