"""The scripts that measure: random pipelines, the reference loops, what they print and what they
refuse."""

from types import SimpleNamespace

import against_reference
import long
import pytest
import random_pipeline
import reference_loop
import scaling
import throughput
import tiny
import torch
import two_commits

from flowrl.samplers import flow_sde
from flowrl.training.budget.architecture import read

CPU = torch.device("cpu")
SMALL = ["batch.prompts=1", "batch.group=3", "batch.micro=4", "sampler.steps=3"]


@long.mark
def test_throughput_prints_every_phase_of_both_loops():
    cfg = throughput.config("shapes-sd3", "nft", [*SMALL, "batch.group=2"])
    how = {"iterations": 1, "reference": True, "budget": "h100"}
    told = throughput.run("shapes-sd3", "nft", cfg, **how)
    rows = [line.split("|") for line in told.splitlines() if line.startswith("| ")][1:]
    cells = {(row[1].strip(), row[2].strip()): [c.strip() for c in row[3:-1]] for row in rows}
    wanted = {"encode", "rollout", "decode", "reference", "update", "iteration"}
    assert {phase for loop, phase in cells if loop == "flowrl"} == wanted
    assert {phase for loop, phase in cells if loop == "reference"} == wanted - {"reference"}
    for seconds, images, gflop, mfu, gb in cells.values():
        assert float(seconds) > 0 and float(images) > 0 and float(gflop) > 0 and float(gb) > 0
        assert 0 <= float(mfu.rstrip("%")) < 200
    # the rollout makes the same forwards in both
    assert cells["flowrl", "rollout"][2] == cells["reference", "rollout"][2]
    assert cells["flowrl", "rollout"][2] == cells["budget", "rollout"][2]


def test_on_a_gpu_flops_are_those_of_the_metrics_and_as_many_a_row_in_the_reference():
    line = {"time/rollout": 2.0, "time/iteration": 9.0, "memory/peak_gb": 3.0}
    line |= {"memory/rollout_gb": 3.0, "nfe/rollout": 8.0, "flops/rollout": 80.0}
    own = throughput.measured(lambda: line, SimpleNamespace(cuda=True), 2)
    assert own["rollout"] == throughput.Phase(seconds=2.0, flops=80.0, gb=3.0, rows=8.0)
    assert own["iteration"].flops == 80.0 and own["iteration"].seconds == 9.0
    theirs = {"rollout": throughput.Phase(rows=12.0), "iteration": throughput.Phase()}
    throughput.as_many_a_row(theirs, own)
    assert theirs["rollout"].flops == theirs["iteration"].flops == 120.0


def test_the_config_of_a_real_model_goes_with_its_random_weights(tmp_path):
    """And with how it is held: here a tiny pipeline, quantised, whose encoders leave."""
    pytest.importorskip("torchao")
    words = ["model.pipeline.height=16", "model.pipeline.width=16", "model.dtype=fp32"]
    words += ["train.precision=no", "model.quantize=int8", "model.encoders=leave"]
    cfg = throughput.config("sd3.5-medium", "nft", [*SMALL, "batch.group=2", *words])
    trainer = throughput.trainer_of(cfg, tiny.pipeline("sd3"), tmp_path / "run", 1)
    assert trainer.policy.latent_shape[-2:] == (8, 8) and trainer.cfg.model.quantize == "int8"
    assert trainer.cfg.model.encoders == "leave" and trainer.iterate(0).metrics["nfe/update"] > 0


def test_the_reference_steps_as_flow_sde_and_recomputes_its_own_log_probs():
    v, x, y = torch.randn(3, 2, 1, 4, 4)
    for sigma, sigma_next in ((1.0, 0.9), (0.6, 0.4)):
        places = torch.tensor([sigma, sigma_next, 0.9])
        mean, std = reference_loop.sde_step(v, x, *places, 0.7)
        ours = flow_sde.transition(v, x, *places[:2], eta=0.7, sigma_cap=places[2])
        assert torch.allclose(mean, ours.mean, atol=1e-5)
        log_prob = reference_loop.log_prob(y, mean, std)
        assert torch.allclose(log_prob, ours.log_prob(y), atol=1e-4)
    cfg = throughput.config("shapes-sd3", "flow_grpo", SMALL)
    pipe = random_pipeline.build("shapes-sd3", CPU, torch.float32)
    loop = throughput.reference_of(cfg, "flow_grpo", pipe, micro=2)
    loop.encode()
    loop.sample()
    rows = torch.arange(3)
    for place, i in enumerate(loop.settings.trained):
        x, y = loop.states[i], loop.states[i + 1]
        with torch.no_grad():
            v = loop.predict(x, loop.times[i].expand(3), rows, phase="update")
        mean, std = reference_loop.sde_step(v, x, *loop.stepper.at(i), 0.7)
        again = reference_loop.log_prob(y, mean, std)
        assert torch.allclose(again, loop.log_probs[place], atol=1e-4)
    assert loop.rows["rollout"] == 3 * 3 * 2 and loop.rows["update"] == 2 * 3 * 2
    loop.update(torch.tensor([1.0, -1.0, 0.5]))
    assert all(weight.grad is not None for weight in loop.weights)


