#!/usr/bin/env python
"""Speculative decoding with a draft model, at a share of right drafts that is set: time a token with and without.

Random weights of two models never agree. Here they are chosen so that they do, for a share of the tokens. The products
that add to the residual are 0, so that a token's logits depend on the token alone; they are read and multiplied as
others are. An embedding and an output head of signs then make the token after t the one with the number t + 1. In the
draft model that is so for a share of all t, chosen at random; after the others comes t + 2.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np

from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.engine.llm import LLM
from llmcl.engine.loading import load_random
from llmcl.engine.speculation import NO_SPECULATION
from llmcl.errors import UsageError
from llmcl.kernels.common.dtype import TILE_ROWS, is_16_bit
from llmcl.kernels.common.weight import Weight
from llmcl.models.random_shapes import RANDOM_SHAPES
from llmcl.runtime.device import Device
from llmcl.speculation.draft_length import FixedLength
from llmcl.speculation.drafters import DraftModel
from llmcl.speculation.drafting import Drafting
from llmcl.tools.markdown import row, table

SIGNS = 128  # columns of an embedding that are not 0, at most: two rows agree in half of them, give or take some
CONTEXT = 2048
EPILOG = """\b
agreement     share of the tokens after which both models have the same token
ms/token      median over the rounds of 1 / decode rate; with drafts, and without in the same run
accepted      drafted tokens that were accepted, of all drafted
tokens, rows  that a verifying step gave, and computed"""


def signs_of(vocab: int, columns: int) -> np.ndarray:
    """A row of +1 and -1 for each token: float32 [vocab, columns]."""
    return 2.0 * np.random.default_rng(0).integers(0, 2, (vocab, columns)).astype(np.float32) - 1.0


def write_rows(device: Device, weight: Weight, rows: np.ndarray) -> None:
    """Makes rows float32 [n, columns] the first columns of a weight, and its other columns 0."""
    n, columns = rows.shape
    for part in weight.parts:
        first = part.first_tile * TILE_ROWS
        own = np.zeros((part.n_tiles * TILE_ROWS, columns), np.float32)
        own[: max(0, min(len(own), n - first))] = rows[first : first + len(own)]
        numbers = _stored(own, part.dtype).reshape(part.n_tiles, TILE_ROWS, columns)
        tiles = np.zeros((part.n_tiles, weight.k, TILE_ROWS), numbers.dtype)
        tiles[:, :columns] = numbers.transpose(0, 2, 1)
        device.write(part.buffer, tiles)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def make_agree(llm: LLM, right: np.ndarray) -> None:
    """Makes the token after t the token t + 1 where right[t], else t + 2; of the last ones the first."""
    weights, vocab = llm.model.weights, llm.config.vocab_size
    for layer in weights.layers:
        for block in layer:
            for name in ("output", "down"):
                if (adds := getattr(block, name, None)) is not None:
                    for part in adds.parts:
                        llm.device.fill(part.buffer, np.uint32(0))
    signs = signs_of(vocab, min(SIGNS, llm.config.hidden_size))
    write_rows(llm.device, weights.embedding, signs)
    # Two tokens may have the same one after them. Then its row of the head is the sum of their signs.
    head = np.zeros_like(signs)
    np.add.at(head, (np.arange(vocab) + np.where(right, 1, 2)) % vocab, signs)
    assert weights.head is not None
    write_rows(llm.device, weights.head, head)


def untied(shape: str, path: Path) -> str:
    """The path of a config.json of that shape whose output head is not its embedding; it reads as much a token."""
    config: dict[str, Any] = RANDOM_SHAPES[shape] if shape in RANDOM_SHAPES else json.loads(Path(shape).read_text())
    path.write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return str(path)


def ms_a_token(llm: LLM, n_tokens: int, rounds: int) -> tuple[float, list[int], Any]:
    """Median milliseconds of a token, the ids, and the statistics of the last round."""
    times, ids, stats = [], [], None
    for turn in range(rounds + 1):
        answer = llm.generate([5, 6, 7, 8], max_tokens=n_tokens, ignore_eos=True)
        ids, stats = answer.token_ids, answer.stats
        assert stats.decode_tokens_per_s
        if turn:  # the first is a warm-up
            times.append(1e3 / stats.decode_tokens_per_s)
    return median(times), ids, stats


def _shares(text: Any) -> tuple[float, ...]:
    one = opt.number(float, "numbers from 0 to 1, separated by commas", lambda share: 0 <= share <= 1)
    return tuple(one(share) for share in str(text).split(","))


def draft_benchmark(
    random: Annotated[
        str, opt.measurement("--random", metavar="SHAPE", help="Of the model: a name or the path of a config.json.")
    ] = "llama-3.1-8b",
    draft: Annotated[str, opt.measurement("--draft", metavar="SHAPE", help="Of the draft model.")] = "llama-3.2-1b",
    agreement: Annotated[
        Any,
        opt.measurement(
            "--agreement",
            metavar="P,...",
            parser=_shares,
            help="Share of tokens after which both models have the same one.",
        ),
    ] = "0.7,0.8,0.9",
    length: Annotated[
        int | None,
        opt.measurement("--length", metavar="N", parser=opt.whole(1), help="Of drafts; left out: as it pays."),
    ] = None,
    n_gen: Annotated[int, opt.measurement("-n", "--n-gen", metavar="N", parser=opt.whole(2), help="Tokens.")] = 256,
    rounds: Annotated[int, opt.measurement("-r", metavar="N", parser=opt.whole(1), help="Rounds.")] = 3,
    dtype: Annotated[
        str, opt.measurement("--dtype", metavar="bfloat16|float16|float32", help="Of the weights.")
    ] = "bfloat16",
    device: opt.Device = None,
) -> None:
    """A model with a draft model, at set shares of right drafts."""
    if not is_16_bit(dtype) and dtype != "float32":
        raise UsageError(f"--dtype is {dtype}; expected bfloat16, float16 or float32, whose numbers can be set")
    with tempfile.TemporaryDirectory() as name:
        large = untied(random, Path(name) / "large.json")
        small = untied(draft, Path(name) / "small.json")
        llm = load_random(large, device=device, dtype=dtype, max_context=CONTEXT)
        drafting_llm = load_random(small, device=llm.device, dtype=dtype, max_context=CONTEXT, seed=1)
    with llm:
        make_agree(llm, np.ones(llm.config.vocab_size, bool))
        drafter = DraftModel(drafting_llm.model, llm.config.vocab_size)
        drafting = Drafting(llm.model, drafter, None if length is None else FixedLength(length))
        columns = ["agreement", "ms/token", "without", "faster by", "accepted", "tokens", "rows"]
        print(*table("rrrrrrr", columns), sep="\n")
        plain, expected, _ = ms_a_token(llm, n_gen, rounds)
        chances = np.random.default_rng(1).random(drafting_llm.config.vocab_size)
        for share in agreement:
            make_agree(drafting_llm, chances < share)
            llm.speculation = drafting
            with_drafts, ids, stats = ms_a_token(llm, n_gen, rounds)
            llm.speculation = NO_SPECULATION
            if ids != expected:
                raise UsageError("the answer with drafts has other tokens than the one without")
            drafted = stats.drafted_tokens or 0
            accepted = f"{stats.accepted_tokens / drafted:.1%}" if drafted else ""
            cells = [f"{share:.0%}", f"{with_drafts:.3f}", f"{plain:.3f}", f"{plain / with_drafts:.2f}x", accepted]
            counts = (stats.tokens_per_step, stats.rows_per_step)
            print(row([*cells, *("" if count is None else f"{count:.2f}" for count in counts)]), flush=True)


if __name__ == "__main__":
    run_script(draft_benchmark, EPILOG)
