"""Getting bytes, from a host that counts what reaches it."""

import asyncio
import base64
import os
import socket
import ssl
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.media_host import MediaHost, answer, media_host, redirect
from tokenmill_server.multimodal import fetch as fetching
from tokenmill_server.multimodal import name_lookup
from tokenmill_server.multimodal.addresses import local_file
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.fetch import Budget, fetch, read_data_url, read_file
from tokenmill_server.multimodal.settings import MediaSettings

LOCAL = MediaSettings(allowed_domains=("localhost",), fetch_timeout_s=60.0)
"""Lets the tests reach a host of theirs."""


def get(url: str, settings: MediaSettings = LOCAL, max_bytes: int = 10**6) -> bytes:
    return asyncio.run(fetch(url, settings, Budget(max_bytes)))


def test_bytes_of_a_page() -> None:
    with media_host(picture=answer(b"picture")) as host:
        assert get(host.url("/picture")) == b"picture"
        assert f"\r\nHost: localhost:{host.port}\r\n" in host.heads[0]
        assert "\r\nAccept-Encoding: identity\r\n" in host.heads[0]


def test_https(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate must be of the name in the address, and of somebody who is known."""
    certificate = Path(__file__).parents[2] / "data" / "localhost.pem"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    settings = replace(LOCAL, allowed_domains=("localhost", "127.0.0.1"))
    with media_host(context, picture=answer(b"picture")) as host:
        with pytest.raises(MediaError, match=r"certificate of 'localhost' is not valid: self.signed"):
            get(host.url("/picture"), settings)
        known = ssl.create_default_context(cafile=certificate)
        monkeypatch.setattr(fetching, "_tls", lambda: known)
        assert get(host.url("/picture"), settings) == b"picture"
        with pytest.raises(MediaError, match=r"certificate of '127\.0\.0\.1' is not valid: IP address mismatch"):
            get(host.url("/picture", "127.0.0.1"), settings)
        assert host.paths == ["/picture"]


def test_ways_to_frame_a_body() -> None:
    def chunked(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\npic\r\n4\r\nture\r\n0\r\n\r\n")

    def unframed(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\npic")
        connection.sendall(b"ture")

    def interim(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
        answer(b"picture")(connection)

    with media_host(chunked=chunked, unframed=unframed, interim=interim) as host:
        for path in ("/chunked", "/unframed", "/interim"):
            assert get(host.url(path)) == b"picture"


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects(status: str) -> None:
    with media_host(first=redirect("/second", status), second=redirect("third"), third=answer(b"picture")) as host:
        assert get(host.url("/first")) == b"picture"
        assert host.paths == ["/first", "/second", "/third"]
        with pytest.raises(MediaError, match="redirects, which --no-media-url-allow-redirects forbids"):
            get(host.url("/first"), MediaSettings(allowed_domains=("localhost",), allow_redirects=False))


def test_endless_redirects() -> None:
    with media_host(again=redirect("/again")) as host, pytest.raises(MediaError, match="more than 5 times"):
        get(host.url("/again"))


@pytest.mark.parametrize(
    "spelling", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::ffff:127.0.0.1]", "0", "localhost"]
)
def test_nothing_reaches_a_host_that_is_not_public(spelling: str) -> None:
    with media_host(picture=answer(b"picture")) as sink:
        with pytest.raises(MediaError, match="not a public address"):
            get(sink.url("/picture", spelling), MediaSettings())
        assert sink.num_connections == 0


@pytest.mark.parametrize("spelling", ["127.0.0.1", "127.1", "2130706433", "[::ffff:127.0.0.1]", "169.254.169.254"])
def test_redirects_are_checked_like_the_first_address(spelling: str) -> None:
    with media_host(picture=answer(b"picture")) as sink, media_host() as host:
        host.pages["/to"] = redirect(sink.url("/picture", spelling))
        with pytest.raises(MediaError, match="--allowed-media-domains"):
            get(host.url("/to"))
        assert (host.paths, sink.num_connections) == (["/to"], 0)


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://localhost/", "http://[", ""]
)
def test_redirects_to_no_host(location: str) -> None:
    with media_host(to=redirect(location)) as host, pytest.raises(MediaError):
        get(host.url("/to"))


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose second answer is another: there is no second question."""
    with media_host(picture=answer(b"picture")) as host, media_host() as sink:
        asked = []

        def answers(name: str) -> list[str]:
            asked.append(name)
            return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

        name_server(monkeypatch, answers)
        settings = MediaSettings(allowed_domains=("turning.example",))
        assert get(host.url("/picture", "turning.example"), settings) == b"picture"
        assert asked == ["turning.example"]
        assert sink.num_connections == 0


def name_server(monkeypatch: pytest.MonkeyPatch, answers: Callable[[str], list[str]]) -> None:
    """Addresses of all names."""
    monkeypatch.setattr(name_lookup, "_addresses", lambda name, port: answers(name))


def test_an_address_that_does_not_answer_takes_no_time_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a host's two takes connections, and says nothing of TLS: it would use up all of the time."""
    certificate = Path(__file__).parents[2] / "data" / "localhost.pem"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    known = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(fetching, "_tls", lambda: known)
    with media_host(context, picture=answer(b"picture")) as host, socket.socket() as silent:
        silent.bind(("127.0.0.3", host.port))
        silent.listen()
        name_server(monkeypatch, lambda name: ["127.0.0.3", "127.0.0.1"])
        assert get(host.url("/picture"), replace(LOCAL, fetch_timeout_s=300.0)) == b"picture"
        assert host.paths == ["/picture"]


def test_an_address_that_refuses_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with media_host(picture=answer(b"picture")) as host:
        name_server(monkeypatch, lambda name: ["127.0.0.3", "127.0.0.4", "127.0.0.1"])
        assert get(host.url("/picture")) == b"picture"
        name_server(monkeypatch, lambda name: ["127.0.0.3", "127.0.0.4"])
        with pytest.raises(MediaError, match="cannot be reached"):
            get(host.url("/picture"))


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_addresses_in_redirects_may_be_written_as_they_are(encoding: str) -> None:
    """As browsers read them: in UTF-8, if it is."""
    with media_host(picture=answer(b"picture")) as host:
        location = "/ü".encode(encoding)
        host.pages["/to"] = lambda connection: connection.sendall(
            b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % location
        )
        host.pages["/%C3%BC"] = answer(b"picture")
        assert get(host.url("/to")) == b"picture"


def test_declared_size_is_refused_before_the_body() -> None:
    with media_host(big=answer(b"", length=2 * 2**30)) as host, pytest.raises(MediaError, match="--max-media-bytes"):
        get(host.url("/big"))


def test_undeclared_size_takes_no_more_memory_than_the_limit() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(bytes(65536))

    with media_host(endless=endless) as host:
        tracemalloc.start()
        with pytest.raises(MediaError, match="more than 1000000 bytes"):
            get(host.url("/endless"))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 4_000_000


def test_endless_headers() -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while True:
            connection.sendall(b"X-More: and more\r\n" * 1000)

    with media_host(endless=endless) as host, pytest.raises(MediaError, match="headers"):
        get(host.url("/endless"))


@pytest.mark.parametrize(
    ("start", "more"),
    [(b"1\r\nx\r\n0\r\n", b"X-More: and more\r\n" * 1000), (b"", b"1\r\nx\r\n" * 10_000), (b"1;", b"x" * 65536)],
    ids=["headers behind the body", "chunks of one byte", "what a chunk says of itself"],
)
def test_what_is_around_the_media_is_limited_as_well(start: bytes, more: bytes) -> None:
    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + start)
        while True:
            connection.sendall(more)

    with media_host(endless=endless) as host, pytest.raises(MediaError, match="around the media"):
        get(host.url("/endless"))