@pytest.mark.parametrize(
    "name", ["sd3.5-medium", "flux.1-dev", "qwen-image", "wan2.1-1.3b", "sd1.5", "sdxl"]
)
def test_every_architecture_becomes_a_pipeline(name):
    """On the meta device: shapes alone, so that it takes seconds."""
    pipe = random_pipeline.build(name, torch.device("meta"), torch.bfloat16)
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    assert type(pipe).__name__ == read(name).pipeline
    kept = {torch.float32} if name.startswith("wan") else set()  # as from_pretrained keeps them
    assert {p.dtype for p in denoiser.parameters()} == {torch.bfloat16} | kept
    for key, part in pipe.components.items():
        if key.startswith("tokenizer") and part is not None:
            ids = part(["a fox", "two"], padding="max_length", max_length=9).input_ids
            assert ids.shape == (2, 9) and 0 < int(ids.min()) <= int(ids.max()) < part.vocabulary


def test_names_of_architectures_may_be_short():
    assert (
        random_pipeline.named("sd35-medium") == "sd3.5-medium"
        and random_pipeline.named("middle") == "middle"
    )
    with pytest.raises(SystemExit, match="--arch sd4 is not known; there are shapes-sd3, middle"):
        random_pipeline.named("sd4")


def test_exponents_are_those_of_power_laws():
    law = [(n, 3.0 * n**0.8) for n in (1, 2, 4, 8)]
    slope, half = scaling.exponent(law)
    assert slope == pytest.approx(0.8) and half < 1e-6
    noisy = [(n, s * f) for n, s in law for f in (0.9, 1.0, 1.1)]
    slope, half = scaling.exponent(noisy)
    assert abs(slope - 0.8) < half < 0.2
    line = scaling.row("resolution", [(n, 1.0 * n * n) for n in (32, 64, 128)])
    assert "| 1.00 [1.00, 1.00] |" in line  # seconds as pixels


class Scripted:
    """In place of a process that runs a commit."""

    def __init__(self, seconds, **counts):
        self.answers = {"time": {"seconds": seconds}, "count": counts}

    def ask(self, what):
        return self.answers[what]


@pytest.mark.parametrize(
    ("after", "fine", "said"),
    [
        (Scripted(1.02, rows=8), True, ""),
        (Scripted(1.0, rows=9), False, "| nft | rows | 8 | 9 | grew |"),
        (Scripted(1.0, rows=7), True, "| nft | rows | 8 | 7 | fell |"),
        (Scripted(1.2, rows=8), False, "1.200 [1.200, 1.200] grew |"),
    ],
)
def test_a_commit_that_counts_more_or_takes_longer_fails(after, fine, said, capsys):
    assert two_commits.compare("nft", [Scripted(1.0, rows=8), after], 3, 0.05) is fine
    assert said in capsys.readouterr().out


def test_savings_are_measured_against_counted_rows():
    """10 rows rolled out at 0.1 s and 4 trained at 0.5 s predict 3 s; 4 s were taken."""
    theirs = {"time/rollout": 2.0, "nfe/rollout": 20.0, "time/update": 6.0, "nfe/update": 12.0}
    ours = {"nfe/rollout": 8.0, "nfe/reference": 2.0, "nfe/update": 4.0, "time/decode": 1.0}
    ours |= {"time/update": 2.0, "time/iteration": 5.0}
    theirs["time/iteration"] = 8.0
    assert against_reference.predicted(ours, theirs) == pytest.approx(3.0)
    whole, update = against_reference.saving("tree_grpo", [(ours, theirs)] * 3)
    assert whole.reached == [0.75] * 3 and whole.measured == "2.00x"
    assert update.counted == "3.00x" and update.measured == "3.00x"
    assert whole.row(False, 0.97).endswith("| 0.750 [0.750, 0.750] | at least 0.97 |")
