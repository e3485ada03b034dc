"""--state-dir: conversations of /v1/responses go on after a restart, and nothing of others is believed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from fake_server import Running, running

from llmcl.errors import UsageError
from llmcl.serve.kept import Kept, KeptResponse
from llmcl.serve.state_dir import StateDir

NAME = "resp_" + "0" * 24
KEPT = {
    "messages": [{"role": "user", "content": "one"}],
    "response": {"id": NAME, "output": []},
    "items": [{"type": "message", "id": "msg_1"}],
}


def openai_client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_conversation_survives_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "state"
    with running(state_dir=folder) as server, openai_client(server) as client:
        first = client.responses.create(model="any", input="Grüße 🙂", instructions="Be brief.")
        second = client.responses.create(model="any", input="two", previous_response_id=first.id)
        client.responses.create(model="any", input="three", previous_response_id=second.id, store=False)
    assert names(folder) == {f"{first.id}.json", f"{second.id}.json"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    with running(state_dir=folder) as server, openai_client(server) as client:
        assert client.responses.retrieve(second.id) == second
        items = [*client.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in items] == ["message"] * 3
        client.responses.create(model="any", input="four", previous_response_id=second.id, store=False)
        asked = server.engine.asked[-1][0]
        assert asked.startswith("[user]Grüße 🙂\n") and asked.endswith(
            "[user]two\n[assistant]two\n[user]four\n[assistant]"
        )
        client.responses.delete(first.id)
    assert names(folder) == {f"{second.id}.json"}


def kept_in(folder: Path, most: int = 3, most_characters: int = 5000) -> Kept:
    return Kept(most, most_characters, StateDir(folder))


def test_files_are_bounded(tmp_path: Path) -> None:
    def response(n: int, size: int = 100) -> tuple[str, KeptResponse]:
        name = f"resp_{n:024x}"
        return name, KeptResponse([{"role": "user", "content": "\ud83d" * size}], {"id": name, "output": []})

    kept = kept_in(tmp_path)
    for n in range(5):
        kept.add(*response(n))
    kept.add(*response(5, 6000))  # above the limit
    kept.close()
    assert names(tmp_path) == {f"{response(n)[0]}.json" for n in (2, 3, 4)}
    for n in 2, 3, 4:  # the fourth was written first
        os.utime(tmp_path / f"{response(n)[0]}.json", (n % 4, n % 4))
    kept = kept_in(tmp_path, most=2)
    kept.close()
    assert len(kept) == 2 and kept.get(response(4)[0]) is None
    assert names(tmp_path) == {f"{response(n)[0]}.json" for n in (2, 3)}
    kept = kept_in(tmp_path, most_characters=1000)
    kept.close()
    assert len(kept) == len(names(tmp_path)) == 1
    kept = kept_in(tmp_path, most_characters=100)
    kept.close()
    assert len(kept) == len(names(tmp_path)) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        json.dumps(KEPT)[:-9],
        "[]",
        "[" * 100_000,
        json.dumps(KEPT | {"response": {"id": "resp_" + "1" * 24, "output": []}}),
        json.dumps(KEPT | {"response": {"id": NAME}}),
        json.dumps(KEPT | {"messages": [5]}),
        json.dumps(KEPT | {"items": [{}]}),
        json.dumps({name: KEPT[name] for name in ("messages", "response")}),
    ],
    ids=["empty", "cut", "list", "nested", "other name", "no output", "no message", "no id", "no items"],
)
def test_a_damaged_file_is_skipped(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"{NAME}.json"
    path.write_text(json.dumps(KEPT))
    assert len(kept_in(tmp_path)) == 1 and not caplog.text
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        kept = kept_in(tmp_path)
    kept.close()
    assert len(kept) == 0 and f"{NAME}.json is not used: it is damaged" in caplog.text
    assert path.read_text() == text


def test_files_of_others_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"{NAME}.json"
    path.write_text(json.dumps(KEPT))
    path.chmod(0o622)
    os.mkfifo(tmp_path / f"resp_{'1' * 24}.json")  # opening it would block
    (tmp_path / f"resp_{'2' * 24}.json").symlink_to("nowhere")
    (tmp_path / "notes.json").write_text("mine")
    before = names(tmp_path)
    with caplog.at_level(logging.WARNING):
        kept = kept_in(tmp_path)
    kept.close()
    assert len(kept) == 0 and names(tmp_path) == before
    assert "others may write to it" in caplog.text and "no plain file" in caplog.text


def test_a_folder_of_others_is_refused(tmp_path: Path, invoke: Callable[..., int]) -> None:
    folder = tmp_path / "open"
    for mode in 0o777, 0o770, 0o1777:
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
        with pytest.raises(UsageError, match="others may write to it; take others' rights away"):
            StateDir(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="File exists; give another folder"):
        StateDir(tmp_path / "file")
    assert invoke("serve", "-m", "smollm2", "--state-dir", str(folder)) == 2


def test_a_full_disk_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmcl.serve.state_dir.write_atomically", full)
    with running(state_dir=tmp_path) as server:
        for _ in range(2):
            assert server.post("/v1/responses", {"input": "Hi"}).status_code == 200
    assert caplog.text.count("responses cannot be kept there (No space left on device)") == 1
    assert names(tmp_path) == set()
