"""Drives a model over a paged KV cache the way a worker does, without a scheduler: any mix of chunks per step."""

from collections.abc import Sequence

import torch

from tokenmill_engine.attention.batch import ForwardBatch, KVGroupBatch
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_kernels import ops


class PagedForward:
    """Requests named by strings. Blocks are handed out in a scrambled order so that wrong tables show."""

    def __init__(self, model: DenseDecoder, num_blocks: int = 64, block_size: int = 16) -> None:
        self.model = model
        self._block_size = block_size
        self.kv_caches = [
            ops.allocate_kv_cache(num_blocks, block_size, spec.num_kv_heads, spec.head_dim, model.dtype, model.device)
            for spec in model.kv_specs
        ]
        for keys, values in self.kv_caches:
            keys.fill_(float("nan"))
            values.fill_(float("nan"))
        self._device = model.device
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, work: Sequence[tuple[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Computes the next tokens of each request; returns float32 logits [num_tokens, vocab_size] by request."""
        ordered = sorted(work, key=lambda item: len(item[1]) != 1)
        batch = self.prepare(ordered)
        logits = self.model.compute_logits(self.model.forward(batch, self.kv_caches))
        pieces = logits.split([len(tokens) for _, tokens in ordered])
        return {name: piece for (name, _), piece in zip(ordered, pieces, strict=True)}

    def prepare(self, work: Sequence[tuple[str, Sequence[int]]]) -> ForwardBatch:
        """The batch of a step, requests with one token first, with blocks and lengths moved on."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, tokens in work:
            first = self._lengths.get(name, 0)
            last = self._lengths[name] = first + len(tokens)
            table = self._tables.setdefault(name, [])
            while len(table) * self._block_size < last:
                table.append(self._free.pop())
            input_ids.extend(tokens)
            positions.extend(range(first, last))
            slots.extend(
                table[position // self._block_size] * self._block_size + position % self._block_size
                for position in range(first, last)
            )
            starts.append(len(input_ids))
        width = max(len(self._tables[name]) for name, _ in work)
        tables = [self._tables[name] + [0] * (width - len(self._tables[name])) for name, _ in work]
        lengths = [self._lengths[name] for name, _ in work]
        return ForwardBatch(
            input_ids=self._int32(input_ids),
            positions=self._int32(positions),
            query_start_loc=self._int32(starts),
            seq_lens=self._int32(lengths),
            groups=[KVGroupBatch(self._int32(tables), torch.tensor(slots, dtype=torch.int64, device=self._device))],
            num_reqs=len(work),
            num_tokens=len(input_ids),
            num_decodes=sum(len(tokens) == 1 for _, tokens in work),
            max_query_len=max(len(tokens) for _, tokens in work),
            max_seq_len=max(lengths),
        )

    def share(self, source: str, name: str, num_tokens: int) -> None:
        """The new request `name` begins with the first tokens of `source`, in the same blocks, a whole number."""
        num_blocks, rest = divmod(num_tokens, self._block_size)
        if rest or num_tokens > self._lengths[source]:
            raise ValueError(f"{num_tokens} tokens are no whole computed blocks")
        self._tables[name], self._lengths[name] = self._tables[source][:num_blocks], num_tokens

    def _int32(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)
