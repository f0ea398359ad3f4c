"""`LLM`: the same engine from Python."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, wait_for
from tests.support.tiny_models import make_tiny_model
from tokenmill import LLM, RepetitionDetection, SamplingParams
from tokenmill_engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    StartupError,
)

pytestmark = pytest.mark.slow

FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": "64M"}
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **FLAGS) as llm:
        yield llm


def engine_processes() -> list[psutil.Process]:
    """Engine cores that this process started itself."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # somebody's end
            if "tokenmill: engine core" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_prompts_of_every_kind_in_order(llm: LLM, tiny_server: Server) -> None:
    """The same text as over HTTP, for text, ids and both in one call."""
    ids = [5, 6, 7, 8]
    outputs = llm.generate(["Once", ids, {"prompt": "Twice"}, {"prompt_token_ids": ids, "cache_salt": "s"}], GREEDY)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == [tiny_server.text(prompt, max_tokens=12) for prompt in ("Once", ids, "Twice", ids)]
    assert [output.prompt for output in outputs] == ["Once", None, "Twice", None]
    assert outputs[1].prompt_token_ids == ids
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert len({output.request_id for output in outputs}) == 4
    assert [output.outputs[0].text for output in llm.generate("Once", GREEDY)] == texts[:1]
    assert [output.outputs[0].text for output in llm.generate(ids, GREEDY)] == texts[1:2]
    assert llm.generate([], GREEDY) == []


def test_many_prompts_with_parameters_of_their_own(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=1 + number % 7, ignore_eos=True) for number in range(40)]
    outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + number % 7 for number in range(40)]
    bar = capfd.readouterr().err
    assert "Processed prompts" in bar
    assert "40/40" in bar
    assert "tok/s" in bar
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capfd.readouterr().err == ""


def test_chat(llm: LLM, tiny_server: Server) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    by_http = tiny_server.post("/v1/chat/completions", messages=conversation, temperature=0, max_tokens=12).json()
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for messages in (conversation, [conversation], [parts]):
        (output,) = llm.chat(messages, GREEDY)  # type: ignore[arg-type]
        assert output.outputs[0].text == by_http["choices"][0]["message"]["content"]
    assert output.prompt is not None
    assert output.prompt.endswith("<|im_start|>assistant\n")
    continued = [*conversation, {"role": "assistant", "content": "Hi "}]
    (output,) = llm.chat(continued, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith("assistant\nHi ")
    (output,) = llm.chat(conversation, GREEDY, tools=[{"type": "function", "function": {"name": "now"}}])
    assert output.prompt is not None
    assert output.prompt.startswith('[{"type": "function", "function": {"name": "now"}}]\n')


def test_choices_logprobs_and_stops(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=3, n=3, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("Once upon", params)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) > 1
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert choice.cumulative_logprob is not None
        chosen = [entry[token] for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert sum(entry.logprob for entry in chosen) == pytest.approx(choice.cumulative_logprob)
        for entry in choice.logprobs:
            assert {1, 2} <= {logprob.rank for logprob in entry.values()}
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    plain = llm.generate("Once", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].outputs[0]
    stop = plain.text[10:14]
    stopped = llm.generate("Once", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop))[0]  # type: ignore[arg-type]
    assert stopped.outputs[0].text == plain.text[: plain.text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


def test_log_probabilities_of_named_tokens_have_no_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=0, logprob_token_ids=(5, 9), ignore_eos=True)
    (choice,) = llm.generate("Once", params)[0].outputs
    assert choice.logprobs is not None
    for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert entry.keys() == {token_id, 5, 9}
        assert [entry[each].rank for each in (token_id, 5, 9)] == [1, None, None]


def test_a_text_that_goes_round_in_circles_ends(llm: LLM) -> None:
    same = {42: 100.0}
    detection = RepetitionDetection(max_pattern_size=1, min_count=3)
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias=same, repetition_detection=detection)
    (choice,) = llm.generate("Once", params)[0].outputs
    assert (choice.token_ids, choice.finish_reason) == ([42] * 3, "repetition")


