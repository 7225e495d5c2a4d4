"""scripts/bench/real_size.py, its folders, tokenizers and rewards; and every model with
a small one starts in throughput.py, with few of everything."""

import dataclasses

import long
import pytest
import random_pipeline
import real_cases
import real_folder
import real_parts
import real_rewards
import real_size
import real_tokenizers
import small_models
import throughput
import torch

from flowrl.config.build import DTYPES
from flowrl.training.budget.architecture import read

SMALL = ["batch.prompts=1", "batch.group=2", "batch.micro=2", "batch.decode=2", "sampler.steps=2"]
NAMES = sorted({*small_models.names()} - {*random_pipeline.EMBEDDED})
LONG = ["sdxl", "sd3.5-medium", "wan2.1-1.3b", "wan2.1-14b", "qwen-image", "flux.1-dev"]


@pytest.fixture
def process(monkeypatch):
    """What runs commands and counts; what it puts in place of classes' methods is taken away."""
    import transformers

    from flowrl.training.loop import Trainer

    encoders = (getattr(transformers, name) for name in real_tokenizers.CLASSES)
    for cls, name in [(Trainer, "iterate"), *((encoder, "forward") for encoder in encoders)]:
        monkeypatch.setattr(cls, name, getattr(cls, name))
    return real_parts.Process()


def changes(name):
    """What makes an architecture narrow; vocabularies stay."""
    parts = (part for part in read(name).parts if part != "safety_checker")
    return {part: small_models.sizes_of(name, part) for part in parts}


def narrow(name):
    """An architecture with few of everything."""
    return real_folder.with_changes(read(name), changes(name))


@pytest.mark.parametrize("name", long.but(NAMES, LONG))
def test_every_model_with_a_small_one_starts(name, tmp_path, monkeypatch):
    monkeypatch.setattr(random_pipeline, "read", narrow)
    size = {"height": 16, "width": 16, "num_frames": 5} if name.startswith("wan") else {}
    size = [f"model.pipeline.{k}={v}" for k, v in (size or {"height": 64, "width": 64}).items()]
    cfg = throughput.config(name, "nft", [*SMALL, *size])
    pipe = random_pipeline.build(name, torch.device("cpu"), DTYPES[cfg.model.dtype])
    trainer = throughput.trainer_of(cfg, pipe, tmp_path / "run", 1)
    metrics = trainer.iterate(0).metrics
    assert metrics["nfe/rollout"] > 0 and metrics["nfe/update"] > 0 and metrics["reward/total"]


@long.mark
@pytest.mark.parametrize("name", ["sd1.5", "flux.1-dev"])
def test_all_parts_of_a_narrow_model_pass(name, process, tmp_path, monkeypatch):
    """Commands of flowrl in this process, from the folder to the LoRA in plain diffusers; again,
    nothing is run."""
    case = dataclasses.replace(real_cases.MODELS[name], fewer=changes(name))
    monkeypatch.setitem(real_cases.MODELS, name, case)
    place = real_cases.Place(name=name, folder=tmp_path / name, results=tmp_path / "results.jsonl")
    assert real_parts.model(place, process)
    known, plan = place.known(), place.known()["budget"]
    for method in real_cases.METHODS:
        assert known[method]["rows"] == plan[method]["rows"]
    guided = [] if name == "flux.1-dev" else ["before, guided"]
    assert known["flow_grpo"]["evaluations"] == ["before", *guided, "after"]
    assert known["lora"]["apart"] <= 2**-7 and known["lora"]["moved"] > 0
    size = place.results.stat().st_size
    assert real_parts.model(place, process) and place.results.stat().st_size == size


