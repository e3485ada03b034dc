"""Text to token ids and back, and conversations to token ids, from a Hugging Face folder or a GGUF file.

The library `tokenizers` has the algorithms. Here is what a checkpoint's files leave to the program: the BOS token,
special tokens in a text, the chat template, and decoding that can go token by token.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcl.checkpoint.files import MAX_HEADER_BYTES, optional_json, read_bytes
from llmcl.errors import (
    CheckpointError,
    ContextLengthError,
    UnsupportedModelError,
    UsageError,
    check_text,
    counted,
    one_line,
    shown,
)
from llmcl.models.config import ModelConfig
from llmcl.models.config.reader import Reader
from llmcl.tokenizer import chat_template, gguf_tokenizer
from llmcl.tokenizer.least_tokens import LeastTokens
from llmcl.tokenizer.library import refusing
from llmcl.tokenizer.text import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from llmcl.checkpoint import Checkpoint

_MAX_TEMPLATE_BYTES = 1 << 20  # 30 000 is the longest known
_LONG = 1 << 16  # characters; shorter texts are tokens in less time than the longest token is found
_SHORT = 1 << 12  # characters; of longer ones `encode` keeps all threads of Python waiting, 1 us for each
_MAX_GROWTH = 64  # of a text by its normalisation; a space becomes 3 bytes in known ones
# With a prefix the library `tokenizers` cuts merges between the bytes of a character, and may end the process.
_SUBWORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"([^"])')
_LEAST_TABLE = 4 * 256  # of a charsmap: it is looked up by the first byte of a text
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_ESCAPED_ASCII = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer; made by `from_checkpoint`.

    Args:
        backend: the `tokenizers` object.
        vocab_size: rows of the model's embedding. Every id must be smaller.
        bos_token_id, eos_token_ids: beginning of a text; the tokens that end an answer.
        prepends_bos: put BOS before a text, for a backend that does not do it itself.
        chat_template: Jinja source, None if the model has none.
        special_tokens: names such as "bos_token" and their texts, for the chat template.
        same_as: ids whose text is another id's, which encoding gives.
    Raises:
        CheckpointError: the tokenizer has ids that the model has no embedding for.
        UnsupportedModelError: token texts are encoded in a way that is not known here.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        prepends_bos: bool = False,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        same_as: Mapping[int, int] | None = None,
    ) -> None:
        _check_normalizer(backend)
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._vocab_size = vocab_size
        self._prepends_bos = prepends_bos
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._same_as = dict(same_as or {})
        self._token_bytes = TokenBytes(backend, self._same_as)
        n_tokens = backend.get_vocab_size(with_added_tokens=True)
        self.n_vocab: int = min(n_tokens, vocab_size)
        self.bos_token_id = bos_token_id
        bos = None if bos_token_id is None else backend.id_to_token(bos_token_id)
        self._least_tokens = LeastTokens(backend, bos, byte_level_alphabet())
        self.eos_token_ids = frozenset(eos_token_ids)
        # An added token without an embedding, as Gemma 3 1B has one for images, is refused where a text holds it.
        if n_tokens > vocab_size and max(backend.get_vocab(with_added_tokens=False).values()) >= vocab_size:
            raise CheckpointError(
                f"The tokenizer has {counted(n_tokens, 'token')}, but the model only "
                f"{counted(vocab_size, 'embedding')}: they do not belong together. Use the tokenizer that came with "
                "the model."
            )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of an open checkpoint, from the metadata of a GGUF file or the files of a folder.

        Raises:
            CheckpointError: no tokenizer, or one that is damaged; the message says what to do.
            UnsupportedModelError: a kind of tokenizer that is not known here, named in the message.
        """
        with refusing("The tokenizer cannot be made", "The checkpoint is damaged; fetch or convert it again."):
            if checkpoint.gguf_metadata is not None:
                return _from_gguf(checkpoint.gguf_metadata, checkpoint.config)
            return _from_folder(checkpoint.path, checkpoint.config)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` and `encode_chat` work."""
        return self.chat_template is not None

    def use_chat_template(self, source: str) -> None:
        """Takes this template (Jinja) in place of the model's own. Raises CheckpointError where it is no Jinja."""
        if not isinstance(source, str):
            raise UsageError(f"chat_template is {shown(source)}; expected the text of a template (Jinja)")
        chat_template.check(source)
        self.chat_template = source

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """The ids of a text.

        A special token written out in the text (such as `<|im_end|>` or `</s>`) becomes that token, as in
        transformers and llama.cpp's completion. Remove it first from the text of others if you do not want that.

        Args:
            text: any string; "" gives no ids or BOS alone.
            add_special_tokens: put BOS in front where the model was trained with it. There is never more than
                one BOS in front, also when the text begins with it.
            most: tokens that there is room for. A text that has more for certain is refused before it is encoded, which
                would take seconds for each megabyte; the ids of any other may still be more.
        Raises:
            ContextLengthError: the text has more than `most` tokens for certain.
            UsageError: it is no string, it holds half a surrogate pair, which no UTF-8 text can, or it holds a token
                that the model has no embedding for.
            CheckpointError: the tokenizer gave an id that the model has no embedding for, of no added token.
        """
        check_text("text", text)
        _check_unicode(text)
        if most is not None and len(text) > max(_LONG, most) and (least := self._least_tokens(text)) > most:
            size = f"at least {least} tokens"
            raise ContextLengthError.with_size(
                size,
                f"the prompt has {size}, the context {most}; shorten the prompt or raise the context "
                "(--ctx-size, max_context)",
            )
        with refusing("The tokenizer failed", "The checkpoint's tokenizer is damaged; fetch it again."):
            ids = self._library_ids(text, add_special_tokens)
        bos = self.bos_token_id
        if add_special_tokens and self._prepends_bos and bos is not None:
            ids = [bos, *ids]
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[next((i for i, token in enumerate(ids) if token != bos), len(ids)) - 1 :]
        if ids and max(ids) >= self._vocab_size:
            last = max(ids)
            if last in self._backend.get_added_tokens_decoder():
                raise UsageError(
                    f"the text holds {shown(self.token(last))}, for which the model has no embedding: its id is {last} "
                    f"of {self._vocab_size}; leave it out of the text"
                )
            raise CheckpointError(
                f"The tokenizer gave id {last}, but the model has only {counted(self._vocab_size, 'embedding')}: "
                "they do not belong together. Use the tokenizer that came with the model."
            )
        return ids

    def _library_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _SHORT:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens and unknown ids give nothing, invalid UTF-8 gives U+FFFD."""
        text = b"".join(map(self._token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._token_bytes.leading_space else text

    def differing_token(self, other: Tokenizer) -> int | None:
        """The first id that both have and that stands for another token in `other`; None: there is none."""
        ids = range(min(self.n_vocab, other.n_vocab))
        return next((i for i in ids if self._backend.id_to_token(i) != other._backend.id_to_token(i)), None)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None for an id without one."""
        return self._backend.id_to_token(self._same_as.get(token_id, token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, in UTF-8; maybe a part of a character. Special and unknown ones add nothing."""
        return self._token_bytes(token_id)

    def detokenizer(self, *, as_it_is: bool = False) -> Detokenizer:
        """A decoder to which ids are given one at a time; all together it gives what `decode` does.

        as_it_is: it keeps the space that SentencePiece puts before the first word.
        """
        return Detokenizer(self._token_bytes, strip_leading_space=self._token_bytes.leading_space and not as_it_is)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it, as text with special tokens.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, ...]`.
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: functions that the model may call, as OpenAI's API describes them; None for none.
            variables: what else the template is to see, such as `enable_thinking`: plain data by names of its own.
        Raises:
            UsageError: there is no chat template, or it does not accept the messages or the variables.
            CheckpointError: the template is broken, or takes more time or memory than one may.
            LlmclError: the process that renders it cannot be started here.
        """
        if self.chat_template is None:
            raise UsageError.with_remedy(
                "The model has no chat template, so it does not take messages.",
                "Give the prompt as plain text, give it a template (chat_template), or use an instruction-tuned model.",
            )
        return chat_template.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self._special_tokens,
            tools=tools,
            variables=variables,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        """The ids of `render_chat`. Its BOS, if any, comes from the template alone, as in transformers.

        most: as of `encode`; what the template made of the messages counts, which may be less than they are.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, tools), False, most=most)


