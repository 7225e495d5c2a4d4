"""Names that people bring from other trainers, and several values, which are several runs."""

import re

import pytest
import typer
import yaml

from flowrl import load_config
from flowrl.cli.main import app
from flowrl.config import ConfigError, load, schema
from flowrl.runtime import registry

TABLES = yaml.safe_load(load.FILE_OF_SYNONYMS.read_text())
TABLE = TABLES["settings"]
# of the issue and of the scripts of TRL, kohya, SimpleTuner and diffusers
WANTED = """
    learning_rate resolution train_batch_size num_generations kl beta wandb report_to prompts rank
    text_encoder_lr xformers cache_latents sample_every_n_steps vae trigger_word output_name
    fp8_base blocks_to_swap network_train_unet_only noise_offset min_snr_gamma clip_skip
    network_dim network_alpha epochs max_train_steps gradient_accumulation_steps mixed_precision
    output_dir pretrained_model_name_or_path cfg_scale guidance_scale num_inference_steps eval_steps
    save_steps checkpointing_steps num_train_epochs clip_range group_size"""


def keys():
    """Every key of the config and of the shipped algorithms, and the sections that hold them."""
    found = set(load.keys(schema.Config))
    for name in registry.shipped("flowrl.algorithms"):
        found |= set(load.keys(schema.algorithm_schema(name), "algorithm."))
    return found


def test_what_a_synonym_names_is_in_the_schema():
    known = (
        keys()
        | {"model", "reward", "flowrl train", "accelerate launch", "a list"}
        | {"without a counterpart"}
    )
    for name, said in TABLE.items():
        # what stands first, and every dotted word
        first = re.match(r"`?((flowrl|accelerate|a|without a) )?[a-z_.]*[a-z]", said)
        named = re.findall(r"(?<![\w/])[a-z]+\.[a-z_.]*[a-z]", said)
        for key in {first[0].strip("`"), *named} - {"file.py"}:
            assert key in known or key.startswith("model.pipeline."), (name, key)


def test_what_a_synonym_of_an_option_names_is_an_option():
    commands = typer.main.get_command(app).commands
    known = {
        o for name in ("generate", "score", "report") for p in commands[name].params for o in p.opts
    }
    for name, said in TABLES["options"].items():
        assert set(re.findall(r"--[a-z-]+", said)) <= known and said.startswith(("--", "a word")), (
            name
        )
        assert load.synonym(f"--{name}", "options") == said


def test_every_name_that_people_bring_is_answered_by_ours():
    for name in WANTED.split():
        with pytest.raises(ConfigError) as error:
            load_config(None, [f"{name}=1"])
        assert str(error.value) == f'unknown key "{name}"; here it is {TABLE[name]}'
    for name in ("lr", "gradient_checkpointing"):  # ours, in a section
        with pytest.raises(ConfigError, match=rf'did you mean "\w+\.{name}"\?'):
            load_config(None, [f"{name}=1"])
    assert load.synonym("--learning-rate") == "optimizer.lr" and load.synonym("lora") is None


@pytest.mark.parametrize(
    ("word", "loop"),
    [
        ("seed=[0,1]", "several seeds are several runs: flowrl train ... --seeds 0,1"),
        ("seed=0, 1", "several seeds are several runs: flowrl train ... --seeds 0,1"),
        (
            "optimizer.lr=1e-4,1e-5",
            "for v in 1e-4 1e-5; do flowrl train ... optimizer.lr=$v output=runs/optimizer.lr-$v",
        ),
        ("train.mode=lora,full", "for v in lora full; do flowrl train ... train.mode=$v"),
        ("algorithm=nft,flow_grpo", "for v in nft flow_grpo; do flowrl train ... algorithm=$v"),
        ("algorithm.ratio=ppo,log", "for v in ppo log; do flowrl train ... algorithm.ratio=$v"),
        ("seed=several", "should be a whole number"),
    ],
)
def test_several_values_are_answered_by_a_loop_of_runs(word, loop):
    with pytest.raises(ConfigError) as error:
        load_config(None, ["algorithm=flow_grpo", word] if "ratio" in word else [word])
    sentence = str(error.value)
    assert loop in sentence and ("several runs are" in sentence) == ("for v" in loop)
    assert "did you mean" not in sentence