def test_after_its_minutes_no_part_is_begun_and_the_row_says_which_passed(tmp_path, monkeypatch):
    place = real_cases.Place(name="sd1.5", folder=tmp_path, results=tmp_path / "results.jsonl")
    monkeypatch.setattr(real_parts, "prepared", lambda place: None)
    began = []
    monkeypatch.setattr(real_parts, "part", lambda place, name, run: not began.append(name))
    clock = iter(range(100))
    monkeypatch.setattr(real_parts.time, "monotonic", lambda: next(clock))
    assert real_parts.model(place, None, until=2)
    assert began == ["check", "budget", "flow_grpo"]
    for name in began:
        place.note(name, passed=True)
    assert "passed: check, budget, flow_grpo; others were not run" in real_size.row(place)
    assert real_size.missed(place) == []


def test_a_process_counts_what_encoders_compute_and_says_what_failed(process):
    """Two encoders of eight texts at most: what is known is not computed again."""
    counted = process("check", "shapes-sd3")
    assert 2 <= counted["encoder_calls"] <= 16 and "gb" not in counted
    with pytest.raises(real_parts.Failed, match="flowrl check ended with exit code 2"):
        process("check", "shapes-sd4")


RUN = {
    "passed": True,
    "seconds": 1.0,
    "cpu": 1.0,
    "rows": {"rollout": 4},
    "gb": 2.0,
    "encoder_calls": 3,
}
PLAN = {"rows": {"rollout": 4}, "gb": 2.0}
FINE = {
    "check": {"passed": True, "seconds": 1.0, "cpu": 1.0},
    "budget": {"passed": True, "seconds": 1.0, "cpu": 1.0, "flow_grpo": PLAN, "nft": PLAN},
    "flow_grpo": RUN,
    "nft": RUN,
    "lora": {"passed": True, "seconds": 1.0, "cpu": 1.0},
}


