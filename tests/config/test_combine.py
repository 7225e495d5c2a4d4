"""Settings that do not combine."""

import pytest

from flowrl.config.build import make_policy
from flowrl.config.combine import REFUSED, check, combines
from flowrl.config.lighter import Shortage, next_change
from flowrl.config.load import load_config
from flowrl.training.budget.planner import check_known
from flowrl.training.out_of_memory import advised

SHARD = "train.shard=[denoiser]"
TEAMS = "train.sequence_parallel=2"
CASES = [
    (["model.encoders=leave", "train.parts=[text_encoder]"], "use model.encoders=stay"),
    (["model.quantize=int8", "train.mode=full"], "int8 freezes the weights, and train.mode=full"),
    (["model.quantize=int8", SHARD], r"only whole .* are split by train.shard=\[denoiser\]"),
    (["model.offload=denoiser", "train.mode=full"], "train.mode=full trains them all"),
    (["model.offload=denoiser", SHARD], r"shard=\[denoiser\] splits them"),
    (["model.offload=denoiser", "batch.overlap=2"], "batch.overlap=2 others are sampled"),
    ([SHARD, "train.compile=blocks"], "train.compile=blocks compiles them"),
    ([SHARD, "train.parts=[denoiser,text_encoder]"], "a trained text encoder is called between"),
    ([TEAMS, SHARD], r"shard=\[denoiser\] both split the network"),
    ([TEAMS, "train.compile=blocks"], "hooks blocks that train.compile=blocks would compile"),
    ([TEAMS, "model.offload=denoiser"], "model.offload=denoiser moves them"),
    ([TEAMS, "model.quantize=int8"], "and not with model.quantize=int8"),
    ([TEAMS, "train.parts=[denoiser,text_encoder]"], "trains a text encoder"),
    ([SHARD, "train.mode=full", "train.precision=fp16"], "the scaler of fp16 looks for overflow"),
    ([SHARD, "train.mode=full", "optimizer.name=adamw8bit"], "of optimizer.name=adamw8bit are not"),
]


def test_there_is_a_case_for_each_record():
    given = [load_config(None, words) for words, _ in CASES]
    assert len(given) == len(REFUSED) and not any(map(combines, given))


@pytest.mark.parametrize(("words", "sentence"), CASES)
def test_a_start_and_a_budget_refuse_what_does_not_combine(words, sentence):
    cfg = load_config(None, words)
    for refuse in (check, make_policy, lambda cfg: check_known(cfg, 2)):
        with pytest.raises(ValueError, match=sentence):
            refuse(cfg)


@pytest.mark.parametrize("words", [words[:-1] for words, _ in CASES])
def test_less_than_all_of_them_combines(words):
    assert combines(load_config(None, words))


@pytest.mark.parametrize(
    ("words", "phase", "passed_over", "instead"),
    [  # a run has one of two settings; the other one would be next
        (["train.parts=[text_encoder]"], "rollout", "model.encoders", {"model.quantize": "int8"}),
        (["train.compile=blocks"], "optimizer", "train.shard", {"model.quantize": "int8"}),
        (["train.mode=full"], "reward", "model.offload", {"batch.states": "host"}),
        ([SHARD], "optimizer", "model.quantize", {"optimizer.name": "adamw8bit"}),
    ],
)
def test_a_budget_proposes_what_would_start(words, phase, passed_over, instead):
    base = ["batch.decode=1", "model.encoders=leave"] if "encoders" not in passed_over else []
    cfg = load_config(None, [*base, *words])
    assert next_change(cfg, Shortage(phase=phase, gpus=2), modelled=True) == instead


def test_a_micro_batch_is_not_halved_below_the_rows_of_one_state():
    words = ["train.gradient_checkpointing=true", "model.quantize=nf4", "batch.states=host"]
    small = ["batch.micro=2", "batch.decode=1", "model.encoders=leave", "model.offload=denoiser"]
    cfg = load_config(None, [*words, *small])
    found = [
        next_change(cfg, Shortage(phase="update", state=state), modelled=True) for state in (1, 2)
    ]
    assert found == [{"batch.micro": 1}, {"optimizer.name": "adamw8bit"}]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["train.parts=[text_encoder]"], "set model.quantize=int8"),
        ([SHARD, "train.mode=full", "model.encoders=leave"], "set train.mode=lora"),
        ([SHARD, "model.encoders=leave"], "set optimizer.name=adamw8bit"),
        ([SHARD, "model.encoders=leave", "optimizer.name=adamw8bit"], "ask for smaller pictures"),
    ],
)
def test_the_sentence_of_a_run_out_of_memory_names_what_would_start(words, fix):
    cfg = load_config(None, [*words, "model.dtype=bf16"])
    assert advised(cfg, Shortage(phase="optimizer")).startswith(fix)
