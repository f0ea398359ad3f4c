"""Structural tags (https://github.com/mlc-ai/xgrammar) in llguidance's terms.

llguidance computes masks from a grammar as the output grows, so that a schema of long strings or lists is ready in
milliseconds, whatever the vocabulary; xgrammar's tables for it take seconds. Only what means the same in both is
translated, the rest is for xgrammar.

llguidance reads text piece by piece (lexemes), each as long as it can be. So parts that are regular are made one
lexeme, which is exact, and one in front of a part that is not must have an end that is seen when it comes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard

from tokenmill_engine.structured_output.grammar import NotExpressibleError
from tokenmill_engine.structured_output.lark_texts import literal, literals, regex_of
from tokenmill_engine.structured_output.tag_parameters import lark_of_parameters

Format = Any
"""Parsed JSON of a part of a tag. What is malformed the other library explains."""


class Layout(Protocol):
    """How JSON is to be written, where a tag says nothing else."""

    has_others: bool
    """Objects that name properties may have others."""

    def __call__(self, part: dict[str, Any]) -> str:
        """The JSON text of the schema in a format of type `json_schema`, with how it is to be written."""


_HEAD: Final = "%llguidance {}\nANY: /(?s:.*)/\nSOME: /(?s:.+)/\n"
_SPACES: Final = frozenset(("\\n*", "\\s*", " *"))
"""Regexes whose end is seen with whatever follows them: nothing that does begins with a space."""
_MAX_REPEATED: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Part:
    """`text` in Lark, that of a lexeme or of a rule."""

    text: str
    is_lexeme: bool = True
    is_closed: bool = True
    """Nothing that may follow could be read as more of it."""
    is_json: bool = False
    """It may begin or end with JSON. The library takes white space between two of them."""


def lark_of_tag(tag: Format, layout: Layout) -> str:
    """A grammar for all of an output. Raises NotExpressibleError."""
    if not isinstance(tag, dict) or "format" not in tag:
        raise NotExpressibleError("the structural tag has no format")
    translation = _Translation(layout)
    start = translation.named(translation.part(tag["format"]))
    return f"{_HEAD}{''.join(translation.rules)}start: {start}\n"


class _Translation:
    def __init__(self, layout: Layout) -> None:
        self.rules: list[str] = []
        self._layout = layout

    def part(self, given: Format) -> _Part:
        """Raises NotExpressibleError."""
        kind = given.get("type") if isinstance(given, dict) else None
        translate = getattr(self, f"_{kind}", None) if isinstance(kind, str) and kind in _TRANSLATED else None
        if translate is None or not given.keys() <= {"type", *_TRANSLATED[str(kind)]}:
            raise NotExpressibleError(f"llguidance has no structural tags of type {kind!r} with {_keys(given)}")
        part: _Part = translate(given)
        return part

    def named(self, part: _Part) -> str:
        """Its name in rules."""
        name = f"{'T' if part.is_lexeme else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}: {part.text}\n")
        return name

    def _const_string(self, given: Format) -> _Part:
        return _Part(literal(given.get("value")))

    def _any_text(self, given: Format) -> _Part:
        return _Part(_text_without(given.get("excludes", [])), is_closed=False)

    def _regex(self, given: Format) -> _Part:
        pattern = _string(given.get("pattern"))
        return _Part(regex_of(pattern), is_closed=pattern in _SPACES)

    def _json_schema(self, given: Format) -> _Part:
        style = given.get("style", "json")
        if style == "qwen_xml":
            return self._parameters(given)
        if style != "json":
            raise NotExpressibleError("llguidance has no such style of arguments")
        return _Part(f"%json {self._layout(given)}", is_lexeme=False, is_json=True)

    def _parameters(self, given: Format) -> _Part:
        text = lark_of_parameters(
            given.get("json_schema"),
            lambda text, is_lexeme: self.named(_Part(text, is_lexeme)),
            lambda schema: f"%json {self._layout({**given, 'json_schema': schema})}",
            has_others=self._layout.has_others,
        )
        return _Part(text, is_lexeme=text == '""')

    def _sequence(self, given: Format) -> _Part:
        return self._joined([self.part(each) for each in _list(given.get("elements"))])

    def _or(self, given: Format) -> _Part:
        return self._either([self.part(each) for each in _list(given.get("elements"))])

    def _optional(self, given: Format) -> _Part:
        content = given.get("content")
        part = self.part(content)
        # JSON never begins so: a lexeme would take the beginning of what follows for its own.
        is_closed = part.is_closed and (not part.is_lexeme or _begins(content, "<"))
        return _Part(f"({self.named(part)})?", part.is_lexeme, is_closed, part.is_json)

    def _star(self, given: Format) -> _Part:
        return self._repeated(given, "*")

    def _plus(self, given: Format) -> _Part:
        return self._repeated(given, "+")

    def _tag(self, given: Format) -> _Part:
        if _string(given.get("begin"))[:1].isspace():
            raise NotExpressibleError("a tag begins with a space")
        return self._tag_after(given, "")

    def _tag_after(self, given: Format, trigger: str) -> _Part:
        """What follows the trigger of a tag."""
        begin, content = _Part(literal(_string(given.get("begin")).removeprefix(trigger))), given.get("content")
        ends = given.get("end") if isinstance(given.get("end"), list) else [given.get("end")]
        if not isinstance(content, dict) or content.get("type") != "any_text":
            is_closed = not any(_is_beginning(one, other) for one in _list(ends) for other in ends)
            return self._joined([begin, self.part(content), _Part(literals(ends), is_closed=is_closed)])
        self.part(content)
        if not all(_list(ends)):
            raise NotExpressibleError("text without an end")
        return self._joined([begin, _Part(_text_until(ends, ends, content.get("excludes", [])))])

    def _tags_with_separator(self, given: Format) -> _Part:
        tag = self._either([self.part(each) for each in _list(given.get("tags"))])
        if given.get("stop_after_first", False) is not True:
            name = self.named(tag)
            more = self._joined([_Part(literal(given.get("separator"))), tag])
            if not more.is_closed or tag.is_json:
                raise NotExpressibleError("tags that have no end")
            tag = _Part(f"{name} ({self.named(more)})*", is_lexeme=False)
        if given.get("at_least_one", False) is True:
            return tag
        return _Part(f"({self.named(tag)})?", tag.is_lexeme, is_closed=not tag.is_lexeme)

    def _triggered_tags(self, given: Format) -> _Part:
        """Text up to a trigger, the rest of a tag that begins with it, and so on; text without triggers at the end."""
        triggers = [_string(each) for each in _list(given.get("triggers"))]
        tags, excluded = _list(given.get("tags")), given.get("excludes", [])
        calls = []
        for trigger in triggers:
            bodies = [self._tag_after(each, trigger) for each in tags if _begins(each, trigger)]
            if not bodies or not all(body.is_closed for body in bodies):
                raise NotExpressibleError("a trigger has no tag, or one that has no end")
            head = self.named(_Part(_text_until([trigger], triggers, excluded)))
            calls.append(f"{head} ({' | '.join(map(self.named, bodies))})")
        if any(not each.strip() or each[0].isspace() for each in triggers) or any(
            sum(_begins(tag, each) for each in triggers) != 1 for tag in tags
        ):
            raise NotExpressibleError("each tag begins with one of the triggers")
        tail = self.named(_Part(_text_without([*triggers, *_list(excluded, least=0)])))
        return _Part(f"({' | '.join(calls)})* {tail}", is_lexeme=False, is_closed=False)

    def _repeated(self, given: Format, operator: str) -> _Part:
        part = self.part(given.get("content"))
        if not part.is_lexeme and (not part.is_closed or part.is_json):
            raise NotExpressibleError("what is repeated has no end")
        # Whether more of a repeated lexeme comes, only what follows it can tell.
        return _Part(f"({self.named(part)}){operator}", part.is_lexeme, not part.is_lexeme)

    def _joined(self, parts: list[_Part]) -> _Part:
        """One after the other."""
        runs: list[_Part] = []
        if sum(part.is_json for part in parts) > 1:
            raise NotExpressibleError("white space between two parts of JSON")
        for part in (each for each in parts if each.text != '""'):
            if runs and part.is_lexeme and runs[-1].is_lexeme:
                is_closed = part.is_closed and runs[-1].is_closed
                runs[-1] = _Part(f"({runs[-1].text}) ({part.text})", True, is_closed)
            elif runs and not runs[-1].is_closed:
                raise NotExpressibleError("whether a part goes on cannot be told from what follows it")
            else:
                runs.append(part)
        if not runs:
            return _Part('""')
        if len(runs) == 1:
            return runs[0]
        is_json = runs[0].is_json or runs[-1].is_json
        return _Part(" ".join(map(self.named, runs)), False, runs[-1].is_closed, is_json)

    def _either(self, parts: list[_Part]) -> _Part:
        """One of them."""
        if len(parts) == 1:
            return parts[0]
        if all(part.is_lexeme for part in parts):
            return _Part(" | ".join(f"({part.text})" for part in parts), True, is_closed=False)
        if any(part.is_lexeme and not part.is_closed for part in parts):
            raise NotExpressibleError("whether a part goes on cannot be told from what follows it")
        if sum(part.is_json for part in parts) > 1:
            raise NotExpressibleError("white space in front of several kinds of JSON")
        is_closed, is_json = all(part.is_closed for part in parts), any(part.is_json for part in parts)
        return _Part(" | ".join(map(self.named, parts)), False, is_closed, is_json)


_TRANSLATED: Final[dict[str, tuple[str, ...]]] = {
    "const_string": ("value",),
    "any_text": ("excludes",),
    "regex": ("pattern",),
    "json_schema": (
        *("json_schema", "style", "max_whitespace_cnt"),
        *("whitespace_pattern", "additional_properties", "lenient"),
    ),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "tag": ("begin", "content", "end"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "triggered_tags": ("triggers", "tags", "excludes"),
}
"""Types of formats, and what each may say."""


def _text_until(ends: Iterable[Any], all_ends: Iterable[Any], excluded: Any) -> str:
    """Text with the first one of `all_ends`, if it is among `ends`, as its end."""
    text = f"(ANY ({literals(ends)})) & ~(ANY ({literals(all_ends)}) SOME)"
    return f"{text} & ~(ANY ({literals(excluded)}) ANY)" if _list(excluded, least=0) else text


def _text_without(excluded: Any) -> str:
    return f"ANY & ~(ANY ({literals(excluded)}) ANY)" if _list(excluded, least=0) else "/(?s:.*)/"


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise NotExpressibleError("a text is none")
    return value


def _list(value: Any, least: int = 1) -> list[Any]:
    if not isinstance(value, list) or len(value) < least or len(value) > _MAX_REPEATED:
        raise NotExpressibleError("a list is none, or is empty")
    return value


def _begins(tag: Any, trigger: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(tag, dict) and isinstance(tag.get("begin"), str) and tag["begin"].startswith(trigger)


def _is_beginning(one: Any, other: Any) -> bool:
    return _string(other).startswith(_string(one)) and one != other


def _keys(given: Any) -> str:
    return ", ".join(sorted(map(str, given))) if isinstance(given, dict) else "nothing"