@pytest.mark.parametrize(
    ("part", "other", "said"),
    [
        ("nft", {}, ""),
        ("nft", {"gb": 2.2}, ""),  # 15% more may be
        ("nft", {"gb": 2.4}, "nft: 2.40 GB, and the budget says 2.00"),
        ("flow_grpo", {"rows": {"rollout": 8}}, "flow_grpo: rows are {'rollout': 8}, and the"),
        ("lora", {"passed": False, "why": "Failed: apart"}, "lora: Failed: apart"),
        ("process", {"passed": False, "why": "killed"}, "process: killed"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(part, other, said, tmp_path):
    place = real_cases.Place(name="sd1.5", folder=tmp_path, results=tmp_path / "results.jsonl")
    for name, found in {**FINE, part: {**FINE.get(part, {}), **other}}.items():
        place.note(name, **found)
    found = real_size.missed(place)
    assert (found == []) if not said else len(found) == 1 and found[0].startswith(said)
    cells = [cell.strip() for cell in real_size.row(place).strip("|").split("|")]
    assert len(cells) == len(real_size.HEAD)
    assert ("not all passed" in cells) == (part in ("lora", "process"))


def test_the_newest_result_of_a_part_counts(tmp_path):
    cases, results = real_cases, tmp_path / "results.jsonl"
    a, b = (cases.Place(name=name, folder=tmp_path, results=results) for name in ("sdxl", "sd1.5"))
    a.note("check", passed=False, why="it was wrong")
    assert not a.done("check") and not b.done("check")
    a.note("check", passed=True)
    assert a.done("check") and not b.done("check") and not a.done("nft")


@pytest.mark.parametrize(
    ("encoder", "size"), [("T5EncoderModel", 32128), ("UMT5EncoderModel", 256384)]
)
def test_stand_ins_of_t5_are_as_large_and_read_the_last_rows(encoder, size):
    own = real_tokenizers.tokenizer("tokenizer", encoder, {"vocab_size": size})
    fox, bird = own(["a red fox", "a blue bird"], padding="max_length", max_length=9).input_ids
    assert len(own) == size and fox != bird and len(fox) == 9
    assert min(fox[:2]) > size // 2 and fox[3] == own.eos_token_id and own.unk_token_id not in fox


def test_the_tokenizers_of_clip_and_qwen():
    first, second = (
        real_tokenizers.tokenizer(name, "CLIPTextModel", {"vocab_size": 49408})
        for name in ("tokenizer", "tokenizer_2")
    )
    told = first("a photo of a cat").input_ids
    assert told == [49406, 320, 1125, 539, 320, 2368, 49407]  # as openai/clip-vit-large-patch14
    assert (first.pad_token_id, second.pad_token_id) == (49407, 0)
    config = {"text_config": {"vocab_size": 152064}}
    qwen = real_tokenizers.tokenizer("tokenizer", "Qwen2_5_VLForConditionalGeneration", config)
    assert len(qwen) == 152064 and qwen("<|im_start|>user").input_ids[0] == 152062
    assert qwen.decode(qwen("a red fox, two DOGS").input_ids) == "a red fox, two DOGS"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_from_one_block_are_random_and_differ_from_row_to_row(dtype):
    before = torch.Tensor.normal_, torch.Tensor.uniform_, torch.get_default_dtype()
    with real_folder.quick_weights(dtype):
        linear = torch.nn.Linear(1024, 2048)  # more values than the block has
        norm, table = torch.nn.LayerNorm(8), torch.nn.Embedding(300, 16)
        own = torch.empty(4, 50_000).normal_(3, 0.1)
    assert (torch.Tensor.normal_, torch.Tensor.uniform_, torch.get_default_dtype()) == before
    assert {p.dtype for p in (linear.weight, norm.weight, table.weight)} == {dtype}
    rows = linear.weight.float()
    assert len(rows.unique(dim=0)) == 2048 and abs(rows.std() * 1024**0.5 - 3**-0.5) < 0.01
    assert (norm.weight == 1).all() and abs(table.weight.float().std() - 1) < 0.05
    assert abs(own.float().mean() - 3) < 0.01 and abs(own.float().std() - 0.1) < 0.01


def test_a_real_network_may_have_other_numbers_deep_inside():
    changes = {"text_encoder": {"text_config": {"num_hidden_layers": 3}}, "vae": {"base_dim": 8}}
    found = real_folder.with_changes(read("qwen-image"), changes)
    whole = read("qwen-image").parts
    text = found.parts["text_encoder"]["text_config"]
    assert text == {**whole["text_encoder"]["text_config"], "num_hidden_layers": 3}
    assert (
        found.parts["vae"]["base_dim"] == 8 and found.parts["transformer"] == whole["transformer"]
    )


def test_the_keys_of_imagereward_are_the_published_ones(tmp_path):
    from flowrl.rewards.networks.blip import renamed

    name = real_rewards._published
    keys = {
        "blip.vision.embeddings.class_embedding": "blip.visual_encoder.cls_token",
        "blip.vision.encoder.layers.23.layer_norm2.bias": (
            "blip.visual_encoder.blocks.23.norm2.bias"
        ),
        "blip.vision.encoder.layers.0.self_attn.qkv.weight": (
            "blip.visual_encoder.blocks.0.attn.qkv.weight"
        ),
        "blip.text.encoder.layer.0.attention.self.query.weight": (
            "blip.text_encoder.encoder.layer.0.attention.self.query.weight"
        ),
        "layers.7.bias": "mlp.layers.7.bias",
    }
    assert {key: name(key) for key in keys} == keys
    back = renamed({value.removeprefix("blip."): 0 for value in keys.values()})
    assert {f"blip.{key}" for key in back} >= {key for key in keys if key.startswith("blip.")}


def test_check_takes_the_type_of_the_networks(tmp_path):
    from typer.testing import CliRunner

    from flowrl.cli.main import app

    told = CliRunner().invoke(app, ["check", "shapes-sd3", "--dtype", "bf16"])
    assert told.exit_code == 0, told.output
    assert "tolerance 0.0001" not in told.output and "tolerance" in told.output
    wrong = CliRunner().invoke(app, ["check", "shapes-sd3", "--dtype", "bfloat16"])
    assert wrong.exit_code == 2 and "bf16" in wrong.output
