r"""The regular expressions with which replies are read, put together from parts with names.

Words are in lower case: search with re.IGNORECASE, or in lower-case text. Groups that are counted:
NUMBER has two, the number and the end of its scale as in "4/5"; BETTER has one, 1 or 2.
"""

from __future__ import annotations


def either(*parts: str) -> str:
    """A group, not counted, that matches any of these."""
    return f"(?:{'|'.join(parts)})"


# --- numbers

DECIMAL = r"\d+(?:\.\d+)?"
# Possessive, so that no shorter number is found inside one that does not fit ("4,5", "4.5.1",
# "4-5", "80%", "4stars").
WHOLE_DECIMAL = r"\d++(?:\.\d++)?+"
SPELLED = either("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
GAP = r"[^\S\n]*"  # spaces within a line

OPERATION = either(
    r"[-–—−&]\s*\d",  # 4 - 5
    r"-+>",  # 4 -> 5
    r"[<>]\s*=?\s*\d",  # 4 <= 5
    r"[+×÷=^~≈±→%?/⁄]",
    r"\d",  # 4 5
    rf",?{GAP}\(?{either('or', 'plus', 'minus', 'times', 'maybe', 'perhaps')}\b",  # 4, maybe 5
    # 3 to four, 3 and about 4
    rf"{either('to', 'till', 'until', 'through', 'and')}\s+(?:\w+\s+)?(?:\d|{SPELLED}\b)",
)
# what follows a number that is not the whole statement
GOES_ON = "|".join(
    (
        r"[.,]*\d",  # 4,5
        r"\w",  # 4stars
        r"\.{2,}\s*\d",  # 4...5
        r"[:;|]\d",  # 4:5
        rf"{GAP}[\])]?{GAP}{OPERATION}",
    )
)
SCALE_END = rf"[\])]?\s*(?:/|out of)\s*({WHOLE_DECIMAL})"  # 4/5, (4) out of 5
NUMBER = rf"[\[(]?\s*([-+]?{WHOLE_DECIMAL})(?:{SCALE_END})?+(?!{GOES_ON})"

# --- scales

SCALE_NOTE = r"(?:\([^)\n]*\))?"  # as "(1-5)" between a name and its colon
SPAN = rf"{DECIMAL}\s*(?:[-–—]|to)\s*"
# the top of a scale: "of 10", "/10", "of 1 to 10", "from 1 to 10"
TOP = rf"(?:\bof\s+(?:the\s+|a\s+)?|/\s*)(?:{SPAN})?({DECIMAL})|\bfrom\s+{SPAN}({DECIMAL})"
NOTED_TOP = rf"{SPAN}({DECIMAL})|{TOP}"  # in a note also "1-10"


def value_of(name: str) -> str:
    """A number after "name:", "name (1-5):" or "name ="; name is a pattern."""
    return rf"{name}\s*{SCALE_NOTE}\s*[:=]\s*{NUMBER}"


# --- which of two

MEDIUM = either("image", "video")
BETTER = (
    rf"\b{MEDIUM}\s*([12])\s+is\s+"
    rf"(?:{either('slightly', 'clearly', 'much', 'significantly')}\s+)?better\b"
)
EQUALS = either(
    f"equally {either('good', 'bad', 'matched')}",
    either("is", "are", "it'?s") + " (?:a )?" + either("tie", "draw"),
    f"are {either('equal', 'tied')}",
)
TIE = rf"\b{EQUALS}\b"


def both_values_of(name: str) -> str:
    """The numbers of "<Name> Score: Image 1: x, Image 2: y", two groups each."""
    first, second = (rf"{MEDIUM}\s*{place}\s*:\s*{NUMBER}" for place in (1, 2))
    return rf"\b{name}\s+score\s*{SCALE_NOTE}\s*:\s*{first}[\s,;]*{second}"


# --- what makes a verdict none

DOUBTS = either(
    "whether",
    "if",
    "unless",
    f"{either('hard', 'difficult', 'impossible')} to",
    f"un{either('sure', 'certain', 'clear')}",
    f"not {either('sure', 'certain', 'clear', 'convinced')}",
    "doubt",
    "either",
)
DOUBT = rf"\b{DOUBTS}\b"  # before the verdict, in its sentence

NEGATIONS = ("not", "no", "never", "nor", "neither", "cannot", "hardly")
REFUSALS = ("false", "wrong", "untrue", "incorrect", "disagree", "deny")
GUESSES = ("might", "may", "maybe", "perhaps", "possibly", "could")
# before the verdict, in its clause
DENIAL = rf"\b{either(*NEGATIONS, *REFUSALS, *GUESSES)}\b|n't\b"

JUDGED = either("true", "false", "correct", "wrong", "untrue", "incorrect", "clear", "certain")
# after the verdict
TAKEN_BACK = "|".join(
    (
        rf"\b{either('if', 'unless', 'provided')}\b",
        r"^\s*or\b",
        rf"\b(?:is|was) (?:not )?{JUDGED}\b",
        r"\?",
    )
)
