"""How a server is set up: where it listens, who may use it, how much it takes on."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from llmcl.errors import UsageError, shown

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class Settings:
    """Times in seconds, sizes in bytes.

    max_sequences: that the engine extends at once. max_queue: further ones that may wait. ping_s: a stream says that it
    lives after so long a silence. header_s, body_s: a client that takes longer to send its request is cut off. send_s:
    and so is one that takes longer to receive an event. count_s: the longest wait for a count of tokens. linger_s: what
    a client goes on to send after a refusal is read and forgotten for so long: it reads the refusal only then.

    Raises UsageError for settings that would let strangers in unasked.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    no_auth: bool = False
    cors_origins: tuple[str, ...] = ()
    max_sequences: int = 8
    max_queue: int = 64
    log_format: str = "text"
    quiet: bool = False
    drain_s: float = 30.0
    ping_s: float = 10.0
    header_s: float = 20.0
    body_s: float = 60.0
    send_s: float = 60.0
    count_s: float = 30.0
    linger_s: float = 10.0
    idle_s: int = 75
    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 16 << 20

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
    """Whether a name or an address without a port is this machine's own."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
