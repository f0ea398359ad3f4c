"""What llguidance says about a grammar, in words for who wrote it."""

import re
from typing import Final

_MAX_CHARS: Final = 300
_MAX_REGEX_CHARS: Final = 80
_NOT_MEANT: Final = ("<state>", "<non-verbose/>")
"""What follows is about the library."""
_NO_END: Final = ("NoExtension", "NoExtensionBias")
_MALFORMED: Final = re.compile(
    r"regex parse error:\n {4}(?P<regex>.*)\n(?P<carets> {4} *\^+)\n(?:.*\n)*?error: (?P<why>.*)"
)
_ANCHORED: Final = re.compile(r"lookarounds not supported yet; (?P<anchor>\w+) in regex /(?P<regex>.*)/")
_ANCHORS: Final = {
    "Start": "^ is supported at the beginning only",
    "End": "$ is supported at the end only",
    "WordUnicode": "\\b is not supported",
    "WordUnicodeNegate": "\\B is not supported",
}


def report(message: str) -> str:
    """One line, without the source that the library quotes below it: that of a regex is often not its author's."""
    for end in _NOT_MEANT:
        message = message.partition(end)[0]
    if message.strip() in _NO_END:
        return "it allows no finite output: nothing fits it, or what does never ends"
    malformed = _MALFORMED.search(message)
    if malformed is not None:
        place = len(malformed["carets"].rstrip("^")) - 4 + 1
        return f"in the regex {_quoted(malformed['regex'])}, at character {place}: {malformed['why']}"
    anchored = _ANCHORED.search(message)
    if anchored is not None and anchored["anchor"] in _ANCHORS:
        return f"in the regex {_quoted(anchored['regex'])}: {_ANCHORS[anchored['anchor']]}"
    return " ".join(message.split())[:_MAX_CHARS]


def _quoted(regex: str) -> str:
    return f"{regex[:_MAX_REGEX_CHARS]}..." if len(regex) > _MAX_REGEX_CHARS else regex
