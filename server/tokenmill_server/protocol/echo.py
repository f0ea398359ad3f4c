"""The prompt as part of a completion's text (`echo`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_server.processing.detokenizer import Detokenizer
from tokenmill_server.processing.generation import TokenLogprob
from tokenmill_server.processing.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class EchoedPrompt:
    """`pieces` joined are `text`: what each prompt token adds to it. `entries` is empty without log-probabilities."""

    text: str
    pieces: list[str]
    entries: list[TokenLogprob | None]


def echo_prompt(
    tokenizer: Tokenizer,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None] | None = None,
) -> EchoedPrompt:
    """The text that the client sent, or that its ids stand for, cut at token borders.

    What the tokenizer put before the text (a start token, a space) belongs to no piece.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.push((token_id,)) for token_id in prompt_token_ids]
    joined = "".join(pieces)
    if prompt is not None and prompt != joined and joined.endswith(prompt):
        _cut_front(pieces, len(joined) - len(prompt))
    return EchoedPrompt(joined if prompt is None else prompt, pieces, list(entries or ()))


def _cut_front(pieces: list[str], num_characters: int) -> None:
    for index, piece in enumerate(pieces):
        if num_characters == 0:
            return
        cut = min(num_characters, len(piece))
        pieces[index] = piece[cut:]
        num_characters -= cut
