"""Kernels that are compiled when they are first launched: for tests that use a part of a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmcl.runtime.device import Launch


def compile_when_used() -> Iterator[None]:
    """No kernel is compiled before its first launch, as all of a model's and a batch's are when it is made.

    A test that asks for logits alone then compiles no kernels for decode, and steps of few sizes none for the others.
    A module has it for all its tests with

        compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "prepare", lambda launch: None)
        yield
