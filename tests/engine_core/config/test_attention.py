"""Which attention backend serves which model where."""

from pathlib import Path

import pytest

from tokenmill_engine.config.attention import (
    parse_attention_backend,
    resolve_attention_backend,
)
from tokenmill_engine.config.device import DeviceInfo
from tokenmill_engine.config.engine import DtypeName
from tokenmill_engine.errors import ConfigError

CPU = DeviceInfo("cpu", "cpu", 1 << 34, 1)
H100 = DeviceInfo("cuda", "H100", 80 << 30, 1, (9, 0))
T4 = DeviceInfo("cuda", "T4", 16 << 30, 1, (7, 5))


@pytest.fixture
def flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, which would not survive being imported."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for file in (package.parent / "__init__.py", package / "__init__.py", package / "interface.py"):
        file.write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("auto", "auto"),
        ("Triton", "triton"),
        ("TRITON_ATTN", "triton-attn"),
        ("triton_attn_vllm_v1", "triton-attn"),
        ("FLASH_ATTN", "flash-attn"),
        (" flash_attn_4 ", "flash-attn-4"),
        ("FLASHINFER_VLLM_V1", "flashinfer"),
        ("ROCM_FLASH", "rocm-flash"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert parse_attention_backend(text) == name


@pytest.mark.parametrize("value", ["FLASHINFERNO", "native_vllm_v2", "", 3, None])
def test_unknown_names(value: object) -> None:
    with pytest.raises(ValueError, match=r"^one of auto, triton, native, flash-attn-4$"):
        parse_attention_backend(value)


@pytest.mark.parametrize("device", [CPU, H100, T4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_default_is_no_backend_that_was_asked_for(device: DeviceInfo, dtype: DtypeName) -> None:
    assert resolve_attention_backend("auto", "", device, 128, dtype) == "auto"


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("requested", "device", "name"),
    [
        ("triton-attn", H100, "auto"),
        ("flash-attn", H100, "flash-attn-4"),
        ("cpu-attn", CPU, "auto"),
        ("torch-sdpa", CPU, "auto"),
    ],
)
def test_names_of_vllm_mean_their_counterparts(
    requested: str, device: DeviceInfo, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_attention_backend(requested, "", device, 128, "bfloat16") == name
    assert not caplog.records


@pytest.mark.parametrize(
    ("requested", "device", "message"),
    [
        ("flashinfer", H100, "--x FLASHINFER is replaced by triton (Tokenmill has no such backend)"),
        ("rocm-flash", CPU, "--x ROCM_FLASH is replaced by native (Tokenmill has no such backend)"),
        ("triton-attn", CPU, "--x TRITON_ATTN is replaced by native (triton: it needs an NVIDIA GPU)"),
        ("torch-sdpa", H100, "--x TORCH_SDPA is replaced by triton (native: it runs on a CPU only)"),
        (
            "flash-attn",
            H100,
            "--x FLASH_ATTN is replaced by triton (flash-attn-4: the Python package flash-attn-4 is not installed)",
        ),
    ],
)
def test_names_of_vllm_that_nothing_answers_to(
    requested: str, device: DeviceInfo, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolve_attention_backend(requested, "--x", device, 128, "bfloat16") == "auto"
    assert [record.getMessage() for record in caplog.records] == [message]


@pytest.mark.usefixtures("flash_attention")
def test_what_is_asked_for_is_taken_if_it_can_serve() -> None:
    assert resolve_attention_backend("triton", "", H100, 128, "float32") == "triton"
    assert resolve_attention_backend("native", "", CPU, 128, "bfloat16") == "native"
    assert resolve_attention_backend("flash-attn-4", "", H100, 128, "bfloat16") == "flash-attn-4"


@pytest.mark.usefixtures("flash_attention")
@pytest.mark.parametrize(
    ("requested", "device", "head_dim", "dtype", "reason"),
    [
        ("triton", CPU, 128, "bfloat16", "needs an NVIDIA GPU; use --attention-backend auto or native"),
        (
            "native",
            H100,
            128,
            "bfloat16",
            "it runs on a CPU only; use --attention-backend auto or triton or flash-attn-4",
        ),
        (
            "native",
            CPU,
            128,
            "float16",
            "it computes in float32 or bfloat16, not in float16; use --attention-backend auto",
        ),
        ("flash-attn-4", H100, 128, "float32", "not in float32; use --attention-backend auto or triton"),
        ("flash-attn-4", H100, 100, "float16", "up to 256, these have 100; use --attention-backend auto or triton"),
        ("flash-attn-4", H100, 264, "float16", "up to 256, these have 264; use --attention-backend auto or triton"),
        ("flash-attn-4", T4, 128, "float16", "compute capability 7.5; use --attention-backend auto or triton"),
        ("flash-attn-4", CPU, 128, "bfloat16", "needs an NVIDIA GPU; "),
    ],
)
def test_refused_with_the_reason_and_what_can_serve(
    requested: str, device: DeviceInfo, head_dim: int, dtype: DtypeName, reason: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_attention_backend(requested, "--x", device, head_dim, dtype)
    assert raised.value.message.startswith(f"--x asks for {requested}, which cannot serve this model here: ")
    assert reason in raised.value.message


def test_every_reason_is_given() -> None:
    with pytest.raises(
        ConfigError, match=r"NVIDIA GPU; .*float32; .*not installed; use --attention-backend auto or native"
    ):
        resolve_attention_backend("flash-attn-4", "", CPU, 64, "float32")