def test_videos_have_a_time_of_their_own() -> None:
    settings = MediaSettings(allowed_domains=("localhost",), fetch_timeout_s=300.0, video_fetch_timeout_s=0.5)
    with media_host() as host:
        host.pages["/never"] = lambda connection: host.stopped.wait() and None
        with pytest.raises(MediaError, match=r"within 0\.5 s.*--video-fetch-timeout"):
            asyncio.run(fetch(host.url("/never"), settings, Budget(1000), "video"))


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
def test_time_is_limited_for_the_whole(start: bytes) -> None:
    """Also for a host that sends a byte now and then."""
    with media_host() as host:

        def slow(connection: socket.socket) -> None:
            connection.sendall(start)
            while not host.stopped.wait(0.05):
                connection.sendall(b"x" if start else b"")

        host.pages["/slow"] = slow
        with pytest.raises(MediaError, match=r"within 0\.5 s.*--image-fetch-timeout"):
            get(host.url("/slow"), MediaSettings(allowed_domains=("localhost",), fetch_timeout_s=0.5))


def test_broken_answers() -> None:
    def nonsense(connection: socket.socket) -> None:
        connection.sendall(b"220 mail.example ESMTP\r\n\r\n")

    def upgrade(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")

    pages = {
        "missing": (answer(b"no", "404 Not Found"), "status 404"),
        "failed": (answer(b"no", "500 Oh"), "status 500"),
        "nothing": (lambda connection: None, "ended the connection early"),
        "short": (answer(b"pict", length=7), "ended the connection early"),
        "nonsense": (nonsense, "does not speak HTTP"),
        "upgrade": (upgrade, "does not speak HTTP"),
        "packed": (answer(b"\x1f\x8b", "200 OK", "Content-Encoding: gzip"), "compressed as 'gzip'"),
    }
    with media_host(**{name: page for name, (page, _) in pages.items()}) as host:
        for name, (_, message) in pages.items():
            with pytest.raises(MediaError, match=message):
                get(host.url(f"/{name}"))


def test_unreachable_hosts() -> None:
    with media_host() as host:
        port = host.port
    with pytest.raises(MediaError, match="cannot be reached"):
        get(MediaHost(port=port).url("/x"))
    settings = replace(LOCAL, allowed_domains=("nowhere.invalid",))
    with pytest.raises(MediaError, match="cannot be found"):
        get("http://nowhere.invalid/", settings)


def test_data_urls() -> None:
    def read(url: str, max_bytes: int = 100) -> bytes:
        return read_data_url(url, Budget(max_bytes))

    data = bytes(range(250, 256)) + b"?>~"
    for text in (base64.b64encode(data), base64.urlsafe_b64encode(data)):
        assert read(f"data:image/png;base64,{text.decode()}") == data
    assert read("data:;base64,AAEC") == b"\0\1\2"
    assert read("DATA:image/png;charset=x;BASE64,AA%3D%3D") == b"\0"
    assert read("data:image/png;base64,AA") == b"\0"
    assert read("data:image/png;base64,AA E\nC") == b"\0\1\2"
    assert read("data:text/plain,a%20b") == b"a b"
    long = bytes(range(256)) * 1000
    for lead in ("", "x", "xx"):  # Pieces end at any part of an escape.
        assert read(f"data:,{lead}" + "".join(f"%{byte:02x}" for byte in long), 10**6) == lead.encode() + long
    random = np.random.default_rng(1)
    for size in (*range(40), 200_000):
        data = random.bytes(size)
        for text in (base64.b64encode(data), base64.urlsafe_b64encode(data)):
            plain = text.decode()
            spaced = "\n".join(plain[at : at + 7] for at in range(0, len(plain), 7))
            for each in (plain, plain.rstrip("="), spaced, plain.replace("=", "%3D"), plain + " " * 70_000):
                assert read(f"data:;base64,{each}", 10**6) == data
    for text in (
        "AA==AA==",
        "AA==" + "A" * 200_000,
        "AA==" + " " * 200_000 + "A",
        "A" * 65_535 + "=" * 9,
        "AA=A",
        "=AAA",
    ):
        with pytest.raises(MediaError, match="not base64"):
            read(f"data:;base64,{text}", 10**6)
    for url in ("data:image/png;base64", "data:image/png;base64,A", "data:image/png;base64,####", "data:" + "x" * 999):
        with pytest.raises(MediaError, match="data: address"):
            read(url)
    with pytest.raises(MediaError, match="more than 9 bytes"):
        read(f"data:;base64,{base64.b64encode(bytes(10)).decode()}", 9)


def test_the_media_of_a_request_share_a_budget() -> None:
    budget = Budget(10)
    url = f"data:;base64,{base64.b64encode(bytes(6)).decode()}"
    read_data_url(url, budget)
    with pytest.raises(MediaError, match="more than 10 bytes"):
        read_data_url(url, budget)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"picture")
    os.mkfifo(tmp_path / "pipe")
    settings = MediaSettings(local_path=str(tmp_path))
    assert read_file(f"file://{tmp_path}/x.png", settings, Budget(7)) == b"picture"
    with pytest.raises(MediaError, match="more than 6 bytes"):
        read_file(f"file://{tmp_path}/x.png", settings, Budget(6))
    for name in ("pipe", ""):
        with pytest.raises(MediaError, match="no regular file"):
            read_file(f"file://{tmp_path}/{name}", settings, Budget(100))


def test_a_folder_that_becomes_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of an address and the opening of its file."""
    outside, folder = tmp_path / "outside", tmp_path / "media" / "inner"
    for each in (outside, folder):
        each.mkdir(parents=True)
        (each / "x.png").write_bytes(b"picture")

    def check(url: str, settings: MediaSettings) -> Path:
        path = local_file(url, settings)
        folder.rename(tmp_path / "gone")
        folder.symlink_to(outside)
        return path

    monkeypatch.setattr(fetching, "local_file", check)
    with pytest.raises(MediaError, match="was moved"):
        read_file(f"file://{folder}/x.png", MediaSettings(local_path=str(tmp_path / "media")), Budget(100))