def test_mistakes_name_the_prompt_and_generate_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1: temperature must be between 0 and 2"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=9)])
    with pytest.raises(InvalidRequestError, match="prompt 0: temperature must be between 0 and 2, got -1"):
        llm.generate("a", SamplingParams(temperature=-1))
    with pytest.raises(TypeError, match="a prompt is text, a list of token ids"):
        llm.generate(123, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(ContextLengthError, match="prompt 0: "):
        llm.generate([[5] * 70000], GREEDY)
    with pytest.raises(InvalidRequestError, match="2 prompts need one or as many sampling_params, got 3"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(InvalidRequestError, match="either `prompt` or `prompt_token_ids`"):
        llm.generate([{"text": "a"}], GREEDY)
    with pytest.raises(InvalidRequestError, match="every message is a mapping with a `role`"):
        llm.chat([{"content": "a"}], GREEDY)
    assert llm.generate("a", GREEDY)


def test_a_model_of_text_alone_refuses_media(llm: LLM, tiny_model: Path) -> None:
    image, said = Image.new("RGB", (8, 8)), {"max_pixels": 64}
    with pytest.raises(InvalidRequestError, match=r"images in multi_modal_data of prompt 0 .* takes text only"):
        llm.generate([{"prompt": "a", "multi_modal_data": {"image": image}}], GREEDY)
    with pytest.raises(InvalidRequestError, match="takes text only: mm_processor_kwargs is not supported"):
        llm.generate({"prompt": "a", "mm_processor_kwargs": said}, GREEDY)
    content = [{"type": "image_pil", "image_pil": image}]
    with pytest.raises(InvalidRequestError, match=r"parts of type 'image_pil' are not supported: .* takes text only"):
        llm.chat([{"role": "user", "content": content}], GREEDY)
    hello = [{"role": "user", "content": "Hello"}]
    with pytest.raises(InvalidRequestError, match="takes text only: mm_processor_kwargs is not supported"):
        llm.chat(hello, GREEDY, mm_processor_kwargs=said)
    with pytest.raises(InvalidRequestError, match="takes text only: media_io_kwargs is not supported"):
        llm.chat(hello, GREEDY, media_io_kwargs={"video": {"fps": 1}})
    with pytest.raises(ConfigError, match=r"limit_mm_per_prompt.*: the model .* takes text only; leave it out"):
        LLM(tiny_model, limit_mm_per_prompt={"image": 2}, **FLAGS)


def test_the_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    (output,) = llm.generate("Once upon", GREEDY)
    assert tokenizer.encode("Once upon") == output.prompt_token_ids
    assert tokenizer.decode(output.outputs[0].token_ids) == output.outputs[0].text


def test_calls_from_several_threads(llm: LLM) -> None:
    alone = [llm.generate(f"thread {number}", GREEDY)[0].outputs[0].text for number in range(4)]
    texts: dict[int, str] = {}

    def run(number: int) -> None:
        texts[number] = llm.generate(f"thread {number}", GREEDY, use_tqdm=False)[0].outputs[0].text

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [texts[number] for number in range(4)] == alone


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        ({"max_modle_len": 3}, ConfigError, "did you mean max_model_len?"),
        ({"port": 8000}, ConfigError, "about serving over HTTP"),
        ({"max_model_len": 10**6}, ConfigError, "use at most 65536"),
        (
            {"num_gpu_blocks_override": 2, "max_model_len": 64},
            StartupError,
            "the largest --max-model-len that fits is 32",
        ),
    ],
)
def test_mistakes_at_the_start(tiny_model: Path, flags: dict[str, Any], error: type[Exception], message: str) -> None:
    before = len(engine_processes())
    with pytest.raises(error) as raised:
        LLM(tiny_model, device="cpu", **flags)
    assert message in str(raised.value)
    assert len(engine_processes()) == before


