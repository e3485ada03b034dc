"""Converts text to token ids and back, and conversations to token ids, from a Hugging Face folder or a GGUF file.

The library `tokenizers` implements the algorithms. This file adds what a checkpoint leaves to the program: BOS, special
tokens inside a text, the chat template, and token-by-token decoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.config.reader import Reader
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
from llmcl.tokenizer import chat_template, damage, gguf_tokenizer
from llmcl.tokenizer.infill_tokens import gguf_infill_ids
from llmcl.tokenizer.least_tokens import LeastTokens
from llmcl.tokenizer.library import refusing, without_report
from llmcl.tokenizer.text import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from llmcl.checkpoint import Checkpoint

_MAX_TEMPLATE_BYTES = 1 << 20  # the longest known template has 30 000
_LONG = 1 << 16  # characters; tokenizing a shorter text is faster than finding the longest token
_SHORT = 1 << 12  # characters; `encode` blocks all Python threads, 1 us per character
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer, made by `from_checkpoint`."""

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
        infill_ids: Mapping[str, int] | None = None,
    ) -> None:
        """Wraps a `tokenizers` object.

        Args:
            backend: the `tokenizers` object.
            vocab_size: rows in the model's embedding. Every id must be smaller.
            bos_token_id, eos_token_ids: the token before a text; the tokens that end an answer.
            prepends_bos: put BOS before a text, for a backend that does not.
            chat_template: Jinja source, None if the model has none.
            special_tokens: texts by name, such as "bos_token", for the chat template.
            same_as: id -> the id with the same text that encoding returns.
            infill_ids: tokens for infilling that the checkpoint names, by part (infill_tokens.py).

        Raises:
            CheckpointError: the tokenizer has ids without an embedding.
            UnsupportedModelError: token texts are encoded in an unknown way.
        """
        damage.check_steps(backend)
        self._may_give_up = damage.may_give_up(backend)
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._vocab_size = vocab_size
        self._prepends_bos = prepends_bos
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens or {})
        self._same_as = dict(same_as or {})
        self.infill_ids = dict(infill_ids or {})
        self._token_bytes = TokenBytes(backend, self._same_as)
        n_tokens = backend.get_vocab_size(with_added_tokens=True)
        self.n_vocab: int = min(n_tokens, vocab_size)
        self.bos_token_id = bos_token_id
        bos = None if bos_token_id is None else backend.id_to_token(bos_token_id)
        self._least_tokens = LeastTokens(backend, bos, byte_level_alphabet())
        self.eos_token_ids = frozenset(eos_token_ids)
        # An added token without an embedding (Gemma 3 1B has an image token) is refused only when a text contains it.
        if n_tokens > vocab_size and max(backend.get_vocab(with_added_tokens=False).values()) >= vocab_size:
            raise CheckpointError(
                f"The tokenizer has {counted(n_tokens, 'token')}, but the model only "
                f"{counted(vocab_size, 'embedding')}: they do not belong together. Use the tokenizer that came with "
                "the model."
            )

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Returns the tokenizer of an open checkpoint, from a GGUF file's metadata or a folder's files.

        Raises:
            CheckpointError: no tokenizer, or a damaged one; the message says what to do.
            UnsupportedModelError: an unknown kind of tokenizer, named in the message.
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
        """Replaces the model's chat template with this Jinja source. Raises CheckpointError for invalid Jinja."""
        if not isinstance(source, str):
            raise UsageError(f"chat_template is {shown(source)}; expected the text of a template (Jinja)")
        chat_template.check(source)
        self.chat_template = source

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """Returns the ids of a text.

        A special token written out in the text (such as `<|im_end|>` or `</s>`) becomes a special token, as in
        transformers and llama.cpp's completion. To prevent this in untrusted text, remove such markers first.

        Args:
            text: any string; "" gives no ids or only BOS.
            add_special_tokens: put BOS in front if the model was trained with BOS. There is never more than
                one BOS in front, even if the text begins with BOS.
            most: room in tokens. A text certain to have more is refused before encoding, which would take seconds
                per megabyte; other texts may still give more ids.

        Raises:
            ContextLengthError: the text certainly has more than `most` tokens.
            UsageError: not a string, half a surrogate pair (not valid UTF-8), or a token for which the model has no
                embedding.
            CheckpointError: the tokenizer returned an id without an embedding for an ordinary token.
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
        quiet = without_report() if self._may_give_up else nullcontext()
        with refusing("The tokenizer failed", "The checkpoint's tokenizer is damaged; fetch it again."), quiet:
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

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Returns the ids of two texts with special tokens, and the index of the second text's first token.

        Raises UsageError for a tokenizer that does not tell the texts apart, and for text that is not Unicode.
        """
        for text in (first, second):
            _check_unicode(text)
        with refusing("The tokenizer failed", "The checkpoint's tokenizer is damaged; fetch it again."):
            encoding = self._backend.encode(first, second)
        types = encoding.type_ids
        if 1 not in types or max(encoding.ids) >= self._vocab_size:
            raise UsageError("the model's tokenizer has no form for pairs of texts; expected that of a cross-encoder")
        return encoding.ids, types.index(1)

    def _library_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _SHORT:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        else:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids = encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids. Special tokens and unknown ids give nothing, invalid UTF-8 gives U+FFFD."""
        text = b"".join(map(self._token_bytes, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._token_bytes.leading_space else text

    def differing_token(self, other: Tokenizer) -> int | None:
        """Returns the first id, present in both, with a different token in `other`; None if there is none."""
        ids = range(min(self.n_vocab, other.n_vocab))
        return next((i for i in ids if self._backend.id_to_token(i) != other._backend.id_to_token(i)), None)

    def token(self, token_id: int) -> str | None:
        """Returns a token as written in the vocabulary; None for an unknown id."""
        return self._backend.id_to_token(self._same_as.get(token_id, token_id))

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token as written in the vocabulary; None if the model does not have the token."""
        token_id = self._backend.token_to_id(token)
        return token_id if token_id is not None and token_id < self._vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """Returns a token's UTF-8 bytes, possibly part of a character. Empty for special tokens and unknown ids."""
        return self._token_bytes(token_id)

    def detokenizer(self, *, as_it_is: bool = False) -> Detokenizer:
        """Returns a decoder that takes ids one at a time and gives the same text as `decode`.

        as_it_is: keeps the space that SentencePiece puts before the first word.
        """
        return Detokenizer(self._token_bytes, strip_leading_space=self._token_bytes.leading_space and not as_it_is)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the conversation in the model's trained format, as text with special tokens.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, ...]`.
            add_generation_prompt: end with the opening of the assistant's answer.
            tools: functions that the model may call, in OpenAI's format; None for none.
            variables: extra plain data by name for the template, such as `enable_thinking`.

        Raises:
            UsageError: there is no chat template, or it rejects the messages or variables.
            CheckpointError: the template is broken, or exceeds a limit on time or memory.
            LlmclError: the render process cannot be started here.
        """
        if self.chat_template is None:
            raise UsageError.with_remedy(
                "The model has no chat template, so it does not take messages.",
                "Give the prompt as plain text, give it a template (chat_template), or use an instruction-tuned model.",
            )
        if chat_template.needs_parts(self.chat_template):
            messages = [chat_template.with_parts(message) for message in messages]
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
        """Returns the ids of `render_chat`. BOS, if any, comes from the template alone, as in transformers.

        most: as for `encode`, applied to the rendered text, which may be shorter than the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, tools), False, most=most)


