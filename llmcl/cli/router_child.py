"""The process that serves one model for a router. Run as a module."""

from __future__ import annotations

import logging
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmcl.cli.command import run_script
from llmcl.cli.option_groups import LoadingToAnswer
from llmcl.cli.serve import load_served
from llmcl.progress import Progress
from llmcl.serve.model_process import KILL_S, ParentLine
from llmcl.serve.run import serve
from llmcl.serve.served import Served
from llmcl.serve.settings import Settings


def serve_one() -> None:
    """Serves a model for a router, in this process."""
    parent = ParentLine()
    spec = parent.spec
    loading, engine, quiet = LoadingToAnswer(**spec["loading"]), spec["engine"], spec["settings"]["quiet"]
    if spec["verbose"]:
        logging.getLogger("llmcl").setLevel(logging.INFO)
    if quiet:
        warnings.simplefilter("ignore")
        logging.getLogger("llmcl").setLevel(logging.ERROR)
    state_dir = spec["state_dir"] and Path(spec["state_dir"])
    settings = Settings(port=0, api_keys=(spec["key"],), state_dir=state_dir, **spec["settings"])
    parent.watch(settings.drain_s + KILL_S)

    def load(progress: Progress) -> Served:
        parent.tell(memories=_memory(spec["model"], loading, engine["max_sequences"], progress))
        parent.wait_for_go()
        return load_served(spec["model"], loading, spec["name"], engine, quiet=quiet, progress=progress)

    def on_ready(served: Served) -> None:
        parent.tell(max_context=served.max_context, facts=asdict(served.facts))

    serve(settings, load, lambda port: parent.tell(port=port), on_ready)


def _memory(model: str, loading: LoadingToAnswer, max_sequences: int, progress: Progress) -> list[dict[str, Any]]:
    """Returns what the model will need in each memory, and what its draft model will."""
    from llmcl.engine.engine import PAGE_TOKENS
    from llmcl.engine.loading import memory_needed

    memories = []
    for name in filter(None, (model, loading.draft_model)):
        stored = replace(loading, dtype="auto", quantize=None) if name != model else loading
        memories += memory_needed(
            name,
            max_sequences=max_sequences,
            page_tokens=loading.kv_page_size or PAGE_TOKENS,
            device=loading.device,
            split=loading.split,
            split_shares=loading.split_shares,
            dtype=stored.dtype,
            quantize=stored.quantize,
            activation_dtype=loading.activation_dtype,
            kv_dtype=loading.kv_dtype,
            max_context=loading.ctx_size,
            kv_page_tokens=loading.kv_page_size,
            offline=loading.offline,
            progress=progress,
        )
    return [asdict(memory) for memory in memories]


if __name__ == "__main__":
    run_script(serve_one)
