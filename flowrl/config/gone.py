"""Settings that were removed, and that a config.yaml of an earlier run may still name."""

from __future__ import annotations

from typing import Any, NamedTuple

SINCE = "2026-11-26"  # the day from which on the settings below are gone
JUDGES = ("rationalrewards", "unifiedreward", "vlm_logit", "vlm_yesno", "vr_thinker")


class Gone(NamedTuple):
    """A setting that was removed; at its default a run goes on without it, with equal numbers."""

    default: Any  # value that a config had where nobody set it
    instead: str  # what to do now, or what holds now, as the end of a sentence


# SECTION.SETTING, or reward.NAME.SETTING, whatever the label of that reward is in a config
GONE = {
    "train.profile_memory": Gone(
        False, "scripts/bench/budget.py counts what each phase allocates on a CPU"
    ),
    "algorithm.window.every_min": Gone(1, "a window stays for one iteration at least"),
    "algorithm.window.knee": Gone(13, "exp_decay sets in at step 13, as in the paper"),
    "data.sampler.help.decay": Gone(0.5, "each visit that succeeds halves the chance of help"),
    "gradient.copies": Gone(1, "samples says how many of a group are noised again"),
    "gradient.rescale": Gone(True, "the gradient of an estimate is divided by its sigma"),
    "guard.warn_after": Gone(10, "it is said after 10 iterations"),
    "watch.factor": Gone(0.1, "stop.watch=lower leaves a tenth of the learning rate"),
    **{
        f"reward.{judge}.{setting}": gone
        for judge in JUDGES
        for setting, gone in {
            "backoff": Gone(1.0, "the first pause is a second; retries says how many there are"),
            "cache": Gone(1024, "the newest 1024 replies are kept"),
            "seed": Gone(None, "extra={seed: 3} adds one to each request"),
            "least": Gone(0.01, "below a probability of 0.01 a sample has no score"),
        }.items()
    },
    "reward.checklist.chunk": Gone(64, "chunk or concurrency of the answerer bounds its calls"),
    "reward.editreward.pooling": Gone("mean", "the released models average their two heads"),
    "reward.geneval.clip": Gone("ViT-L-14-quickgelu", "clip_weights says where its weights are"),
    "reward.geneval.side": Gone(800, "the detector sees 800 px"),
    "reward.inverse_dynamics.threshold": Gone(0.1, "agreement=exp tells how near actions are"),
    "reward.jpeg.goal": Gone("compressible", "a weight of -1 rewards large files"),
    "reward.motion_smoothness.pool": Gone(1, "the pixels themselves are compared"),
    "reward.rationalrewards.aspects": Gone(None, "all aspects of the task are averaged"),
    "reward.reference.cap": Gone(60.0, "60 dB are the highest PSNR"),
    "reward.sharpness.chunk": Gone(16, "16 frames are read at a time"),
    "reward.tiling.chunk": Gone(16, "16 frames are read at a time"),
    "reward.video.fps": Gone(None, "frames says how many frames of each video are scored"),
    "reward.video.video_fps": Gone(None, "frames says how many frames of each video are scored"),
    "reward.vqascore.mask_unknown": Gone(False, "the network sees T5's unknown token"),
    "reward.win_rate.decimals": Gone(None, "rates are exact"),
    "reward.win_rate.margin": Gone(0.0, "temperature=0.5 makes near scores nearly a tie"),
    "reward.vr_thinker.most": Gone(8, "a reply may ask for 8 frames"),
    "reward.vr_thinker.workspace": Gone(48, "48 frames of a video can be asked for"),
    "reward.vr_thinker.when_full": Gone("drop", "the oldest pictures are left out"),
}
REWARDS = ("reward.", "reward.ensemble.members.")  # below them stand labels of rewards


def without_gone(tree: Any, *, whatever: bool = False) -> Any:
    """Return a config without removed settings; a value that is no config is returned as it is.

    ValueError where one had another value than its default; whatever: any value is dropped.
    """
    return _without(tree, "", "", whatever)


def _without(tree: Any, owner: str, where: str, whatever: bool) -> Any:
    """owner, where: what stands before a key of the tree in GONE, and in the config."""
    if not isinstance(tree, dict):
        return tree
    out = {}
    for key, value in tree.items():
        gone = GONE.get(f"{owner}{key}")
        if gone is None:
            out[key] = _without(value, _owner(tree, key, owner), f"{where}{key}.", whatever)
        elif value != gone.default and not whatever:
            raise ValueError(
                f"{where}{key}={str(value).lower()} is a setting that is gone since {SINCE}; leave"
                f" it out: {gone.instead}"
            )
    return out


def _owner(tree: dict[Any, Any], key: Any, owner: str) -> str:
    """What stands before the keys of tree[key] in GONE: a reward's is called by its name."""
    if owner in REWARDS:
        entry = tree[key]
        return f"reward.{entry.get('name', key) if isinstance(entry, dict) else key}."
    inner = str(key).removesuffix("_settings")  # as judge_settings, those of the reward `judge`
    return f"{owner}{key}." if inner == key else f"reward.{tree.get(inner, inner)}."