class TokenBytes:
    """The UTF-8 bytes of each token of a `tokenizers` object, found on demand and remembered.

    Special tokens and ids outside the vocabulary have none. `leading_space`: the decoder drops one space at
    the start of a text. It agrees with the decoder of `tokenizers`, except where that one loses text: an
    added token stands for its own text also when that happens to read as byte-level code, and an invalid
    sequence of byte tokens does not take the valid ones beside it along.
    """

    def __init__(self, backend: Backend, same_as: Mapping[int, int] | None = None) -> None:
        self._backend = backend
        self._same_as = same_as or {}
        self._known: dict[int, bytes] = {}
        for index, token in backend.get_added_tokens_decoder().items():
            self._known[index] = b"" if token.special else token.content.encode()
        self._byte_of: dict[str, int] | None = None
        self._byte_fallback = self.leading_space = False
        self._space: str | None = None
        decoder: Any = backend.decoder
        self._read_decoder({"type": None} if decoder is None else json.loads(decoder.__getstate__()))

    def __call__(self, token_id: int) -> bytes:
        token_id = self._same_as.get(token_id, token_id)
        found = self._known.get(token_id)
        if found is None:
            is_id = 0 <= token_id < 1 << 32  # as the library counts them
            token = self._backend.id_to_token(token_id) if is_id else None
            found = self._known[token_id] = self._bytes_of(token or "")
        return found

    def _read_decoder(self, decoder: dict[str, Any]) -> None:
        """Takes over one step of decoding, as tokenizer.json describes it."""
        match decoder:
            case {"type": "Sequence", "decoders": steps}:
                for step in steps:
                    self._read_decoder(step)
            case {"type": "ByteLevel"}:
                self._byte_of = byte_level_alphabet()
            case {"type": "Replace", "pattern": {"String": space}, "content": " "}:
                self._space = space
            case {"type": "Metaspace", "replacement": space, "prepend_scheme": scheme}:
                self._space, self.leading_space = space, scheme != "never"
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                self.leading_space = True
            case {"type": "Fuse"}:
                pass
            case _:
                raise UnsupportedModelError(
                    f"The tokenizer's decoder {one_line(json.dumps(decoder), 80)} is not supported; supported are "
                    "byte-level BPE (ByteLevel) and SentencePiece (Metaspace, or Replace, ByteFallback, "
                    "Fuse, Strip)."
                )

    def _bytes_of(self, token: str) -> bytes:
        if self._byte_of is not None:
            try:
                return bytes(map(self._byte_of.__getitem__, token))
            except KeyError:
                return token.encode()
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return (token if self._space is None else token.replace(self._space, " ")).encode()


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level BPE (GPT-2), the other way round.

    Printable bytes stand for themselves as Latin-1 characters; the other 68 are numbered from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _check_normalizer(backend: Any) -> None:
    """Where memory ends, the library `tokenizers` ends the process. So no text may become many times as long."""
    growth = 1 if backend.normalizer is None else _growth(json.loads(backend.normalizer.__getstate__()))
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"The tokenizer's normalizer may make a text {shown(growth)} times as long, expected at most "
            f"{_MAX_GROWTH}. It is damaged or hostile; get tokenizer.json again."
        )


