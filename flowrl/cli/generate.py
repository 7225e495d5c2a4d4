"""`flowrl generate`: images and videos from a model, with a run's LoRA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

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
from flowrl.runtime.store.run_folder import is_run, lora_folder

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
    str,
    typer.Option("--seed", "--seeds", metavar="0,1,2", help="Each makes a sample of each prompt."),
]
WithBase = Annotated[
    bool, typer.Option("--with-base", help="The base model's, too, from the same noise.")
]
Batch = Annotated[int, typer.Option(min=1, help="Samples made at once; fewer need less memory.")]
Output = Annotated[
    str | None,
    typer.Option(
        "-o",
        "--output",
        help="out.png, out.mp4, out.npy ...; several get numbers. Or a folder, out/, where the same"
        " command goes on after a stop. Default: out, with the suffix that suits.",
    ),
]
Form = Annotated[
    Literal["png", "jpg", "webp", "mp4", "gif", "npy"] | None,
    typer.Option("--format", help="Format of the files in a folder. Default: png, of videos mp4."),
]
Grid = Annotated[Path | None, typer.Option(help="A contact sheet of the samples, as sheet.png.")]

WORD = re.compile(r"[^:/]+$")  # in a name of a file or a dataset there would be one of these
# options that change samples or files, beside the model's
HOW = ("steps", "guidance", "rlg", "best_of", "search", "calls", "refine", "enough")
SHARED = (*HOW, "reward", "hints", "form")
LITTLE = frozenset(["a", "an", "and", "at", "in", "of", "on", "the", "with"])  # are no prompts


def generate(
    ctx: typer.Context,
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
    seed: Seed = "0",
    with_base: WithBase = False,
    batch: Batch = 8,
    output: Output = None,
    form: Form = None,
    grid: Grid = None,
) -> None:
    """Make images or videos."""
    from flowrl.runtime import log

    log.setup()
    with one_sentence_errors():
        # words first: so far nothing imports torch
        # typer before 0.29 leaves paths in ctx.params as text
        model, words = expanded(model), {**ctx.params, "lora": lora, "grid": grid}
        seeds = _judge(model, prompts or [], words)
        folder, file = _place(output, words)
        named, chosen = parse_columns(columns), parse_rewards(reward) if reward else None
        how = _how(words, chosen, scored=not file)
        settings = _settings(model, words)

        from flowrl.rewards import load_set
        from flowrl.rollouts.inference import gallery

        log.hush()
        asked = _asked(prompts or [], named, settings["model"])
        rows = gallery.wanted(asked, seeds, settings, base=with_base)
        todo = rows if file else gallery.left(folder, rows)
        chooser = load_set(chosen) if chosen else None
        how |= {"reward": chooser, "meta": _meta_of(chooser, asked)}
        # the words are checked before this line, because loading a model takes minutes
        if todo:
            policy = _load(model, words, asked)
            _check_scale(policy, guidance, pipeline)
            _name(todo, policy, file, words)
            with one_sentence_errors(disk=1):
                gallery.fill(policy, asked, todo, folder, how, batch=batch, listed=not file)
        made = [str(folder / row["file_name"]) for row in rows]
        said = made if file else [f"{folder}: {len(rows)} samples, {len(todo)} of them new"]
        said += [str(gallery.sheet(rows, folder, grid))] if grid else []
        show("\n".join(said), wrap=True)
    _say_next(made[0] if file else str(folder), rows[0], reward)


def _say_next(place: str, row: dict[str, Any], reward: list[str] | None) -> None:
    """Say how to score what was made, if rewards take it. row: the first sample's."""
    from flowrl.config.compose import drawn_by

    if row["file_name"].endswith(part("flowrl.data.media", "MEDIA_SUFFIXES")):
        world = drawn_by(row["model"])
        if world == "shapes_edit":  # files do not tell what was edited
            if not reward and "image" not in row["pipeline"]:
                next_steps(f"the same with --reward {world} -o FOLDER/ lists scores")
            return
        usual = {None: "clip", "shapes": "clip.preset=shapes"}.get(world, world)
        rewards = " ".join(f"--reward {word}" for word in reward or [usual])
        prompt = "" if Path(place).is_dir() else f" --prompt {quote(row['prompt'])}"
        next_steps(f"flowrl score {quote(place)}{prompt} {rewards}")


