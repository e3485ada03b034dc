"""`llmcl serve`: serves models over HTTP, for clients of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llmcl.cli import options as opt
from llmcl.cli.loading import load_model, load_to_answer
from llmcl.cli.option_groups import LoadingToAnswer, with_groups
from llmcl.cli.text_files import named, read_text
from llmcl.errors import UsageError, shown
from llmcl.progress import Progress
from llmcl.serve.model_facts import model_name
from llmcl.serve.settings import LOG_FORMATS

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM
    from llmcl.serve.cache_file import CacheFile as Kept
    from llmcl.serve.embeddings import LlmEmbedder
    from llmcl.serve.model_facts import ModelFacts
    from llmcl.serve.served import Served
    from llmcl.vision.image_reader import ImageReader

PANEL = "Server"
MAX_PORT = 65535

Host = Annotated[
    str,
    opt.option(
        PANEL, "--host", metavar="ADDRESS", help="Address to listen on. Any but this machine's own needs an API key."
    ),
]
Port = Annotated[
    int,
    opt.option(
        PANEL,
        "--port",
        metavar="PORT",
        parser=opt.number(int, f"a whole number from 0 (any that is free) to {MAX_PORT}", lambda p: 0 <= p <= MAX_PORT),
        help="Port to listen on. 0 takes a free one.",
    ),
]
ApiKey = Annotated[
    list[str] | None,
    opt.option(PANEL, "--api-key", metavar="KEY", help="API key that clients must send. Can be repeated."),
]
ApiKeyFile = Annotated[
    str | None, opt.option(PANEL, "--api-key-file", metavar="FILE", help="File of API keys, one per line.")
]
NoAuth = Annotated[
    bool, opt.option(PANEL, "--no-auth", help="Accept requests without a key, also from other machines.")
]
CorsOrigin = Annotated[
    list[str] | None,
    opt.option(
        PANEL,
        "--cors-origin",
        metavar="ORIGIN",
        help="Let web pages of this origin use the server, such as https://example.org, or * for all. Can be repeated.",
    ),
]
AllowRemoteImages = Annotated[
    str | None,
    opt.option(
        PANEL,
        "--allow-remote-images",
        metavar="HOST[,HOST...]",
        help="Fetch images that requests name by address from these hosts.  [default: none]",
    ),
]
MaxSequences = Annotated[
    int,
    opt.option(PANEL, "--max-sequences", metavar="N", parser=opt.whole(1), help="Answers to make at the same time."),
]
MaxQueue = Annotated[
    int,
    opt.option(
        PANEL,
        "--max-queue",
        metavar="N",
        parser=opt.whole(0),
        help="Requests that may wait. Further ones get status 429.",
    ),
]
Alias = Annotated[
    str | None, opt.option(PANEL, "--alias", metavar="NAME", help="Model name for clients.  [default: the model's own]")
]
LogFormat = Annotated[
    str,
    opt.choice(PANEL, "--log-format", LOG_FORMATS, help="Format of the log on standard error, one line per request."),
]
AllowLoraUpdates = Annotated[
    bool,
    opt.option(
        PANEL,
        "--allow-lora-updates",
        help="Let clients load LoRA adapters from this machine's files, and unload them.",
    ),
]
CacheFile = Annotated[
    Path | None,
    opt.option(
        PANEL,
        "--cache-file",
        metavar="FILE",
        help="Keep the prompt cache in this file across restarts. It is written after the last answer.",
    ),
]
CacheFileSize = Annotated[
    int,
    opt.option(
        PANEL,
        "--cache-file-size",
        metavar="MIB",
        parser=opt.whole(1, "mebibytes"),
        help="Maximum size of the cache file.",
    ),
]
StateDir = Annotated[
    Path | None,
    opt.option(
        PANEL,
        "--state-dir",
        metavar="DIR",
        help="Keep the conversations of /v1/responses in this folder across restarts.",
    ),
]
EmbeddingModel = Annotated[
    str | None,
    opt.option(
        PANEL,
        "--embedding-model",
        metavar="NAME|PATH",
        help="Answer /v1/embeddings with this model, beside the answers of -m.",
    ),
]
RerankModel = Annotated[
    str | None,
    opt.option(
        PANEL,
        "--rerank-model",
        metavar="NAME|PATH",
        help="Answer /v1/rerank with this reranker, beside the answers of -m.",
    ),
]
_MODELS = "Several models"
ServedModels = Annotated[
    list[str] | None,
    opt.option(  # `_names` reads the variable: typer would split it at spaces
        opt.MODEL_PANEL,
        *opt.MODEL_NAMES,
        metavar="NAME|PATH",
        env=False,
        help=f"{opt.MODEL_HELP} Can be repeated.  [env var: LLMCL_MODEL, one model]",
    ),
]
ModelsDir = Annotated[
    Path | None,
    opt.option(_MODELS, "--models-dir", metavar="DIR", help="Serve the models in this folder: GGUF files and folders."),
]
ModelsMax = Annotated[
    int,
    opt.option(
        _MODELS, "--models-max", metavar="N", parser=opt.whole(0), help="Models to keep loaded. 0: as many as fit."
    ),
]
NoModelsAutoload = Annotated[
    bool,
    opt.option(_MODELS, "--no-models-autoload", help="Load models at POST /models/load, not at the first request."),
]
IdleUnload = Annotated[
    float | None,
    opt.option(
        _MODELS,
        "--idle-unload",
        metavar="S",
        parser=opt.number(float, "a number above 0", lambda s: s > 0),
        help="Unload a model after this many seconds without a request.  [default: never]",
    ),
]
DrainSeconds = Annotated[
    float,
    opt.option(
        PANEL,
        "--drain-seconds",
        metavar="S",
        parser=opt.number(float, "a number, 0 or more", lambda s: s >= 0),
        help="Seconds that running answers may take to end after a signal.",
    ),
]


@with_groups
def serve(
    model: ServedModels = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    no_auth: NoAuth = False,
    cors_origin: CorsOrigin = None,
    allow_remote_images: AllowRemoteImages = None,
    max_sequences: MaxSequences = 8,
    max_queue: MaxQueue = 64,
    batch_invariant: Annotated[bool, opt.batch_invariant(PANEL)] = False,
    alias: Alias = None,
    log_format: LogFormat = "text",
    drain_seconds: DrainSeconds = 30.0,
    cache_file: CacheFile = None,
    cache_file_size: CacheFileSize = 4096,
    state_dir: StateDir = None,
    embedding_model: EmbeddingModel = None,
    rerank_model: RerankModel = None,
    pooling: opt.Pooling = None,
    models_dir: ModelsDir = None,
    models_max: ModelsMax = 4,
    no_models_autoload: NoModelsAutoload = False,
    idle_unload: IdleUnload = None,
    allow_lora_updates: AllowLoraUpdates = False,
    loading: LoadingToAnswer = LoadingToAnswer(),
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Serve one model or several to OpenAI's and Anthropic's clients."""
    names = model or ([os.environ["LLMCL_MODEL"]] if os.environ.get("LLMCL_MODEL") and models_dir is None else [])
    if not names and models_dir is None:
        raise UsageError("no model: give -m/--model NAME|PATH, several times for several models, or --models-dir DIR")
    try:
        from llmcl.serve.run import serve as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("llmcl"):
            raise
        raise UsageError(f'llmcl serve needs the package {error.name}: pip install "llmcl[serve]"') from error
    from llmcl.serve.remote_images import parse_hosts
    from llmcl.serve.settings import Settings

    settings = Settings(
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *_keys_of(api_key_file)),
        no_auth=no_auth,
        cors_origins=tuple(cors_origin or ()),
        image_hosts=parse_hosts(allow_remote_images),
        max_sequences=max_sequences,
        max_queue=max_queue,
        state_dir=state_dir,
        lora_updates=allow_lora_updates,
        log_format=log_format,
        quiet=quiet,
        drain_s=drain_seconds,
    )

    options = {"max_sequences": max_sequences, "batch_invariant": batch_invariant}
    if models_dir is not None or idle_unload is not None or len(names) > 1:
        single = {"--alias": alias, "--cache-file": cache_file, "--pooling": pooling}
        single |= {"--embedding-model": embedding_model, "--rerank-model": rerank_model}
        single |= {"--lora": " ".join(loading.lora or ()) or None}
        for option, value in single.items():
            if value is not None:
                raise UsageError(f"{option} {shown(str(value))} is for one model; leave it out, or serve one model")
        from llmcl.cli.router import Several, serve_several

        several = Several(names, models_dir, models_max, not no_models_autoload, idle_unload)
        serve_several(settings, several, options, loading, verbose=verbose)
        return
    kept = None if cache_file is None else _cache_file(cache_file, cache_file_size)

    def load(progress: Progress) -> Served:
        served = load_served(
            names[0],
            loading,
            alias or model_name(names[0]),
            options,
            quiet=quiet,
            progress=progress,
            cache_file=kept,
            embedding_model=embedding_model,
            rerank_model=rerank_model,
            pooling=pooling,
        )
        if not quiet:
            print("ready", file=sys.stderr, flush=True)
        return served

    run(settings, load)


