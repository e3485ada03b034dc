"""Reads requests from a JSON Lines file and writes their results to another file, which may already hold some."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from llmcl.engine.engine import Engine, Question
from llmcl.engine.generation import ANSWER_OPTIONS, Piece
from llmcl.errors import LlmclError, UsageError, one_line, shown
from llmcl.progress import ANSWERING, Progress
from llmcl.sampling_options import PARAMETERS
from llmcl.tools import json_text

OPTIONS = tuple(name for name in ANSWER_OPTIONS if name != "logits_processor")  # JSON has no functions
FIELDS = "prompt", "messages", "id", "raw", "system_prompt", "priority", *OPTIONS
MATCH_FIELDS = "schema", "regex", "grammar", "choices"
MAX_SEED = (1 << 64) - 1

Key = tuple[str, str | int]
"""By which a request and its result are known: ("id", its id), or ("index", its number in the file)."""


@dataclass(frozen=True)
class FileRequest:
    """A line in the request file."""

    index: int  # the request's number, from 0
    where: str  # file and line, for messages
    given: Mapping[str, Any]

    @property
    def key(self) -> Key:
        return ("id", self.given["id"]) if "id" in self.given else ("index", self.index)

    def question(self, engine: Engine, defaults: Mapping[str, Any]) -> Question:
        """Converts the request for an engine. defaults: options of `Engine.submit`, used if the line lacks them.

        A default seed applies to request 0 and grows by one per request, so repeated prompts get different answers.
        """
        fields = {name: value for name, value in self.given.items() if name != "id"}
        prompt = fields.pop("messages", None) or fields.pop("prompt")
        if any(name in fields for name in MATCH_FIELDS):
            defaults = {name: value for name, value in defaults.items() if name not in MATCH_FIELDS}
        options = {**defaults, **fields}
        if "seed" not in fields and defaults.get("seed") is not None:
            options["seed"] = defaults["seed"] + self.index & MAX_SEED
        try:
            return engine.question(prompt, **options)
        except LlmclError as error:
            raise type(error)(f"{self.where}: {error}") from error


@dataclass
class Totals:
    """Counts of requests, results and tokens."""

    n_requests: int
    n_before: int  # results already in the file
    n_done: int = 0
    n_tokens: int = 0


def parse_requests(text: str, origin: str) -> list[FileRequest]:
    """Parses one request per line; skips empty lines.

    Raises UsageError naming line and field for the first bad request.
    """
    requests: list[FileRequest] = []
    seen: dict[Key, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{origin} line {number}"
        request = FileRequest(len(requests), where, _checked(_object(line, where), where))
        if request.key in seen:
            raise UsageError(
                f"{where}: id {shown(request.key[1])} is that of {seen[request.key]} as well; expected "
                "another for each request"
            )
        seen[request.key] = where
        requests.append(request)
    if not requests:
        raise UsageError(f'{origin} has no requests; expected a JSON object a line, such as {{"prompt": "..."}}')
    return requests


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON ({error}); expected an object on one line") from error
    if not isinstance(value, dict):
        raise UsageError(f'{where} is {shown(value)}; expected an object such as {{"prompt": "..."}}')
    return value


def _checked(line: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the fields with a value: null counts as missing. AnswerOptions checks its own values."""

    def check(name: str, holds: bool, expected: str) -> None:
        if name in fields and not holds:
            raise UsageError(f"{where}: {name} is {shown(fields[name])}; expected {expected}")

    if unknown := [name for name in line if name not in FIELDS]:
        raise UsageError(f"{where}: the field {shown(unknown[0])} is not known; expected some of {', '.join(FIELDS)}")
    fields = {name: value for name, value in line.items() if value is not None}
    if ("prompt" in fields) == ("messages" in fields):
        raise UsageError(f"{where}: expected one of the fields prompt and messages")
    prompt, messages, stop = fields.get("prompt"), fields.get("messages"), fields.get("stop")
    are_ids = isinstance(prompt, list) and all(_is_whole(part) for part in prompt)
    check("prompt", bool(prompt) and (isinstance(prompt, str) or are_ids), "a text, or token ids")
    are_messages = isinstance(messages, list) and all(map(_is_message, messages))
    check("messages", bool(messages) and are_messages, 'a list of {"role": "...", "content": "..."}')
    are_texts = isinstance(stop, list) and all(isinstance(text, str) for text in stop)
    check("stop", isinstance(stop, str) or are_texts, "a text, or a list of texts")
    check("id", isinstance(fields.get("id"), str) or _is_whole(fields.get("id")), "a text or a whole number")
    check("system_prompt", isinstance(fields.get("system_prompt"), str), "a text")
    check("schema", isinstance(fields.get("schema"), (dict, str)), "a JSON schema")
    choices = fields.get("choices")
    check("choices", isinstance(choices, list) and all(isinstance(text, str) for text in choices), "a list of texts")
    breakers = fields.get("dry_sequence_breakers")
    are_texts = isinstance(breakers, list) and all(isinstance(text, str) for text in breakers)
    check("dry_sequence_breakers", are_texts, "a list of texts")
    for name in "regex", "grammar":
        check(name, isinstance(fields.get(name), str), "a text")
    for name in "raw", "ignore_eos":
        check(name, isinstance(fields.get(name), bool), "true or false")
    for name in "max_tokens", "priority", *(name for name, each in PARAMETERS.items() if each.kind is int):
        check(name, _is_whole(fields.get(name)), "a whole number")
    for name in (name for name, each in PARAMETERS.items() if each.kind is float):
        check(name, _is_whole(fields.get(name)) or isinstance(fields.get(name), float), "a number")
    return fields


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def answer_requests(
    engine: Engine,
    requests: Sequence[FileRequest],
    output: Path,
    defaults: Mapping[str, Any],
    progress: Progress | None = None,
) -> Totals:
    """Appends a result line for each request without a result in `output`, in order of completion.

    Each line is written whole, in a single write. After an interrupt, the next call continues with the same file. All
    requests are checked before the first starts. progress: called with the number of results.
    """
    with open_results(output, requests) as (done, write):
        left = [request for request in requests if request.key not in done]
        totals = Totals(len(requests), len(done))
        questions = [request.question(engine, defaults) for request in left]
        texts: list[list[str]] = [[] for _ in left]

        def report() -> None:
            if progress is not None:
                progress(ANSWERING, totals.n_before + totals.n_done, totals.n_requests)

        report()
        answers: Generator[tuple[int, Piece], None, None] = engine.stream_questions(questions)
        with closing(answers):
            for i, piece in answers:
                texts[i].append(piece.text)
                if piece.stats is None:
                    continue
                write(_result(left[i], questions[i], "".join(texts[i]), piece))
                texts[i] = []
                totals.n_done += 1
                totals.n_tokens += piece.stats.generated_tokens
                report()
    return totals


