"""Wrong inputs for scripts/bench/fuzz.py: settings of every kind, and damaged files of a run.

Case `number` of a seed is always the same, whatever ran before it.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_damage
import yaml

from flowrl.config.load import flatten
from flowrl.config.schema import Config, algorithm_schema
from flowrl.rewards.core.reward import reward_class
from flowrl.runtime import registry

TINY = (  # a run of two iterations that takes seconds
    "algorithm=nft",
    "algorithm.steps=2",
    "reward=jpeg",
    "batch.prompts=2",
    "batch.group=2",
    "sampler.steps=4",
    "iterations=2",
    "eval.every=0",
    "eval.images=4",
    "eval.steps=2",
    "checkpoint.every=1",
    "trackers=[]",
    "model.self_check=false",
)
SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 16, 64, 10**9, 10**30, -(2**63), 0.5, -0.0, 1e-9, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "no", "nan", "1e3", "none", "null", "a"),
    *("[b]", "[/b]", "x[/b]", "{a}", "${seed}", "${nowhere}", "${", "a,b", "a=b", "a: b", "# a"),
    *("\x1b[31mred", "\u202eabc", "a\nflowrl: b", "\x00", "é", "圆形", "👩‍👩‍👧", "e\u0301" * 50),
    *("pipeline", "bf16", "cpu", "cuda", "../..", "nowhere.txt", "'", '"', "\\", "%s", "a" * 5000),
)
PIPELINE = (
    *("height", "width", "guidance_scale", "negative_prompt", "num_images_per_prompt", "sigmas"),
    *("max_sequence_length", "mu", "generator", "latents", "prompt", "prompt_2", "prompt_embeds"),
    *("joint_attention_kwargs", "callback_on_step_end", "clip_skip", "skip_guidance_layers"),
    *("callback_on_step_end_tensor_inputs", "num_inference_steps", "output_type", "self", "dtype"),
    *("lora", "device", "shape", "kind", "cond", "source", "return_dict", "heights", "é", "[b]"),
)
BOMB = "a0: &a0 [1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
TEXTS = (  # whole files
    *(b"", b"\n", b"null", b"[]", b"3", b"a: [", b"{", b"a: 1\na: 2", b"a: &a [*a]", b"a: *b"),
    *(b"\x00\x01\x02", b"\xff\xfe", b"\x89PNG\r\n\x1a\n", b"a: \x1b[31m", b"? [1]\n: 2"),
    *(b"a: !!python/object/apply:os.getcwd []", b"a: !!binary x", b"---\na: 1\n---\nb: 2", b"- 1"),
    *(BOMB.encode(), b"a: " + b"[" * 60_000, b"a: " + b"x" * 2_000_000, b"1: 2", b"{}: 1"),
    *(b"defaults: 3", b"defaults: [{a: b}]", b"reward: [jpeg]", b"model: sd1.5", b"algorithm: 3"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str  # "words 17"
    words: list[str]  # of the command line
    prepare: Callable[[Path], None] = lambda folder: None  # in the folder that the command runs in


def config_case(seed: int, number: int) -> Case:
    """A config that is most likely wrong."""
    rng = random.Random(f"config {seed} {number}")
    kinds = (of_words, of_words, of_file, of_file, of_rewards, of_rewards, of_text, at_start)
    kinds += (of_pipeline, of_pipeline)
    kind = kinds[number % len(kinds)]
    words, prepare = kind(rng)
    name = f"{kind.__name__.partition('_')[2]} {number}"
    return Case(name=name, words=words, prepare=prepare or (lambda folder: None))


Made = tuple[list[str], Callable[[Path], None] | None]  # words, and what is prepared


def of_words(rng: random.Random) -> Made:
    """Settings on the command line, most of them known."""
    keys = [*flatten(Config.model_construct().model_dump(mode="json")), *options(rng)]
    said = [
        f"{rng.choice(('', '', '', '+', '++', '~'))}{key_of(rng, keys)}" for _ in range(some(rng))
    ]
    return ["show", *TINY, *(f"{key}={written(rng)}" for key in said)], None


def of_file(rng: random.Random) -> Made:
    """A YAML file with settings of any type."""
    keys = [*flatten(Config.model_construct().model_dump(mode="json")), *options(rng)]
    tree: dict[str, Any] = {"algorithm": {"name": "nft"}, "reward": {"jpeg": 1.0}}
    for _ in range(some(rng)):
        put(tree, key_of(rng, keys).split("."), value_of(rng))
    text = yaml.safe_dump(tree, allow_unicode=rng.random() < 0.5)
    return ["show", "own.yaml"], lambda folder: write(folder / "own.yaml", text.encode())


def of_text(rng: random.Random) -> Made:
    """A file that is hardly a config."""
    text = rng.choice(TEXTS)
    if rng.random() < 0.5:
        text = damaged(rng, b"algorithm: {name: nft}\nreward: {jpeg: 1.0}\nseed: 3\n" + text)
    return ["show", "own.yaml"], lambda folder: write(folder / "own.yaml", text)


def of_rewards(rng: random.Random) -> Made:
    """Settings of any reward, by its own schema."""
    name = rng.choice(registry.choices("flowrl.rewards"))
    keys = [*reward_class(name).Settings.model_fields, "weight", "name"]
    words = [f"reward.{name}.{key_of(rng, keys)}={written(rng)}" for _ in range(some(rng))]
    return ["show", *TINY, f"reward={name}", *words], None


def of_pipeline(rng: random.Random) -> Made:
    """Arguments of the pipeline's call, in a check of the model or a run's start."""
    known = PIPELINE if rng.random() < 0.4 else PIPELINE[:8]  # those that a call of any type reads
    said = {rng.choice(known): value_of(rng) for _ in range(rng.choice((1, 1, 2)))}
    if rng.random() < 0.3:
        pairs = (f"{key}={json.dumps(value)}" for key, value in said.items())
        return [
            "check",
            "shapes-sd3",
            *(word for pair in pairs for word in ("--pipeline", pair)),
        ], None
    tree = {"model": {"pipeline": said}}
    return ["train", "own.yaml", *TINY], lambda folder: write(
        folder / "own.yaml", yaml.safe_dump(tree).encode()
    )


def at_start(rng: random.Random) -> Made:
    """A run that is built, if its settings allow it."""
    keys = [
        key
        for key in flatten(Config.model_construct().model_dump(mode="json"))
        if not key.startswith(("model.source", "output"))
    ]
    words = [f"{key_of(rng, keys)}={written(rng)}" for _ in range(rng.choice((1, 1, 2)))]
    return ["train", *TINY, *words], None


def folder_case(seed: int, number: int, run: Path) -> Case:
    """A copy of a run with damaged or edited files, and a command that reads it."""
    rng = random.Random(f"folder {seed} {number}")
    command = COMMANDS[number % len(COMMANDS)]

    def prepare(folder: Path) -> None:
        copy = folder / "run[seed3]"
        shutil.copytree(run, copy)
        files = fault_damage.candidates(copy)
        by_hand = [path for path in files if path.suffix in (".json", ".jsonl", ".yaml")]
        for _ in range(rng.choice((1, 1, 2, 3))):
            path = rng.choice(rng.choice((files, by_hand, by_hand)))
            if path.is_file():
                with contextlib.suppress(ValueError, TypeError):  # it was damaged before
                    fault_damage.damage(path, rng, SCALARS)

    return Case(name=f"{command[0]} {number}", words=list(command), prepare=prepare)


COMMANDS = (
    ("report", "run[seed3]"),
    ("train", "--resume", "run[seed3]"),
    ("report", "run[seed3]"),
    ("evaluate", "run[seed3]", "--images", "2", "--steps", "1"),
    ("report", "run[seed3]"),
    ("generate", "shapes-sd3", "a red circle", "--steps", "1", "--lora", "run[seed3]"),
    ("train", "--resume", "run[seed3]", "iterations=3"),
)


# ---------------------------------------------------------------------- values and keys


def some(rng: random.Random) -> int:
    return rng.choice((1, 1, 1, 2, 3, 6))


def options(rng: random.Random) -> list[str]:
    """Options of the method of TINY, or of another one."""
    name = rng.choice(("nft", "nft", *registry.choices("flowrl.algorithms")))
    return [f"algorithm.{key}" for key in algorithm_schema(name).model_fields] + [
        *("reward.jpeg.quality", "reward.jpeg.weight", "reward.jpeg", "reward", "model", "data"),
        *("model.pipeline.height", "model.pipeline.negative_prompt", "algorithm", "experiment"),
    ]


def key_of(rng: random.Random, keys: list[str]) -> str:
    """A key, at times a misspelled, longer or shorter one."""
    key, kind = rng.choice(keys), rng.random()
    if kind < 0.06:
        return key.rpartition(".")[0] or key
    if kind < 0.12:
        return f"{key}.{rng.choice(('a', 'weight', '0', '[b]', 'é', ''))}"
    if kind < 0.18:
        at = rng.randrange(len(key))
        return key[:at] + rng.choice("aZ._[]é ") + key[at + 1 :]
    return key


def value_of(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.75:
        return rng.choice(SCALARS)
    if kind < 0.87:
        return [value_of(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 0.98:
        return {
            str(rng.choice(SCALARS))[:9]: value_of(rng, depth + 1) for _ in range(rng.randrange(3))
        }
    deep: Any = 1
    for _ in range(rng.choice((20, 60, 120))):
        deep = [deep]
    return deep


def written(rng: random.Random) -> str:
    """A value as a word of the command line, at times not in its grammar."""
    value = value_of(rng)
    text = json.dumps(value, ensure_ascii=False) if rng.random() < 0.6 else str(value)
    return text.replace("\x00", "")  # which no word can hold


def put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[keys[-1]] = value


# ---------------------------------------------------------------------- files


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Cut off, with other bytes in it, longer, or replaced."""
    at, kind = rng.randrange(len(data) + 1), rng.randrange(5)
    some_bytes = rng.choice(
        (b"\x00", b"\xff" * 9, b"\x1b[2J", b"[", b"null", b'"', b"\n", rng.randbytes(40))
    )
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + some_bytes + data[at + len(some_bytes) :]
    if kind == 2:
        return data + some_bytes
    if kind == 3:
        return data[:at] + some_bytes + data[at:]
    return rng.choice(TEXTS)
