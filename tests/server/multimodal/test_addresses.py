"""Which addresses may be fetched from."""

import asyncio
import ipaddress
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_server.multimodal.addresses import is_public, local_file, parse_target, resolve
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.settings import MediaSettings

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450:4001:80e::200e", "64:ff9b::808:808"]
PRIVATE = [
    *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"),
    *(
        "169.254.169.254",
        "168.63.129.16",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "203.0.113.5",
        "224.0.0.1",
        "240.0.0.1",
    ),
    *("255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "fe80::1", "fec0::1"),
    *("fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1"),
    *("2002:7f00:1::", "2001:0:7f00:1::1", "100::1"),
]
LOOPBACK_SPELLINGS = [
    *("http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://0x7f.1/"),
    *("http://0177.0.0.1/", "http://017700000001/", "http://127.0.0.1./", "http://localhost/", "http://LOCALHOST./"),
    *("http://[::1]/", "http://[0:0:0:0:0:0:0:1]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"),
    *("http://0/", "http://0.0.0.0/", "http://[::]/", "http://１２７.０.０.１/", "http://①②⑦.⓪.⓪.①/"),
    *("http://127。0。0。1/", "HTTP://127.0.0.1/", "https://127.0.0.1/", "http://127.0.0.1:80/"),
    *("http://169.254.169.254/latest/meta-data/", "http://2852039166/", "http://[::ffff:a9fe:a9fe]/"),
    *("http://[fe80::1]/", "http://10.0.0.1/", "http://[fd00:ec2::254]/"),
]
MALFORMED = [
    *("http://", "http:///x", "http://[::1", "http://a b/", "http://a\nb/", "http://host:99999/", "http://host:x/"),
    *("http://user@host/", "http://user:word@host/", "http://good.example\\@127.0.0.1/", "ftp://host/x", "host/x", ""),
    *("gopher://127.0.0.1:70/", "javascript:alert(1)", "http://[fe80::1%25eth0]/", "http://" + "a" * 9000),
    "http://" + "a" * 70 + ".example/",
]


@pytest.mark.parametrize("text", PUBLIC)
def test_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", PRIVATE)
def test_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@given(st.ip_addresses(v=4))
def test_addresses_within_addresses(address: ipaddress.IPv4Address) -> None:
    """Mapped and translated ones are as public as what they stand for."""
    assert is_public(ipaddress.ip_address(f"::ffff:{address}")) == is_public(address)
    assert is_public(ipaddress.ip_address(f"64:ff9b::{address}")) == is_public(address)


@pytest.mark.parametrize("url", LOOPBACK_SPELLINGS)
def test_every_spelling_of_an_address_that_is_not_public_is_refused(url: str) -> None:
    with pytest.raises(MediaError, match=r"not a public address|cannot be found"):
        asyncio.run(resolve(parse_target(url), MediaSettings()))


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed(url: str) -> None:
    with pytest.raises(MediaError):
        parse_target(url)


def test_public_addresses_are_resolved_to_themselves() -> None:
    settings = MediaSettings()
    assert asyncio.run(resolve(parse_target("https://1.1.1.1/x"), settings)) == ["1.1.1.1"]
    assert asyncio.run(resolve(parse_target("http://[2606:4700:4700::1111]/"), settings)) == ["2606:4700:4700::1111"]


def test_one_private_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers with a public and a private address."""

    def found(*_arguments: object, **_options: object) -> list[object]:
        return [(2, 1, 6, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(MediaError, match="not a public address"):
        asyncio.run(resolve(parse_target("http://both.example/"), MediaSettings()))


def test_a_dot_at_the_end_of_a_name_is_for_name_servers() -> None:
    target = parse_target("https://Example.com.:8443/x")
    assert (target.host, target.authority) == ("example.com", "example.com:8443")
    for url in ("http://./", "http://../", "http://a../"):
        with pytest.raises(MediaError):
            parse_target(url)


def test_domains() -> None:
    """Listed hosts only; they may be private, but not link-local. No other spelling of a listed host is listed."""
    settings = MediaSettings(allowed_domains=("localhost", "127.0.0.1"))
    assert set(asyncio.run(resolve(parse_target("http://LocalHost/"), settings))) <= {"127.0.0.1", "::1"}
    assert asyncio.run(resolve(parse_target("http://127.0.0.1:99/"), settings)) == ["127.0.0.1"]
    for url in ("http://2130706433/", "http://[::1]/", "http://1.1.1.1/", "http://localhost.example/", "http://127.1/"):
        with pytest.raises(MediaError, match="--allowed-media-domains"):
            asyncio.run(resolve(parse_target(url), settings))
    machine = (
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "fd00:ec2::254",
        "fd20:ce::254",
        "fd00:c1::a9fe:a9fe",
        "fd00:ec2::23",
        "::ffff:169.254.169.254",
    )
    for host in machine:
        url = f"http://[{host}]/" if ":" in host else f"http://{host}/"
        with pytest.raises(MediaError, match="not a public address"):
            asyncio.run(resolve(parse_target(url), MediaSettings(allowed_domains=machine)))


def test_what_goes_into_the_request() -> None:
    target = parse_target("https://Bücher.example:8443/a b/é?q=ü#part".replace(" ", "%20"))
    assert (target.is_https, target.host, target.port) == (True, "xn--bcher-kva.example", 8443)
    assert (target.authority, target.path) == ("xn--bcher-kva.example:8443", "/a%20b/%C3%A9?q=%C3%BC")
    assert parse_target("http://host.example").path == "/"
    assert parse_target("http://[2606:4700::1]/").authority == "[2606:4700::1]"


def test_files(tmp_path: Path) -> None:
    """Only within the folder, whatever the address looks like; links out of it are out of it."""
    folder, outside = tmp_path / "media", tmp_path / "media-secret"
    folder.mkdir()
    outside.mkdir()
    (outside / "x.png").write_bytes(b"secret")
    (folder / "a picture.png").write_bytes(b"picture")
    (folder / "out").symlink_to(outside)
    (folder / "link.png").symlink_to(outside / "x.png")
    (folder / "inner.png").symlink_to(folder / "a picture.png")
    settings = MediaSettings(local_path=str(folder))
    assert local_file(f"file://{folder}/a%20picture.png", settings) == folder / "a picture.png"
    assert local_file(f"file:{folder}/inner.png", settings) == folder / "a picture.png"
    assert local_file(f"file://localhost{folder}/inner.png", settings) == folder / "a picture.png"
    for path in ("/../media-secret/x.png", "/%2e%2e/media-secret/x.png", "/out/x.png", "/link.png", "/none.png", "\0"):
        with pytest.raises(MediaError, match="not in the folder"):
            local_file(f"file://{folder}{path}", settings)
    for url in ("file:///etc/passwd", f"file://{outside}/x.png"):
        with pytest.raises(MediaError, match="not in the folder"):
            local_file(url, settings)
    with pytest.raises(MediaError, match="malformed"):
        local_file("file://[", settings)
    with pytest.raises(MediaError, match="characters, more than the limit"):
        local_file(f"file://{folder}/{'x' * 10_000}", settings)
    with pytest.raises(MediaError, match="without a host"):
        local_file("file://host.example/x.png", settings)
    with pytest.raises(MediaError, match="--allowed-local-media-path"):
        local_file(f"file://{folder}/a%20picture.png", MediaSettings())
