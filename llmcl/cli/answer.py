"""Shows an answer while streaming, and stops between two tokens on Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmcl.errors import counted

if TYPE_CHECKING:
    from llmcl.engine.generation import Piece
    from llmcl.engine.stats import GenerationStats


@dataclass
class ShownAnswer:
    """The answer shown so far. `stats` arrives with the last token, so an interrupted answer has none."""

    n_tokens: int = 0
    tbt_ms: list[float] = field(default_factory=list)
    stats: GenerationStats | None = None
    finish_reason: str | None = None
    interrupted: bool = False

    def report(self) -> str:
        """Returns the text report for the whole answer, or for the part received."""
        if self.stats is not None:
            return self.stats.report(width=_columns())
        from llmcl.engine.stats import report_so_far

        return report_so_far(self.tbt_ms, self.n_tokens, width=_columns())

    def fills_context(self, max_tokens: int) -> bool:
        """Returns whether a full context ended the answer before max_tokens."""
        n_tokens = self.n_tokens if self.stats is None else self.stats.generated_tokens
        return self.finish_reason == "length" and n_tokens < max_tokens

    def summary(self) -> str:
        """Returns one line with the answer's times."""
        from llmcl.engine.stats import between_arrivals, summarize

        tbt, stats = summarize(between_arrivals(self.tbt_ms)), self.stats
        parts = [] if stats is None or stats.ttft_ms is None else [f"TTFT {stats.ttft_ms:.0f} ms"]
        if tbt["p50"] is not None:
            parts.append(f"TBT p50 {tbt['p50']:.1f} ms, p99 {tbt['p99']:.1f} ms")
        return ", ".join([*parts, counted(self.n_tokens if stats is None else stats.generated_tokens, "token")])

    def why_cut(self, max_tokens: int) -> str | None:
        """Returns a sentence for a cut-off answer, otherwise None."""
        if self.fills_context(max_tokens):
            return "stopped: the context is full (make it larger with -c)"
        if self.finish_reason == "length":
            return f"stopped at the limit of {counted(max_tokens, 'token')} (raise it with -n)"
        return None


def _columns() -> int | None:
    """Returns standard error's terminal width; None if not a terminal."""
    if not sys.stderr.isatty():
        return None
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(sys.stderr.fileno()).columns) or None
    except (OSError, ValueError):
        return None


def write_plain(text: str) -> None:
    """Prints a piece of an answer unchanged."""
    print(text, end="", flush=True)


def show(pieces: Generator[Piece, None, None], write: Callable[[str], None] = write_plain) -> ShownAnswer:
    """Prints each piece as it comes, with `write`. Ctrl-C ends the answer after the current token and closes `pieces`.
    Before the first token, or on a second Ctrl-C, KeyboardInterrupt is raised at once.
    """
    answer = ShownAnswer()
    with _ctrl_c_ends(answer), closing(pieces):
        for piece in pieces:
            write(piece.text)
            answer.n_tokens += 1
            answer.stats = piece.stats
            answer.finish_reason = piece.finish_reason
            if piece.tbt_ms is not None:
                answer.tbt_ms.append(piece.tbt_ms)
            if answer.interrupted:
                break
    return answer


@contextmanager
def _ctrl_c_ends(answer: ShownAnswer) -> Iterator[None]:
    # An exception inside a token could leave the KV cache and its position inconsistent.
    def on_ctrl_c(signum: int, frame: Any) -> None:
        if answer.interrupted or answer.n_tokens == 0:
            raise KeyboardInterrupt
        answer.interrupted = True

    previous = signal.signal(signal.SIGINT, on_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
