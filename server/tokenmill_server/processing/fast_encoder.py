"""Encodes text with `fastokens`, several times as fast as `tokenizers`, where both give the same ids."""

import logging
from collections.abc import Iterator

from fastokens import Tokenizer as FastBackend
from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)

_PROBES = (
    "",
    " ",
    "Hello, world! It's  an example:\n\n\t1234567 + 3.14 = x_y; don't, I'VE, WE'LL\r\n  \u00a0end ",
    "lik'\u017f'Ts x'\u017fTs 'S \u2019s \u212a 'Re",  # an old s is one too for who looks for contractions in any case
    "caf\u00e9 cafe\u0301 \ufb01 \u2167 \u00b2 \u0663\u0664 \uac01 \u1100\u1161\u11a8 \u0915\u094d\u0937\u093f",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \ufeff\x00\x85\u2028|\u3000\x0b\x0c",
    "def f(a, b):\n    return {a: [b, *a]}  # {{!?}}\n\n\n\n        <b>&amp;</b>\\n%s$^~`@",
    "aaaaaaaaaaaaaaaaaaaaaaaa ------------ ............ \n \n  \n   word" + " " * 40 + "word",
    "McDonald's iPhone15ProMAX HTTPServer \u00c9COLE \u00dcber \u0130stanbul \u01c5 na\u00efve",
)


def make_fast_encoder(backend: Backend) -> FastBackend | None:
    """None if the library does not know this kind of tokenizer, or differs from `tokenizers` on texts that are hard."""
    try:
        encoder = FastBackend.from_json_str(backend.to_str())
        for text in _probes(backend):
            for special in (False, True):
                expected = backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
                if encoder.encode(text, special).ids != expected:
                    logger.info("texts are encoded by tokenizers: fastokens differs for this vocabulary")
                    return None
    except Exception as error:  # both raise bare ones
        logger.info("texts are encoded by tokenizers: %s", str(error)[:200])
        return None
    return encoder


def _probes(backend: Backend) -> Iterator[str]:
    yield from _PROBES
    for token in backend.get_added_tokens_decoder().values():
        yield f"a {token.content} b{token.content}\n{token.content}c  {token.content.upper()}"
