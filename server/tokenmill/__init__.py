"""Tokenmill: a small, fast, honest LLM serving engine.

>>> from tokenmill import LLM, SamplingParams
>>> with LLM(model="path/to/model") as llm:
...     outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
"""

from tokenmill_engine.messages import RepetitionDetection, SamplingParams, StructuredOutputsParams
from tokenmill_server.llm import LLM
from tokenmill_server.llm_outputs import CompletionOutput, Logprob, RequestOutput
from tokenmill_server.llm_vectors import EmbeddingRequestOutput, PoolingRequestOutput, ScoringRequestOutput

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PoolingRequestOutput",
    "RepetitionDetection",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]
