"""Starting a reward server: its address, its token, its packages, what it says of itself."""

import os
import socket
import subprocess
import sys

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from flowrl import rewards
from flowrl.rewards.server.addresses import is_loopback
from flowrl.rewards.server.app import Server


def brightness(media, prompts, context=None):
    return media.mean((1, 2, 3))


def test_an_address_that_others_reach_needs_a_token(monkeypatch):
    for host in ("0.0.0.0", "::", "10.0.0.1", "gpu-box"):
        with pytest.raises(ValueError, match="can be reached from other machines.*token_env"):
            Server({"jpeg": 1.0}, host=host, port=0)
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    for value, said in (
        (None, "is empty or not set"),
        ("two words", "holds spaces"),
        ("schlüssel", "outside ASCII"),
    ):
        monkeypatch.delenv("MY_TOKEN", raising=False)
        if value is not None:
            monkeypatch.setenv("MY_TOKEN", value)
        with pytest.raises(ValueError, match=f"token_env=MY_TOKEN.*{said}"):
            Server({"jpeg": 1.0}, token_env="MY_TOKEN", port=0)


def test_a_port_that_is_taken_and_a_device_that_is_none_are_sentences():
    with pytest.raises(ValueError, match="device=cudaa cannot be used"):
        Server({"jpeg": 1.0}, port=0, device="cudaa")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ValueError, match="cannot be served.*choose another port"),
    ):
        Server({"jpeg": 1.0}, port=taken.getsockname()[1])


def test_describe_names_the_rewards_and_the_address():
    served = {"jpeg": 1.0, "light": {"reward": brightness, "weight": 0.5}}
    with Server(served, port=0, device="cpu") as server:
        described = server.describe()
    assert described.splitlines() == [
        "jpeg (weight 1): minus kilobytes at JPEG quality 95, divided by 500",
        "light (weight 0.5): as the function gives it",
        f"{server.url} on cpu; train with: reward=remote reward.remote.url={server.url}",
    ]


def test_serving_needs_neither_diffusers_nor_transformers():
    blocked = ("diffusers", "transformers", "accelerate", "peft", "omegaconf", "open_clip")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "import httpx, torch\n"
        "from flowrl.rewards import load\n"
        "from flowrl.rewards.server.app import Server\n"
        "with Server({'jpeg': 1.0}, port=0, device='cpu') as s:\n"
        "    print(load('remote', url=s.url)(torch.zeros(1, 3, 8, 8), ['a']).tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert out.stdout.strip() == str(
        rewards.load("jpeg")(torch.zeros(1, 3, 8, 8), ["a"]).tolist()
    ), out.stderr
