"""Adapters over HTTP, as vLLM's and llama-server's clients choose, list, load and unload them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_server import Running, running, served

from llmcl.checkpoint.lora import Adapter, LowRank
from llmcl.errors import CheckpointError
from llmcl.models.adapters import AdapterSet


class FakeLoras:
    def __init__(self) -> None:
        self.loras = AdapterSet()
        self.load_lora("fr=adapters/fr")
        self.load_lora("de=adapters/de")

    def load_lora(self, lora: str) -> str:
        name, _, path = lora.partition("=")
        if path == "missing":
            raise CheckpointError("adapter missing: there is no such file or folder")
        low = LowRank(np.zeros((8, 16), np.float32), np.zeros((16, 8), np.float32))
        self.loras.loaded[name] = Adapter(name, path, {"w": low}, name.encode())
        return name

    def unload_lora(self, name: str) -> None:
        self.loras.unload(name)


@pytest.fixture
def server() -> Iterator[Running]:
    with running(lora_updates=True) as server:
        server.service.ready(replace(served(server.engine), loras=FakeLoras()))
        yield server


def asked(server: Running, **body: Any) -> Any:
    """What the engine was asked for as `lora`."""
    answer = server.chat("a", max_tokens=1, **body)
    assert answer.status_code == 200, answer.text
    return server.engine.asked[-1][1].get("lora")


def test_a_request_chooses_adapters(server: Running) -> None:
    assert asked(server, model="fake") is asked(server, model="gpt-4o") is asked(server) is None
    assert asked(server, model="fr") == asked(server, model="fake:fr") == "fr"
    assert asked(server, lora=[{"id": 1, "scale": 0.5}]) == {"de": 0.5}
    assert asked(server, lora=[{"id": 0}, {"id": "de", "scale": -1}]) == {"fr": 1.0, "de": -1.0}
    answer = server.post("/v1/completions", {"prompt": "a", "model": "fr", "max_tokens": 1})
    assert answer.status_code == 200 and server.engine.asked[-1][1]["lora"] == "fr"


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        ({"model": "fake:es"}, 404, "there is no adapter 'es'; loaded are fr, de"),
        ({"lora": [{"id": 2}]}, 400, "loaded are 0 (fr), 1 (de)"),
        ({"lora": [{"id": True}]}, 400, "lora[0].id"),
        ({"lora": [{"id": 0, "scale": "much"}]}, 400, "lora[0].scale"),
        ({"lora": {"id": 0}}, 400, "expected a list"),
        ({"lora": [{"id": 0}], "model": "de"}, 400, "does not go with the adapter de"),
    ],
)
def test_a_senseless_choice_is_refused(server: Running, body: dict[str, Any], status: int, what: str) -> None:
    answer = server.post("/v1/completions", {"prompt": "a"} | body)
    assert answer.status_code == status and what in answer.json()["error"]["message"], answer.text


def test_adapters_are_listed_as_models_and_with_scales(server: Running) -> None:
    models = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["fake", "fr", "de"] and models[1]["parent"] == "fake"
    assert server.http.get("/v1/models/de").json()["id"] == "de"
    listed = server.post("/lora-adapters", [{"id": 1, "scale": 0.5}]).json()
    assert listed == server.http.get("/lora-adapters").json()
    assert [(each["id"], each["path"], each["scale"]) for each in listed] == [
        (0, "adapters/fr", 0.0),
        (1, "adapters/de", 0.5),
    ]
    assert server.post("/lora-adapters", {"id": 1}).status_code == 400


def test_adapters_are_loaded_and_unloaded(server: Running) -> None:
    es = {"lora_name": "es", "lora_path": "adapters/es"}
    assert server.post("/v1/load_lora_adapter", es).text == "Success: LoRA adapter 'es' added successfully."
    assert asked(server, model="es") == "es"
    assert server.post("/v1/load_lora_adapter", es).status_code == 400
    assert server.post("/v1/load_lora_adapter", es | {"load_inplace": True}).status_code == 200
    missing = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "missing"})
    assert missing.status_code == 400 and "no such file" in missing.json()["error"]["message"]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "es"}).status_code == 200
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "es"}).status_code == 404
    assert server.post("/v1/load_lora_adapter", {"lora_name": "x"}).status_code == 400
    assert server.post("/v1/load_lora_adapter", {"lora_name": "../x", "lora_path": "x"}).status_code == 400


def test_clients_load_nothing_unless_allowed() -> None:
    with running() as server:
        server.service.ready(replace(served(server.engine), loras=FakeLoras()))
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "es", "lora_path": "/etc"})
        assert answer.status_code == 403 and "--allow-lora-updates" in answer.json()["error"]["message"]
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "fr"}).status_code == 403
