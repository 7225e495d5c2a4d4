"""`flowrl train` by the launchers that docs/many_gpus.md names, against one process.

    python scripts/bench/launchers.py

The same small run, on the CPU: in one process, then on two by accelerate and by torchrun, and on
two machines by each, which are two launchers here that meet at an address. A figure is the norm of
the difference of the exported LoRA's B matrices, which start at 0, over the norm of one process's.
Exit code 1 where one exceeds --most.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from processes import apart, free_port
from safetensors.torch import load_file
from torch import Tensor

RUN = [
    "-m",
    "flowrl",
    "train",
    "model=shapes-sd3",
    "algorithm=flow_grpo",
    "reward=jpeg",
    "batch.prompts=4",
    "batch.group=2",
    "batch.micro=1",  # each row alone: kernels round alike
    "sampler.steps=4",
    "sampler.guidance=none",
    "iterations=2",
    "data.eval=null",
    "ema.every=1",  # the LoRA that is exported is averaged
    "optimizer.eps=1e-3",  # Adam's first step is g / (|g| + eps): a small eps blows rounding up
    "trackers=[]",
]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no"]
TORCHRUN = ["torch.distributed.run"]
ENV = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SECONDS = 900


def launchers(port: int) -> dict[str, list[list[str]]]:
    """By name, the launcher's words on each machine."""
    met = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    torch_met = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    return {
        "accelerate, two processes": [[*ACCELERATE, "--num_machines", "1", *met[2:]]],
        "torchrun, two processes": [[*TORCHRUN, "--nproc-per-node", "2", *torch_met]],
        "accelerate, two machines": [
            [*ACCELERATE, "--num_machines", "2", "--machine_rank", str(rank), *met]
            for rank in range(2)
        ],
        "torchrun, two machines": [
            [*TORCHRUN, "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1"]
            + torch_met
            for rank in range(2)
        ],
    }


def train(machines: list[list[str]], output: Path, words: list[str]) -> Tensor:
    """A run by launchers that start together -> what it learned, flat. SystemExit where one
    fails."""
    run = [*RUN, *words, f"output={output}"]
    started = [
        subprocess.Popen(
            [sys.executable, *(["-m", *launcher] if launcher else []), *run],
            env=os.environ | ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launcher in machines
    ]
    said = [process.communicate(timeout=SECONDS)[0] for process in started]
    for process, text in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{' '.join(process.args)}\n{text}")
    found = {}
    for path in sorted((output / "lora").glob("*.safetensors")):
        found |= load_file(path)
    moved = [found[name].double().flatten() for name in sorted(found) if "lora_B" in name]
    return torch.cat(moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=float, default=1e-6, help="largest figure that passes")
    asked = parser.parse_args()
    figures: list[float] = []
    with tempfile.TemporaryDirectory() as where:
        one = train([[]], Path(where) / "one", [])
        print("| launcher | base | LoRA |\n|---|---|---|")
        for base, words in (("replicated", []), ("sharded", ["train.shard=[denoiser]"])):
            for name, machines in launchers(free_port()).items():
                found = train(machines, Path(where) / str(len(figures)), words)
                figures.append(apart({"": one}, {"": found})[""])
                print(f"| {name} | {base} | {figures[-1]:.1e} |", flush=True)
    raise SystemExit(max(figures) > asked.most)


if __name__ == "__main__":
    main()
