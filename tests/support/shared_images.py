"""As `shared_steps`, with images: `shared_images RANK SIZE STORE_PATH FAMILY weights|data`. Every process has an engine
core of its own, which plans what the others' do. It writes the tokens of all prompts, twice, and what was too large."""

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tests.support.shared_steps import HANG_S, joined  # first: kernels are to be interpreted

# isort: split
from tests.engine_core.engine.test_images import subject_of
from tests.support.image_engine import ImageEngine, image_config
from tests.support.local_stages import LocalStages
from tests.support.model_loading import CPU
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.ipc.lifecycle import exit_at_once


def main() -> None:
    rank, size, store, mode = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[5]
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    group, gloo = joined(rank, size, store)
    family = cast(Any, sys.argv[4])
    scheduler = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=24, encoder_cache_tokens=40)
    config = image_config(cached_tiny_media_model(family), scheduler)
    config = replace(config, model=replace(config.model, encoder_mode=cast(Any, mode)))
    stages = LocalStages(config, CPU, with_graphs=True, group=group)
    engine = ImageEngine(config, stages, stages.capacity)
    subject = subject_of(family)
    tokens = [engine.ask(subject.prompts) for _ in range(2)]
    media = stages.steps[0].media
    assert media is not None
    assert media.outputs is not None
    group.agree_min(0)  # nobody leaves before all are done
    answer = {
        "is_right": tokens == [[list(answer) for answer in subject.answers]] * 2,
        "kept": len(media.outputs._outputs),
        "elsewhere": len(media.outputs._elsewhere),
        "large": 0 if gloo is None else gloo.num_calls,
    }
    sys.stdout.write(json.dumps(answer) + "\n")
    exit_at_once(0)


if __name__ == "__main__":
    main()
