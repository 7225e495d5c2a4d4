"""Media are scored with several rewards at once: weighted sum, failed samples, and the errors that
are kept.

A reward that fails for some samples must not end a run of days, and one that breaks its contract
must not be trained on for another minute. So: NaN or inf marks a failed sample; an exception is
retried sample by sample; a wrong shape, dtype or device is a RewardBug.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowrl.data.media import media_kind
from flowrl.data.prompts import Prompts
from flowrl.rewards.core.ask import ask
from flowrl.rewards.core.counted import counted
from flowrl.rewards.core.domains import check_domains, covers, domains_of, is_asked
from flowrl.rewards.core.failures import RewardBug, RewardUnavailable, explained, kind_of, kinds_of
from flowrl.rewards.core.reward import COLUMNS, ORIGINS, Reward
from flowrl.rewards.core.reward_set import RewardSet, Spec, load_set
from flowrl.runtime.copies import own
from flowrl.runtime.log import logger
from flowrl.runtime.memory import ran_out
from flowrl.runtime.registry import did_you_mean
from flowrl.runtime.text import printable
from flowrl.types import MediaContext, Rewards


class TooManyInvalid(RuntimeError):
    """So many samples could not be scored that training on the rest would mislead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardScores:
    """The scores of one reward for B samples."""

    values: Tensor  # (B,) fp32, not finite where scoring failed
    problem: str | None = None  # first problem, with the number of failed samples
    kinds: Counter[str] = field(default_factory=Counter)  # kind of failure -> number of samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """B samples as rewards see them."""

    media: Tensor  # (B, *D) fp32
    prompts: list[str]  # B prompts
    context: MediaContext  # columns with B rows each

    @property
    def seen(self) -> tuple[Tensor, list[str], MediaContext]:
        """The arguments of a reward."""
        return self.media, self.prompts, self.context

    def take(self, rows: Tensor) -> Samples:
        """These rows of the samples."""
        return Samples(
            media=self.media[rows.to(self.media.device)],
            prompts=[self.prompts[i] for i in rows],
            context=take(self.context, rows),
        )


def check_columns(chosen: RewardSet, columns: Iterable[str]) -> None:
    """Check that every column which a reward declares is offered; see check_needs."""
    # columns that rewards declare, and those that rules about rewards read
    offered = set(columns)
    for label, reward in chosen.rewards.items():
        for column in sorted(reward.needs):
            if column not in COLUMNS:
                raise RewardBug(
                    f'reward "{label}" needs "{column}", which is not a context'
                    f" column{did_you_mean(column, COLUMNS)}"
                )
            if column not in offered:
                have = ", ".join(sorted(offered)) or "none"
                origin = ORIGINS.get(column, "no data file brings it")
                remedy = f"{reward.remedies[column]}, " if column in reward.remedies else ""
                raise ValueError(
                    f'reward "{label}" needs the context column "{column}", which is not provided'
                    f" (provided: {have}); {origin}: {remedy}score in Python with"
                    f" MediaContext({column}=...), or leave this reward out"
                )
    if chosen.domains and "meta" not in offered:
        raise ValueError(
            f'reward "{next(iter(chosen.domains))}" states domains, and the context column "meta",'
            f" which names that of each sample, is not provided; {ORIGINS['meta']}: score in"
            f' Python with MediaContext(meta=[{{"{chosen.domain_field}": ...}}, ...])'
        )
    for label, primary in chosen.strata.items():
        if "group" not in offered:
            raise ValueError(
                f'reward "{label}" is scaled among the samples of a prompt (stratify={primary}),'
                f' and the context column "group" is not provided; {ORIGINS["group"]}: score in'
                " Python with MediaContext(group=...), or leave stratify out"
            )


def given_columns(context: MediaContext) -> list[str]:
    """Names of the columns that a context has."""
    return [field.name for field in fields(context) if getattr(context, field.name) is not None]


def check_needs(rewards: Spec | RewardSet, columns: Iterable[str]) -> None:
    """Check at start-up that every context column which a reward declares is among `columns`; raise
    ValueError with reward and column where one is not."""
    check_columns(load_set(rewards), columns)


