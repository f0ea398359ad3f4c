"""Makes a model folder of another size, for dummy weights: `python -m benchmarks.shapes 70b FOLDER OUTPUT`.

Everything but the sizes stays what it is in FOLDER, a Llama with a tokenizer: from one of Llama-3.1-8B it makes one of
Llama-3.1-70B (`70b`), and from any one that a CPU computes in no time, with heads for `-tp 2` and `-tp 4` (`tiny`).
Neither has weights: serve it with `--load-format dummy`.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

SHAPES: Mapping[str, Mapping[str, int]] = {
    "70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    },
}
_COPIED = ("tokenizer*", "*_map.json", "generation_config.json", "*.jinja")


def make_shape(shape: str, folder: Path, output: Path) -> Path:
    """Writes `config.json` with the sizes of `shape` and copies what belongs to the tokenizer; returns `output`.

    Raises: OSError, ValueError if there is no configuration in `folder`.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps({**config, **SHAPES[shape]}, indent=1), encoding="utf-8")
    for path in {path for pattern in _COPIED for path in folder.glob(pattern)}:
        shutil.copyfile(path, output / path.name)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    print(make_shape(args.shape, args.folder, args.output))  # noqa: T201


if __name__ == "__main__":
    main()
