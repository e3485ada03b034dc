"""Images in requests of each API, through the official clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from fake_server import FakeEngine, Running, running, served
from image_models import save_model
from image_server import ImageEngine, data_url, encoded, image_server, picture

import llmcl
from llmcl.runtime.platforms import DeviceEntry

URL = data_url(picture())
WIDE = data_url(picture(5, 1, "JPEG"), "image/jpeg")


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    with image_server() as server:
        yield server


def sizes(server: Running) -> list[tuple[int, int]]:
    assert isinstance(server.engine, ImageEngine)
    return server.engine.images()


def asked(server: Running) -> str:
    return server.engine.asked[-1][0]


def places(server: Running) -> list[int]:
    """The first token of each image in the last prompt."""
    assert isinstance(server.engine, ImageEngine)
    return [placed.first for placed in server.engine.placed()]


def image_url(url: str, **more: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(said: str) -> Any:
    return {"type": "text", "text": said}


def test_chat_completions(seeing: Running) -> None:
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="k")
    content = [text("a"), image_url(URL, detail="high"), text("b"), text("c"), image_url(WIDE)]
    answer = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": content}])
    assert sizes(seeing) == [(3, 2), (5, 1)]
    assert asked(seeing) == "[user]a(<img><img>)b\nc(<img><img>)\n[assistant]"
    assert places(seeing) == [8, 15]  # a token each for a byte and for <img>
    assert answer.usage is not None and answer.usage.prompt_tokens == len("[user]a(12)b\nc(12)\n[assistant]")


def test_responses_and_those_that_go_on(seeing: Running) -> None:
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="k")
    part = {"type": "input_image", "image_url": URL, "detail": "auto"}
    first = client.responses.create(
        model="fake", input=[{"role": "user", "content": [part, {"type": "input_text", "text": "a"}]}]
    )
    assert sizes(seeing) == [(3, 2)] and asked(seeing) == "[user](<img><img>)a\n[assistant]"
    client.responses.create(model="fake", input="b", previous_response_id=first.id)
    assert sizes(seeing) == [(3, 2)]
    assert asked(seeing) == "[user](<img><img>)a\n[assistant](<img><img>)a\n[user]b\n[assistant]"
    output = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]
    output += [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "r"}, part]}]
    client.responses.create(model="fake", input=output)
    assert asked(seeing) == "[assistant]<f{}>\n[tool]r\n[user](<img><img>)\n[assistant]" and sizes(seeing) == [(3, 2)]


def test_messages(seeing: Running) -> None:
    client = anthropic.Anthropic(base_url=seeing.url, api_key="k")
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture())}
    image: Any = {"type": "image", "source": source}
    said: Any = [{"role": "user", "content": [image, text("a")]}]
    answer = client.messages.create(model="fake", max_tokens=9, messages=said)
    assert sizes(seeing) == [(3, 2)] and asked(seeing) == "[user](<img><img>)a\n[assistant]"
    assert client.messages.count_tokens(model="fake", messages=said).input_tokens == answer.usage.input_tokens
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("r"), image]}
    said += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result, text("b")]}]
    client.messages.create(model="fake", max_tokens=9, messages=said)
    assert asked(seeing).endswith("[assistant]<f{}>\n[tool]r\n[user](<img><img>)b\n[assistant]")
    assert sizes(seeing) == [(3, 2)] * 2


def test_ollama(seeing: Running) -> None:
    client = ollama.Client(seeing.url)
    client.chat("fake", [{"role": "user", "content": "a", "images": [picture(), picture(5, 1)]}])
    assert sizes(seeing) == [(3, 2), (5, 1)] and asked(seeing) == "[user](<img><img>)(<img><img>)a\n[assistant]"
    answer = client.generate("fake", "b", images=[picture()], system="s")
    assert sizes(seeing) == [(3, 2)] and asked(seeing) == "[system]s\n[user](<img><img>)b\n[assistant]"
    assert answer.context is None  # token ids would not tell the image
    context = client.generate("fake", "a").context
    client.generate("fake", "b", images=[picture()], context=context)
    begin = len(context or ()) + len("[user](")
    assert places(seeing) == [begin]
    assert "vision" in (client.show("fake").capabilities or ())


def test_an_image_keeps_its_place_whatever_the_text_says(seeing: Running) -> None:
    """Also if the text holds a marker or an image token."""
    content = [text("<img> <picture>"), image_url(URL), text("<img>")]
    said = [{"role": "system", "content": "<picture>"}, {"role": "user", "content": content}]
    assert seeing.post("/v1/chat/completions", {"messages": said}).status_code == 200
    assert asked(seeing) == "[system]<picture>\n[user]<img> <picture>(<img><img>)<img>\n[assistant]"
    begin = len("[system]<picture>\n[user]X <picture>(")
    assert places(seeing) == [begin]


def test_the_server_says_that_it_takes_images(seeing: Running, shared: Running) -> None:
    for server, takes in (seeing, True), (shared, False):
        assert server.http.get("/props").json()["modalities"] == {"vision": takes, "audio": False}
        (model,) = server.http.get("/v1/models").json()["data"]
        assert model.get("capabilities") == (["completion", "multimodal"] if takes else None)


def test_apply_template_shows_a_marker(seeing: Running) -> None:
    said = [{"role": "user", "content": [image_url(URL)]}]
    assert seeing.post("/apply-template", {"messages": said}).json() == {"prompt": "[user]<picture>\n[assistant]"}


USER: Any = {"role": "user"}
WITH_IMAGES: dict[str, tuple[Any, str]] = {
    "/v1/chat/completions": ({"messages": [USER | {"content": [image_url(URL)]}]}, "messages[0].content[0]"),
    "/apply-template": ({"messages": [USER | {"content": [image_url(URL)]}]}, "messages[0].content[0]"),
    "/v1/responses": (
        {"input": [USER | {"content": [{"type": "input_image", "image_url": URL}]}]},
        "input[0].content[0]",
    ),
    "/v1/messages": (
        {
            "max_tokens": 1,
            "messages": [
                USER | {"content": [text("a"), {"type": "image", "source": {"type": "base64", "data": encoded(b"x")}}]}
            ],
        },
        "messages[0].content[1]",
    ),
    "/v1/messages/count_tokens": (
        {"messages": [USER | {"content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}]},
        "messages[0].content[0]",
    ),
    "/api/chat": ({"messages": [USER | {"content": "a", "images": [encoded(b"x")]}]}, "messages[0].images[0]"),
    "/api/generate": ({"prompt": "a", "images": [encoded(b"x")]}, "images[0]"),
}


def message_of(answer: Any) -> str:
    error = answer.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("path", WITH_IMAGES)
def test_a_model_without_vision_takes_none(path: str, shared: Running) -> None:
    body, place = WITH_IMAGES[path]
    answer = shared.post(path, body)
    assert answer.status_code == 400 and message_of(answer).startswith(f"{place}: fake takes no images")


OTHERS: dict[str, tuple[Any, str, str]] = {
    "no Base64": (image_url("data:image/png;base64,###"), "", "not Base64"),
    "not in Base64": (image_url("data:image/svg+xml,<svg/>"), "", "expected a data URL"),
    "no image": (image_url(data_url(b"%PDF-1.7 ")), "", "picture"),
    "empty": (image_url(data_url(b"")), "", "empty"),
    "cut off": (image_url(data_url(picture(400, 400, "JPEG")[:-300])), "", "damaged"),
    "a file": (image_url("file:///etc/passwd"), "", "expected a data URL"),
    "elsewhere": (image_url("https://example.org/a.png"), "", "--allow-remote-images example.org"),
    "no address": ({"type": "image_url"}, ".image_url", "is missing"),
    "a number": ({"type": "image_url", "image_url": {"url": 1}}, ".image_url.url", "got 1"),
    "a detail": (image_url(URL, detail="huge"), ".image_url.detail", "one of auto"),
    "a kept file": ({"type": "input_image", "file_id": "f"}, ".file_id", "not supported"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_images_are_refused_by_place(name: str, seeing: Running) -> None:
    part, field, word = OTHERS[name]
    answer = seeing.post("/v1/chat/completions", {"messages": [USER | {"content": "a"}, USER | {"content": [part]}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == f"messages[1].content[0]{field}", error
    assert error["message"].startswith("messages[1].content[0]") and word in error["message"], error


def test_too_many_images(seeing: Running) -> None:
    content = [image_url(URL)] * 101
    answer = seeing.post("/v1/chat/completions", {"messages": [USER | {"content": content}]})
    assert answer.status_code == 400 and "at most 100" in message_of(answer)


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_other_roles_have_none(role: str, seeing: Running) -> None:
    said = [{"role": role, "content": [image_url(URL)]}, USER | {"content": "a"}]
    answer = seeing.post("/v1/chat/completions", {"messages": said})
    assert answer.status_code == 400 and "only text is" in message_of(answer)


def test_more_images_than_the_context_are_not_read_to_the_end() -> None:
    with image_server() as server:
        served = server.service.served()
        object.__setattr__(served, "max_context", 5)
        answer = server.post("/v1/chat/completions", {"messages": [USER | {"content": [image_url(URL)] * 4}]})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
        assert "at least 6 tokens" in message_of(answer)


def test_a_model_with_vision_takes_larger_bodies() -> None:
    """A conversation brings all its images again."""
    large = data_url(picture() + bytes(3000))
    limits = {"max_body_bytes": 2000, "max_image_body_bytes": 5000}
    with image_server(**limits) as server, running(**limits) as other:
        for each, status in (server, 200), (other, 413):
            answer = each.post("/v1/chat/completions", {"messages": [USER | {"content": [image_url(large)]}]})
            assert answer.status_code == status, answer.text
        assert server.post("/v1/completions", {"prompt": "x" * 3000}).status_code == 413


def test_an_image_that_comes_again_is_not_computed_again() -> None:
    with image_server() as server:
        assert isinstance(server.engine, ImageEngine)
        said = [USER | {"content": [image_url(URL), image_url(WIDE), image_url(URL)]}]
        for _ in range(2):
            assert server.post("/v1/chat/completions", {"messages": said}).status_code == 200
            assert sizes(server) == [(3, 2), (5, 1), (3, 2)]
        assert server.engine.tower.ran == [(3, 2), (5, 1)]


def test_counting_does_not_run_the_tower() -> None:
    with image_server() as server:
        assert isinstance(server.engine, ImageEngine)
        source = {"type": "base64", "data": encoded(picture())}
        said = [USER | {"content": [{"type": "image", "source": source}]}]
        counted = server.post("/v1/messages/count_tokens", {"messages": said}).json()
        assert counted == {"input_tokens": len("[user](12)\n[assistant]")} and not server.engine.tower.ran


# SmolVLM2's: a text that is no list of parts is lost.
PARTS_ALONE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<picture>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            PARTS_ALONE,
            "<|im_start|>System: s<end_of_utterance>\nUser:(<img><img>)a<end_of_utterance>\nAssistant:",
        ),
        ("{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}", "<system>s<user>(<img><img>)\na"),
    ],
    ids=["parts alone", "texts alone"],
)
def test_templates_that_know_one_form(template: str, expected: str) -> None:
    said = [{"role": "system", "content": "s"}, USER | {"content": [image_url(URL), text("a")]}]
    with image_server(template) as server:
        assert server.post("/v1/chat/completions", {"messages": said}).status_code == 200
        assert asked(server) == expected
        if template is PARTS_ALONE:
            server.chat("b")
            assert asked(server) == "<|im_start|>User: b<end_of_utterance>\nAssistant:"


def test_a_tokenizer_without_the_image_token() -> None:
    """As in GGUF files of Gemma 3: another token holds the place."""
    with image_server(token="<pad>") as server:
        content = [text("<pad>"), image_url(URL)]
        assert server.post("/v1/chat/completions", {"messages": [USER | {"content": content}]}).status_code == 200
        assert asked(server) == "[user]<pad>(<pad><pad>)\n[assistant]" and places(server) == [len("[user]X(")]


@pytest.mark.slow
def test_a_models_own_tower(default_entry: DeviceEntry, tmp_path: Path) -> None:
    """The server's answer is the one of `generate`; an image sent again is found in the cache."""
    folder = save_model(tmp_path / "smolvlm", "smolvlm")
    settings: dict[str, Any] = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
    with llmcl.load(str(folder), device=default_entry.index, dtype="float32", max_context=512) as llm:
        alone = [llm.generate("What?", images=[picture(60, size)], **settings) for size in (40, 41)]
        stand_in = FakeEngine(llm.tokenizer)
        with llm.engine(max_sequences=2) as engine, running(stand_in, loaded=False) as server:
            model = served(stand_in, max_context=engine.max_context)
            object.__setattr__(model, "engine", engine)
            server.service.ready(replace(model, images=llm.images.reader()))
            for size, expected in ((40, alone[0]), (41, alone[1]), (40, alone[0])):
                content = [image_url(data_url(picture(60, size))), text("What?")]
                body = {"messages": [{"role": "user", "content": content}], **settings}
                answer = server.post("/v1/chat/completions", body).json()
                assert answer["choices"][0]["message"]["content"] == expected.text
                assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
