"""The cases of real_size.py: which models, how small their calls, and where results lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 2**30
TRAINED = "pickscore"  # the reward that the first model is trained by
METHODS = ("flow_grpo", "nft")
ROWS = ("rollout", "reference", "update")
PROMPTS = ("a red fox in the snow", "a blue bird on a branch", "a green car by the sea")
HELD_OUT = ("a yellow boat",)
SMALL = [
    "data=file",
    "reward=jpeg",
    "sampler.steps=2",
    "batch.prompts=1",
    "batch.group=2",
    "batch.updates=1",
    "batch.micro=2",
    "batch.decode=2",
    "eval.steps=2",
    "eval.images=1",
    "ema.every=1",  # else the average of three steps is what it began with
    "trackers=[]",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named model, and what of it fits 20 GB."""

    # arguments of the pipeline's call
    size: Mapping[str, int] = field(default_factory=lambda: {"height": 64, "width": 64})
    # component -> numbers of its architecture that are smaller than the real ones
    fewer: Mapping[str, Any] = field(default_factory=dict)
    said: str = "all"  # how many of its blocks there are, for the table


VIDEO = {"height": 32, "width": 32, "num_frames": 5}
MODELS = {
    "sd1.5": Case(),
    "sdxl": Case(),
    "sd3.5-medium": Case(),
    "wan2.1-1.3b": Case(size=VIDEO),
    "flux.1-dev": Case(
        fewer={"transformer": {"num_layers": 4, "num_single_layers": 8}},
        said="4 of 19 and 8 of 38",
    ),
    "qwen-image": Case(
        fewer={
            "transformer": {"num_layers": 8},
            "text_encoder": {"text_config": {"num_hidden_layers": 10}},
        },
        said="8 of 60, 10 of 28 of the text encoder",
    ),
    "wan2.1-14b": Case(size=VIDEO, fewer={"transformer": {"num_layers": 6}}, said="6 of 40"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a case lives: its folder, and the results of all."""

    name: str  # of a model or a reward
    folder: Path  # its weights, runs and log
    results: Path  # results.jsonl of all cases

    def known(self) -> dict[str, dict[str, Any]]:
        """Part -> its newest result, of this case."""
        if not self.results.is_file():
            return {}
        lines = map(json.loads, self.results.read_text().splitlines())
        return {line["part"]: line for line in lines if line["case"] == self.name}

    def note(self, part: str, **found: Any) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps({"case": self.name, "part": part, **found}) + "\n")

    def done(self, part: str) -> bool:
        return bool(self.known().get(part, {}).get("passed", False))


def settings(place: Place) -> list[str]:
    """The words of a model's runs, but for the method and the folder."""
    size = [f"model.pipeline.{key}={value}" for key, value in MODELS[place.name].size.items()]
    data = [f"data.train={place.folder / 'train.txt'}", f"data.eval={place.folder / 'eval.txt'}"]
    source = f"model.source={place.folder / 'weights'}"
    return [f"model={place.name}", source, *size, *SMALL, *data]
