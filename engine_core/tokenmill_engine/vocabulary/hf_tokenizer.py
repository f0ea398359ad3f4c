"""Reads the tokenizer of a folder in Hugging Face layout: `tokenizer.json`, and what `tokenizer_config.json` adds."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from tokenmill_engine.config.hf_folder import read_optional_json, read_special_tokens
from tokenmill_engine.errors import ConfigError


def load_hf_tokenizer(folder: Path) -> Backend:
    """Raises ConfigError if `folder` has no readable `tokenizer.json`."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        if (folder / "tokenizer.model").is_file():
            convert = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            raise ConfigError(
                f"{folder} holds only tokenizer.model; write tokenizer.json beside it once, in Python: "
                f"from transformers import AutoTokenizer; {convert}"
            )
        raise ConfigError(f"{folder} has no tokenizer.json; name another place with --tokenizer")
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer file {file} is damaged: {error}") from error
    config = read_optional_json(folder / "tokenizer_config.json")
    _add_configured_tokens(backend, config)
    if isinstance(config.get("add_bos_token"), bool):
        _set_bos(backend, read_special_tokens(folder).bos_token, add_bos=config["add_bos_token"])
    return backend


def _add_configured_tokens(backend: Backend, config: dict[str, Any]) -> None:
    """Marks as special the tokens that only `tokenizer_config.json` declares so."""
    specials = [
        token["content"]
        for token in (config.get("added_tokens_decoder") or {}).values()
        if isinstance(token, dict) and token.get("special") and backend.token_to_id(token["content"]) is not None
    ]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [token for token in specials if token not in known]
    if missing:
        backend.add_special_tokens(missing)


def _set_bos(backend: Backend, bos_token: str | None, add_bos: bool) -> None:
    """Makes the post-processor begin sequences with `bos_token`, or not. Leaves it alone where it already agrees."""
    bos_id = backend.token_to_id(bos_token) if bos_token is not None else None
    if bos_token is None or bos_id is None:
        return
    probe = backend.encode("a", add_special_tokens=True).ids
    if (bos_id in probe[:1]) == add_bos:
        return
    if not add_bos and _kinds(backend) - {"ByteLevel", "Sequence", "TemplateProcessing"}:
        raise ConfigError("add_bos_token is false but the tokenizer's post-processor cannot be changed")
    pieces = [bos_token, "$A"] if add_bos else ["$A"]
    backend.post_processor = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, "$B:1"],
        special_tokens=[(bos_token, bos_id)] if add_bos else [],
    )


def _kinds(backend: Backend) -> set[str]:
    if backend.post_processor is None:
        return set()
    state = json.loads(backend.post_processor.__getstate__())
    return {state["type"], *(part["type"] for part in state.get("processors", []))}
