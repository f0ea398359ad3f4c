"""The GGUF header parser, against the `gguf` package and against damaged files."""

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import tiny_config, tiny_weights
from tokenmill_engine.config.gguf_file import GGML_TYPES, is_gguf, read_gguf
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.errors import ConfigError


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    config = tiny_config("llama", num_hidden_layers=1)
    write_tiny_gguf(path, config, tiny_weights(config), lambda _: gguf.GGMLQuantizationType.Q4_0)
    return path


def test_it_says_what_the_gguf_package_says(file: Path) -> None:
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(extent) for extent in reversed(tensor.shape))
        assert (mine.type_id, mine.offset, mine.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for kind, (block_size, block_bytes) in GGML_QUANT_SIZES.items():
        assert GGML_TYPES[int(kind)] == (kind.name, block_size, block_bytes)


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "values.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**60)
    writer.add_int64("i64", -(2**60))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 🙂")
    writer.add_array("texts", ["a", "", "東京"])
    writer.add_array("numbers", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "values.gguf").metadata
    del metadata["general.architecture"]
    assert metadata == {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 2**60,
        "i64": -(2**60),
        "f32": 0.5,
        "f64": 1e300,
        "yes": True,
        "text": "naïve 🙂",
        "texts": ["a", "", "東京"],
        "numbers": [1, -2, 3],
    }


def test_the_embedded_models_header_is_read_fast() -> None:
    path = embedded_model_path()
    started = time.thread_time()
    header = read_gguf(path)
    assert time.thread_time() - started < 1.0
    assert len(header.tensors) == 272
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF file"),
        (b"\x00" * 64, "is not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + b"\x00" * 32, "has version 1; versions 2 and 3 are supported"),
        (b"GGUF" + struct.pack(">I", 3) + b"\x00" * 32, "big-endian"),
        (b"GGUF" + struct.pack("<I", 3), "truncated inside its header"),
    ],
)
def test_files_that_are_no_usable_gguf_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_gguf(path)
    assert "bad.gguf" in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read GGUF file .*absent\.gguf: No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_a_file_cut_anywhere_is_refused_as_truncated(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    lengths = {5, 9, 17, 24, 30, len(content) // 2, len(content) - 1, *random.Random(0).sample(range(24, 9000), 60)}
    for length in sorted(lengths):
        cut.write_bytes(content[:length])
        with pytest.raises(ConfigError, match="truncated"):
            read_gguf(cut)


def test_random_damage_gives_an_answer_or_a_readable_error(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    header_end = min(tensor.offset for tensor in read_gguf(file).tensors.values())
    bad = tmp_path / "damaged.gguf"
    rng = random.Random(1)
    refusals: list[str] = []
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 4, 64])):
            damaged[rng.randrange(8, header_end)] = rng.randrange(256)
        bad.write_bytes(damaged)
        try:
            read_gguf(bad)
        except ConfigError as error:
            refusals.append(error.message)
    assert len(refusals) > 50
    assert all("damaged.gguf" in message for message in refusals)


def test_is_gguf_goes_by_name_or_first_bytes(tmp_path: Path, file: Path) -> None:
    renamed, other = tmp_path / "model.bin", tmp_path / "other.bin"
    renamed.write_bytes(file.read_bytes()[:16])
    other.write_bytes(np.zeros(16, np.uint8).tobytes())
    assert is_gguf(file)
    assert is_gguf(renamed)
    assert not is_gguf(other)
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "absent.gguf")
