"""draft_rows, draft_last_seen, draft_counts, accept_draft: what a step that verifies drafts has beside the model.

The first row of a text in such a step is the token sampled last, the rows after it are guesses of those that follow.
Sampling depends on seed, step number and token id alone, so each row can sample what one step after another would have.

step: of one text, its own step state; of several, a RaggedStep. texts: the step state that has a record of each text;
of one the same. Both are called `step` and `texts` in all four.
"""

from __future__ import annotations

from llmcl.kernels.common.cost import once, per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.sample import N_SLOTS
from llmcl.runtime.device import Buffer, Device, Launch


def draft_rows(
    device: Device,
    draft: Buffer,
    step: StepState,
    texts: StepState,
    sampling: Buffer,
    rows: StepState,
    row_sampling: Buffer,
) -> list[Launch]:
    """Tells `rows` the place of each row of the step; of one text, makes the drafted tokens its rows before.

    draft int32 [max_rows]: how many tokens are drafted, and these; not read with a RaggedStep, which has them. sampling
    int32 [texts, slots]: the sampling parameters. rows: a step state of max_rows sequences; row_sampling int32
    [max_rows, slots]: those of each row.
    """
    constants = {
        **step.constants,
        **texts.record_constants("texts", "TEXTS", "TEXT_SLOTS"),
        **rows.record_constants("rows", "ROW_RECORDS", "ROW_RECORD_SLOTS"),
        "MAX_ROWS": rows.n_sequences,
        "SAMPLING_SLOTS": N_SLOTS,
    }
    args = [draft, step.state, step.tokens, texts.state, sampling, rows.state, row_sampling]
    size = (rows.n_sequences,)
    cost = per_token(24 + 8 * N_SLOTS)
    return [device.launch("portable/draft_rows.cl", "draft_rows", constants, args, groups=(1,), local=size, cost=cost)]


def draft_last_seen(device: Device, step: StepState, texts: StepState, last_seen: Buffer, out: Buffer) -> list[Launch]:
    """out int32 [n, vocab]: last_seen int32 [texts, vocab], the latest positions of tokens before the step, as each of
    its rows knows them: with itself and the rows of its text before it.
    """
    return _as_rows_know(device, "draft_last_seen", step, texts, last_seen, out)


def draft_counts(device: Device, step: StepState, texts: StepState, counts: Buffer, out: Buffer) -> list[Launch]:
    """out int32 [n, vocab]: counts int32 [texts, vocab], how often the answer has each token before the step, as each
    of its rows knows them: with the drafted tokens of its text up to its own.
    """
    return _as_rows_know(device, "draft_counts", step, texts, counts, out)


def _as_rows_know(
    device: Device, kernel: str, step: StepState, texts: StepState, of_texts: Buffer, out: Buffer
) -> list[Launch]:
    size, vocab = local_size(device, 256), of_texts.nbytes // (4 * max(1, texts.n_sequences))
    run = run_of(device, min(vocab, 4096))
    constants = {
        **step.constants,
        **texts.record_constants("texts", "TEXTS", "TEXT_SLOTS"),
        "VOCAB": vocab,
        "RUN": run,
        "LOCAL_SIZE": size,
    }
    return [
        device.launch(
            f"portable/{kernel}.cl",
            kernel,
            constants,
            [step.state, step.tokens, texts.state, of_texts, out],
            groups=lambda n: (-(-vocab // (size * run)), n),
            local=(size, 1),
            cost=per_token(8 * vocab),
        )
    ]


def accept_draft(
    device: Device,
    row_sampled: Buffer,
    step: StepState,
    texts: StepState,
    last_seen: Buffer,
    counts: Buffer,
    accepted: Buffer,
    max_rows: int,
) -> list[Launch]:
    """Accepts each text's drafted tokens up to the first that is not what the row before sampled, and moves it on.

    row_sampled int32 [n]: what each row sampled. last_seen, counts int32 [texts, vocab]: brought up to date. accepted
    int32 [n + texts]: of each text, as many places as it has rows and one more: how many tokens were sampled, at least
    1, and these.
    """
    constants = {
        **step.constants,
        **texts.record_constants("texts", "TEXTS", "TEXT_SLOTS"),
        "VOCAB": last_seen.nbytes // (4 * max(1, texts.n_sequences)),
        "MAX_ROWS": max_rows,
    }
    return [
        device.launch(
            "portable/accept_draft.cl",
            "accept_draft",
            constants,
            [row_sampled, step.state, step.tokens, texts.state, last_seen, counts, accepted],
            groups=(1,),
            local=(max_rows,),
            cost=once(20 * max_rows),
        )
    ]
