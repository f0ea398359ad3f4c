"""The files of the page at `/` as any client gets them. What they do in a browser: tests/e2e/test_webui.py."""

import re
from html.parser import HTMLParser

import httpx
import pytest

from tests.support.api_server import MODEL_NAME, run_server
from tests.support.sse import is_error
from tokenmill_server.webui.files import web_files

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = [f"/webui/{name}" for name in web_files()]


class _Addresses(HTMLParser):
    """Everything that a page loads, and whatever it has of scripts and styles in itself."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses |= {value for name in ("src", "href") if (value := values.get(name)) and value[0] != "#"}
        self.inline += [name for name in values if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in values):
            self.inline.append(tag)


@pytest.mark.parametrize("path", ["/", *FILES])
def test_files_and_their_headers(client: httpx.Client, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 200
    suffix = "html" if path == "/" else path.rpartition(".")[2]
    assert reply.headers["content-type"].partition(";")[0] == TYPES[suffix]
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    head = client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(reply.content))
    assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", reply.content), "it loads from elsewhere"


def test_files_that_a_browser_has_are_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"x", W/{first.headers["etag"]}', "*"):
        again = client.get("/", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
    assert client.get("/", headers={"If-None-Match": '"x"'}).status_code == 200


def test_the_page_loads_files_that_exist_and_has_no_code_in_itself(client: httpx.Client) -> None:
    page = _Addresses()
    page.feed(client.get("/").text)
    assert page.inline == []
    imported = {name for path in FILES for name in re.findall(r'from "\./([\w.-]+)"', client.get(path).text)}
    loaded = page.addresses | {f"webui/{name}" for name in imported}
    assert {f"/{address}" for address in loaded} == set(FILES) - {"/webui/index.html"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_is_only_read(client: httpx.Client, method: str) -> None:
    for path in ("/", "/webui/app.js", "/webui/server.json"):
        reply = client.request(method, path)
        assert is_error(reply, 405)
        assert set(reply.headers["allow"].split(", ")) <= {"GET", "HEAD"}


@pytest.mark.parametrize("name", ["nothing.js", "files.py", "../files.py", "..%2ffiles.py", "static/app.js", ""])
def test_there_are_no_other_files(client: httpx.Client, name: str) -> None:
    assert is_error(client.get(f"/webui/{name}"), 404)


def test_what_the_page_is_told(client: httpx.Client) -> None:
    told = client.get("/webui/server.json").json()
    assert told["models"] == [MODEL_NAME, "other/name"]
    assert (told["max_model_len"], told["max_images"], told["sampling"]) == (8192, 0, {})
    assert told["version"] == client.get("/version").json()["version"]


def test_the_schema_of_the_api_has_no_page(client: httpx.Client) -> None:
    assert not [path for path in client.get("/openapi.json").json()["paths"] if path == "/" or "webui" in path]


@pytest.mark.slow
def test_a_key_is_needed_for_what_says_something_of_the_server() -> None:
    options = {"api_keys": ("secret",), "root_path": "/llm", "default_sampling": {"temperature": 0.6}}
    with run_server(**options) as server, server.client() as client:
        for path in ("/", "/llm/", *FILES):
            assert client.get(path).status_code == 200
        assert is_error(client.get("/webui/server.json"), 401)
        assert is_error(client.get("/metrics"), 401)
        told = client.get("/llm/webui/server.json", headers={"Authorization": "Bearer secret"})
        assert told.json()["sampling"] == {"temperature": 0.6}


@pytest.mark.slow
def test_a_server_without_the_page() -> None:
    with run_server(disable_webui=True, api_keys=("secret",)) as server, server.client() as client:
        for path in ("/", *FILES, "/webui/server.json"):
            assert is_error(client.get(path), 401)
            assert is_error(client.get(path, headers={"Authorization": "Bearer secret"}), 404)