def test_dtype(llm: LLM, tiny_model: Path) -> None:
    """Half the bits: close to the same log-probabilities, not equal."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def score(model: LLM) -> list[float]:
        output = model.generate([[5, 6, 7, 8, 9, 10]], params)[0]
        assert output.prompt_logprobs is not None
        return [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry is not None]

    exact = score(llm)
    with LLM(tiny_model, **(FLAGS | {"dtype": "bfloat16"})) as short:
        rounded = score(short)
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.5)


def test_seed_and_dummy_weights(tiny_model: Path) -> None:
    """The same seed gives the same random weights and the same draws; another one others."""
    drawn = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def run(seed: int, load_format: str) -> tuple[list[int], list[int]]:
        with LLM(tiny_model, **FLAGS, seed=seed, load_format=load_format, enforce_eager=True) as model:
            first, second = model.generate(["a", "a"], [greedy, drawn])
            return first.outputs[0].token_ids, second.outputs[0].token_ids

    dummy, same, other = run(1, "dummy"), run(1, "dummy"), run(2, "dummy")
    real, real_other = run(1, "auto"), run(2, "auto")
    assert dummy == same
    assert dummy[0] != other[0]
    assert dummy[0] != real[0]
    assert real[0] == real_other[0]
    assert real[1] != real_other[1]


def test_data_parallel_and_stats(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(tiny_model, **FLAGS, data_parallel_size=2, disable_log_stats=False, log_stats_interval=0.2) as model:
        before = {process.pid for process in engine_processes()}
        assert len(before) >= 2
        outputs = model.generate([f"p {n}" for n in range(30)], SamplingParams(max_tokens=200, ignore_eos=True))
        assert all(len(output.outputs[0].token_ids) == 200 for output in outputs)
        log: list[str] = []

        def is_logged() -> bool:
            log.append(capfd.readouterr().err)
            return all(engine in "".join(log) for engine in ("Engine 000", "Engine 001"))

        wait_for(is_logged, PATIENCE_S, "statistics of both engine cores")


def test_shutdown_ends_processes_and_later_calls(tiny_model: Path) -> None:
    before = {process.pid for process in engine_processes()}
    model = LLM(tiny_model, **FLAGS)
    started = [process for process in engine_processes() if process.pid not in before]
    assert len(started) == 1
    model.shutdown()
    model.shutdown()
    assert not any(process.is_running() for process in started)
    with pytest.raises(EngineDeadError, match="shut down"):
        model.generate("a", GREEDY)


def test_the_models_own_limit_may_exceed_the_context(tmp_path: Path) -> None:
    """It is nobody's mistake; a limit that the caller names is."""
    model = make_tiny_model(tmp_path / "model", "llama")
    (model / "generation_config.json").write_text(json.dumps({"max_new_tokens": 10**6}))
    with LLM(model, **FLAGS, max_model_len=64) as llm:
        assert 1 <= len(llm.generate("a")[0].outputs[0].token_ids) <= 63
        with pytest.raises(InvalidRequestError, match="max_tokens is 1000000"):
            llm.generate("a", SamplingParams(max_tokens=10**6))


def test_killed_engine_core(tiny_model: Path) -> None:
    before = {process.pid for process in engine_processes()}
    with LLM(tiny_model, **FLAGS) as model:
        (process,) = [process for process in engine_processes() if process.pid not in before]
        threading.Timer(0.5, process.kill).start()
        with pytest.raises(EngineDeadError, match="engine core 0 was killed"):
            model.generate(["a"] * 4, SamplingParams(max_tokens=50000, ignore_eos=True))
        with pytest.raises(EngineDeadError, match="engine core 0 was killed"):
            model.generate("a", GREEDY)


SCRIPT = """
import signal, sys
from tokenmill import LLM, SamplingParams
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background of a script
llm = LLM(sys.argv[1], device="cpu", dtype="float32", kv_cache_memory_bytes="64M")
assert "torch" not in sys.modules and "transformers" not in sys.modules
print("ready", flush=True)
sys.stdin.readline()
try:
    print("working", flush=True)
    llm.generate(["a"] * 4, SamplingParams(max_tokens=int(sys.argv[2]), ignore_eos=True))
except KeyboardInterrupt:
    print(llm.generate("a", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].finish_reason, flush=True)
"""


@pytest.mark.parametrize("end", ["of the script", "by Ctrl-C", "by kill -9"])
def test_nothing_survives_the_script(tiny_model: Path, end: str) -> None:
    """Without `with` and without `shutdown`. Ctrl-C ends a call, not the engine."""
    with tempfile.TemporaryDirectory(prefix="tm-") as folder, contextlib.ExitStack() as stack:
        script = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tiny_model), "4" if end == "of the script" else "60000"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": folder},
        )
        stack.callback(script.kill)
        assert script.stdin is not None
        assert script.stdout is not None
        with script.stdin, script.stdout:
            assert script.stdout.readline() == "ready\n"
            children = psutil.Process(script.pid).children()
            assert len(children) == 1
            script.stdin.write("go on\n")
            script.stdin.flush()
            assert script.stdout.readline() == "working\n"
            if end != "of the script":
                time.sleep(0.5)  # very likely it has begun, and nothing depends on it
                script.send_signal(signal.SIGINT if end == "by Ctrl-C" else signal.SIGKILL)
            rest = script.stdout.read()
        assert script.wait(PATIENCE_S) == (-signal.SIGKILL if end == "by kill -9" else 0)
        assert rest == ("length\n" if end == "by Ctrl-C" else "")
        wait_for_ends(children)
        if end != "by kill -9":
            assert list(Path(folder).iterdir()) == []
