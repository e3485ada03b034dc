"""Server settings: address, access, limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from llmcl.errors import UsageError, shown

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class Settings:
    """Times are in seconds, sizes in bytes. Raises UsageError for settings that would admit strangers by accident."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    no_auth: bool = False
    cors_origins: tuple[str, ...] = ()
    image_hosts: tuple[str, ...] = ()  # hosts that images may be fetched from, see remote_images.parse_hosts
    max_sequences: int = 8  # extended at once by the engine
    max_queue: int = 64  # further sequences that may wait
    state_dir: Path | None = None  # keeps responses between runs
    lora_updates: bool = False  # clients may load and unload adapters
    log_format: str = "text"
    quiet: bool = False
    drain_s: float = 30.0
    ping_s: float = 10.0  # silence before a stream sends a sign of life
    header_s: float = 20.0  # limit for receiving the headers
    body_s: float = 60.0  # limit for receiving the body
    send_s: float = 60.0  # limit for a client to accept an event
    count_s: float = 30.0  # limit for counting tokens
    linger_s: float = 10.0  # after a refusal, data is still read and dropped: some clients read only after sending
    idle_s: int = 75
    socket_s: float = 3600.0  # longest life of a WebSocket, as at OpenAI
    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 16 << 20
    max_image_body_bytes: int = 64 << 20  # with images: a conversation brings all of them again

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise UsageError("an API key is empty or has characters other than visible ASCII ones; give another")
        if self.api_keys and self.no_auth:
            raise UsageError("--no-auth and --api-key contradict each other: give one of the two")
        if not self.api_keys and not self.no_auth and not self.is_local:
            raise UsageError(
                f"--host {shown(self.host)} can be reached from other machines, and without a key anyone there could "
                "use the model: give --api-key KEY, or --no-auth if that is meant"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    @property
    def max_in_flight(self) -> int:
        return self.max_sequences + self.max_queue


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Returns whether a name or an address without a port is a loopback address."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
