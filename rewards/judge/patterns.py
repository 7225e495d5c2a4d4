r"""The regular expressions with which replies are read, put together from parts with names.

Words are in lower case: search with re.IGNORECASE, or in lower-case text. Groups that are counted:
NUMBER has two, the number and the end of its scale as in "4/5"; BETTER has two, one of them 1 or 2.
"""

from __future__ import annotations


def either(*parts: str) -> str:
    """A group, not counted, that matches any of these patterns."""
    return f"(?:{'|'.join(parts)})"


# --- numbers

# Possessive, so that no shorter number is found inside one that does not fit ("4,5", "4.5.1",
# "4-5", "80%", "4stars").
DECIMAL = r"\d++(?:\.\d++)?+"
SPELLED = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SIZE = rf"(?:{DECIMAL}|{either(*SPELLED)}\b)"  # size of a scale or a set, "5" or "five"
GAP = r"[^\S\n]*+"  # spaces within a line; possessive, as every run of spaces before a choice

UNIT = rf"(?:{GAP}分|\s{GAP}{either('points?', 'pts', 'stars?', 'marks?')}\b)"
# Words that may follow a score in its line. Any other word makes the number a count of something:
# "Final Score: 2 objects are missing" is no score.
FOLLOWS = either(
    *("because", "as", "since", "for", "due", "given", "with", "without", "based", "considering"),
    *("but", "and", "although", "though", "while", "despite", "which", "where", "after", "on"),
    *("so", "thus", "therefore", "hence", "in total", "overall", "very", "quite", "it", "this"),
    *("good", "great", "excellent", "perfect", "fair", "decent", "average", "poor", "bad", "weak"),
    *("weil", "da", "denn", "parce", "car", "porque", "ya que", "pois", "perché", "omdat"),
)
OTHER_WORD = rf"(?-i:(?!{FOLLOWS}\b)[a-zà-ÿ])"

MOST = either("the", "an?", "possible", "maximum", "total", "of")
# matches: of, out of, of the, out of a maximum of
OF = rf"(?:/|(?:out\s+)?of\b(?:\s+{MOST}\b){{0,3}})"
# "2 of 3 objects", "two of the four are red": a part of a set, and not a score on a scale
SHARE = rf"{SIZE}\s*+{OF}\s*+{SIZE}(?=\s+{OTHER_WORD})"
SMALL_SHARE = rf"{SIZE}\s*+{OF}\s*+{either('[2-9]', *SPELLED[1:9])}(?![.,]?\d)\b"  # "only 2 of 3"

OPERATION = either(
    rf"(?!(?<=\s)[-–—]\s+{SHARE})[-–—−&]\s*\d",  # 4 - 5, but not: 4 - 3 of 4 objects are red
    r"-+>",  # 4 -> 5
    r"[<>]\s*=?\s*\d",  # 4 <= 5
    r"[+×÷=^~≈±→%/⁄]",
    r"\(?\?",
    r"\d",  # 4 5
    # 4, maybe 5
    rf",?{GAP}\(?{either('or', 'plus', 'minus', 'times', 'may(?:be)?', 'perhaps', 'could')}\b",
    # 3 to four, 3 and about 4
    rf"{either('to', 'till', 'until', 'through', 'and')}\s+(?:\w+\s+)?(?:\d|{either(*SPELLED)}\b)",
)
# text after a number that shows that the number is not the whole statement
GOES_ON = "|".join(
    (
        r"[.,]*\d",  # 4,5
        r"\w",  # 4stars
        r"\.{2,}\s*\d",  # 4...5
        r"[:;|]\d",  # 4:5
        rf"{GAP}[,;:|]{GAP}{DECIMAL}{GAP}(?:[.,;|)\]}}!?]|\n|\Z)",  # 4, 5
        rf"{GAP}[\])]?{GAP}{OPERATION}",
        rf"{GAP}{OTHER_WORD}",
    )
)
# 4/5, (4) out of 5, 4 points (of 5)
SCALE_END = rf"[\])]?{UNIT}?\s*+\(?\s*+{OF}\s*+({SIZE})\)?"
NUMBER = rf"[\[(]?\s*+([-+]?{DECIMAL})(?:{SCALE_END})?+{UNIT}?+(?!{GOES_ON})"