def _keys_of(file: str | None) -> list[str]:
    """Returns the keys in a file, one per line; empty lines are skipped."""
    if file is None:
        return []
    origin = named("--api-key-file", file)
    keys = read_text(file, origin).split()
    if not keys:
        raise UsageError(f"{origin}: has no keys; expected one a line")
    return keys


def _cache_file(path: Path, mebibytes: int) -> Kept:
    """Raises UsageError if the file cannot be written, before long work starts."""
    from llmcl.serve.cache_file import CacheFile

    folder = path.absolute().parent
    is_special = path.exists() and not path.is_file()  # opening a pipe would block for ever
    if is_special or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{named('--cache-file', path)}: no file can be written there; give one in a folder that you may write"
        )
    return CacheFile(path, mebibytes << 20)


def load_served(
    model: str,
    loading: LoadingToAnswer,
    name: str,
    options: dict[str, Any],
    *,
    quiet: bool,
    progress: Progress,
    cache_file: Kept | None = None,
    embedding_model: str | None = None,
    rerank_model: str | None = None,
    pooling: str | None = None,
) -> Served:
    """Loads a model and opens its engine, or makes a server for embeddings. options: the engine's."""
    from llmcl.checkpoint.lora import is_named

    unnamed = replace(loading, lora=[lora for lora in loading.lora or () if not is_named(lora)])
    llm = load_to_answer(model, unnamed, quiet=quiet, progress=progress, compile_kernels=False)
    embedder = _embedder(llm, name, loading, embedding_model, pooling, quiet, progress)
    if embedder is not None and embedder.llm is llm:
        served = _embedding_server(embedder, model)
    else:
        served = _load(llm, model, loading, name, options, cache_file, embedder, quiet, progress)
    if rerank_model is not None:
        served = _with_reranker(served, rerank_model, loading, quiet, progress)
    gc.collect()  # otherwise a collection over all loaded objects would interrupt an answer
    return served


