"""Prompts that end in the middle of a text (`suffix`), for models that have learnt to fill it in."""

from dataclasses import dataclass

from tokenmill_server.processing.tokenizer import Tokenizer


@dataclass(slots=True, frozen=True)
class FillInMiddle:
    """The tokens that a model expects before the beginning, before the end, and before the middle, which it writes."""

    before: str
    between: str
    behind: str

    def prompt(self, beginning: str, end: str) -> str:
        """What the model continues with the middle."""
        return f"{self.before}{beginning}{self.between}{end}{self.behind}"


_FORMS = (
    FillInMiddle("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, and the vocabulary of Qwen3
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    FillInMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


def find_fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """The form for which the vocabulary has tokens, if it has any."""
    for form in _FORMS:
        if all(tokenizer.token_id(token) is not None for token in (form.before, form.between, form.behind)):
            return form
    return None
