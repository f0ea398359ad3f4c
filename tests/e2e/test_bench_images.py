"""`tokenmill bench serve --dataset-name random-mm` against a real server."""

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import start_server
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_server.bench import cli

pytestmark = pytest.mark.slow


def test_a_server_answers_chats_with_random_images(tmp_path: Path) -> None:
    folder = cached_tiny_media_model("qwen2_5_vl")
    with start_server(str(folder), *TINY_FLAGS) as server:
        arguments = [
            *["serve", "--base-url", server.url, "--tokenizer", str(folder), "--dataset-name", "random-mm"],
            *["--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos", "--seed", "4"],
            *["--random-input-len", "6", "--random-output-len", "5", "--random-mm-sizes", "20x30..90x60"],
            *["--random-mm-base-items-per-request", "2", "--random-mm-repeat-share", "0.5"],
            *["--result-dir", str(tmp_path), "--result-filename", "out.json"],
        ]
        assert cli.main(arguments) == 0
        result = json.loads((tmp_path / "out.json").read_text())
        assert (result["completed"], result["failed"], result["total_images"]) == (12, 0, 24)
        assert result["total_output_tokens"] == 60
        assert result["total_sent_bytes"] > 4 / 3 * result["total_image_bytes"] > 0
        assert 0.0 < server.metric("encoder_time_seconds_sum") < server.metric("step_time_seconds_sum")
        assert 0 < server.metric("encoder_time_seconds_count") < server.metric("step_time_seconds_count")
        # Pixels travel once for each: three bytes for each of a patch, of which a placeholder has four.
        assert server.metric("engine_message_bytes_total") > 4 * 3 * result["total_different_images"]
        # Those that were sent again are known.
        assert server.metric("mm_cache_queries_total") == 24
        assert server.metric("mm_cache_hits_total") == 24 - result["total_different_images"] > 0
