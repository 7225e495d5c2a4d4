"""A tiny policy, and a folder of its samples as `flowrl score` writes it."""

import json

import pytest
import small
import torch

from flowrl import load_policy
from flowrl.data.media import save
from flowrl.rollouts.generation import sample
from flowrl.samplers import keys

TEXTS = ["a red circle", "two blue squares"]


@pytest.fixture(scope="module")
def policy():
    made = load_policy("shapes-sd3", lora={"rank": 2, "alpha": 4})
    made.trainable.add_view("old")
    return made


@pytest.fixture(scope="module")
def made(policy, tmp_path_factory):
    """Seven samples of the policy, four and three of a prompt, scored by `flowrl score` -> (folder,
    x0 by file name, pixels by name)."""
    folder = tmp_path_factory.mktemp("offline")
    texts = [TEXTS[0]] * 4 + [TEXTS[1]] * 3
    x, sigma, _ = sample(
        policy, texts, keys.key("offline test", torch.arange(7)), steps=16, guidance=3.0
    )
    with torch.no_grad():
        media = policy.decode(x, float(sigma[0]))
    for i, picture in enumerate(media):
        save(picture, folder / "made" / f"{i}.png")
    entries = [{"file": f"made/{i}.png", "prompt": text} for i, text in enumerate(texts)]
    (folder / "p.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = [
        "--prompts",
        folder / "p.jsonl",
        "--reward",
        "jpeg",
        "--reward",
        "shapes=0.5",
        "-o",
        folder / "scored",
    ]
    result = small.invoke("score", folder / "made", *words)
    assert result.exit_code == 0, result.output
    x0 = {f"media/{i}.png": x0 for i, x0 in enumerate(policy.clean(x, sigma))}
    return folder / "scored", x0, {f"media/{i}.png": picture for i, picture in enumerate(media)}
