"""`flowrl generate`: images and videos from a model, with a run's LoRA."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from flowrl.cli.common import (
    LARGEST_SEED,
    REWARD,
    Call,
    Columns,
    Hints,
    call_arguments,
    check_model,
    named_values,
    next_steps,
    one_sentence_errors,
    parse_columns,
    parse_guidance,
    parse_rewards,
    show,
)
from flowrl.runtime.excerpt import part
from flowrl.runtime.paths import expanded
from flowrl.runtime.store.run_folder import is_run

Model = Annotated[
    str,
    typer.Argument(
        help="A run folder, a name of configs/model, a folder in diffusers layout, or a hub id."
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Argument(help="Prompts, files of them, or other sources as of data.train."),
]
Lora = Annotated[Path | None, typer.Option(help="A run folder, or a LoRA of any trainer.")]
Steps = Annotated[int, typer.Option(min=1, help="Denoising steps.")]
Guidance = Annotated[
    str, typer.Option(help="A scale, none, or pipeline (the pipeline's own setting).")
]
Rlg = Annotated[
    float,
    typer.Option(
        help="Reinforcement Learning Guidance: extrapolates from the base model through the LoRA."
    ),
]
BestOf = Annotated[
    int, typer.Option(min=1, help="Candidates a prompt; the one with the highest reward is kept.")
]
Searching = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOW|SETTING=VALUE",
        help="random, zero_order or tree: the best that --calls can find; and its settings, once"
        " for each.",
    ),
]
Calls = Annotated[
    int | None, typer.Option(min=1, help="With --search: most network calls a prompt.")
]
Rounds = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rounds in which a judge rewrites the prompt; a picture is taken if it scores higher.",
    ),
]
Enough = Annotated[
    float | None,
    typer.Option(help="With --refine: a picture that scores so much is left as it is."),
]
Chooser = Annotated[
    list[str] | None,
    typer.Option(metavar=REWARD, help="The reward that chooses, and its settings; once for each."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=LARGEST_SEED, help="Equal seeds give equal pictures.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        help="out.png, out.mp4, out.npy ...; several prompts get numbers. Default: out, with the"
        " suffix that suits.",
    ),
]

WORD = re.compile(r"[^:/]+$")  # in a name of a file or a dataset there would be one of these
LITTLE = frozenset(["a", "an", "and", "at", "in", "of", "on", "the", "with"])  # are no prompts


def generate(
    model: Model,
    prompts: Prompts = None,
    lora: Lora = None,
    steps: Steps = 28,
    guidance: Guidance = "pipeline",
    rlg: Rlg = 1.0,
    best_of: BestOf = 1,
    search: Searching = None,
    calls: Calls = None,
    refine: Rounds = None,
    enough: Enough = None,
    reward: Chooser = None,
    pipeline: Call = None,
    hints: Hints = None,
    columns: Columns = None,
    seed: Seed = 0,
    output: Output = None,
) -> None:
    """Make images or videos."""
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        # words first: so far nothing imports torch
        model, prompts = expanded(model), prompts or []
        _judge(model, prompts, lora, output, pipeline, rlg)
        named = parse_columns(columns)
        how: dict[str, Any] = {"steps": steps, "seed": seed, "rlg": rlg, "best_of": best_of}
        how |= {"guidance": parse_guidance(guidance), "search": _search(search, calls)}
        chosen = parse_rewards(reward) if reward else None
        part("flowrl.rollouts.inference.generate", "check_way")(best_of, search, refine, chosen)
        if chosen and best_of == 1 and not (search or refine):
            raise ValueError(
                "--reward chooses among samples, and one is made of each prompt; add --best-of 4,"
                " --search or --refine, or leave --reward out"
            )
        how["refine"] = _refine(refine, enough)

        from flowrl.data.media import MEDIA_SUFFIXES
        from flowrl.rewards import load_set
        from flowrl.rollouts.inference import generate as generation

        log.hush()
        embedded = _embedded(model)
        asked = _asked(prompts, named, embedded)
        chooser = load_set(chosen) if chosen else None
        how |= {"reward": chooser, "meta": _meta_of(chooser, asked)}
        # the words are checked before this line, because loading a model takes minutes
        policy = _load(model, lora, pipeline, hints)
        _check_scale(policy, guidance, pipeline)
        output = _suited(policy, output)
        made = generation.generate(policy, asked, **how)
        with one_sentence_errors(disk=1):
            saved = _save(made, output)
    if saved[0].suffix in MEDIA_SUFFIXES:
        first = asked[0] if isinstance(asked[0], str) else asked[0]["prompt"]
        usual = "clip.preset=shapes" if embedded else "clip"
        rewards = " ".join(f"--reward {word}" for word in reward or [usual])
        next_steps(f"flowrl score {quote(str(saved[0]))} --prompt {quote(first)} {rewards}")


def _judge(
    model: str,
    prompts: list[str],
    lora: Path | None,
    output: Path | None,
    pipeline: list[str] | None,
    rlg: float,
) -> None:
    """Raise ValueError for what is wrong with these words, before torch is imported."""
    if not prompts:
        own = f'model? flowrl generate shapes-sd3 "{model}"' if " " in model else ""
        raise ValueError(f"which {own or f'prompt? flowrl generate {model} PROMPT'}")
    if output:
        part("flowrl.data.media", "check_output")(output)
    if lora and not lora.exists():
        part("flowrl.config.build", "lora_of")(lora)  # whose error names what may be given
    named_values("--pipeline", pipeline, "height=512", lambda name: frozenset())
    _check_quoted(prompts)
    if is_run(model):
        return
    if rlg != 1 and lora is None:
        raise ValueError("--rlg compares the LoRA with the base model; give --lora too")
    check_model(model)


def _load(model: str, lora: Path | None, pipeline: list[str] | None, hints: str | None) -> Any:
    """Load the policy as a run trained it, or with its LoRA and heads; with the run's arguments of
    the call, which `pipeline` overrides."""
    from flowrl.config.build import heads_of, lora_of, pipeline_of, trained
    from flowrl.policy import load_policy

    if is_run(model):
        if lora:
            raise ValueError(f"{model} is a run and has weights of its own; leave --lora out")
        return trained(Path(model), call_arguments(pipeline), hints)
    weights, settings = lora_of(lora) if lora else (None, {})
    call = (pipeline_of(lora) if lora else {}) | call_arguments(pipeline)
    if hints:
        call["hints"] = hints
    policy: Any = load_policy(model, **settings, **call)
    if weights:
        policy.load_lora(weights)
    if lora and (heads := heads_of(lora)):
        policy.load_heads(heads)
    return policy


def _check_quoted(prompts: list[str]) -> None:
    """Ask whether prompts of one word each are a sentence that nobody put in quotes."""
    names = [word for word in prompts if " " in word or Path(word).suffix or not WORD.match(word)]
    if len(prompts) < 2 or names:
        return
    said = f'{len(prompts)} prompts of one word each; for one prompt write "{" ".join(prompts)}"'
    if not LITTLE.isdisjoint(word.lower() for word in prompts):
        raise ValueError(f"{said}, or list them in a file, one a line")
    from flowrl.runtime.log import logger

    logger.warning(said)


def _embedded(model: str) -> bool:
    """Whether it is an embedded model, or a run of one."""
    from flowrl.config.compose import is_embedded
    from flowrl.config.load import read_config

    return is_embedded(
        read_config(Path(model, "config.yaml")).model.source if is_run(model) else model
    )


def _asked(prompts: list[str], columns: dict[str, str], embedded: bool) -> list[Any]:
    """Load the prompts, and warn of words that the embedded model never saw, if it is one."""
    from flowrl.data.prompts import of_words

    asked = of_words(prompts, columns)
    if not embedded:
        return asked
    from flowrl.runtime.log import logger
    from flowrl.shapes.prompts import vocabulary, words

    texts = " ".join(row if isinstance(row, str) else row["prompt"] for row in asked)
    known = vocabulary()
    if new := [word for word in dict.fromkeys(words(texts)) if word not in known]:
        listed = ", ".join(new[:5]) + ", ..." * (len(new) > 5)
        logger.warning(
            f"the embedded model never saw these words: {listed}; all that it knows are"
            f" {', '.join(sorted(known))}"
        )
    return asked


def _suited(policy: Any, output: Path | None) -> Path | None:
    """The file to write, with a suffix that suits what the policy makes."""
    import torch

    from flowrl.data import media
    from flowrl.rollouts.from_files import media_shape
    from flowrl.runtime.log import logger

    if output is None or output.suffix.lower() == media.ARRAY:
        return output
    suits = media.fitting(output, torch.empty(media_shape(policy)))
    if suits != output:
        logger.warning(f"{output.name} does not suit what is made; it is saved as {suits.name}")
    return suits


def _check_scale(policy: Any, guidance: str, words: list[str] | None) -> None:
    """Raise ValueError where the scale of the pipeline's call is given, and another one in its
    place."""
    given = {word.partition("=")[0] for word in words or ()} & {"guidance_scale", "true_cfg_scale"}
    if given and guidance != "pipeline" and policy.branches("pipeline") > 1:
        raise ValueError(
            f"--guidance {guidance} takes the place of --pipeline {min(given)}; give one of the two"
        )


def _search(words: list[str] | None, calls: int | None) -> Any:
    """Build a Search from HOW and SETTING=VALUE; return None where no search is asked for."""
    from dataclasses import fields

    from flowrl.runtime.registry import did_you_mean

    if not words:
        if calls is not None:
            raise ValueError(f"--calls {calls} is read with --search; add --search zero_order")
        return None
    ways, own = [word for word in words if "=" not in word], [w for w in words if "=" in w]
    if len(ways) != 1 or calls is None:
        raise ValueError(
            "--search needs one way (random, zero_order or tree), and --calls, the most network"
            " calls that a prompt may cost"
        )
    Search = part("flowrl.rollouts.search", "Search")
    given = named_values("--search", own, "radius=0.2", lambda name: frozenset())
    known = [f.name for f in fields(Search)[2:]]
    for name in given:
        if name not in known:
            raise ValueError(f"--search {name}: no such setting{did_you_mean(name, known)}")
    return Search(how=ways[0], calls=calls, **given)


def _refine(rounds: int | None, enough: float | None) -> Any:
    """Build a Refine of this many rounds; return None where no refinement is asked for."""
    if rounds is None:
        if enough is not None:
            raise ValueError(f"--enough {enough:g} is read with --refine; add --refine 1")
        return None
    from flowrl.rollouts.inference.refine import Refine

    return Refine(rounds=rounds, enough=enough)


def _meta_of(rewards: Any, prompts: list[Any]) -> list[dict[str, Any]] | None:
    """Meta that the shapes reward, if it is in the set, reads for prompts that bring only a
    text."""
    if (
        rewards is None
        or not isinstance(prompts[0], str)
        or not any(reward.name == "shapes" for reward in rewards.rewards.values())
    ):
        return None
    from flowrl.shapes.prompts import find

    return [find(prompt) for prompt in prompts]


def _save(made: Any, output: Path | None) -> list[Path]:
    """Write each item and print where; several items get numbers. A wrong suffix does not lose what
    was made."""
    from flowrl.data import media
    from flowrl.runtime.store import files

    output = media.fitting(output or Path("out.png"), made[0])
    files.clean(output.parent)
    several = [output.with_stem(f"{output.stem}-{i}") for i in range(len(made))]
    names = several if len(made) > 1 else [output]
    saved = [media.save(item, name) for item, name in zip(made, names, strict=True)]
    show("\n".join(map(str, saved)), wrap=True)
    return saved