def _growth(normalizer: dict[str, Any]) -> int:
    """How many times as many bytes a text may have after the replacements of a normalizer."""
    match normalizer:
        case {"type": "Sequence", "normalizers": steps}:
            return math.prod(map(_growth, steps))
        case {"type": "Replace", "pattern": pattern, "content": content}:
            replaced = len(pattern.get("String", "").encode()) or 1  # an expression may match a byte
            return max(1, -(-len(content.encode()) // replaced))
        case _:
            return 1


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"The text is not valid Unicode: character {error.start} is {text[error.start]!r}, half a "
            "surrogate pair. This comes from input that is not UTF-8: convert it to UTF-8 first."
        ) from None


# ---- a GGUF file ----------------------------------------------------------------------------------------


def _from_gguf(metadata: Mapping[str, Any], config: ModelConfig) -> Tokenizer:
    read = Reader(metadata, "GGUF metadata")
    template = read.text("tokenizer.chat_template", default="") or None
    backend, adds_bos = gguf_tokenizer.build(metadata)
    if adds_bos and config.bos_token_id is None:
        raise CheckpointError(
            "GGUF metadata: texts are to begin with BOS, but tokenizer.ggml.bos_token_id is missing. Convert it again."
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": next(iter(config.eos_token_ids), None),
        "unk_token": _id(read, "tokenizer.ggml.unknown_token_id"),
        "pad_token": _id(read, "tokenizer.ggml.padding_token_id"),
    }
    return Tokenizer(
        backend,
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id,
        eos_token_ids=config.eos_token_ids,
        prepends_bos=adds_bos,
        chat_template=template,
        special_tokens={
            name: tokens[index] for name, index in ids.items() if index is not None and 0 <= index < len(tokens)
        },
        same_as=gguf_tokenizer.repeated(tokens),
    )


def _id(read: Reader, key: str) -> int | None:
    """A token id that only the chat template uses. One outside the vocabulary counts as none."""
    value = read.get(key)
    if value is not None and type(value) is not int:
        read.fail(key, value, "a token id")
    return value


# ---- a Hugging Face folder ------------------------------------------------------------------------------


def _charsmap_problem(text: bytes) -> str | None:
    """What is wrong with a charsmap in base64: the size of a table in 4 bytes, the table, and texts.

    The library takes memory for the table before it looks whether there is one, and at other damage it panics, which
    writes a backtrace to the terminal.
    """
    try:
        data = base64.b64decode(text, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except ValueError as error:
        return f"is damaged: {one_line(error)}"
    if size < _LEAST_TABLE or size > len(data) - 4:
        return f"says that it has a table of {size} bytes, expected {_LEAST_TABLE} to its own {len(data)}"
    return None


def _from_folder(folder: Path, config: ModelConfig) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.exists():
        raise CheckpointError(
            f"{folder} has no tokenizer.json. If it has a tokenizer in another form (tokenizer.model, vocab.json), "
            "write the file with transformers: "
            f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}").'
        )
    settings = optional_json(folder / "special_tokens_map.json") | optional_json(folder / "tokenizer_config.json")
    data = read_bytes(file, MAX_HEADER_BYTES)
    plain = _ESCAPED_ASCII.sub(lambda escape: bytes.fromhex(escape[1].decode()), data) if b"\\u00" in data else data
    if found := _SUBWORD_PREFIX.search(plain):
        raise UnsupportedModelError(
            f"{file}: continuing_subword_prefix begins with {shown(found[1].decode('latin-1'))}, expected none, as in "
            "all tokenizers that llmcl supports. Get the file again."
        )
    for found in _CHARSMAP.finditer(plain):
        if problem := _charsmap_problem(found[1].replace(b"\\/", b"/")):
            raise CheckpointError(f"{file}: precompiled_charsmap {problem}. Get the file again.")
    with refusing(f"{file} cannot be read as a tokenizer", "Get the file again."):
        backend = Backend.from_buffer(data)
    special_tokens = {
        name: text for name in _SPECIAL_TOKENS if (text := _token_text(name, settings.get(name))) is not None
    }
    bos, eos = (backend.token_to_id(special_tokens.get(name, "")) for name in ("bos_token", "eos_token"))
    return Tokenizer(
        backend,
        vocab_size=config.vocab_size,
        bos_token_id=config.bos_token_id if bos is None else bos,
        eos_token_ids=(*config.eos_token_ids, *(() if eos is None else (eos,))),
        chat_template=_folder_template(folder, settings),
        special_tokens=special_tokens,
    )


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: its own file before the entry in tokenizer_config.json, as transformers does."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _decoded(read_bytes(file, _MAX_TEMPLATE_BYTES), file)
    template = optional_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # several, by name
        named = [item for item in template if isinstance(item, dict)]
        if wrong := [item.get("name") for item in named if not isinstance(item.get("name"), str)]:
            raise CheckpointError(_unexpected("the name of a chat_template", wrong[0], "a string"))
        template = next((item.get("template") for item in named if item["name"] == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(_unexpected("chat_template", template, "a string, or a list of named ones"))
    return template


def _token_text(name: str, value: Any) -> str | None:
    """A special token is written as its text or as an object with its text and properties."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise CheckpointError(_unexpected(name, value, "a string, or an object with a string `content`"))
    return text


def _unexpected(entry: str, value: object, expected: str) -> str:
    return f"The tokenizer's settings: {entry} is {shown(value)}, expected {expected}. Get tokenizer_config.json again."


def _decoded(data: bytes, file: Path) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Get the file again.") from error
