"""Numbers and verdicts in the replies of judges: text in, a value or Unreadable out.

One rule for all: a reply counts only if it says one thing. A number outside its scale, on another
scale ("3/10", "3 points out of 10"), in a sum, a range or a choice ("2 + 2", "3 to 4", "4 or 5"),
two different ones where the format has one place, or one that counts things ("2 objects are
missing"), is a miss; so is a verdict that is doubted or denied ("I am not sure that Image 1 is
better"). A miss is never a value.

These are read all the same: thoughts before the answer (<think>), Markdown emphasis and fences,
quotes and names as in JSON, boxes of LaTeX, full-width characters, "4/5" on a scale that ends at 5,
trailing commas in JSON, and reasons behind a score ("4 because 2 of 3 objects are there").
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from flowrl.rewards.judge.patterns import (
    BETTER,
    CORRECTED,
    DENIAL,
    DOUBT,
    MEDIUM,
    NOTED_TOP,
    NUMBER,
    SHARE,
    SMALL_SHARE,
    SPELLED,
    SPLIT,
    TAKEN_BACK,
    TIE,
    TOP,
    both_values_of,
    value_of,
)

T = TypeVar("T")


class UnreadableReply(ValueError):
    """A reply does not hold the value that was asked for; the message says what is missing."""


# --- text


def answer_part(text: str) -> str:
    """The text after the thoughts of a reply; a thought that never ends leaves nothing."""
    text = re.split(r"</think>", text, flags=re.I)[-1]
    return re.split(r"<think>", text, maxsplit=1, flags=re.I)[0]


def plain(text: str) -> str:
    """Text in plain characters, without emphasis, quotes, marks of code and LaTeX, and zero-width
    characters.

    Compatibility characters (NFKC) become their plain forms; a product keeps its sign.
    """
    text = re.sub(r"[`$\"“”„«»\u200b-\u200d\ufeff]", "", unicodedata.normalize("NFKC", text))
    text = re.sub(r"(?<!\w)'|'(?!\w)|</?(?:b|strong|em|i)>", "", text)
    text = re.sub(r"\\boxed\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(?<=[\d)])\*(?=[\d(])|(?<=[\d)] )\*(?= [\d(])", "×", text).replace("*", "")


def shown(text: str, length: int = 80) -> str:
    """The beginning of a reply, on one line and in quotes, for messages."""
    line = " ".join(text.split())
    return repr(line if len(line) <= length else f"{line[:length]}...")


def agreed(values: Iterable[T], what: str, text: str) -> T:
    """The value on which all agree; no value, or two different ones -> Unreadable."""
    distinct = list(dict.fromkeys(values))
    if not distinct:
        raise UnreadableReply(f"no {what} in the reply {shown(text)}")
    if len(distinct) > 1:
        raise UnreadableReply(
            f"contradictory {what} ({' and '.join(map(str, distinct[:3]))}) in the reply"
            f" {shown(text)}"
        )
    return distinct[0]


def number(match: re.Match[str], group: int, low: float, high: float, what: str) -> float:
    """Groups `group` and `group + 1` of NUMBER as a value in [low, high]."""
    value = scaled(match, group, high, what)
    if not low <= value <= high:
        raise UnreadableReply(f"{what} {value:g} is outside {low:g} to {high:g}")
    return value


def scaled(match: re.Match[str], group: int, high: float, what: str) -> float:
    """Read a value as `number` does, without limits; a scale named in its sentence must end at
    high."""
    value, text = float(match[group]), match.string
    after = text[match.end(group) if match[group + 1] is None else match.end(group + 1) :]
    rest = re.split(r"[.;!](?=\s|$)|\n|[:=]\s*[-+\[(]?\d", after, maxsplit=1)[0]
    if re.search(CORRECTED, after.partition("\n")[0], re.I) or re.search(SPLIT, rest, re.I):
        raise UnreadableReply(f"{what} {value:g} is not the only one: {shown(after)}")
    tops = [
        *([match[group + 1]] if match[group + 1] else []),
        *_tops(NOTED_TOP, text[match.start() : match.start(group)]),
        *_tops(TOP, re.sub(f"{SHARE}|{SMALL_SHARE}", "", rest, flags=re.I)),
    ]
    if other := next((top for top in tops if _size(top) != high), None):
        raise UnreadableReply(
            f"{what} {value:g}/{other} is on another scale than one that ends at {high:g}"
        )
    return value


def _size(top: str) -> float:
    """The end of a scale, in digits or as a word."""
    return SPELLED.index(top.lower()) + 1 if top.lower() in SPELLED else float(top)


def _tops(pattern: str, text: str) -> list[str]:
    return [next(filter(None, found.groups())) for found in re.finditer(pattern, text, re.I)]


# --- scores of one picture


def final_score(text: str, low: float = 1, high: float = 5) -> float:
    """The number after "Final Score:".

    The references allow 1 to 5 (Flow-GRPO), 0 to 5 (MixGRPO), 1 to 10 (videos).
    """
    found = re.finditer(value_of(r"final[\s_-]*score"), plain(answer_part(text)), re.I)
    values = [number(m, 1, low, high, "Final Score") for m in found]
    return agreed(values, 'number after "Final Score:"', text)


def named_scores(
    text: str, names: Iterable[str], low: float = 0, high: float = 5
) -> dict[str, float]:
    """Numbers after "<Name> Score (1-5):", of the names that are there; lower-case keys."""
    body, out = plain(answer_part(text)), {}
    for name in names:
        found = re.finditer(value_of(rf"\b{name}[\s_-]*score"), body, re.I)
        values = [number(m, 1, low, high, f"{name} Score") for m in found]
        if values:
            out[name.lower()] = agreed(values, f"{name} Score", text)
    return out


def labelled_scores(text: str, labels: Iterable[str], low: float, high: float) -> dict[str, float]:
    """Numbers of lines "label: n" or "label = n", of the labels that are there."""
    body, out = plain(answer_part(text)), {}
    for label in labels:
        found = re.finditer(value_of(rf"(?<![\w-]){re.escape(label)}"), body, re.I)
        values = [number(m, 1, low, high, label) for m in found]
        if values:
            out[label] = agreed(values, label, text)
    return out


def edit_scores(text: str) -> tuple[float, float]:
    """The two numbers from 0 to 25 of {"score": [a, b]} (UnifiedReward-Edit)."""
    values = []
    for found in objects(text):
        scores = found.get("score")
        if isinstance(scores, list) and len(scores) == 2 and all(_is_number(x) for x in scores):
            values.append((float(scores[0]), float(scores[1])))
    pair = agreed(values, 'JSON with two numbers in "score"', text)
    if not all(0 <= x <= 25 for x in pair):
        raise UnreadableReply(f"scores {pair[0]:g} and {pair[1]:g}: both must be in 0 to 25")
    return pair


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- which of two


def _stated(text: str) -> float:
    """P(first is better), 1, 0 or 0.5, of a verdict in words.

    Verdicts are "Image 2 is better than Image 1", "... equally good", or a bare "Image 1". A
    verdict that its sentence doubts or denies -> Unreadable.
    """
    body = plain(text).replace("’", "'").strip()
    found = []
    if bare := re.fullmatch(rf"{MEDIUM}\s*([12])\s*[.!]?", body, re.I):
        found.append(1.0 if bare[1] == "1" else 0.0)
    for sentence in re.split(r"(?<=[.!?])\s+|\n", body):
        for verdict in re.finditer(f"{BETTER}|{TIE}", sentence, re.I):
            if _is_unsure(verdict):
                raise UnreadableReply(
                    f"a verdict that is doubted or denied in the reply {shown(text)}"
                )
            found.append({"1": 1.0, "2": 0.0}.get(verdict[1] or verdict[2], 0.5))
    return agreed(found, "verdict", text)


def _is_unsure(verdict: re.Match[str]) -> bool:
    """Whether the sentence around a verdict doubts it, denies it or takes it back."""
    before, after = verdict.string[: verdict.start()], verdict.string[verdict.end() :]
    clause = re.split(r"[,;–—]|\bbut\b", before, flags=re.I)[-1]
    searched = ((DOUBT, before), (DENIAL, clause), (TAKEN_BACK, after))
    return any(re.search(pattern, words, re.I) for pattern, words in searched)


def answers(text: str) -> list[str]:
    """Texts in <answer> or <final answer> tags after the thoughts.

    The last of them may lack its end.
    """
    name = r"(?:final\s+)?answer\s*>"
    tags = re.finditer(rf"<\s*{name}(.*?)(?:<\s*/\s*{name}|\Z)", answer_part(text), re.I | re.S)
    return [tag[1].strip() for tag in tags]


def tagged_verdict(text: str) -> float:
    """P(first is better), 1, 0 or 0.5, of the text in the answer tags (UnifiedReward-Think)."""
    return agreed([_stated(answer) for answer in answers(text)], "<answer>", text)


def verdict(text: str) -> float:
    """Read a verdict as `tagged_verdict` does; without answer tags, read the whole reply
    (UnifiedReward 1.0, -Edit)."""
    return tagged_verdict(text) if answers(text) else _stated(answer_part(text))


def pair_scores(text: str, names: Iterable[str], tolerance: float = 0.02) -> dict[str, float]:
    """P(first is better) along each named axis; lower-case keys.

    It reads "<Name> Score: Image 1: x, Image 2: 1 - x" (UnifiedReward 2.0).
    """
    body, out = plain(answer_part(text)), {}
    for name in names:
        found = []
        for m in re.finditer(both_values_of(name), body, re.I):
            first, second = number(m, 1, 0, 1, f"{name} Score"), number(m, 3, 0, 1, f"{name} Score")
            if abs(first + second - 1) > tolerance:
                raise UnreadableReply(f"{name} Score {first:g} and {second:g} do not add up to 1")
            found.append(first)
        out[name.lower()] = agreed(found, f"{name} Score of both", text)
    return out


def flex(text: str) -> dict[str, float | None]:
    """P(first is better) of UnifiedReward-Flex's JSON: 1, 0, or 0.5 for a tie.

    Returns {"overall": p, "A ...": p, ...} with the first three categories; one without a readable
    winner is None.
    """
    found = [item for item in objects(text) if "winner" in item]
    winners = [_winner(item["winner"], text) for item in found]
    overall = agreed(winners, 'JSON with a "winner"', text)
    out: dict[str, float | None] = {}
    for item in found:
        categories = item.get("categories")
        for place, category in enumerate(categories[:3] if isinstance(categories, list) else []):
            if isinstance(category, Mapping):
                name = str(category.get("name") or f"category {place + 1}")
                out[name] = _category_winner(category, text)
    return {**out, "overall": overall}


def _category_winner(category: Mapping[str, Any], text: str) -> float | None:
    try:
        return _winner(category.get("cat_winner"), text)
    except UnreadableReply:
        return None


def _winner(value: Any, text: str) -> float:
    """1 for "Image 1", 0 for "Video 2", 0.5 for "tie"; "Image 1/2" and the like -> Unreadable."""
    words = plain(str(value)).strip().lower()
    if match := re.fullmatch(rf"{MEDIUM}?\s*([12])(?:\s+(?:is better|wins))?[.!]?", words):
        return 1.0 if match[1] == "1" else 0.0
    tie = re.search(TIE, words) and not re.search(f"{DOUBT}|{DENIAL}", words)
    if tie or words in ("tie", "draw", "equal", "both", "neither"):
        return 0.5
    raise UnreadableReply(f"winner {shown(words)} is neither the first, nor the second, nor a tie")


# --- JSON


def objects(text: str) -> list[dict[str, Any]]:
    """The outermost JSON objects of a reply, after the thoughts; trailing commas are forgiven."""
    body = re.sub(r",(?=\s*[}\]])", "", answer_part(text))
    decoder, out, place = json.JSONDecoder(), [], body.find("{")
    while place >= 0:
        try:
            value, end = decoder.raw_decode(body, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            out.append(value)
        place = body.find("{", end)
    return out


# --- critiques (RationalRewards)

ASPECTS = {
    "text_faithfulness": "Text Faithfulness",
    "image_faithfulness": "Image Faithfulness",
    "physical_quality": "Physical and Visual Quality",
    "text_rendering": "Text Rendering",
}


def aspects(text: str, *, cut: bool = False) -> dict[str, float]:
    """Scores of a critique's numbered aspects, clamped to [1, 4] as the reference does.

    Aspects that are N/A or not named are left out, and everything from the summary on is ignored.
    Unreadable is raised for an aspect that is named and has neither score nor N/A, for a score on
    another scale, if no aspect has a score, and for a reply that was cut before its summary.
    """
    summary = r"#\s*Summary\s*:|^\s*Summary\s*:"
    body, *rest = re.split(summary, plain(answer_part(text)), maxsplit=1, flags=re.I | re.M)
    if cut and not rest:
        raise UnreadableReply(
            f"no summary, and so perhaps not every aspect, in the reply {shown(text)}"
        )
    out = {}
    for name, values in _stated_aspects(body).items():
        value = agreed(values, f'number or N/A after "Score:" of {ASPECTS[name]}', text)
        if value is not None:
            out[name] = value
    if not out:
        raise UnreadableReply(f"no aspect with a score in the reply {shown(text)}")
    return out


def _stated_aspects(body: str) -> dict[str, list[float | None]]:
    """The scores of each aspect that has a heading; None: N/A."""
    titles = "|".join(re.escape(title) for title in ASPECTS.values())
    heading = rf"^[#\s]*(?:\d+\s*[.)]\s*)?({titles})\s*(?:\(|:|$)"
    heads = list(re.finditer(heading, body, re.I | re.M))
    ends = [head.start() for head in heads[1:]] + [len(body)]
    found: dict[str, list[float | None]] = {}
    for head, end in zip(heads, ends, strict=False):
        name = next(name for name, title in ASPECTS.items() if title.lower() == head[1].lower())
        value = _aspect_score(body[head.end() : end], ASPECTS[name])
        values = found.setdefault(name, [])
        if value is None or not math.isnan(value):
            values.append(value)
    return found


def _aspect_score(block: str, title: str) -> float | None:
    """The number after "Score:", in headings before other lines; None: N/A, NaN: neither."""
    for heading in (r"^[#\s]*Score\s*:\s*(.*)$", r"\bScore\s*:\s*(.*)$"):
        lines = re.findall(heading, block, re.I | re.M)
        values = [_score_in(line, title) for line in lines]
        if stated := [value for value in values if value is None or not math.isnan(value)]:
            return agreed(stated, f"Score of {title}", block)
    return math.nan


def _score_in(line: str, title: str) -> float | None:
    """The score of a line after "Score:"; None: N/A, NaN: the line has no score."""
    if re.match(r"N\s*/\s*A\b", line, re.I):
        return None
    match = re.match(NUMBER, line, re.I)
    return math.nan if match is None else min(max(scaled(match, 1, 4, title), 1.0), 4.0)


def refined_request(text: str) -> str | None:
    """The rewritten request of a critique, all its lines, without quotes; None if there is none."""
    section = r"Refined Request\s*:\s*\**\s*(.*?)(?=\n\s*#|\Z)"
    found = re.search(section, answer_part(text), re.I | re.S)
    request = found[1].strip().strip('"“”').strip() if found else ""
    if not request or re.fullmatch(r"(?:N\s*/\s*A|None)\.?", request, re.I):
        return None
    return request


# --- token probabilities

# least probability of the words that are read, together: below it the model says something else
LEAST = 0.01
# characters with which tokenizers write a space or a new line before a word
TOKEN_MARKS = " \n\t▁ĠĊ"


def digit_mean(first: Mapping[str, float], top: int) -> float:
    """Expected digit under the log-probabilities of the first token (Edit-R1) -> [0, top].

    Probabilities are renormalised over the digits 0 to top; a digit that is not in `first` has
    probability 0. first: token -> log-probability.
    """
    mass = _masses(first, map(str, range(top + 1)), lambda token: token.strip(TOKEN_MARKS))
    total = _enough(mass, first, f"digit from 0 to {top}")
    return sum(int(digit) * p for digit, p in mass.items()) / total


def yes_share(first: Mapping[str, float], *, variants: bool = False) -> float:
    """P(Yes) / (P(Yes) + P(No)) at the first token.

    variants: also count the words in any case, and with a space before them (Flow-Factory's
    canonicalize).
    """

    def spelled(token: str) -> str:
        return token.strip(TOKEN_MARKS).capitalize() if variants else token

    mass = _masses(first, ("Yes", "No"), spelled)
    note = "" if variants else " exactly (variants=true counts other spellings)"
    return mass["Yes"] / _enough(mass, first, f'"Yes" or "No"{note}')


def _masses(
    first: Mapping[str, float], words: Iterable[str], fold: Callable[[str], str]
) -> dict[str, float]:
    """Probability of each word, summed over the tokens that `fold` turns into it.

    A log-probability above 0 -> Unreadable.
    """
    for token, logprob in first.items():
        if logprob > 0.01:  # 0.01 is more than rounding can give
            raise UnreadableReply(
                f"the server gives the token {token!r} the log-probability {logprob:.3g}, which is"
                " above 0"
            )
    out = dict.fromkeys(words, 0.0)
    for token, logprob in first.items():
        if (word := fold(token)) in out:
            out[word] += math.exp(logprob)
    return out


def _enough(mass: Mapping[str, float], first: Mapping[str, float], what: str) -> float:
    """The probability of all words together; less than LEAST -> Unreadable."""
    total = sum(mass.values())
    if not first:
        raise UnreadableReply(
            "the server sent no token log-probabilities; use one that supports logprobs and"
            " top_logprobs"
        )
    if total < LEAST:
        top = sorted(first.items(), key=lambda item: -item[1])[:3]
        likely = ", ".join(f"{token!r} {math.exp(p):.2g}" for token, p in top)
        raise UnreadableReply(
            f"the first token has probability {total:.2g} to be a {what}; most likely are {likely}"
        )
    return total


# --- dialogues about videos (VR-Thinker)


def frame_request(text: str) -> list[int] | None:
    """Frame numbers that a reply asks for; None: it does not ask for any.

    A request is {"name": "select_frames", "arguments": {"target_frames": [3, 7]}}, {"frames": [3,
    7]} or <frames>3, 7</frames>. One that cannot be read -> Unreadable.
    """
    after = answer_part(text)
    if tag := re.search(r"<frames>(.*?)(?:</frames>|\Z)", after, re.I | re.S):
        return _whole_numbers(re.split(r"[\s,;]+", tag[1].strip()))
    for found in objects(after):
        inner = found.get("arguments", found)
        for key in ("target_frames", "frames"):
            if isinstance(inner, Mapping) and key in inner:
                return _whole_numbers(inner[key] if isinstance(inner[key], list) else [inner[key]])
    if re.search(r"<tool_call>|select_frames", after, re.I):
        raise UnreadableReply("a tool call without a readable list of target_frames")
    return None


def _whole_numbers(values: Iterable[Any]) -> list[int]:
    """Distinct whole numbers, in the order given."""
    out = []
    for value in values:
        try:
            whole = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            whole = math.nan
        if not whole.is_integer():
            raise UnreadableReply(f"frame {value!r} is not a whole number")
        out.append(int(whole))
    return list(dict.fromkeys(out))


def final_answer(text: str, read: Callable[[str], T]) -> T | None:
    r"""The value that `read` makes of the answer tags; None: the reply is not final.

    A reply without tags that does not call a tool is read at its \boxed{...}.
    """
    said = answers(text)
    if not said and not re.search(r"<tool_call>", text, re.I):
        said = [f"OA = {box}" for box in re.findall(r"\\boxed\{([^{}]*)\}", answer_part(text))]
    found = [read(answer) for answer in said]
    if any(value != found[0] for value in found):
        raise UnreadableReply(f"two different answers in the reply {shown(text)}")
    return found[0] if found else None
