"""What every message keeps to, and exit codes."""

from __future__ import annotations

import numpy as np
import pytest

from llmcl.errors import (
    CheckpointError,
    ContextLengthError,
    DeviceError,
    HubError,
    KernelBuildError,
    OutOfDeviceMemoryError,
    UnsupportedModelError,
    UsageError,
    counted,
    one_line,
    shown,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("\x1b[31m\u202e\n\ud800", r"'\x1b[31m\u202e\n\ud800'"),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (10**400, "a number of 401 digits"),
        ([10**5000, {"a": ["\n"]}], r"[a number of 5001 digits, {'a': ['\n']}]"),
        (np.zeros(10**6), "ndarray of 1000000 values"),
        (np.zeros(1), "ndarray of 1 value"),
        ([[["x" * 99] * 9] * 9], "[[['" + "x" * 73 + "..."),
        (None, "None"),
    ],
)
def test_values_in_messages_are_cut_and_escaped(value: object, text: str) -> None:
    assert shown(value) == text


def test_one_of_a_kind_is_no_plural() -> None:
    assert [counted(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_other_programs_messages_are_put_on_one_line() -> None:
    assert one_line(ValueError("a\n\x1b[2Jb")) == r"a\n\x1b[2Jb"
    assert one_line("\x07" * 10**6, 50) == r"\x07" * 11 + r"\x0" + "..."


def test_errors_have_codes_of_their_own() -> None:
    classes = [
        UsageError,
        DeviceError,
        OutOfDeviceMemoryError,
        KernelBuildError,
        CheckpointError,
        UnsupportedModelError,
        HubError,
        ContextLengthError,
    ]
    assert len({error.exit_code for error in classes} | {0, 1}) == len(classes) + 2