class TokenBytes:
    """Returns each token's UTF-8 bytes for a `tokenizers` object, computed on demand and cached.

    Special tokens and unknown ids have no bytes. `leading_space`: the decoder drops one space at the start of a text.
    The result agrees with the decoder in `tokenizers`, except where the latter loses text: an added token keeps its own
    text even if it reads as byte-level code, and an invalid sequence of byte tokens does not remove valid neighbours.
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
        self._continues: str | None = None  # begins tokens within a word (WordPiece)
        decoder: Any = backend.decoder
        self._read_decoder({"type": None} if decoder is None else json.loads(decoder.__getstate__()))

    def __call__(self, token_id: int) -> bytes:
        token_id = self._same_as.get(token_id, token_id)
        token_bytes = self._known.get(token_id)
        if token_bytes is None:
            is_id = 0 <= token_id < 1 << 32  # the library uses 32-bit ids
            token = self._backend.id_to_token(token_id) if is_id else None
            token_bytes = self._known[token_id] = self._bytes_of(token or "")
        return token_bytes

    def _read_decoder(self, decoder: dict[str, Any]) -> None:
        """Records one decoding step from tokenizer.json."""
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
            case {"type": "WordPiece", "prefix": str(prefix)}:
                self._continues, self.leading_space = prefix, True
            case {"type": "Fuse"}:
                pass
            case _:
                raise UnsupportedModelError(
                    f"The tokenizer's decoder {one_line(json.dumps(decoder), 80)} is not supported; supported are "
                    "byte-level BPE (ByteLevel), WordPiece and SentencePiece (Metaspace, or Replace, ByteFallback, "
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
        if self._continues is not None:
            is_within = token.startswith(self._continues)
            return (token.removeprefix(self._continues) if is_within else f" {token}").encode()
        return (token if self._space is None else token.replace(self._space, " ")).encode()


def byte_level_alphabet() -> dict[str, int]:
    """Maps each character in byte-level BPE (GPT-2) to its byte.

    Printable bytes are Latin-1 characters; the other 68 are numbered from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


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
        infill_ids=gguf_infill_ids(metadata, min(len(tokens), config.vocab_size)),
    )


def _id(read: Reader, key: str) -> int | None:
    """Returns a token id used only by the chat template. Ids outside the vocabulary are ignored later."""
    value = read.get(key)
    if value is not None and type(value) is not int:
        read.fail(key, value, "a token id")
    return value


# ---- a Hugging Face folder ------------------------------------------------------------------------------


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
    damage.check_json(file, data)
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
    """Returns the chat template. chat_template.jinja goes before tokenizer_config.json, as in transformers."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _decoded(read_bytes(file, _MAX_TEMPLATE_BYTES), file)
    template = optional_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # several templates by name
        named = [item for item in template if isinstance(item, dict)]
        if wrong := [item.get("name") for item in named if not isinstance(item.get("name"), str)]:
            raise CheckpointError(_unexpected("the name of a chat_template", wrong[0], "a string"))
        template = next((item.get("template") for item in named if item["name"] == "default"), None)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(_unexpected("chat_template", template, "a string, or a list of named ones"))
    return template


def _token_text(name: str, value: Any) -> str | None:
    """Reads a special token, written as text or as an object with text and properties."""
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
