"""Fetches images from the hosts that `--allow-remote-images` lists.

A request names the address, so it must not reach anything else that this machine can reach: a listed name must resolve
to public addresses only, the connection goes to the address that was checked, and redirects are checked alike.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, urljoin, urlsplit

import anyio
import h11

from llmcl.errors import UsageError, one_line, shown

OPTION = "--allow-remote-images"
MAX_BYTES = 20 << 20
FETCH_S = 10.0
MAX_REDIRECTS = 3
MAX_URL = 4096
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = {301, 302, 303, 307, 308}
_READ_BYTES = 1 << 16
# A host in a list: a name, an IPv4 address, or an IPv6 address in brackets; then a port.
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class FetchError(Exception):
    """An image cannot be fetched. The message tells the client why."""


@dataclass(frozen=True)
class _Target:
    url: str
    is_tls: bool
    host: str
    port: int
    path: str


def parse_hosts(text: str | None) -> tuple[str, ...]:
    """Parses HOST[:PORT][,HOST...]. Raises UsageError for anything else."""
    hosts = [host.strip() for host in (text or "").split(",")] if text is not None else []
    for host in hosts:
        match = _HOST.fullmatch(host)
        if match is None or (match["port"] is not None and not 0 < int(match["port"]) < 1 << 16):
            raise UsageError(
                f"{OPTION} {shown(text)}: {shown(host)} is no host; expected names or addresses such as "
                "images.example.org,192.0.2.7:8000"
            )
        if match["name"].startswith("[") and _address(match["name"][1:-1]) is None:
            raise UsageError(f"{OPTION} {shown(text)}: {shown(host)} is no IPv6 address; expected [2001:db8::7]")
    return tuple(_listed(host) for host in hosts)


def _listed(host: str) -> str:
    match = _HOST.fullmatch(host)
    assert match is not None
    return _normal(match["name"]) + ("" if match["port"] is None else f":{int(match['port'])}")


def _normal(host: str) -> str:
    """Writes a host in one way: names in lower case, addresses in their short form, IPv6 in brackets."""
    bare = host.strip("[]").rstrip(".").lower()
    if (address := _address(bare)) is None:
        return bare
    return f"[{address}]" if address.version == 6 else str(address)


def _address(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


async def fetch(url: str, hosts: Iterable[str]) -> bytes:
    """Returns the bytes behind an address. hosts: from `parse_hosts`. Raises FetchError."""
    allowed = frozenset(hosts)
    try:
        with anyio.fail_after(FETCH_S):
            for _ in range(MAX_REDIRECTS + 1):
                target = _target(url, allowed)
                data, location = await _get(target, await _resolve(target))
                if location is None:
                    return data
                url = urljoin(url, location)
        raise FetchError(f"{one_line(url, 80)}: more than {MAX_REDIRECTS} redirects")
    except TimeoutError:
        raise FetchError(f"{one_line(url, 80)}: was not fetched within {FETCH_S:g} s; send it as a data URL") from None
    except (OSError, EOFError, ValueError, h11.RemoteProtocolError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
        raise FetchError(
            f"{one_line(url, 80)}: cannot be fetched ({one_line(reason, 80)}); send it as a data URL"
        ) from None


def _target(url: str, allowed: frozenset[str]) -> _Target:
    """Parses an address and checks its host against the list."""
    where = one_line(url, 80)
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or any(c in url for c in ' \\"<>'):
        raise FetchError(f"{where}: is not an address; expected up to {MAX_URL} ASCII characters without spaces")
    parts: SplitResult = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise FetchError(f"{where}: expected a data URL, or an address with http or https")
    if "@" in parts.netloc:
        raise FetchError(f"{where}: names a user; leave it out")
    host, port = _normal(parts.hostname), parts.port or _PORTS[parts.scheme]
    if f"{host}:{port}" not in allowed and not (host in allowed and port == _PORTS[parts.scheme]):
        named = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
        raise FetchError(
            f"{where}: images are not fetched from {one_line(named, 80)}; send a data URL, or start the server with "
            f"{OPTION} {one_line(named, 80)}"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return _Target(url, parts.scheme == "https", host, port, path)


async def _resolve(target: _Target) -> str:
    """Returns the address to connect to. A listed address may be private, a name's addresses must all be public."""
    if _address(target.host.strip("[]")) is not None:
        return target.host.strip("[]")
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = [str(answer[4][0]) for answer in answers]
    for address in addresses:
        if not is_public(address):
            raise FetchError(f"{target.host} has the address {address}, which is not public; allow the address itself")
    if not addresses:
        raise FetchError(f"{target.host} has no address; send a data URL")
    return addresses[0]


def is_public(text: str) -> bool:
    """Returns whether an address belongs to the public internet, also if it carries an IPv4 address inside."""
    address = _address(text.partition("%")[0])
    if address is None or "%" in text:
        return False
    if address.version == 6:
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast


async def _get(target: _Target, address: str) -> tuple[bytes, str | None]:
    """Returns the response's body, or where a redirect leads."""
    tls = _tls() if target.is_tls else None
    name = target.host.strip("[]") if target.is_tls else None
    reader, writer = await asyncio.open_connection(address, target.port, ssl=tls, server_hostname=name)
    try:
        connection = h11.Connection(h11.CLIENT)
        default = target.port == _PORTS["https" if target.is_tls else "http"]
        headers = [
            ("host", target.host if default else f"{target.host}:{target.port}"),
            ("accept", "image/*"),
            ("accept-encoding", "identity"),
            ("user-agent", "llmcl"),
            ("connection", "close"),
        ]
        writer.write(connection.send(h11.Request(method="GET", target=target.path, headers=headers)) or b"")
        writer.write(connection.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return await _read(connection, reader, target.url)
    finally:
        writer.close()
        with suppress(OSError):
            writer.transport.abort()


async def _read(connection: h11.Connection, reader: asyncio.StreamReader, url: str) -> tuple[bytes, str | None]:
    data = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            headers = {name: value.decode("latin-1") for name, value in event.headers}
            if event.status_code in _REDIRECTS and b"location" in headers:
                return b"", headers[b"location"]
            if event.status_code != 200:
                raise FetchError(f"{one_line(url, 80)}: the host answers with status {event.status_code}, expected 200")
            if int(headers.get(b"content-length", "0")) > MAX_BYTES:
                raise _too_large(url)
        elif isinstance(event, h11.Data):
            data += event.data
            if len(data) > MAX_BYTES:
                raise _too_large(url)
        elif isinstance(event, h11.EndOfMessage):
            return bytes(data), None
        elif isinstance(event, h11.ConnectionClosed):
            raise EOFError


def _too_large(url: str) -> FetchError:
    return FetchError(f"{one_line(url, 80)}: has more than {MAX_BYTES >> 20} MiB; send a smaller image")


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
