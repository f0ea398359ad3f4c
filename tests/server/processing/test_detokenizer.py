from hypothesis import given
from hypothesis import strategies as st

from tokenmill_server.processing.detokenizer import Detokenizer
from tokenmill_server.processing.tokenizer import Tokenizer

_TEXTS = st.text(alphabet=st.sampled_from("ab \n1é日本🎉👩‍👩‍👧"))


def grouped(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in groups of the given sizes, the rest one by one."""
    groups, start = [], 0
    for size in sizes:
        groups.append(ids[start : start + size])
        start += size
    return groups + [[token_id] for token_id in ids[start:]]


@given(text=_TEXTS, sizes=st.lists(st.integers(0, 4)))
def test_pieces_join_to_the_text(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    ids = tokenizer.encode(text)
    pieces = [detokenizer.push(group) for group in grouped(ids, sizes)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@given(ids=st.lists(st.integers(0, 49300)), sizes=st.lists(st.integers(0, 4)))
def test_grouping_does_not_matter_for_any_ids(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    one = Detokenizer(tokenizer, skip_special_tokens=False)
    other = Detokenizer(tokenizer, skip_special_tokens=False)
    assert "".join(one.push(group) for group in grouped(ids, sizes)) == "".join(other.push([t]) for t in ids)


def test_a_character_waits_for_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦄")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert pieces == [""] * (len(ids) - 1) + ["🦄"]


def test_an_unfinished_character_is_dropped_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    assert "".join(detokenizer.push([token_id]) for token_id in tokenizer.encode("ok🦄")[:-1]) == "ok"


def test_special_tokens_are_hidden_or_shown(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer, skip_special_tokens=True).push([504, 2, 504]) == "TheThe"
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([504, 2]) == "The<|im_end|>"


def test_output_may_finish_the_last_character_of_the_prompt(tokenizer: Tokenizer) -> None:
    prompt, rest = tokenizer.encode("Hello world 🦄")[:-1], tokenizer.encode("Hello world 🦄")[-1:]
    detokenizer = Detokenizer(tokenizer, True, prompt)
    assert detokenizer.push(rest) + detokenizer.push(tokenizer.encode(" yes")) == "🦄 yes"


def test_output_that_ignores_the_broken_end_of_the_prompt_is_clean(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Hello world 🦄")[:-1]
    assert Detokenizer(tokenizer, True, prompt).push(tokenizer.encode("yes")) == "yes"
