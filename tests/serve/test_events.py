"""Sending a stream's events to clients that read them at once, late or never."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llmcl.serve.events import HEAD_S, ClientGoneError, EventSender

HEAD = b"headers"


class Client:
    """What was sent to it. reads: cleared while it takes nothing more."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended = False
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            self.ended |= not message["more_body"]
            await self.reads.wait()
        else:
            self.sent.append(HEAD)

    def sender(self, send_s: float = 30.0, ping_s: float = 30.0) -> EventSender:
        return EventSender(self.send, ping_s=ping_s, send_s=send_s)


def test_what_the_system_takes_is_sent_at_once() -> None:
    async def work() -> None:
        client = Client()
        async with client.sender() as sender:
            for data in (b"a", b"", b"b"):
                sender.put(data)
            assert client.sent == [HEAD, b"a", b"b"]
        assert client.sent == [HEAD, b"a", b"b", b""] and client.ended

    asyncio.run(work())


def test_the_first_events_go_out_with_the_first_token() -> None:
    async def work() -> None:
        client = Client()
        async with client.sender() as sender:
            sender.hold(b"a")
            sender.hold(b"b")
            assert not client.sent and not sender.is_begun
            sender.put(b"c")
            assert client.sent == [HEAD, b"abc"] and sender.is_begun

    asyncio.run(work())


@pytest.mark.parametrize("held", [b"", b"a"])
def test_headers_do_not_wait_long_for_a_token(held: bytes) -> None:
    async def work() -> None:
        client = Client()
        async with client.sender() as sender:
            sender.hold(held)
            while not client.sent:
                await asyncio.sleep(0.005)
            assert client.sent == [HEAD, held]
            sender.put(b"b")
            assert client.sent == [HEAD, held, b"b"]

    asyncio.run(asyncio.wait_for(work(), 20))


def test_a_stream_without_events_has_its_headers() -> None:
    async def work() -> None:
        client = Client()
        async with client.sender():
            pass
        assert client.sent == [HEAD, b""] and client.ended

    asyncio.run(work())


def test_nothing_is_sent_of_a_stream_that_fails_before_its_first_event() -> None:
    async def work() -> None:
        client = Client()
        with pytest.raises(ValueError):
            async with client.sender() as sender:
                sender.hold(b"a")
                raise ValueError
        await asyncio.sleep(2 * HEAD_S)
        assert not client.sent

    asyncio.run(work())


def test_what_a_slow_client_does_not_take_follows_in_its_order() -> None:
    async def work() -> None:
        client = Client()
        async with client.sender() as sender:
            sender.put(b"a")
            client.reads.clear()
            for data in (b"b", b"c", b"d"):
                sender.put(data)
            await asyncio.sleep(0.1)
            assert client.sent == [HEAD, b"a", b"b"]
            client.reads.set()
            await asyncio.sleep(0.1)
            sender.put(b"e")
            assert client.sent == [HEAD, b"a", b"b", b"cd", b"e"]
            client.reads.clear()
            sender.put(b"f")
            sender.put(b"g")
            asyncio.get_running_loop().call_later(0.01, client.reads.set)
        assert b"".join(client.sent[1:]) == b"abcdefg" and client.ended

    asyncio.run(work())


@pytest.mark.parametrize("at_end", [True, False])
def test_a_client_that_takes_nothing_is_gone(at_end: bool) -> None:
    async def work() -> None:
        client = Client()
        with pytest.raises(ClientGoneError):
            async with client.sender(send_s=0.02) as sender:
                client.reads.clear()
                sender.put(b"a")
                sender.put(b"b")
                if not at_end:
                    await asyncio.sleep(0.2)
                    sender.put(b"c")
        assert client.sent == [HEAD, b"a"] and not client.ended

    asyncio.run(work())


def test_a_silent_stream_is_pinged() -> None:
    async def work() -> None:
        client = Client()
        async with client.sender(ping_s=0.01) as sender:
            sender.put(b"a")
            while len(client.sent) < 5:
                await asyncio.sleep(0.005)
        assert client.sent[:5] == [HEAD, b"a", *[b": ping\n\n"] * 3]

    asyncio.run(asyncio.wait_for(work(), 30))
