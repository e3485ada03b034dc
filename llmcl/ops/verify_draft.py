"""draft_rows, draft_last_seen, draft_counts, accept_draft: what a step that verifies drafts has beside the model.

Row 0 of such a step is the token sampled last, the rows after it are guesses of those that follow. Sampling depends on
seed, step number and token id alone, so each row can sample what one step after another would have.
"""

from __future__ import annotations

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import once, per_token
from llmcl.kernels.common.sizes import local_size, run_of
from llmcl.kernels.common.step_state import StepState
from llmcl.runtime.device import Buffer, Device, Launch


def draft_rows(device: Device, draft: Buffer, step: StepState, rows: StepState) -> list[Launch]:
    """Makes the drafted tokens rows of the next step of `step`, and tells `rows` the place of each.

    draft int32 [max_rows]: how many tokens are drafted, and these. rows: a step state of max_rows sequences.
    """
    constants = {**rows.constants, "MAX_ROWS": rows.n_sequences}
    args = [draft, step.state, step.tokens, rows.state]
    return [
        device.launch(
            "portable/draft_rows.cl",
            "draft_rows",
            constants,
            args,
            groups=(1,),
            local=(1,),
            cost=once(16 * rows.n_sequences),
        )
    ]


def draft_last_seen(device: Device, step: StepState, last_seen: Buffer, out: Buffer) -> list[Launch]:
    """out int32 [n, vocab]: last_seen int32 [vocab], the latest positions of tokens before the step, as each of its
    rows knows them: with itself and the rows before it.
    """
    size, vocab = local_size(device, 256), last_seen.nbytes // 4
    run = run_of(device, min(vocab, 4096))
    return [
        device.launch(
            "portable/draft_last_seen.cl",
            "draft_last_seen",
            {**step_state.CONSTANTS, "VOCAB": vocab, "RUN": run, "LOCAL_SIZE": size},
            [step.state, step.tokens, last_seen, out],
            groups=lambda n: (-(-vocab // (size * run)), n),
            local=(size, 1),
            cost=per_token(8 * vocab),
        )
    ]


def draft_counts(device: Device, step: StepState, counts: Buffer, out: Buffer) -> list[Launch]:
    """out int32 [n, vocab]: counts int32 [vocab], how often the answer has each token before the step, as each of its
    rows knows them: with the drafted tokens up to its own.
    """
    size, vocab = local_size(device, 256), counts.nbytes // 4
    run = run_of(device, min(vocab, 4096))
    return [
        device.launch(
            "portable/draft_counts.cl",
            "draft_counts",
            {"VOCAB": vocab, "RUN": run, "LOCAL_SIZE": size},
            [step.tokens, counts, out],
            groups=lambda n: (-(-vocab // (size * run)), n),
            local=(size, 1),
            cost=per_token(8 * vocab),
        )
    ]


def accept_draft(
    device: Device, row_sampled: Buffer, step: StepState, last_seen: Buffer, counts: Buffer, accepted: Buffer
) -> list[Launch]:
    """Accepts drafted tokens up to the first that is not what the row before sampled, and moves the text on.

    row_sampled int32 [n]: what each row sampled. last_seen, counts int32 [vocab]: of the text, brought up to date.
    accepted int32 [n + 1]: how many tokens were sampled, at least 1, and these.
    """
    return [
        device.launch(
            "portable/accept_draft.cl",
            "accept_draft",
            {**step_state.CONSTANTS, "VOCAB": last_seen.nbytes // 4},
            [row_sampled, step.state, step.tokens, step.sampled, last_seen, counts, accepted],
            groups=(1,),
            local=(1,),
            cost=per_token(20),
        )
    ]