def _embedder(
    llm: LLM,
    name: str,
    loading: LoadingToAnswer,
    embedding_model: str | None,
    pooling: str | None,
    quiet: bool,
    progress: Progress,
) -> LlmEmbedder | None:
    """Returns what makes embeddings: the other model, or llm if it is made for them or has a pooling; else None."""
    from llmcl.serve.embeddings import LlmEmbedder

    if embedding_model is not None:
        other = load_model(
            embedding_model, loading, ctx_size=None, compile_kernels=False, quiet=quiet, progress=progress
        )
        return LlmEmbedder(other, model_name(embedding_model), pooling)
    settings = llm.embedding
    if pooling is None and settings.pooling is None and settings.ranking is None and not llm.config.bidirectional:
        return None
    return LlmEmbedder(llm, name, pooling)


def _embedding_server(embedder: LlmEmbedder, model: str) -> Served:
    """Returns a model that makes embeddings, no text."""
    from llmcl.serve.embeddings import NoAnswers
    from llmcl.serve.rerank import LlmReranker
    from llmcl.serve.served import Served

    llm = embedder.llm
    return Served(
        NoAnswers(),
        llm.tokenizer,
        embedder.name,
        max_context=llm.max_context,
        vocab_size=llm.config.vocab_size,
        created=int(time.time()),
        grammars=llm.grammars,
        device=llm.device.name,
        facts=model_facts(llm, model),
        close=llm.close,
        embedder=embedder,
        reranker=None if llm.embedding.ranking is None else LlmReranker(llm, embedder.name),
    )