def _result(request: FileRequest, question: Question, text: str, last: Piece) -> dict[str, Any]:
    assert last.stats is not None
    result = {
        "index": request.index,
        "text": text,
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.stats.prompt_tokens,
        "cached_tokens": last.stats.cached_tokens,
        "generated_tokens": last.stats.generated_tokens,
    }
    if "id" in request.given:
        result = {"id": request.given["id"], **result}
    return result | ({"seed": question.options.seed} if question.options.temperature > 0 else {})


def check_is_plain(output: Path) -> None:
    """Raises UsageError unless the path is free or a plain file: a pipe would block, and /dev/zero never end."""
    if output.exists() and not output.is_file():
        raise UsageError(
            f"--output {one_line(output)} is no plain file; give one, from which the next run can see what is done"
        )


@contextmanager
def open_results(
    output: Path, requests: Sequence[FileRequest]
) -> Iterator[tuple[set[Key], Callable[[Mapping[str, Any]], None]]]:
    """Yields the keys of the results in the file, and a function that appends a result.

    Truncates a partial last line left by an interrupt. Raises UsageError for a file that cannot be written or holds
    anything except results for these requests.
    """
    origin = f"--output {one_line(output)}"
    try:
        check_is_plain(output)
        file = output.open("a+b", buffering=0)
        file.seek(0)
    except OSError as error:
        raise UsageError(f"{origin}: cannot be written ({error.strerror}); give a file in a folder that can") from error
    with file:
        _lock(file, origin)
        data = file.readall()
        lines, end, rest = data.rpartition(b"\n")
        whole = lines + end
        known = {request.key for request in requests}
        done = _keys_of_results(whole, origin, known)
        if rest and not any(_is_begun(rest, key) for key in known):
            raise _no_result(f"{origin} line {len(whole.splitlines()) + 1}")
        file.truncate(len(whole))

        def write(result: Mapping[str, Any]) -> None:
            line = (json_text.dumps(dict(result)) + "\n").encode()
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError as error:
                raise LlmclError(
                    f"{origin}: cannot be written ({error.strerror}); make room, and the same command goes on"
                ) from error

        yield done, write


def _lock(file: FileIO, origin: str) -> None:
    """Locks the file against other runs until it is closed: both would answer the same requests."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{origin} is being written by another run; wait until it has ended, or give another file"
        ) from None
    except OSError:  # a file system without locks
        pass


def _keys_of_results(data: bytes, origin: str, known: set[Key]) -> set[Key]:
    keys: set[Key] = set()
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n")[:-1], 1):
        where = f"{origin} line {number}"
        result = _object(line, where)
        name = "id" if "id" in result else "index"
        value = result.get(name)
        key = (name, value if isinstance(value, str) or _is_whole(value) else "")
        if key not in known or not isinstance(result.get("text"), str):
            raise _no_result(where)
        keys.add(key)
    return keys


def _is_begun(rest: bytes, key: Key) -> bool:
    """Whether an unfinished line can be the start of the result with this key."""
    start = json_text.dumps(dict([key])).removesuffix("}").encode() + b", "
    return rest.startswith(start) or start.startswith(rest)


def _no_result(where: str) -> UsageError:
    return UsageError(f"{where} is not the result of a request of --input; give another file, or remove this one")
