"""What generation moves and computes: 4 bytes a token to the host, nothing to the device, nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from which_devices import taken

import llmcl
from llmcl import reference
from llmcl.engine.generation import token_ids
from llmcl.engine.llm import LLM
from llmcl.errors import OutOfDeviceMemoryError
from llmcl.kernels.common.step_state import RING, StepState
from llmcl.kernels.cpu import persistent_step
from llmcl.models.kv_cache import KVCache
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.preemptions import Preemptions

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "repeat_penalty": 1.1, "seed": 3},
    "counted": {"temperature": 0.6, "presence_penalty": 0.5, "frequency_penalty": 0.3, "seed": 3},
}


@pytest.fixture(scope="module", params=["as it is", pytest.param("as a GPU", marks=pytest.mark.slow)])
def small(
    request: pytest.FixtureRequest, default_entry: DeviceEntry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """A small model with room for 2048 tokens, in float32."""
    config = small_config(max_position=2048)
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=6))
    with llmcl.load(str(folder), device=taken(default_entry, request.param)) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(autouse=True)
def preempted(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Says whether other programs take cores away, whatever they do here; at first they do not."""

    def says(cost_turns: bool) -> None:
        monkeypatch.setattr(Preemptions, "cost_turns", cost_turns)

    says(False)
    return says


def prompt(n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(n).integers(3, 131, n)]


