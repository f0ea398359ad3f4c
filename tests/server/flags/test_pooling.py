"""What a model is used for: by what its files say, and by flags."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedding_models import MINILM, make_sentence_model
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.pooling import PoolingConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags


def configure(model: Path | str, *arguments: str) -> EngineConfig:
    return build_configuration(read_flags([str(model), "--device", "cpu", *arguments], {})).engine


def test_a_text_encoder_makes_vectors() -> None:
    engine = configure(MINILM)
    assert engine.model.pooling == PoolingConfig("mean", normalize=True)
    assert (engine.model.dtype, engine.model.max_model_len) == ("float32", 256)
    assert (engine.scheduler.whole_prompts, engine.cache.enable_prefix_caching) == (True, False)
    assert engine.model.architecture.num_parameters == 22_565_376


def test_a_step_holds_the_longest_text() -> None:
    assert configure(MINILM, "--max-num-batched-tokens", "100", "--max-num-seqs", "8").model.max_model_len == 100
    with pytest.raises(ConfigError, match="use --max-num-batched-tokens 200"):
        configure(MINILM, "--max-num-batched-tokens", "100", "--max-num-seqs", "8", "--max-model-len", "200")


@pytest.mark.parametrize("flag", [("--runner", "generate"), ("--task", "generate")])
def test_a_text_encoder_generates_nothing(flag: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"{flag[0]} generate does not fit.*BertModel without output embeddings"):
        configure(MINILM, *flag)


def test_one_worker_has_a_text_encoder() -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 2 does not fit BertModel.*--data-parallel-size"):
        configure(MINILM, "-tp", "2")


@pytest.mark.parametrize(
    "arguments", [("--runner", "pooling"), ("--convert", "embed"), ("--task", "embed"), ("--task", "embedding")]
)
def test_a_model_of_text_makes_vectors_if_asked(arguments: tuple[str, str]) -> None:
    model = cached_tiny_model("qwen3")
    assert configure(model).model.pooling is None
    assert configure(model, "--runner", "generate").model.pooling is None
    engine = configure(model, *arguments)
    assert engine.model.pooling == PoolingConfig("last", normalize=True)
    assert engine.model.architecture.tie_word_embeddings
    assert not engine.scheduler.whole_prompts
    assert engine.cache.enable_prefix_caching


def test_flags_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--runner generate contradicts --convert embed"):
        configure(cached_tiny_model("qwen3"), "--runner", "generate", "--convert", "embed")
    with pytest.raises(ConfigError, match="--convert none does not fit"):
        configure(cached_tiny_model("qwen3"), "--runner", "pooling", "--convert", "none")


def test_a_decoder_that_was_made_for_vectors_makes_them(tmp_path: Path) -> None:
    make_sentence_model(tmp_path, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, normalize=False)
    assert configure(tmp_path).model.pooling == PoolingConfig("last", normalize=False)
    assert configure(tmp_path, "--runner", "generate").model.pooling is None


def test_files_about_vectors_mean_nothing_for_text(tmp_path: Path) -> None:
    """Neither the length that they were made for, nor modules that are not supported."""
    make_sentence_model(tmp_path, {"pooling_mode": "lasttoken"})
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert configure(tmp_path).model.max_model_len == 100
    with pytest.raises(ConfigError, match="use at most 100"):
        configure(tmp_path, "--max-model-len", "200")
    assert configure(tmp_path, "--runner", "generate").model.max_model_len > 100
    assert configure(tmp_path, "--runner", "generate", "--max-model-len", "200").model.max_model_len == 200
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.LSTM"}]')
    assert configure(tmp_path, "--task", "generate").model.pooling is None
    with pytest.raises(ConfigError, match="has a module 'LSTM'"):
        configure(tmp_path)


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode_mean_tokens": True}, "by 'mean' pooling"),
        ({"pooling_mode_max_tokens": True}, "asks for max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_lasttoken": True}, "asks for cls, lasttoken"),
        ({"pooling_mode": "weightedmean"}, "asks for weightedmean"),
        ({}, "asks for nothing"),
    ],
)
def test_pooling_that_is_not_supported(tmp_path: Path, pooling: dict[str, Any], message: str) -> None:
    make_sentence_model(tmp_path, pooling)
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path)


def test_a_decoder_without_output_embeddings_makes_vectors(tmp_path: Path) -> None:
    make_sentence_model(tmp_path, {"pooling_mode": "lasttoken"}, headless=True)
    (tmp_path / "modules.json").unlink()
    engine = configure(tmp_path)
    assert engine.model.pooling == PoolingConfig("last")
    assert engine.model.architecture.name == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match="without output embeddings"):
        configure(tmp_path, "--runner", "generate")


@pytest.mark.parametrize(
    ("told", "squashed"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, True),
    ],
)
def test_a_model_for_pairs(tmp_path: Path, told: dict[str, Any], squashed: bool) -> None:
    write_cross_encoder(tmp_path, **told)
    engine = configure(tmp_path, "--load-format", "dummy", "--task", "score")
    assert engine.model.pooling == PoolingConfig("cls", scores_pairs=True, squash=squashed)
    assert engine.model.architecture.num_parameters == 22_565_376 + 384 * 385 + 385


def test_a_model_for_pairs_takes_nothing_from_files_about_vectors(tmp_path: Path) -> None:
    make_sentence_model(tmp_path, {"pooling_mode_mean_tokens": True})
    write_cross_encoder(tmp_path)
    engine = configure(tmp_path, "--load-format", "dummy")
    assert engine.model.pooling == PoolingConfig("cls", scores_pairs=True)


def test_a_model_for_pairs_tells_their_texts_apart(tmp_path: Path) -> None:
    write_cross_encoder(tmp_path, type_vocab_size=1)
    with pytest.raises(ConfigError, match="type_vocab_size must be 2 or more for pairs of texts, not 1"):
        configure(tmp_path, "--load-format", "dummy")


def write_cross_encoder(folder: Path, **changes: Any) -> None:
    """The configuration and tokenizer of one."""
    config = json.loads((MINILM / "config.json").read_text())
    config |= {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text((MINILM / "tokenizer.json").read_text())


def test_classes_are_not_supported(tmp_path: Path) -> None:
    config = json.loads((MINILM / "config.json").read_text()) | {"architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="with one label, which scores pairs of texts, not 2"):
        configure(tmp_path, "--load-format", "dummy")


def test_newer_files_name_the_kind(tmp_path: Path) -> None:
    make_sentence_model(tmp_path, {"pooling_mode": "lasttoken"})
    assert configure(tmp_path).model.pooling == PoolingConfig("last")


def test_modules_that_are_not_supported(tmp_path: Path) -> None:
    make_sentence_model(tmp_path, {"pooling_mode": "lasttoken"})
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ConfigError, match="module 'Dense'"):
        configure(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_act", "swish"),
        ("num_attention_heads", 5),
    ],
)
def test_variants_of_bert_that_are_not_supported(tmp_path: Path, key: str, value: object) -> None:
    config = json.loads((MINILM / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError, match=key):
        configure(tmp_path, "--load-format", "dummy")
