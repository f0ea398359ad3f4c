"""Log-probabilities of tokens that requests name (`logprob_token_ids`), in the place of the most likely ones."""

from collections.abc import Sequence

import numpy as np
import torch

from tokenmill_engine.sampling.logprobs import Logprobs, RawScores
from tokenmill_engine.sampling.transfer import to_device


class WantedTokens:
    """The named tokens of some rows among those that are scored."""

    def __init__(self, rows: Sequence[int], token_ids: Sequence[Sequence[int]], device: torch.device) -> None:
        """`rows` are indexes into the scored rows, each with its `token_ids`, not empty."""
        index = [row for row, ids in zip(rows, token_ids, strict=True) for _ in ids]
        columns = [column for ids in token_ids for column in range(1, 1 + len(ids))]
        self._rows = to_device(np.array(index, np.int64), device)
        self._columns = to_device(np.array(columns, np.int64), device)
        self._token_ids = to_device(np.array([each for ids in token_ids for each in ids], np.int64), device)

    def put(self, scores: Logprobs, raw: RawScores) -> None:
        """Overwrites columns 1, 2, ... of the rows in `scores`, which `raw` has made. What a row has beyond its named
        tokens stays."""
        own = scores.token_ids[:, 0].to(torch.int64)
        log_total = raw.logits.gather(1, own[:, None])[:, 0] - scores.logprobs[:, 0]
        places = self._rows, self._columns
        scores.token_ids[places] = self._token_ids.to(torch.int32)
        scores.logprobs[places] = raw.logits[self._rows, self._token_ids] - log_total[self._rows]
