"""Kinds of prompts, and how they become token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from llmcl.engine.images import Images, PromptWithImages, placed_images
from llmcl.engine.message_parts import (
    Picture,
    are_parts,
    flat,
    flat_content,
    holds_images,
    picture_list,
    rendered_with_images,
    texts_in,
    without_images,
)
from llmcl.errors import UsageError, check_flags, check_text, shown
from llmcl.progress import Progress
from llmcl.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]
Part = str | Mapping[str, Any]
Texts = list[str] | tuple[str, ...]  # a list of prompts, though a list of parts may hold texts, too
Prompt = str | Sequence[Message] | Sequence[Part] | Sequence[int]


def is_list(prompt: object) -> TypeGuard[Sequence[Any]]:
    """Returns whether `prompt` is a list that can be read twice. An iterator would be empty after the first look."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    return isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray, memoryview))


def are_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Returns whether `prompt` is a list or an array of token ids."""
    return is_list(prompt) and all(issubclass(kind, (int, np.integer)) for kind in {*map(type, prompt)})


def are_prompts(prompt: Any) -> TypeGuard[Sequence[Any]]:
    """Returns whether `prompt` is a list of prompts: texts, message lists, or lists or arrays of token ids."""
    if isinstance(prompt, np.ndarray) or not is_list(prompt) or not prompt:
        return False
    return all(isinstance(part, str) or is_list(part) for part in prompt)


def is_chat(prompt: Any, *, raw: bool) -> bool:
    """Returns whether a prompt goes through the chat template: a text or messages, not token ids."""
    return not raw and (isinstance(prompt, str) or any(issubclass(kind, Mapping) for kind in {*map(type, prompt)}))


def has_parts(prompt: str | Sequence[Any]) -> bool:
    """Returns whether a prompt is content parts, or messages with an image."""
    return not isinstance(prompt, str) and (are_parts(prompt) or holds_images(prompt))


def check_answers(answers: object) -> None:
    """Raises UsageError unless `answers` is a list of texts and lists of token ids."""
    if not is_list(answers) or not len(answers):
        raise UsageError(f"answers is {shown(answers)}; expected a list of texts, or of lists of token ids")
    for i, answer in enumerate(answers):
        if not isinstance(answer, str) and not are_ids(answer):
            raise UsageError(f"answers[{i}] is {shown(answer)}; expected a text or token ids")


class PromptReader:
    """Turns prompts into token ids for a model. model_name: for messages."""

    def __init__(self, model_name: str):
        self.model_name = model_name
        self._tokenizer: Tokenizer | None = None  # `load` sets it
        self.images = Images(model_name, lambda progress: None, "it has random weights")  # `load` sets it
        self._warned_no_template = False

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer. Random weights have none: their prompts are token ids."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back. Raises UsageError for a model without a tokenizer."""
        if self._tokenizer is None:
            raise UsageError(f"{self.model_name} has no tokenizer; expected token ids as the prompt")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        system_prompt: str | None = None,
        images: Sequence[Picture] | None = None,
        most: int | None = None,
        progress: Progress | None = None,
    ) -> list[int]:
        """Returns a prompt's token ids. A text goes through the chat template, if there is one, unless `raw`.

        images: pictures in front of a text, or for the parts of messages without a picture; beside token ids a list of
        PlacedImage. With images, the tower computes their rows, and a PromptWithImages is returned. most: room in
        tokens. progress: called while the first image loads the tower. Raises ContextLengthError for a text with
        certainly more tokens.
        """
        if not isinstance(prompt, str) and not is_list(prompt):
            raise UsageError(
                f"the prompt is {shown(prompt)}; expected text, parts, messages [{{'role': ..., 'content': ...}}], or "
                "token ids"
            )
        check_flags(raw=raw)
        if system_prompt is not None:
            check_text("system_prompt", system_prompt)
        if are_ids(prompt):
            if images is not None:
                return PromptWithImages(prompt, placed_images(images))
            return prompt if isinstance(prompt, PromptWithImages) else [*map(int, prompt)]
        if images is not None or has_parts(prompt):
            text, adds_bos, pictures = self._text_with_images(prompt, raw, system_prompt, images, progress)
            if pictures:
                return self.images.encode(text, pictures, self.tokenizer, adds_bos=adds_bos, most=most)
        else:
            text, adds_bos = self._text(prompt, raw, system_prompt)
        return self.tokenizer.encode(text, adds_bos, most=most)

    def _text_with_images(
        self,
        prompt: str | Sequence[Any],
        raw: bool,
        system_prompt: str | None,
        images: Sequence[Picture] | None,
        progress: Progress | None,
    ) -> tuple[str, bool, list[Picture]]:
        """Returns the text with a marker per picture, whether the tokenizer adds BOS, and the pictures."""
        if isinstance(prompt, str) and raw:  # the caller wrote the markers
            return *self._text(prompt, raw, system_prompt), picture_list(images)
        messages, pictures = without_images(prompt, images)
        marker = ""
        if pictures:
            marker = self.images.vision(progress).processor.marker
            self.images.check_texts(texts_in(messages))
        if (isinstance(prompt, str) or are_parts(prompt)) and (raw or not self.tokenizer.has_chat_template):
            return *self._text(flat_content(messages[0]["content"], marker), raw, system_prompt), pictures

        def render(messages: list[dict[str, Any]]) -> str:
            return self._text(messages, raw, system_prompt)[0]

        text = rendered_with_images(messages, marker, render) if pictures else render(flat(messages, marker))
        return text, False, pictures

    def encode_answers(
        self, prompt: Prompt, answers: Sequence[str | Sequence[int]], *, raw: bool, system_prompt: str | None
    ) -> list[list[int]]:
        """Returns the token ids of answers as they follow the prompt's ids.

        A text is cut into tokens together with the prompt: a space or a byte at the border then lies as in training. If
        the border lies within a token, or the prompt is token ids, the answer is cut alone.
        """
        before: list[int] = []
        start, adds_bos = "", False
        if not are_ids(prompt) and any(isinstance(answer, str) for answer in answers):
            start, adds_bos = self._text(prompt, raw, system_prompt)
            before = self.tokenizer.encode(start, adds_bos)
        texts = []
        for i, answer in enumerate(answers):
            if not isinstance(answer, str):
                texts.append([*map(int, answer)])
            else:
                whole = self.tokenizer.encode(start + answer, adds_bos)
                is_before = whole[: len(before)] == before
                texts.append(whole[len(before) :] if is_before else self.tokenizer.encode(answer, False))
            if not texts[i]:
                raise UsageError(f"answers[{i}] is {shown(answer)}, which has no tokens; expected at least one")
        return texts

    def _text(self, prompt: str | Sequence[Any], raw: bool, system_prompt: str | None) -> tuple[str, bool]:
        """The text that the model reads, and whether the tokenizer adds BOS to it: a chat template has its own."""
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            if raw or not tokenizer.has_chat_template:
                if system_prompt is not None:
                    reason = "raw prompts" if raw else f"{self.model_name}, which has no chat template,"
                    raise UsageError(f"system_prompt has no place in {reason}; put it into the prompt")
                if not raw:
                    self._warn_no_template()
                return prompt, True
            prompt = [{"role": "user", "content": prompt}]
        messages: list[Message] = [*prompt]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return tokenizer.render_chat(messages), False

    def _warn_no_template(self) -> None:
        if self._warned_no_template:
            return
        self._warned_no_template = True
        _log.warning(
            "%s has no chat template, so the prompt is given to it as it is; --raw (raw=True) says that "
            "this is meant, --chat-template-file (chat_template) gives it one",
            self.model_name,
        )