def score(
    media: Tensor,
    prompts: list[str],
    rewards: Spec | RewardSet,
    context: MediaContext | None = None,
) -> Rewards:
    """Score B samples without gradient.

    media: (B, 3, H, W) or (B, F, 3, H, W) fp32 in [0, 1], or any other (B, *D) fp32. rewards: see
    load_set; load once and pass the set when scoring often. Returns Rewards on media's device: raw
    parts, total = sum of weight * part (or the counted value of the part), NaN where a weighted
    part (or a pixel) is not finite. Samples with pixels that are not finite are shown to no reward;
    one that compares the members of a group sees the others. A reward with domains is asked for
    samples of these alone, and adds nothing to the total of others.
    """
    context = MediaContext() if context is None else context
    media = check_media(media, prompts)
    return score_with(load_set(rewards).to(media.device), media, prompts, context)


def score_with(
    chosen: RewardSet, media: Tensor, prompts: list[str], context: MediaContext
) -> Rewards:
    """`score` for media that check_media passed, with rewards that are on their device, or that
    `ready` brings there."""
    if chosen.ready is not None:  # networks that wait in host memory come to their device
        chosen.ready()
    # Refuse media that no reward can score.
    check_context(context, len(media))
    check_columns(chosen, given_columns(context))
    check_kind(chosen.rewards, media, prompts)
    # Score with each reward in turn, on samples whose pixels are finite.
    samples, rows = Samples(media=media, prompts=prompts, context=context), _visible(media)
    domains = domains_of(chosen, context.meta or [])
    asked = covers(chosen, domains)
    raw, errors, kinds = {}, [], Counter[str]()
    if hidden := len(prompts) - len(rows):
        errors = [f"media: {hidden} of {len(prompts)} samples hold NaN or inf pixels"]
        kinds["pixels"] = hidden
    for label in chosen.rewards:
        one = _evaluate(label, chosen, samples, _asked(asked, label, rows))
        raw[label] = one.values.masked_fill(~one.values.isfinite(), math.nan)
        errors += [one.problem] if one.problem else []
        if one.kinds and label in chosen.decisive:
            kinds += one.kinds
    # Add the values up, after rules by which rewards depend on each other.
    changed = counted(chosen, raw, context.group, asked) if chosen.rules else {}
    asked = {label: own.to(media.device) for label, own in asked.items()}
    total = _unscored(samples)
    total[rows.to(media.device)] = 0.0
    known = total == 0
    for label, value in (raw | changed).items():
        if label in asked:  # it adds nothing to a sample for which it is absent
            value = torch.where(asked[label], value, 0.0)
        if weight := chosen.weights[label]:
            total, known = total + weight * value, known & value.isfinite()
        elif label in chosen.apart:
            total = total.masked_fill(~value.isfinite(), math.nan)
            known = known & value.isfinite()
    valid = total.isfinite()
    if beyond := int((known & ~valid).sum()):
        errors.append(f"total: weight times score is beyond fp32 for {beyond} samples")
        kinds["overflow"] = beyond
    return Rewards(
        raw=raw,
        counted=changed,
        weights=dict(chosen.weights),
        total=total.masked_fill(~valid, math.nan),
        valid=valid,
        errors=errors,
        kinds=dict(kinds),
        features=None if chosen.features is None else _features(chosen, samples, rows),
        asked=asked,
        domain=domains,
    )


def _asked(asked: Mapping[str, Tensor], label: str, rows: Tensor) -> Tensor:
    """Those of the rows for which a reward is asked."""
    return rows[asked[label][rows]] if label in asked else rows


def _features(chosen: RewardSet, samples: Samples, rows: Tensor) -> Tensor:
    """Features of the samples, (B, d) fp32, of which `rows` are shown; NaN for the others."""

    def of(media: Tensor, *_: Any) -> Tensor:
        return chosen.features.of(media, rows)

    return ask("diversity.features", chosen.seconds, of, *samples.seen)


@torch.no_grad()
def readings(
    media: Tensor, prompts: list[str], rewards: RewardSet, context: MediaContext
) -> dict[str, Tensor]:
    """Readings that evaluation shows, name -> (B,) fp32: every reward, "total", and each reward's
    parts as <label>/<part>. NaN where scoring failed."""
    scored = score(media, prompts, rewards, context)
    say_problem(scored)
    out = {**scored.raw, "total": scored.total}
    samples, visible = Samples(media=media, prompts=prompts, context=context), _visible(media)
    asked = {label: own.cpu() for label, own in scored.asked.items()}
    for label in rewards.rewards:
        for rows, found in _parts(label, rewards, samples, _asked(asked, label, visible)):
            place = rows.to(media.device)
            for part, value in found.items():
                name = f"{label}/{part}"
                column = out.setdefault(name, _unscored(samples))
                column[place] = held(name, value, media[place])
    return out