class Crossings:
    """Bytes between host and device as the OpenCL calls move them, not as llmcl counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        import pyopencl as cl  # llmcl has made the loader find its drivers by now

        self.to_host = self.to_device = 0
        copy = cl.enqueue_copy

        def counted(queue: Any, target: Any, source: Any, **options: Any) -> Any:
            if isinstance(target, np.ndarray):
                self.to_host += target.nbytes
            if isinstance(source, np.ndarray):
                self.to_device += source.nbytes
            return copy(queue, target, source, **options)

        def refused(*args: Any, **options: Any) -> Any:
            raise AssertionError("generation neither maps nor fills buffers")

        monkeypatch.setattr(cl, "enqueue_copy", counted)
        monkeypatch.setattr(cl, "enqueue_map_buffer", refused)
        monkeypatch.setattr(cl, "enqueue_fill_buffer", refused)


@pytest.mark.parametrize("n_prompt", [3, 1500])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_token_brings_four_bytes_to_the_host_and_none_to_the_device(
    sampling: str, n_prompt: int, small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = small.stream(prompt(n_prompt), max_tokens=40, ignore_eos=True, **SAMPLINGS[sampling])
    next(stream)
    next(stream)
    with monkeypatch.context() as patch:
        crossings = Crossings(patch)
        before, steps = small.device.traffic.copy(), small.model.decode_steps
        for n in range(1, 31):
            next(stream)
            moved = small.device.traffic.since(before)
            assert (moved.device_to_host_bytes, moved.host_to_device_bytes) == (4 * n, 0)
            assert (crossings.to_host, crossings.to_device) == (4 * n, 0)
            assert small.model.decode_steps - steps == n
    stream.close()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_launches_per_token_are_those_that_the_context_needs(
    sampling: str, small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyopencl as cl

    launched: list[int] = []
    enqueue, model = cl.enqueue_nd_range_kernel, small.model

    def counted(*args: Any, **options: Any) -> Any:
        launched[-1] += 1
        return enqueue(*args, **options)

    for n_prompt in (3, 1500):
        stream = small.stream(prompt(n_prompt), max_tokens=12, ignore_eos=True, **SAMPLINGS[sampling])
        next(stream)
        next(stream)
        launched.clear()
        with monkeypatch.context() as patch:
            patch.setattr(cl, "enqueue_nd_range_kernel", counted)
            for _ in range(8):
                launched.append(0)
                next(stream)
        stats = list(stream)[-1].stats
        assert stats is not None and stats.kernel_launches_per_token == launched[0]
        assert launched == [needed_launches(model, n_prompt)] * 8


def needed_launches(model: Model, position: int) -> int:
    """Of a step: all but those that a short context does without, and those of sampling."""
    needed = [launch for launch in model.decode_launches if launch.first_position <= position]
    return len(needed) + len(model.sampler.launches)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_demo_model_reports_its_traffic(sampling: str, smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(smollm2.device, smollm2.config, smollm2.model.weights, smollm2.model.cache)
    monkeypatch.setattr(smollm2, "model", model)
    for n_prompt in (2, 300):  # more than the 256 keys up to which attention has one split
        answer = smollm2.generate(prompt(n_prompt), max_tokens=4, ignore_eos=True, **SAMPLINGS[sampling])
        stats = answer.stats
        assert (stats.device_to_host_bytes_per_token, stats.host_to_device_bytes_per_token) == (4.0, 0.0)
        # A CPU has the whole step in a few launches. Elsewhere there are five or six kernels a layer, embedding and
        # head, or all layers in a persistent kernel.
        assert stats.kernel_launches_per_token == needed_launches(model, n_prompt)
        if persistent_step.CpuPersistentStep().supports_device(smollm2.device):
            assert len(model.decode_launches) < 9


def test_a_single_token_has_no_traffic_per_token(small: LLM) -> None:
    stats = small.generate(prompt(5), max_tokens=1).stats
    assert stats.generated_tokens == 1
    assert stats.device_to_host_bytes_per_token is None and stats.kernel_launches_per_token is None


def test_answers_longer_than_the_ring_of_sampled_tokens(small: LLM) -> None:
    """The device keeps the last RING ids only; the host must have read each before it is overwritten."""
    answer = small.generate(prompt(9), max_tokens=2 * RING + 10, ignore_eos=True).token_ids
    assert len(answer) == 2 * RING + 10
    logits = small.logits(prompt(9) + answer)[8:-1]
    chosen = logits[np.arange(len(answer)), answer]
    np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=1e-4)


def test_a_closed_generation_leaves_a_cache_that_can_be_built_on(small: LLM) -> None:
    fresh = small.generate(prompt(40), max_tokens=12, ignore_eos=True).token_ids
    small.clear()
    begun = token_ids(small.model, small.sequence, prompt(40), SamplingParams(), 100)
    told = [next(begun) for _ in range(5)]
    begun.close()
    assert told == fresh[:5]
    assert small.sequence.token_ids == prompt(40) + told
    going_on = token_ids(small.model, small.sequence, [*prompt(40), *told], SamplingParams(), 7)
    assert list(going_on) == fresh[5:]


def steps_in_a_row(model: Model) -> int:
    """Steps of a launch at most; the test is left out where it is one."""
    if (most := max(model._decode.whole_steps, default=1)) == 1:
        pytest.skip("a launch is a step at most: only a processor's may be several")
    return most


@pytest.mark.parametrize("n_prompt, n", [(3, 2 * RING + 10), (3, 2), (2040, 9), (2040, 100)])
def test_several_steps_a_launch_make_the_same_answer(
    n_prompt: int, n: int, small: LLM, preempted: Callable[[bool], None]
) -> None:
    """Up to the end of the context, too."""
    most = steps_in_a_row(small.model)
    expected = small.generate(prompt(n_prompt), max_tokens=n, ignore_eos=True).token_ids
    held = list(small.sequence.token_ids)
    small.clear()
    preempted(True)
    steps, launches = small.model.decode_steps, small.device.traffic.kernel_launches
    answer = small.generate(prompt(n_prompt), max_tokens=n, ignore_eos=True)
    assert answer.token_ids == expected and small.sequence.token_ids == held
    assert small.model.decode_steps - steps == len(expected) - 1
    if len(expected) > RING:
        assert answer.stats.kernel_launches_per_token == pytest.approx(1 / most, rel=0.1)
    assert small.device.traffic.kernel_launches > launches


def test_tokens_of_one_launch_arrive_together(small: LLM, preempted: Callable[[bool], None]) -> None:
    most = steps_in_a_row(small.model)
    preempted(True)
    pieces = list(small.stream(prompt(9), max_tokens=1 + 3 * most, ignore_eos=True))
    alone = [0, *range(1, len(pieces), most)]  # the first of the answer, and of each launch
    assert [i for i, piece in enumerate(pieces) if piece.tbt_ms != 0] == alone
    stats = pieces[-1].stats
    assert stats is not None and stats.arrivals == len(alone) == 4
    assert stats.tbt_ms["mean"] > stats.tpot_ms  # type: ignore[operator]  # of an arrival, and of a token


def test_an_answer_that_ends_within_a_launch_leaves_a_cache_that_can_be_built_on(
    small: LLM, preempted: Callable[[bool], None]
) -> None:
    most = steps_in_a_row(small.model)
    expected = small.generate(prompt(40), max_tokens=20, ignore_eos=True).token_ids
    preempted(True)
    for told in range(1, most + 3):
        small.clear()
        begun = token_ids(small.model, small.sequence, prompt(40), SamplingParams(), 100)
        answer = [next(begun) for _ in range(told)]
        begun.close()
        assert answer == expected[:told]
        held = small.sequence.token_ids
        assert held == (prompt(40) + expected)[: len(held)] and told <= len(held) - 40 < told + most
        going_on = token_ids(small.model, small.sequence, [*prompt(40), *answer], SamplingParams(), 20 - told)
        assert list(going_on) == expected[told:]


def test_only_the_largest_logit_is_taken_several_times_a_launch(small: LLM, preempted: Callable[[bool], None]) -> None:
    steps_in_a_row(small.model)
    preempted(True)
    for sampling in ("sampled", "counted"):
        stats = small.generate(prompt(3), max_tokens=5, ignore_eos=True, **SAMPLINGS[sampling]).stats
        assert stats.kernel_launches_per_token == needed_launches(small.model, 3) > 1


def test_a_step_is_alone_where_the_cache_has_no_room_for_more(
    small: LLM, preempted: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = steps_in_a_row(small.model)
    preempted(True)
    prepare = type(small.model.cache).prepare

    def scarce(cache: KVCache, step: StepState, sequence: SequenceState, n_tokens: int, place: int = 0) -> None:
        if 1 < n_tokens <= most:
            raise OutOfDeviceMemoryError("no pages are left")
        prepare(cache, step, sequence, n_tokens, place)

    expected = small.generate(prompt(9), max_tokens=20, ignore_eos=True).token_ids
    small.clear()
    monkeypatch.setattr(type(small.model.cache), "prepare", scarce)
    answer = small.generate(prompt(9), max_tokens=20, ignore_eos=True)
    assert answer.token_ids == expected
    assert answer.stats.kernel_launches_per_token == needed_launches(small.model, 9)


@pytest.mark.parametrize("held", [0, 1, 25, 39, 40, 41])
def test_the_common_prefix_is_reused(held: int, small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(40)
    small.logits(ids[:held] + [0] * 10 if held < 40 else ids[:held] + [7] * (held - 40))
    counts: list[int] = []
    prefill = small.model.prefill

    def counted(sequence: SequenceState, new: Sequence[int], **options: Any) -> None:
        counts.append(len(new))
        prefill(sequence, new, **options)

    monkeypatch.setattr(small.model, "prefill", counted)
    reused = list(token_ids(small.model, small.sequence, ids, SamplingParams(), 5))
    assert counts == [max(1, 40 - held)]  # the last token's logits are not kept
    small.clear()
    assert reused == list(token_ids(small.model, small.sequence, ids, SamplingParams(), 5))


def test_the_device_makes_no_more_steps_than_tokens_need(small: LLM) -> None:
    steps = small.model.decode_steps
    assert len(small.generate(prompt(4), max_tokens=7, ignore_eos=True).token_ids) == 7
    assert small.model.decode_steps - steps == 6


def test_memory_does_not_grow_with_use(small: LLM) -> None:
    def use() -> int:
        small.generate(prompt(700), max_tokens=5, temperature=1.0, top_p=0.9)
        small.logits(prompt(100))
        return small.device.allocated_bytes

    held = use()
    assert all(use() == held for _ in range(3))
    assert small.device.peak_bytes >= held


@pytest.mark.parametrize("penalties", [(0.8, 0.0), (0.0, 0.3), (-0.2, 0.15)], ids=["presence", "frequency", "both"])
def test_penalties_count_the_answer_and_not_the_prompt(penalties: tuple[float, float], small: LLM) -> None:
    """Greedily, each token is the one that the twin's penalty leaves the most likely."""
    presence, frequency = penalties
    asked, vocab = prompt(30), small.config.vocab_size
    options: dict[str, Any] = {"max_tokens": 25, "ignore_eos": True}
    answer = small.generate(asked, presence_penalty=presence, frequency_penalty=frequency, **options).token_ids
    logits = small.logits([*asked, *answer[:-1]])[len(asked) - 1 :]
    for n, row in enumerate(logits):
        counts = np.bincount(np.array(answer[:n], np.int64), minlength=vocab)
        penalized = reference.penalize_counts(row, counts, presence, frequency)
        assert penalized[answer[n]] >= penalized.max() - 1e-4
    assert answer != small.generate(asked, **options).token_ids