def _with_reranker(served: Served, model: str, loading: LoadingToAnswer, quiet: bool, progress: Progress) -> Served:
    """Adds a reranker. Raises UsageError for another model."""
    from llmcl.serve.rerank import LlmReranker

    llm = load_model(model, loading, ctx_size=None, compile_kernels=False, quiet=quiet, progress=progress)
    if llm.embedding.ranking is None:
        raise UsageError(f"{named('--rerank-model', model)} is no reranker; give a cross-encoder or a Qwen3-Reranker")

    def close() -> None:
        served.close()
        llm.close()

    return replace(served, reranker=LlmReranker(llm, model_name(model)), close=close)


def _load(
    llm: LLM,
    model: str,
    loading: LoadingToAnswer,
    name: str,
    options: dict[str, Any],
    cache_file: Kept | None,
    embedder: LlmEmbedder | None,
    quiet: bool,
    progress: Progress,
) -> Served:
    from llmcl.checkpoint.lora import is_named
    from llmcl.serve.served import Served

    for lora in loading.lora or ():
        if is_named(lora):
            llm.load_lora(lora)
    # before the engine takes the rest of the memory
    images = _image_reader(llm, progress, required=loading.mmproj is not None)
    # The engine compiles its own kernels at once; the kernels in `llm` are not used.
    pages: dict[str, Any] = {} if loading.kv_page_size is None else {"kv_page_tokens": loading.kv_page_size}
    engine = llm.engine(progress=progress, **pages, **options)
    if cache_file is not None and (said := cache_file.restore(engine)) and not quiet:
        print(said, file=sys.stderr, flush=True)

    def close() -> None:
        if cache_file is not None:
            cache_file.store(engine)
        engine.close()
        llm.close()
        if embedder is not None:
            embedder.llm.close()

    return Served(
        engine,
        llm.tokenizer,
        name,
        max_context=engine.max_context,
        vocab_size=llm.config.vocab_size,
        created=int(time.time()),
        grammars=llm.grammars,
        device=llm.device.name,
        facts=model_facts(llm, model),
        close=close,
        embedder=embedder,
        loras=engine,
        images=images,
    )


def _image_reader(llm: LLM, progress: Progress, *, required: bool) -> ImageReader | None:
    """Returns what reads images; None if the model takes none, or if Pillow is not installed.

    required: raises UsageError instead (--mmproj).
    """
    try:
        return llm.images.reader(progress)
    except UsageError:
        if required:
            raise
        return None
    except ModuleNotFoundError as error:
        if error.name != "PIL":
            raise
        if required:
            raise UsageError('images need the package Pillow: pip install "llmcl[images]"') from error
        return None


def model_facts(llm: LLM, model: str) -> ModelFacts:
    """Returns what clients may read about the model. model: the user's name for it."""
    from llmcl.serve.model_facts import ModelFacts

    config, weights = llm.config, [stage.weights for stage in llm.model.stages]
    # some are tied
    matrices = {id(matrix): matrix.nbytes for each in weights for matrix in (each.embedding, *each.matrices)}
    return ModelFacts(
        family=config.architecture,
        n_parameters=config.n_parameters(),
        embedding_size=config.hidden_size,
        weight_type=llm.dtype,
        n_bytes=sum(matrices.values()),
        is_gguf=model.endswith(".gguf") or config.dtype == "quantized",
    )