def _parts(
    label: str, chosen: RewardSet, samples: Samples, visible: Tensor
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield (rows, their parts by name): all visible samples at once, or one by one if that
    fails."""
    reward, queue = chosen.rewards[label], [visible] if len(visible) else []
    while queue:
        rows = queue.pop()
        some = samples.take(rows)
        try:
            found = ask(label, chosen.seconds, reward.parts, *some.seen)
        except RewardUnavailable:
            raise
        # `score` met and counted the error, too; samples that fail alone stay NaN
        except Exception:
            queue += _retry_units(reward, samples.context, rows) if rows is visible else []
            continue
        yield rows, found


def say_problem(scored: Rewards) -> None:
    """Warn of the first sample that could not be scored."""
    for problem in scored.errors[:1]:
        logger.warning(f"not scored: {printable(problem)}")


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    """reward/<name>/mean|std, reward/total, reward/invalid and reward/invalid/<kind> of an
    iteration, and reward/total/<domain> with rewards by domain; kinds are those of
    flowrl.rewards.core.failures. Where no reward counts, as with media from files, there is no
    total."""
    out = {"reward/invalid": float((~rewards.valid).sum())}
    counts = any(rewards.weights.values())
    if counts:
        out["reward/total"] = rewards.total.nanmean().item()
    out |= {f"reward/invalid/{kind}": float(n) for kind, n in sorted(rewards.kinds.items())}
    for name, rows in rewards.by_domain().items():
        if counts and (known := rewards.valid & rows).any():
            out[f"reward/total/{name}"] = rewards.total[known].mean().item()
    for name, value in rewards.raw.items():
        value = value[~value.isnan()].double()  # fp64, so that equal scores have a deviation of 0
        if len(value):
            out[f"reward/{name}/mean"] = value.mean().item()
            out[f"reward/{name}/std"] = value.std(correction=0).item()
    return out


def concat(parts: list[Rewards]) -> Rewards:
    """Join chunks of samples, scored with the same rewards, to one record."""
    return Rewards(
        raw={label: torch.cat([part.raw[label] for part in parts]) for label in parts[0].raw},
        counted={k: torch.cat([part.counted[k] for part in parts]) for k in parts[0].counted},
        weights=parts[0].weights,
        total=torch.cat([part.total for part in parts]),
        valid=torch.cat([part.valid for part in parts]),
        errors=[error for part in parts for error in part.errors],
        kinds=dict(sum((Counter(part.kinds) for part in parts), Counter[str]())),
        features=joined([part.features for part in parts]),
        seen={name: torch.cat([part.seen[name] for part in parts]) for name in parts[0].seen},
        asked={name: torch.cat([part.asked[name] for part in parts]) for name in parts[0].asked},
        domain=None
        if parts[0].domain is None
        else [d for part in parts for d in part.domain or ()],
    )


def joined(parts: list[Tensor | None]) -> Tensor | None:
    """Join features of chunks, (n, d) each; raise ValueError where d differs. Features (n, 0) of a
    chunk whose media were not shown become NaN."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    widths = sorted({part.shape[1] for part in known} - {0}) or [0]
    if len(widths) > 1:
        raise ValueError(
            f"diversity.features gave vectors of {' and of '.join(map(str, widths))} numbers, of"
            " different samples; give vectors of one length"
        )
    return torch.cat([pad(part, (0, widths[0] - part.shape[1]), value=math.nan) for part in known])


def check_valid(rewards: Rewards, limit: float = 0.05) -> None:
    """Raise TooManyInvalid when more than the fraction `limit` of samples is invalid, or all are;
    the message holds the first error."""
    bad, count = int((~rewards.valid).sum()), rewards.valid.numel()
    if bad > limit * count or (bad and bad == count):
        first = rewards.errors[0] if rewards.errors else "no message was kept"
        most = f", {explained(rewards.kinds)}" if rewards.kinds else ""
        raise TooManyInvalid(
            f"{bad} of {count} samples could not be scored (allowed: {limit:.0%}){most}; first"
            f" error: {first}"
        )


def check_media(media: Tensor, prompts: list[str]) -> Tensor:
    """The media without gradient; raises ValueError unless every reward can rely on their form."""
    if not isinstance(media, Tensor) or media.dtype != torch.float32:
        got = f"{media.dtype} tensor" if isinstance(media, Tensor) else type(media).__name__
        raise ValueError(
            f"media is a {got}; rewards take an fp32 tensor, pictures in [0, 1]"
            " (flowrl.data.media.from_pil makes one)"
        )
    if media.ndim < 2:
        raise ValueError(
            f"media has shape {tuple(media.shape)}; the first axis is the samples, and each needs"
            " one more at least"
        )
    if not media.numel() and len(media):
        raise ValueError(f"media has shape {tuple(media.shape)}, which holds no pixel")
    listed = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    if not listed or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(f"prompts={printable(repr(prompts), 60)}; give a list, a text a sample")
    if len(prompts) != len(media):
        raise ValueError(f"{len(media)} media but {len(prompts)} prompts; give one prompt a sample")
    media = media.detach()
    if media_kind(media.shape) == "arrays":
        return media
    low, high = (float(end) for end in media.aminmax()) if media.numel() else (0.0, 1.0)
    if not (math.isfinite(low) and math.isfinite(high)):  # such samples are refused one by one
        low, high = (float(end) for end in media.nan_to_num(0.0, 0.0, 0.0).aminmax())
    if low < -0.01 or high > 1.01:
        raise ValueError(
            f"media spans [{low:.3g}, {high:.3g}]; rewards take [0, 1]: (media + 1) / 2 maps from"
            " [-1, 1], media / 255 from bytes"
        )
    return media


def check_context(context: Any, count: int) -> None:
    """Raise ValueError unless each column of a context has an entry for each of `count` samples."""
    if not isinstance(context, MediaContext):
        raise ValueError(
            f"context is a {type(context).__name__}; give flowrl.types.MediaContext(meta=..., ...)"
        )
    for name in given_columns(context):
        column = getattr(context, name)
        kind, called = (list | tuple, "list") if name == "meta" else (Tensor, "tensor")
        if not isinstance(column, kind):
            raise ValueError(
                f"context.{name} is a {type(column).__name__}; give a {called} with an entry for"
                " each sample"
            )
        size = len(column) if getattr(column, "ndim", 1) else 0
        if size != count:
            raise ValueError(
                f'context.{name} has {size} entries for {count} media; "{name}" should have one row'
                f" for each of the {count} prompts"
            )


def check_kind(rewards: Mapping[str, Reward], media: Tensor, prompts: list[str]) -> None:
    """Raise ValueError where a reward does not take media of this kind, or reads a prompt that is
    empty."""
    empty = [i for i, prompt in enumerate(prompts) if not prompt.strip()]
    arrays = media_kind(media.shape) == "arrays"
    for label, reward in rewards.items():
        if arrays and reward.takes == "pictures":
            raise ValueError(
                f'reward "{label}" takes images (B, 3, H, W) or videos (B, F, 3, H, W), and media'
                f" has shape {tuple(media.shape)}; give a reward for such media: a function (media,"
                ' prompts, context), or a Reward with takes = "any"'
            )
        if not arrays and reward.video == ("no" if media.ndim == 5 else "only"):
            takes, got = ("images", "videos") if media.ndim == 5 else ("videos", "images")
            raise ValueError(
                f'reward "{label}" takes {takes}, and the media are {got} of shape'
                f" {tuple(media.shape)}; leave it out"
            )
        if empty and reward.reads_prompt:
            raise ValueError(
                f'reward "{label}" reads the prompt, and that of sample {empty[0]} is empty; give'
                " every sample a text"
            )


def _visible(media: Tensor) -> Tensor:
    """Rows, on the CPU, of samples without NaN or inf pixels."""
    # aminmax makes no copy, and gives NaN twice where a pixel is NaN
    ends = torch.stack(media.flatten(1).aminmax(dim=1))
    return torch.nonzero(ends.isfinite().all(0).cpu()).flatten()


def _unscored(samples: Samples) -> Tensor:
    """NaN for each sample (B,)."""
    return torch.full((len(samples.prompts),), math.nan, device=samples.media.device)


def _evaluate(label: str, chosen: RewardSet, samples: Samples, rows: Tensor) -> RewardScores:
    """The scores of one reward for these rows; the other samples have no value."""
    values, place = _unscored(samples), rows.to(samples.media.device)
    if not len(rows):
        return RewardScores(values=values)
    shown = samples if len(rows) == len(samples.prompts) else samples.take(rows)
    try:
        values[place] = _checked(label, chosen, shown)
    except (RewardBug, RewardUnavailable):
        raise
    except Exception as error:  # a reward may fail in any way; its samples are counted as invalid
        broke = f"{label}: {type(error).__name__}: {error}"
    else:
        broke = ""
    if broke:
        kinds = _score_again(label, chosen, samples, rows, values)
        how = f"in a chunk of {len(rows)}; tried one at a time, {kinds.total()} failed"
        return RewardScores(values=values, problem=f"{broke} ({how})", kinds=kinds)
    failed, problem = int((~values[place].isfinite()).sum()), chosen.rewards[label].problem
    if not failed:
        return RewardScores(values=values)
    why = f" ({problem})" if problem else ""
    said = f"{label}: NaN or inf for {failed} of {len(rows)} samples{why}"
    return RewardScores(values=values, problem=said, kinds=kinds_of(problem, failed))


def _score_again(
    label: str, chosen: RewardSet, samples: Samples, rows: Tensor, values: Tensor
) -> Counter[str]:
    """Score rows one by one into values (B,) -> those that failed, which keep their NaN, by
    kind."""
    reward, kinds = chosen.rewards[label], Counter[str]()
    for unit in _retry_units(reward, samples.context, rows):
        try:
            found = _checked(label, chosen, samples.take(unit))
        except (RewardBug, RewardUnavailable):
            raise
        except Exception as error:  # the message of the whole chunk was kept
            if ran_out(error):  # a single sample is too large, and so are all others
                raise
            kinds[kind_of(error)] += len(unit)
            continue
        values[unit.to(values.device)] = found
        if failed := int((~found.isfinite()).sum()):
            kinds += kinds_of(reward.problem, failed)
    return kinds


def _retry_units(reward: Reward, context: MediaContext, rows: Tensor) -> list[Tensor]:
    """Rows to try again together: a sample, or a group for a reward that compares its members."""
    if "group" in reward.needs and context.group is not None:
        group = context.group.cpu()[rows]
        return [rows[group == g] for g in group.unique()]
    return list(rows.split(1))


def _checked(label: str, chosen: RewardSet, samples: Samples) -> Tensor:
    """Values of the reward, checked against its contract."""
    values = ask(label, chosen.seconds, chosen.rewards[label], *samples.seen)
    return held(label, values, samples.media)


def held(label: str, out: Any, media: Tensor) -> Tensor:
    """Check what a reward returned for media against its contract -> the same tensor."""
    expected = f"a float32 tensor of shape ({len(media)},) on {media.device}"
    if not isinstance(out, Tensor):
        got = f"a {type(out).__module__}.{type(out).__name__}"
        raise RewardBug(f'reward "{label}" returned {got}; expected {expected}')
    if out.shape != (len(media),) or out.dtype != torch.float32 or out.device != media.device:
        dtype = str(out.dtype).removeprefix("torch.")
        got = f"a {dtype} tensor of shape {tuple(out.shape)} on {out.device}"
        raise RewardBug(f'reward "{label}" returned {got}; expected {expected}')
    return out


def take(context: MediaContext, rows: Tensor) -> MediaContext:
    """The same columns for these rows of the samples."""
    columns = {field.name: getattr(context, field.name) for field in fields(context)}
    return MediaContext(**{name: _some(value, rows) for name, value in columns.items()})


def _some(column: Any, rows: Tensor) -> Any:
    """Some rows of a column, which is a tensor, a list or None."""
    if column is None:
        return None
    if isinstance(column, Tensor):
        return column[rows.to(column.device)]
    return [column[i] for i in rows]


def check_meta(
    rewards: RewardSet, sources: dict[str, Prompts], *, whole: bool = False, scored: bool = True
) -> None:
    """Check that every prompt carries the values that its rewards read, and raise ValueError that
    names the first which does not; rewards receive the texts of their domains. whole, scored: see
    `check_domains`."""
    check_domains(rewards, sources, whole=whole, scored=scored)
    for label, reward in rewards.rewards.items():
        texts = []
        for source, prompts in sources.items():
            for prompt in (row for row in prompts if is_asked(rewards, label, row)):
                _check_prompt(label, reward, prompt, source)
                texts.append(prompt["prompt"])
        if texts:
            reward.expect(own(texts))


def _check_prompt(label: str, reward: Reward, prompt: Mapping[str, Any], source: str) -> None:
    if missing := sorted(reward.reads - prompt.keys()):
        raise ValueError(
            f'reward "{label}" reads "{missing[0]}" of each prompt, which "{prompt["prompt"]}" in'
            f" {source} does not carry; add it to that line of a .jsonl file, or choose another"
            " reward"
        )
    if complaint := reward.complaint(own(prompt)):
        raise ValueError(
            f'reward "{label}": the prompt "{prompt["prompt"]}" in {source} {complaint}'
        )