def _judge(model: str, prompts: list[str], words: Mapping[str, Any]) -> list[int]:
    """Return the seeds; ValueError for what is wrong with these words, before torch is imported."""
    from flowrl.cli.seeds import split

    seeds = split(words["seed"], None)[0]
    if max(seeds) > LARGEST_SEED:
        raise ValueError(f"--seed {max(seeds)} is above {LARGEST_SEED}, the largest seed")
    if not prompts:
        own = f'model? flowrl generate shapes-sd3 "{model}"' if " " in model else ""
        raise ValueError(f"which {own or f'prompt? flowrl generate {model} PROMPT'}")
    lora = words["lora"]
    if lora and not lora.exists():
        part("flowrl.config.build", "lora_of")(lora)  # whose error names what may be given
    named_values("--pipeline", words["pipeline"], "height=512", lambda name: frozenset())
    _check_quoted(prompts)
    if is_run(model):
        return seeds
    if (words["rlg"] != 1 or words["with_base"]) and lora is None:
        option = "--with-base" if words["with_base"] else "--rlg"
        raise ValueError(f"{option} compares the LoRA with the base model; give --lora too")
    check_model(model)
    return seeds


def _place(output: str | None, words: Mapping[str, Any]) -> tuple[Path, Path | None]:
    """The folder of the files, and their common name; None: each is named by its prompt."""
    path, check = Path(expanded(output or "out.png")), part("flowrl.data.media", "check_output")
    listed = output is not None and (output.endswith("/") or path.is_dir() or not path.suffix)
    if listed and (path.is_file() or is_run(path)):
        what = "a file" if path.is_file() else "the folder of a run"
        raise ValueError(f"-o {output} is {what}; give another folder for the samples")
    if not listed and (words["form"] or words["with_base"]):
        option = "--format" if words["form"] else "--with-base"
        raise ValueError(f"{option} is about a folder of files; give one, -o out/")
    if (grid := words["grid"]) and grid.suffix not in part("flowrl.data.media", "IMAGE_SUFFIXES"):
        raise ValueError(f"--grid {grid}: a contact sheet is a picture, such as sheet.png")
    check(Path(f"out.{words['form'] or 'png'}") if listed else path)
    return (path, None) if listed else (path.parent, path)


def _how(words: Mapping[str, Any], chosen: Any, *, scored: bool) -> dict[str, Any]:
    """Arguments of `generate`. chosen: the rewards; scored: a list takes their scores."""
    if words["enough"] is not None and words["refine"] is None:
        raise ValueError(f"--enough {words['enough']:g} is read with --refine; add --refine 1")
    Refine, refine = part("flowrl.rollouts.inference.refine", "Refine"), words["refine"]
    how = {name: words[name] for name in ("steps", "rlg", "best_of")}
    how |= {"guidance": parse_guidance(words["guidance"]), "reward": chosen}
    how["search"] = _search(words["search"], words["calls"])
    how["refine"] = Refine(rounds=refine, enough=words["enough"]) if refine else None
    ways = [how[name] for name in ("best_of", "search", "refine")]
    part("flowrl.rollouts.inference.generate", "check_way")(*ways, chosen)
    if chosen and not scored and ways == [1, None, None]:
        raise ValueError(
            "--reward chooses among samples, and one is made of each prompt; add --best-of 4,"
            " --search or --refine, give a folder for a list with scores, -o out/, or leave"
            " --reward out"
        )
    return how


