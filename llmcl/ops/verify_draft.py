"""draft_rows, draft_last_seen, draft_counts, accept_draft: extra ops for steps that verify drafts.

In such a step, a text's first row is the token sampled last, and the following rows are guesses for the next tokens.
Sampling only depends on seed, step number and token id, so each row samples exactly like a separate step.

All four ops take `step` and `texts`. step: a single text's own step state, or a RaggedStep for several texts. texts:
the step state with a record per text; for a single text, the same as step.
"""

from __future__ import annotations

from llmcl.kernels.common.cost import once, per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
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
    """Writes the place of each of the step's rows into `rows`. With a single text, also makes the drafted tokens its
    rows.

    draft int32 [max_rows]: the number of drafted tokens, then the tokens; ignored with a RaggedStep, which already
    holds them. sampling int32 [texts, slots]: sampling parameters. rows: a step state with max_rows sequences.
    row_sampling int32 [max_rows, slots]: each row's sampling parameters.
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
    return op_launches(device, "draft_rows", constants, args, groups=(1,), local=size, cost=cost)


def draft_last_seen(device: Device, step: StepState, texts: StepState, last_seen: Buffer, out: Buffer) -> list[Launch]:
    """Writes out int32 [n, vocab]: last_seen int32 [texts, vocab] (latest token positions before the step), updated per
    row.

    Each row counts itself and the earlier rows of its text.
    """
    return _as_rows_know(device, "draft_last_seen", step, texts, last_seen, out)


def draft_counts(device: Device, step: StepState, texts: StepState, counts: Buffer, out: Buffer) -> list[Launch]:
    """Writes out int32 [n, vocab]: counts int32 [texts, vocab] (token counts in the answer before the step), updated
    per row.

    Each row counts the drafted tokens of its text up to its own.
    """
    return _as_rows_know(device, "draft_counts", step, texts, counts, out)


def _as_rows_know(
    device: Device, op: str, step: StepState, texts: StepState, of_texts: Buffer, out: Buffer
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
    return op_launches(
        device,
        op,
        constants,
        [step.state, step.tokens, texts.state, of_texts, out],
        groups=lambda n: (-(-vocab // (size * run)), n),
        local=(size, 1),
        cost=per_token(8 * vocab),
    )


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
    """Accepts each text's drafted tokens up to the first mismatch with the previous row's sample, and advances the
    text.

    row_sampled int32 [n]: each row's sample. last_seen, counts int32 [texts, vocab]: updated. accepted int32
    [n + texts]: each text has a slot per row and an extra slot in front: the number of sampled tokens (at least 1),
    then the tokens.
    """
    constants = {
        **step.constants,
        **texts.record_constants("texts", "TEXTS", "TEXT_SLOTS"),
        "VOCAB": last_seen.nbytes // (4 * max(1, texts.n_sequences)),
        "MAX_ROWS": max_rows,
    }
    return op_launches(
        device,
        "accept_draft",
        constants,
        [row_sampled, step.state, step.tokens, texts.state, last_seen, counts, accepted],
        groups=(1,),
        local=(max_rows,),
        cost=once(20 * max_rows),
    )
