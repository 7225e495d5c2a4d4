"""What does not go with weights that leave the device (model.encoders, model.offload)."""

from __future__ import annotations

from flowrl.config.schema import Config


def check_moving(cfg: Config) -> None:
    """ValueError where weights cannot leave as it is said; no model is needed."""
    if cfg.model.encoders == "leave" and "text_encoder" in cfg.train.parts:
        raise ValueError(
            "model.encoders=leave is for frozen text encoders, and train.parts has text_encoder,"
            " which is needed in every forward; use model.encoders=stay"
        )
    if cfg.model.offload == "none":
        return
    what = f"model.offload={cfg.model.offload}"
    if cfg.train.mode == "full":
        raise ValueError(
            f"{what} moves frozen weights, and train.mode=full trains them all; use"
            " train.mode=lora, or leave model.offload out"
        )
    if cfg.train.shard:
        raise ValueError(
            f"{what} moves whole weights, and train.shard=[{','.join(cfg.train.shard)}] splits"
            " them; leave one of the two out"
        )
    if cfg.batch.overlap:
        raise ValueError(
            f"{what} frees the device while samples are scored, and with"
            f" batch.overlap={cfg.batch.overlap} others are sampled meanwhile; leave one of the two"
            " out"
        )