# --- scales

SCALE_NOTE = r"(?:\([^)\n]*\))?"  # a note such as "(1-5)" between a name and its colon
SPAN = rf"{DECIMAL}\s*(?:[-–—]|to)\s*"
# The top of a scale, in the words around a score.
TOP = "|".join(
    (
        # /10, out of 10, out of 1 to 10
        rf"(?:/|\bout\s+of\b(?:\s+{MOST}\b){{0,3}})\s*+(?:{SPAN})?({SIZE})(?!\s+{OTHER_WORD})",
        rf"\bfrom\s+{SPAN}({DECIMAL})",  # from 1 to 10
        rf"\b(?:scale|range)\b[^.\n\d]{{0,12}}(?:{SPAN})?({SIZE})",  # on the scale 1-10
        rf"(?:{SPAN})?({SIZE})[-\s]*(?:points?[-\s]+)?(?:scale|range|system)\b",  # a 10-point scale
        rf"[(\[]\s*{SPAN}({DECIMAL})\s*[)\]]",  # (1-10)
        rf"满分\s*({DECIMAL})",
    )
)
NOTED_TOP = rf"{SPAN}({DECIMAL})|{OF}\s*+({SIZE})|{TOP}"  # a note may also say "1-10" and "of 10"

# --- words after a score that show that it is no score

CORRECTIONS = either(
    *("no", "wait", "actually", "rather", "sorry", "correction", "i meant?", "make (?:it|that)"),
)
# "4, no, 3", "4. Actually 3/5"
CORRECTED = (
    rf"\b{CORRECTIONS}\b[^.;\n\d]{{0,20}}{DECIMAL}(?:\s*+{OF}\s*+{SIZE})?+\s*+(?:[.,;!?)\]]|\Z)"
)
SPLIT = rf"^\s*for\b[^.;\n]*?\b{DECIMAL}\s+for\b"  # 4 for colour and 3 for style


def value_of(name: str) -> str:
    """A number after "name:", "name (1-5):" or "name ="; name is a pattern.

    The number of a list that begins in the next line does not match.
    """
    return rf"{name}\s*+{SCALE_NOTE}\s*+[:=]{GAP}(?!\n\s*+\d++[.)]\s)\s*+{NUMBER}"


# --- which of two

MEDIUM = r"(?:edited\s+)?(?:image|video)"
ADVERBS = either("slightly", "clearly", "much", "significantly", "overall", "the")
# "better aligned", "better in colour": a verdict on one aspect, and not on the whole
IN_PART = r"\s+(?:\w+ed|drawn|lit|at|with|on|in(?!\s+(?:every|all|general|my)))\b"
BETTER = "|".join(
    (
        rf"\b{MEDIUM}\s*([12])\s+is\s+(?:{ADVERBS}\s+)*"
        rf"(?:better\b(?!{IN_PART})|winner\b|superior\b|preferred\b)",
        rf"\b{either('prefer', 'choose', 'pick', 'winner is')}\s+{MEDIUM}\s*([12])\b",
    )
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


# --- words that show that a verdict is no verdict

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
DOUBT = rf"\b{DOUBTS}\b"  # a doubt before the verdict, in its sentence

NEGATIONS = ("not", "no", "never", "nor", "neither", "nobody", "none", "cannot", "hardly")
REFUSALS = ("false", "wrong", "untrue", "incorrect", "disagree", "deny")
GUESSES = ("might", "may", "maybe", "perhaps", "possibly", "could")
# words before the verdict, in its clause, that deny it
DENIAL = rf"\b{either(*NEGATIONS, *REFUSALS, *GUESSES)}\b|n't\b"

JUDGED = either("true", "false", "correct", "wrong", "untrue", "incorrect", "clear", "certain")
# words after the verdict that take it back
TAKEN_BACK = "|".join(
    (
        rf"\b{either('if', 'unless', 'provided')}\b",
        r"^\s*or\b",
        rf"\b(?:is|was) (?:not )?{JUDGED}\b",
        r"\?",
    )
)
