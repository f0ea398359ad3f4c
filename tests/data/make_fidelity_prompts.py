"""Writes fidelity_prompts.json: `python tests/data/make_fidelity_prompts.py`, which takes a few minutes.

A hundred prompts, cut from `fidelity_passages.txt` or questions in the chat format, with transformers' greedy ids in
float32. A prompt whose continuation hangs on a near tie is replaced: rounding in another order could change it.
"""

import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.smollm2 import DATA, PROMPTS_FILE, Reference
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer

NUM_PROMPTS = 100
MIN_MARGIN = 0.02
"""Smallest distance of the two largest logits at any generated token. Float32 implementations differ by about 1e-4."""
BLOCK_EDGES = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 256)
LONGEST = 600

QUESTIONS = (
    "Who wrote the play Romeo and Juliet?",
    "Explain in one sentence why the sky is blue.",
    "How many days are there in a leap year?",
    "Write a haiku about autumn.",
    "What is 17 plus 25?",
    "Give me three names for a black cat.",
    "Translate to French: Good morning, my friend.",
    "What does the Python expression len('mill') return?",
    "Name the largest ocean on Earth.",
    "Is a tomato a fruit or a vegetable?",
    "How do I boil an egg?",
    "List the primary colours.",
    "What is the opposite of 'ancient'?",
    "Write a function in C that returns the larger of two integers.",
    "Summarize the story of the tortoise and the hare.",
    "Which planet is known as the red planet?",
    "Why do leaves change colour?",
    "Correct this sentence: She go to school every days.",
    "What should I pack for a weekend in the mountains?",
    "Count from one to ten.",
    "Tell me a short joke about computers.",
    "What is the boiling point of water in Fahrenheit?",
    "How many legs does a spider have?",
    "Write a polite reply that declines an invitation to dinner.",
)


def chat_text(rng: random.Random, question: str) -> str:
    """One or two turns that end with the question and where the assistant is to speak."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    if rng.random() < 0.3:
        before = rng.choice(QUESTIONS)
        text = (
            f"<|im_start|>user\n{before}<|im_end|>\n<|im_start|>assistant\nLet me think about that.<|im_end|>\n{text}"
        )
    return text


def passage_ids(rng: random.Random, passages: list[list[int]], length: int) -> list[int]:
    """`length` tokens of passages in a random order, from anywhere in the first one."""
    ids: list[int] = []
    while len(ids) < length:
        chosen = rng.choice(passages)
        ids += chosen[rng.randrange(len(chosen)) :] if not ids else chosen
    return ids[:length]


def subjects() -> list[int | str]:
    """Of each prompt the number of tokens, few of them large, or the question."""
    num_spread = NUM_PROMPTS - len(BLOCK_EDGES) - len(QUESTIONS)
    spread = [round(4 * (LONGEST / 4) ** (index / (num_spread - 1))) for index in range(num_spread)]
    return [*BLOCK_EDGES, *spread, *QUESTIONS]


def make_row(index: int, subject: int | str, tokenizer: Tokenizer, reference: Reference) -> dict[str, object]:
    """The first candidate without a near tie."""
    passages = [tokenizer.encode(text) for text in (DATA / "fidelity_passages.txt").read_text().split("~~~~\n")]
    rng = random.Random(index)
    while True:
        if isinstance(subject, str):
            kind, prompt = "chat", tokenizer.encode(chat_text(rng, subject))
        else:
            kind, prompt = "passages", passage_ids(rng, passages, subject)
        greedy = reference.continue_greedily(prompt, max_tokens=16 + index % 9)
        scores = reference.score(prompt + greedy)
        if scores.margins[len(prompt) - 1 :].min() >= MIN_MARGIN:
            return {"name": f"{kind} {index}, {len(prompt)} tokens", "prompt_ids": prompt, "greedy_ids": greedy}


def main() -> None:
    path = resolve_model(None).path
    tokenizer, reference = load_tokenizer(path), Reference(path)
    rows = [make_row(index, subject, tokenizer, reference) for index, subject in enumerate(subjects())]
    PROMPTS_FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
