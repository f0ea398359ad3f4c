"""GGUF files: dequantization, row order, logits, errors; and the embedded model against its float32 reference."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.support.model_loading import CPU, load_on_cpu, loaded_weights, model_config
from tests.support.paged_forward import PagedForward
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import Family, make_tiny_model, tiny_config, tiny_weights
from tokenmill_engine.config.gguf_file import GGML_TYPES, read_gguf
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.weights import GGUFSource

REFERENCE = Path(__file__).parents[2] / "data" / "smollm2_reference.json"
TOKENS = list(range(5, 60, 2))

MIXED = {
    "attn_q": GGMLQuantizationType.Q4_0,
    "attn_k": GGMLQuantizationType.Q4_1,
    "attn_v": GGMLQuantizationType.Q5_0,
    "attn_output": GGMLQuantizationType.Q5_1,
    "ffn_gate": GGMLQuantizationType.Q8_0,
    "ffn_up": GGMLQuantizationType.F16,
    "ffn_down": GGMLQuantizationType.BF16,
}


def mixed_type(name: str) -> GGMLQuantizationType:
    return next((kind for part, kind in MIXED.items() if part in name), GGMLQuantizationType.Q8_0)


def write_pair(
    folder: Path,
    family: Family,
    choose_type: Callable[[str], GGMLQuantizationType] = mixed_type,
    **overrides: Any,
) -> tuple[Path, Path]:
    """(GGUF file, Hugging Face folder with the file's dequantized weights)."""
    config = tiny_config(family, **overrides)
    hf_folder = make_tiny_model(folder / "hf", family, **overrides)
    file = folder / "model.gguf"
    stored = write_tiny_gguf(file, config, tiny_weights(config), choose_type)
    save_file(stored, hf_folder / "model.safetensors")
    return file, hf_folder


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_file_of_mixed_types_equals_transformers_on_its_dequantized_weights(
    tmp_path: Path, family: Family, overrides: dict[str, Any]
) -> None:
    import transformers

    file, hf_folder = write_pair(tmp_path, family, **overrides)
    assert {tensor.type_name for tensor in read_gguf(file).tensors.values()} >= {
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"
    }  # fmt: skip
    weights = loaded_weights(file, CPU)
    for name, expected_weight in loaded_weights(hf_folder, CPU).items():
        torch.testing.assert_close(weights[name], expected_weight, atol=0, rtol=0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(
        PagedForward(load_on_cpu(file)).step([("a", TOKENS)])["a"], expected, atol=1e-4, rtol=1e-4
    )


def test_llama_3_frequency_divisors_in_the_file_are_used(tmp_path: Path) -> None:
    file, hf_folder = write_pair(tmp_path, "llama", rope_scaling=None)
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    plain = model_config(hf_folder)
    rope = replace(plain.architecture.rope, freq_factors=tuple(divisors.tolist()))
    expected = load_on_cpu(hf_folder, architecture=replace(plain.architecture, rope=rope))

    config = tiny_config("llama")
    weights = tiny_weights(config) | {"rope_freqs.weight": divisors}
    write_tiny_gguf(file, config, weights, mixed_type)
    ours, plain_logits = (PagedForward(load_on_cpu(source)).step([("a", TOKENS)])["a"] for source in (file, hf_folder))
    torch.testing.assert_close(ours, PagedForward(expected).step([("a", TOKENS)])["a"], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(ours, plain_logits, atol=1e-2)


def write_one_tensor(path: Path, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """A file with one [6, 512] tensor of type `kind`; returns its raw bytes [6, bytes per row]."""
    storage = GGML_TYPES[kind]
    row_bytes = 512 // storage.block_size * storage.block_bytes
    # Bytes below 64 make every half-precision or exponent-only scale finite and small.
    data = np.random.default_rng(0).integers(0, 64, (6, row_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return data


READABLE = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
]


@pytest.mark.parametrize("name", READABLE)
def test_every_type_can_be_read_in_pieces(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    data = write_one_tensor(tmp_path / "one.gguf", kind)
    source = GGUFSource(tmp_path / "one.gguf")
    try:
        assert source.shapes == {"weight": (6, 512)}
        room = [torch.empty(2 * 512 * source.dtype("weight").itemsize, dtype=torch.uint8) for _ in range(3)]
        pieces = [source.read("weight", 1024 * index, 1024, buffer) for index, buffer in enumerate(room)]
    finally:
        source.close()
    ours = torch.cat(pieces).float().numpy().reshape(6, 512)
    np.testing.assert_array_equal(ours, quants.dequantize(data, kind))
    assert np.isfinite(ours).all()
    assert np.unique(ours).size > 2


@pytest.mark.parametrize("name", ["Q8_1", "I32"])
def test_a_type_that_cannot_be_dequantized_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_one_tensor(tmp_path / "one.gguf", GGMLQuantizationType[name])
    source = GGUFSource(tmp_path / "one.gguf")
    try:
        with pytest.raises(ConfigError, match=rf"weight has type {name}"):
            source.read("weight", 0, 512, torch.empty(2048, dtype=torch.uint8))
    finally:
        source.close()


def test_a_file_without_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    config = tiny_config("llama")
    weights = tiny_weights(config)
    del weights["model.layers.2.self_attn.o_proj.weight"]
    write_tiny_gguf(tmp_path / "model.gguf", config, weights, mixed_type)
    with pytest.raises(ConfigError, match=r"lacks 1 tensor.*blk\.2\.attn_output\.weight"):
        load_on_cpu(tmp_path / "model.gguf")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama")
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"model\.gguf is truncated.*download it again"):
        load_on_cpu(file)


def test_a_split_model_is_read_from_all_its_files(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "llama")
    config = tiny_config("llama")
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "llama", split_max_tensors=10)
    whole = read_gguf(file)
    raw = np.fromfile(file, np.uint8)
    writer.add_block_count(config["num_hidden_layers"])
    for key in ("embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv",
                "attention.key_length", "context_length", "rope.dimension_count"):  # fmt: skip
        writer.add_uint32(f"llama.{key}", int(whole.metadata[f"llama.{key}"]))  # type: ignore[arg-type]
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for tensor in whole.tensors.values():
        storage = GGML_TYPES[tensor.type_id]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // storage.block_size * storage.block_bytes)
        data = raw[tensor.offset : tensor.offset + tensor.nbytes].reshape(shape)
        writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType(tensor.type_id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    ours, expected = (PagedForward(load_on_cpu(path)).step([("a", TOKENS)])["a"] for path in (parts[0], file))
    assert torch.equal(ours, expected)
    parts[1].unlink()
    with pytest.raises(ConfigError, match=parts[1].name):
        load_on_cpu(parts[0])


@pytest.mark.slow
def test_the_embedded_model_continues_the_reference_prompts_exactly() -> None:
    """Greedy ids in float32 equal those of transformers; the three prompts decode as one batch."""
    cases = json.loads(REFERENCE.read_text())
    forward = PagedForward(load_on_cpu(None))
    logits = forward.step([(case["prompt"], case["prompt_ids"]) for case in cases])
    generated: dict[str, list[int]] = {case["prompt"]: [] for case in cases}
    logprobs: dict[str, list[float]] = {case["prompt"]: [] for case in cases}
    limits = {case["prompt"]: len(case["fp32_ids"]) for case in cases}
    while logits:
        for name, rows in logits.items():
            best = rows[-1].log_softmax(dim=-1).max(dim=-1)
            generated[name].append(int(best.indices))
            logprobs[name].append(float(best.values))
        open_names = [name for name in logits if len(generated[name]) < limits[name]]
        logits = forward.step([(name, generated[name][-1:]) for name in open_names]) if open_names else {}
    for case in cases:
        assert generated[case["prompt"]] == case["fp32_ids"]
        assert logprobs[case["prompt"]] == pytest.approx(case["fp32_logprob"], abs=2e-3)


@pytest.mark.slow
def test_the_embedded_model_in_bfloat16_gives_near_reference_probabilities() -> None:
    """Teacher-forced: greedy text is fragile in bfloat16, log-probabilities of the reference's tokens are not."""
    forward = PagedForward(load_on_cpu(None, dtype="bfloat16"))
    for case in json.loads(REFERENCE.read_text()):
        prompt, answer = case["prompt_ids"], case["fp32_ids"]
        logits = forward.step([(case["prompt"], prompt + answer[:-1])])[case["prompt"]]
        logprobs = logits[len(prompt) - 1 :].log_softmax(dim=-1)
        ours = logprobs.gather(1, torch.tensor(answer)[:, None]).squeeze(1)
        difference = (ours - torch.tensor(case["fp32_logprob"])).abs()
        assert difference.mean() < 0.05
        assert difference.max() < 0.5
