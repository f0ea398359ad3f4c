"""Which hosts and files media may come from.

A client that names an address makes this server connect to it. By default only public addresses are connected to:
whoever may send requests must not reach what this machine alone can reach. It is the address that counts, never its
spelling: names are resolved first, each address they have is checked, and the caller connects to the one that was
checked, so that a second answer of the name server changes nothing.
"""

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.name_lookup import look_up
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.processing.shown import shown

_DEFAULT_PORTS = {"http": 80, "https": 443}
_MAX_URL_CHARS = 8192
_FORBIDDEN_CHARS = re.compile(r"[\x00-\x20\x7f\\]")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LINK_LOCAL_V4 = ipaddress.IPv4Network("169.254.0.0/16")
_CLOUD_SERVICES = frozenset(
    ipaddress.ip_address(each)
    for each in (
        "168.63.129.16",
        "100.100.100.200",
        *("fd00:ec2::23", "fd00:ec2::253", "fd00:ec2::254"),
        "fd20:ce::254",
        "fd00:c1::a9fe:a9fe",
    )
)
"""Azure's, which is in a public network (learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16),
Alibaba's, and those of Amazon, Google and Oracle that are not link-local."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a request for media."""

    is_https: bool
    host: str
    """As certificates spell it: ASCII, no brackets."""
    port: int
    authority: str
    """The value of the header Host."""
    path: str
    """With the query, ASCII."""


def is_public(address: IPAddress) -> bool:
    """Whether `address` is one of the internet's, reachable by everyone. Addresses within addresses count as both."""
    if address in _CLOUD_SERVICES:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not (address.is_multicast or address.is_reserved)
    inner = _inner(address)
    if inner is not None:
        return is_public(inner)
    return address in _GLOBAL_UNICAST and address.is_global and address.sixtofour is None and address.teredo is None


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that packets to this one end at, for a mapped one or one behind a translator."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None


def _is_of_the_machine(address: IPAddress) -> bool:
    """Link-local, or else where a cloud hands out credentials of the machine."""
    inner = _inner(address) if isinstance(address, ipaddress.IPv6Address) else address
    if address in _CLOUD_SERVICES or inner in _CLOUD_SERVICES:
        return True
    return address.is_link_local if inner is None else inner in _LINK_LOCAL_V4


def parse_target(url: str) -> Target:
    """An http or https address, taken apart. Raises MediaError."""
    parts = _split(url)
    if parts.scheme not in _DEFAULT_PORTS:
        raise MediaError(f"media addresses begin with http:, https: or data:, got {shown(url)}")
    if parts.username is not None or parts.password is not None:
        raise MediaError("media addresses with a user name or password are not supported")
    try:
        port, host = parts.port, parts.hostname or ""
    except ValueError as error:
        raise MediaError(f"the media address {shown(url)} is malformed: {error}") from error
    if not host or "%" in host:  # zones of link-local addresses are written with a %
        raise MediaError(f"the media address {shown(url)} names no host")
    try:
        # A dot at the end is for name servers; certificates and web servers know the name without.
        name = host if ":" in host else host.removesuffix(".").encode("idna").decode("ascii").lower()
    except UnicodeError as error:
        raise MediaError(f"the media address {shown(url)} has a malformed host name") from error
    if not name or name.endswith("."):
        raise MediaError(f"the media address {shown(url)} names no host")
    default = _DEFAULT_PORTS[parts.scheme]
    port = default if port is None else port
    shown_host = f"[{name}]" if ":" in name else name
    return Target(
        is_https=parts.scheme == "https",
        host=name,
        port=port,
        authority=shown_host if port == default else f"{shown_host}:{port}",
        path=_ascii(parts.path or "/") + (f"?{_ascii(parts.query)}" if parts.query else ""),
    )


def _check_length(url: str) -> None:
    """Before it is split: `urlsplit` remembers what it was given."""
    if len(url) > _MAX_URL_CHARS:
        raise MediaError(f"the media address has {len(url)} characters, more than the limit of {_MAX_URL_CHARS}")


def _split(url: str) -> SplitResult:
    _check_length(url)
    if _FORBIDDEN_CHARS.search(url):
        raise MediaError(
            "media addresses have no white space (%20 stands for a space), backslashes or control characters"
        )
    try:
        return urlsplit(url)
    except ValueError as error:
        raise MediaError(f"the media address {shown(url)} is malformed: {error}") from error


def _ascii(text: str) -> str:
    return "".join(char if char.isascii() else "".join(f"%{byte:02X}" for byte in _utf8(char)) for char in text)


def _utf8(char: str) -> bytes:
    return char.encode("utf-8", "replace")


def check_domain(target: Target, settings: MediaSettings) -> None:
    """Raises MediaError for a host that --allowed-media-domains leaves out."""
    if settings.allowed_domains and target.host not in settings.allowed_domains:
        raise MediaError(f"media from {shown(target.host)} are not allowed: it is not in --allowed-media-domains")


async def resolve(target: Target, settings: MediaSettings) -> list[str]:
    """The addresses of the target's host, all of them checked. Connect to these and to nothing else.

    Raises MediaError if the host may not be asked, or has no address, or one that is not public. A host that
    --allowed-media-domains names may be in a private network, but never be link-local or a cloud's service of this
    machine.
    """
    check_domain(target, settings)
    try:
        texts = await look_up(target.host, target.port)
    except (OSError, UnicodeError) as error:
        raise MediaError(f"the host {shown(target.host)} of the media address cannot be found") from error
    addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
    listed = bool(settings.allowed_domains)
    if not addresses or any(_is_of_the_machine(each) or not (listed or is_public(each)) for each in addresses):
        raise MediaError(
            f"media from {shown(target.host)} are not allowed: it is not a public address; "
            "--allowed-media-domains names hosts of private networks that may be asked"
        )
    return [str(address) for address in addresses]


def local_file(url: str, settings: MediaSettings) -> Path:
    """The file that a file: address names, links resolved.

    Raises MediaError unless it is in the folder of --allowed-local-media-path.
    """
    if settings.local_path is None:
        raise MediaError("file: addresses are not allowed without --allowed-local-media-path")
    _check_length(url)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise MediaError("the file: address is malformed") from error
    if parts.netloc not in ("", "localhost"):
        raise MediaError("a file: address names a file of the server, without a host")
    refused = MediaError("the file is not in the folder of --allowed-local-media-path, or does not exist")
    root = os.path.realpath(settings.local_path)
    try:
        path = os.path.realpath(unquote(parts.path), strict=True)
    except (OSError, ValueError) as error:
        raise refused from error
    if os.path.commonpath([root, path]) != root:
        raise refused
    return Path(path)
