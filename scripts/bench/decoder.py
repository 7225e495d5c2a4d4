"""What inferring a decoder costs in memory, at the size of a real video.

    python scripts/bench/decoder.py [--height 480] [--width 832] [--frames 81]

A tiny Wan whose VAE is stood in for by one that returns values of the right shape at no cost: what
is left is flowrl's and the pipeline's. Prints the peak beyond what the process held before, in all
and per value of one video: of the pipeline itself for two videos, of loading, of the self-check.
Exit code 1 beyond MOST bytes a value.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import torch  # noqa: E402
from diffusers.models.autoencoders.vae import DecoderOutput  # noqa: E402
from zoo import cases  # noqa: E402

import flowrl  # noqa: E402

MOST = 48  # bytes a value of one video: six copies of two videos in fp32


def resident() -> int:
    """Bytes of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak(run: Callable[[], Any]) -> tuple[Any, int]:
    """What run returns, and the largest memory while it ran, beyond what was held before."""
    start, largest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.is_set():
            largest = max(largest, resident())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(), max(largest, resident()) - start
    finally:
        done.set()
        watcher.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, usual in (("height", 480), ("width", 832), ("frames", 81)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    size = parser.parse_args()
    torch.set_num_threads(1)
    pipe: Any = cases()["wan21"].make()
    config = {**pipe.transformer.config, "rope_max_seq_len": 1024, "num_layers": 1}
    pipe.transformer = type(pipe.transformer).from_config(config)  # its own ends at 32 places
    shape = (3, size.frames, size.height, size.width)
    values = torch.Size(shape).numel()

    def decode(vae: Any, z: torch.Tensor, return_dict: bool = True, **options: Any) -> Any:
        made = torch.zeros(1).expand(len(z), *shape)
        return DecoderOutput(sample=made) if return_dict else (made,)

    type(pipe.vae).decode = decode
    call = {"height": size.height, "width": size.width, "num_frames": size.frames}
    own = {**call, "num_inference_steps": 1, "output_type": "pt"}
    _, running = peak(lambda: pipe(["a red circle", "two blue squares"], **own))
    policy, loading = peak(lambda: flowrl.load_policy(pipe, **call))
    _, checking = peak(policy.self_check)
    print(f"one video: {shape}, {values / 1e6:.1f} million values")
    for name, held in (("pipeline", running), ("loading", loading), ("self-check", checking)):
        print(f"{name:10}  {held / 1e9:5.2f} GB  {held / values:5.1f} bytes a value")
    sys.exit(max(loading, checking) > MOST * values)


if __name__ == "__main__":
    main()
