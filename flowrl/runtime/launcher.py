"""What a launcher asked for and started, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

PLUGINS = {  # what accelerate's launcher asks for by the environment, and what does it here
    "ACCELERATE_USE_FSDP": ("--use_fsdp", "train.shard=[denoiser]"),
    "ACCELERATE_USE_DEEPSPEED": ("--use_deepspeed", "train.shard=[denoiser]"),
    "ACCELERATE_USE_MEGATRON_LM": ("--use_megatron_lm", "train.shard=[denoiser]"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("--use_parallelism_config", "train.shard=[denoiser]"),
}


def check_launcher(environment: Mapping[str, str]) -> None:
    """ValueError for what accelerate's launcher was asked for and flowrl does in another way."""
    for name, (flag, instead) in PLUGINS.items():
        if environment.get(name, "false").lower() in ("1", "true", "yes", "y", "on", "t"):
            raise ValueError(
                f"{flag} wraps models in a plugin of accelerate, which LoRA on a replayed pipeline"
                f" does not fit; launch with --multi_gpu, and set {instead} to split the weights"
            )
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() not in ("no", ""):
        raise ValueError(
            f"--dynamo_backend={environment['ACCELERATE_DYNAMO_BACKEND'].lower()} compiles models"
            " that accelerate prepares, and flowrl's are not; leave it out"
        )


def check_teams(processes: int, members: int) -> None:
    """ValueError where processes do not make whole teams."""
    if processes % members:
        raise ValueError(
            f"train.sequence_parallel={members}: {members} processes share each call of the"
            f" network, and {processes} cannot be dealt into such teams; launch a multiple of"
            f" {members}, or leave train.sequence_parallel out"
        )
