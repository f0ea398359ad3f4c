"""Builds a tokenizer from the metadata of a GGUF file.

GGUF names its pre-tokenizer instead of describing it, so each name that a supported model uses has its recipe here,
taken from the tokenizer.json of the original models. An unknown name is refused: guessing would change ids in silence.
Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tokenmill_engine.config.gguf_file import read_gguf
from tokenmill_engine.errors import ConfigError

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_SPACE_MARK = "\u2581"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_TEKKEN_SPLIT = rf"{_CASED_WORDS % ('', '')}|\p{{N}}|{_CASED_TAIL}"
_GPT4O_SPLIT = rf"{_CASED_WORDS % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_TAIL}"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How one family cuts text before merging."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    """A word that is in the vocabulary is taken whole, whatever the merges say."""
    add_bos: bool = False
    """Used where the file does not say."""
    unicode_nfc: bool = False


def _splits(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        parts: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


_LLAMA3 = _PreTokenizer(_splits(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS: dict[str, _PreTokenizer] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _PreTokenizer(_splits(_LLAMA3_SPLIT))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _PreTokenizer(_splits(_QWEN2_SPLIT), unicode_nfc=True)),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez"), _PreTokenizer(_splits(_QWEN2_SPLIT))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _PreTokenizer(_single_digits)
    ),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"), _PreTokenizer(_byte_level)),
    "tekken": _PreTokenizer(_splits(_TEKKEN_SPLIT), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _PreTokenizer(_splits(_GPT4O_SPLIT))),
    "default": _PreTokenizer(_splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def load_gguf_tokenizer(path: str) -> Backend:
    """Raises ConfigError for an unknown kind of vocabulary or pre-tokenizer, or missing metadata."""
    return build_gguf_tokenizer(read_gguf(path).metadata, path)


def build_gguf_tokenizer(metadata: Mapping[str, Any], path: str) -> Backend:
    """The tokenizer that the `tokenizer.ggml.*` keys describe; `path` is for messages."""
    vocabulary = _Vocabulary(metadata, path)
    if vocabulary.kind == "gpt2":
        backend, add_bos = _build_byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        backend, add_bos = _build_sentencepiece(vocabulary)
    else:
        raise ConfigError(f"GGUF file {path}: tokenizer kind {vocabulary.kind!r} is not supported (gpt2, llama)")
    vocabulary.add_special_tokens(backend)
    vocabulary.set_bos(backend, add_bos)
    return backend


class _Vocabulary:
    """The metadata that both kinds share."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self.path = path
        self._metadata = metadata
        self.kind: str = self.require("model")
        self.tokens: list[str] = self.require("tokens")
        self.types: list[int] = self.get("token_type", [_NORMAL] * len(self.tokens))
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.types) != len(self.tokens):
            raise ConfigError(f"GGUF file {path}: {len(self.tokens)} tokens but {len(self.types)} token types")

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"GGUF file {self.path} has no metadata key 'tokenizer.ggml.{key}'")
        return value

    def add_special_tokens(self, backend: Backend) -> None:
        """Control tokens are special; user-defined ones are found in text first but stay visible."""
        of_type = {
            kind: [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind]
            for kind in (_CONTROL, _USER_DEFINED)
        }
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in of_type[_CONTROL]])
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in of_type[_USER_DEFINED]])

    def set_bos(self, backend: Backend, default: bool) -> None:
        bos_id = self.get("bos_token_id")
        if not self.get("add_bos_token", default) or bos_id is None:
            return
        if not 0 <= bos_id < len(self.tokens):
            raise ConfigError(f"GGUF file {self.path}: bos_token_id {bos_id} is outside its vocabulary")
        bos = self.tokens[bos_id]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
        )


def _build_byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """Byte-level BPE. Returns it and whether sequences begin with a start token unless the file says otherwise."""
    name = vocabulary.get("pre", "default")
    recipe = _PRE_TOKENIZERS.get(name)
    if recipe is None:
        raise ConfigError(
            f"GGUF file {vocabulary.path}: pre-tokenizer {name!r} is not supported; use --tokenizer with the "
            f"folder of the original model (supported: {', '.join(sorted(_PRE_TOKENIZERS))})"
        )
    merges = []
    for merge in vocabulary.require("merges"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        model = models.BPE(vocabulary.ids, merges, ignore_merges=recipe.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"GGUF file {vocabulary.path}: its merges do not fit its vocabulary ({error})") from error
    backend = Backend(model)
    if recipe.unicode_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = recipe.build()
    backend.decoder = decoders.ByteLevel()
    return backend, recipe.add_bos


def _build_sentencepiece(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """SentencePiece BPE: pieces with scores become merges; the better a piece, the earlier its merge."""
    model = models.BPE(
        vocabulary.ids,
        _merges_of_pieces(vocabulary),
        unk_token=vocabulary.tokens[vocabulary.get("unknown_token_id", 0)],
        fuse_unk=True,
        byte_fallback=_BYTE in vocabulary.types,
    )
    backend = Backend(model)
    prefix = bool(vocabulary.get("add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges_of_pieces(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best resulting piece first."""
    scores: list[float] = vocabulary.require("scores")
    if len(scores) != len(vocabulary.tokens):
        raise ConfigError(
            f"GGUF file {vocabulary.path}: {len(vocabulary.tokens)} tokens but {len(scores)} token scores"
        )
    ids, types = vocabulary.ids, vocabulary.types
    ranked: list[tuple[float, int, int, str, str]] = []
    for token_id, piece in enumerate(vocabulary.tokens):
        if types[token_id] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], token_id, ids[left], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