def _settings(model: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """What all samples share, as their files and the list of the folder say it. "weights" tells a
    checkpoint or a LoRA from others, wherever it lies."""
    from flowrl.config.load import read_for_sampling
    from flowrl.config.rules import unknown_model

    found: dict[str, Any] = {"model": model}
    lora = words["lora"]
    run = next((Path(place) for place in (model, lora) if place and is_run(place)), None)
    own = read_for_sampling(run / "config.yaml").model if run else None
    if own and is_run(model):
        if problem := unknown_model(own.source):
            elsewhere = f"where it is elsewhere now: flowrl generate PLACE PROMPTS --lora {model}"
            raise ValueError(f"{problem}; {model} was trained from it, {elsewhere}")
        newest = part("flowrl.runtime.store.checkpoint", "latest")(run)
        found = {"model": own.source, "run": Path(model).resolve().name, "checkpoint": newest.name}
        found["weights"] = sha256((newest / "manifest.json").read_bytes()).hexdigest()[:16]
    elif lora:
        files = sorted(lora_folder(lora).rglob("*.safetensors")) or [lora] * lora.is_file()
        weights = sha256(b"".join(sha256(file.read_bytes()).digest() for file in files))
        found |= {"lora": lora.name, "weights": weights.hexdigest()[:16]}
    given = named_values("--pipeline", words["pipeline"], "height=512", lambda name: frozenset())
    found["pipeline"] = {**(own.pipeline if own else {}), **given}
    found |= {name: words[name] for name in SHARED if words[name] not in (None, [])}
    return found | {"guidance": parse_guidance(words["guidance"])}


def _load(model: str, words: Mapping[str, Any], prompts: list[Any]) -> Any:
    """Load the policy as a run trained it, or with its LoRA and heads; with the run's arguments of
    the call, which --pipeline overrides."""
    from flowrl.config.build import heads_of, lora_of, pipeline_of, trained
    from flowrl.data import conditions
    from flowrl.policy import load_policy

    lora, call, hints = words["lora"], call_arguments(words["pipeline"]), words["hints"]
    if is_run(model):
        if lora:
            raise ValueError(f"{model} is a run and has weights of its own; leave --lora out")
        return trained(Path(model), call, hints, prompts=prompts)
    weights, settings = lora_of(lora) if lora else (None, {})
    call = (pipeline_of(lora) if lora else {}) | call
    if hints:
        call["hints"] = hints
    # the pipeline is called as with the first prompt that brings more than its text
    shown = conditions.of([row for row in prompts[:1] if not isinstance(row, str)])
    policy: Any = load_policy(model, example=shown[0] if shown else None, **settings, **call)
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


def _asked(prompts: list[str], columns: dict[str, str], model: str) -> list[Any]:
    """Load the prompts, and warn of words that the embedded model never saw, if it is one."""
    from flowrl.config.compose import unseen_words
    from flowrl.data.prompts import of_words

    asked = of_words(prompts, columns)
    texts = [row if isinstance(row, str) else row["prompt"] for row in asked]
    if sentence := unseen_words(model, texts):
        from flowrl.runtime.log import logger

        logger.warning(sentence)
    return asked


def _name(
    rows: list[dict[str, Any]], policy: Any, file: Path | None, words: Mapping[str, Any]
) -> None:
    """Name the files of rows, with a suffix that suits what the policy makes."""
    import torch

    from flowrl.data import media
    from flowrl.rollouts.from_files import media_shape
    from flowrl.runtime.log import logger

    form, shape = words["form"], media_shape(policy)
    given = file or Path(f"out.{form or 'png'}")
    suits = media.fitting(given, torch.empty(shape))
    if suits != given and form:
        known = ", ".join(media.WRITTEN[media.media_kind((1, *shape))])
        raise ValueError(f"--format {form} does not suit what is made, which is saved as {known}")
    if words["grid"] and suits.suffix == media.ARRAY:
        raise ValueError("--grid shows pictures, and .npy holds numbers; leave one of them out")
    if suits != given and file and words["output"]:
        logger.warning(f"{given.name} does not suit what is made; it is saved as {suits.name}")
    for i, row in enumerate(rows):
        stem = f"{suits.stem}-{i}" if len(rows) > 1 else suits.stem
        row["file_name"] = f"{stem if file else row['file_name']}{suits.suffix}"


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
