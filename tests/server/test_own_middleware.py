"""What `--middleware` may name."""

import pytest

from tokenmill_engine.errors import ConfigError
from tokenmill_server.own_middleware import load_middleware


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module.Name", "No module named"),
        ("json.NoSuchName", "no attribute"),
        ("json.dumps", "neither a class nor an async function"),
    ],
)
def test_what_leads_to_nothing_of_use(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--middleware {path}: .*{message}"):
        load_middleware([path])
