"""What `--middleware` may name."""

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

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


class Asking:
    """Takes more than an application."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self.app, self.secret = app, secret


class Silent:
    """Forgot what it is there for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Asking, "it cannot be made: TypeError: .*'secret'; it is called with the application and nothing else"),
        (Silent, "its objects cannot be called"),
    ],
)
def test_what_cannot_be_put_around_an_application(made: type, message: str) -> None:
    path = f"{__name__}.{made.__name__}"
    (wrap,) = load_middleware([path])
    with pytest.raises(ConfigError, match=f"^--middleware {path}: {message}"):
        wrap(application)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """To be wrapped."""
