"""`llmcl tune`: finds and stores a device's fastest sizes for attention and products."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llmcl.cli import options as opt
from llmcl.cli.text_files import check_writable, hand_over, write_text
from llmcl.errors import UsageError, counted
from llmcl.tools import json_text
from llmcl.tools.markdown import table

if TYPE_CHECKING:
    from llmcl.architectures.config import ModelConfig
    from llmcl.kernels.common.attention import AttentionShape
    from llmcl.runtime.device import Device
    from llmcl.tools.tune import Measurement, Tuning

CONSTANTS = (
    *("BLOCK_M", "BLOCK_N", "DV_TILE", "N_SPLITS"),
    *("LOCAL_SIZE", "AT_ONCE", "AHEAD", "VECTORS", "ITEM_TOKENS", "ITEM_ROWS"),
)
EPILOG = """\b
prefill  the combinations A to H of BLOCK_M/BLOCK_N/DV_TILE: A 32/32/32,
         B 32/32/64, C 32/64/32, D 32/64/64, E 64/32/32, F 64/64/64,
         G 32/32/128, H 32/16/16 (DV_TILE at most head_dim), then one
         constant at a time from the fastest
decode   N_SPLITS (into how many runs the keys are cut) and BLOCK_N
products each product of the model but for experts, for one token and for
         --n-prompt: LOCAL_SIZE (work-items that share a tile), AT_ONCE and
         AHEAD (pieces asked for at once, and when), VECTORS (of a piece of
         quantised weights), ITEM_TOKENS and ITEM_ROWS (what a work-item
         computes); in the portable variants alone
         Each is compared with NumPy in float64 before it is timed.
vs G     speed-up over G, which cuts the output least; elsewhere over the
         default
memory   bytes of a work-item (private, spill) and a work-group (local),
         where the driver reports them
The winners are stored for the device, driver and kernel variant, and for the
head_dim and KV dtype or the size and dtype of a product; later runs use
them, unless --combo or kernel_options says otherwise."""


def tune(
    model: opt.OptionalModel = None,
    random: opt.RandomShape = None,
    n_prompt: opt.PromptTokens = 512,
    n_depth: Annotated[
        int,
        opt.measurement(
            "-d", "--n-depth", metavar="N", parser=opt.whole(1), help="Context that decode attends to, in tokens."
        ),
    ] = 1024,
    kernel: Annotated[
        str,
        opt.choice(
            "Measurement", "--kernel", ("all", "prefill", "decode", "products"), env=False, help="What to tune."
        ),
    ] = "all",
    variant: Annotated[
        str | None,
        opt.measurement(
            "--variant", metavar="NAME", help="A kernel variant.  [default: the one that this device uses]"
        ),
    ] = None,
    combo: Annotated[
        str | None,
        opt.measurement(
            "--combo",
            metavar="A..H",
            parser=opt.one_of(*opt.COMBINATIONS),
            help="Time only this combination of prefill, beside G and the default, and store nothing.",
        ),
    ] = None,
    store: Annotated[
        bool, opt.measurement("--store/--no-store", help="Keep the fastest for later runs, or only show them.")
    ] = True,
    offline: opt.Offline = False,
    device: opt.Device = None,
    dtype: opt.DtypeOfAny = "auto",
    kv_dtype: opt.KvDtype = "auto",
    markdown: Annotated[Path | None, opt.written("--markdown", "the tables as Markdown")] = None,
    csv_file: Annotated[Path | None, opt.written("--csv", "the tables as CSV")] = None,
    json_file: Annotated[Path | None, opt.written("--json", "the tables as JSON")] = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Find the fastest sizes of a model's attention and products on a device, and keep them for later runs."""
    opt.check_model_or_random(model, random)
    files = {"--markdown": markdown, "--csv": csv_file, "--json": json_file}
    for option, path in files.items():
        check_writable(option, path)
    from llmcl.runtime.device import Device
    from llmcl.tools.tune import COMBINATIONS, tune_decode, tune_prefill
    from llmcl.tools.tune_products import tune_products

    config, weight_dtype = _config(model, random, offline, dtype)
    shape = _shape(config, dtype, kv_dtype)
    if config.latent is not None:
        if kernel in ("prefill", "decode"):
            raise UsageError(
                "the model has latent attention, whose kernels have no sizes to choose; use --kernel products"
            )
        kernel = "products"
    opened = Device.open(device)
    stores = store and combo is None
    if stores:
        _store(opened, [])  # tests first whether the folder is writable

    def note(row: Measurement) -> None:
        if not quiet:
            outcome = f"{row.ms:.3f} ms" if row.ms is not None else row.refused
            print(f"{row.kernel} {row.label} ({_constants(row)}): {outcome}", file=sys.stderr, flush=True)

    if not quiet:
        print(f"device: {opened.entry.label}", file=sys.stderr)
    tunings = []
    if kernel in ("all", "prefill"):
        wanted = tuple(COMBINATIONS) if combo is None else tuple(dict.fromkeys((combo, "G")))
        tunings.append(
            tune_prefill(opened, shape, n_prompt, variant=variant, combinations=wanted, search=combo is None, note=note)
        )
    if kernel in ("all", "decode") and combo is None:
        tunings.append(tune_decode(opened, shape, n_depth, variant=variant, note=note))
    if kernel in ("all", "products") and combo is None:
        tunings += tune_products(opened, config, weight_dtype, n_prompt, variant=variant, note=note)
    if not tunings:
        raise UsageError(
            f"the kernels of products that {opened.name} uses have no sizes to choose; try --variant portable"
        )
    titles = [_title(tuning, shape, n_prompt, n_depth) for tuning in tunings]
    hand_over(
        lambda: _store(opened, tunings) if stores else None,
        lambda: _show(tunings, titles),
        lambda: _write(files, tunings, titles, opened.name),
    )
    if stores:
        print(f"stored in {opened.cache.path}")


def _config(model: str | None, random: str | None, offline: bool, dtype: str) -> tuple[ModelConfig, str]:
    """Returns the model's config, without loading weights, and the most common weight dtype."""
    from llmcl.checkpoint import open_checkpoint
    from llmcl.checkpoint.mixes import MIXES
    from llmcl.kernels.common.dtype import NATIVE
    from llmcl.models.random_shapes import random_shape_config

    dtype = MIXES[dtype][0].lower() if dtype in MIXES else dtype
    if random is not None:
        config = random_shape_config(random)
        return config, config.dtype if dtype == "auto" else dtype
    with open_checkpoint(str(model), offline=offline) as checkpoint:
        sizes: dict[str, int] = {}
        for tensor in checkpoint.tensors.values():
            if len(tensor.shape) == 2:
                sizes[tensor.format] = sizes.get(tensor.format, 0) + tensor.shape[0] * tensor.shape[1]
        return checkpoint.config, NATIVE[max(sizes, key=lambda name: sizes[name])] if dtype == "auto" else dtype


def _shape(config: ModelConfig, dtype: str, kv_dtype: str) -> AttentionShape:
    """Returns the model's attention shape, with the KV dtype for loading."""
    from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
    from llmcl.kernels.common.dtype import check_kv_dtype, is_rounded

    if kv_dtype == "auto":
        kv_dtype = "float32" if "float32" in (dtype, config.dtype if dtype == "auto" else dtype) else "float16"
    check_kv_dtype(kv_dtype, config.head_dim)
    exact = not is_rounded(kv_dtype, config.dtype if dtype == "auto" else dtype)
    heads = config.n_q_heads, config.n_kv_heads, config.head_dim
    return AttentionShape(*heads, CAPACITY_MULTIPLE, kv_dtype, exact_queries=exact)


def _title(tuning: Tuning, shape: AttentionShape, n_prompt: int, n_depth: int) -> str:
    if tuning.title:
        return tuning.title
    is_prompt = tuning.kernel == "attention_prefill"
    work = counted(n_prompt, "token") if is_prompt else f"one token, {counted(n_depth, 'key')}"
    heads = f"{counted(shape.n_q_heads, 'query head')}, {counted(shape.n_kv_heads, 'KV head')}"
    heads += f", head_dim {shape.head_dim}"
    return f"{tuning.kernel}, {tuning.variant} variant: {work}, {heads}, KV {shape.kv_dtype}"


def _constants(row: Measurement) -> str:
    return " ".join(f"{name} {value}" for name, value in row.constants.items())


def _cells(tuning: Tuning) -> list[list[str]]:
    rows = []
    for row in tuning.rows:
        label = f"{row.label} *" if row is tuning.winner else row.label
        base = tuning.baseline_ms
        speed = "" if row.ms is None or base is None else f"{base / row.ms:.2f}x"
        memory = ["" if n is None else str(n) for n in _memory(row).values()]
        shown = "/".join(map(str, row.constants.values()))
        rows.append([label, shown, "refused" if row.ms is None else f"{row.ms:.3f}", speed, *memory])
    return rows


def _memory(row: Measurement) -> dict[str, int | None]:
    names = ("private_bytes", "local_bytes", "spill_bytes")
    return {name: None if row.memory is None else getattr(row.memory, name) for name in names}


def _header(tuning: Tuning) -> list[str]:
    against = "vs G" if tuning.kernel == "attention_prefill" else "vs default"
    constants = "/".join(tuning.rows[0].constants)
    return ["choice", constants, "ms", against, "private B", "local B", "spill B"]


def _refusals(tuning: Tuning) -> list[str]:
    return [f"{row.label} refused: {row.refused}" for row in tuning.rows if row.refused is not None]


def _show(tunings: Sequence[Tuning], titles: Sequence[str]) -> None:
    from llmcl.cli.tables import console, new_table

    out = console()
    for tuning, title in zip(tunings, titles, strict=True):
        out.print(title, soft_wrap=True)
        table = new_table()
        for i, name in enumerate(_header(tuning)):
            table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
        for row in _cells(tuning):
            table.add_row(*row)
        out.print(table)
        for line in _refusals(tuning):
            out.print(line, soft_wrap=True)
        out.print()
    for tuning in tunings:
        what = tuning.title or tuning.kernel
        if tuning.winner is None:
            print(f"{what}: no choice was correct on this device, so nothing is stored; see `llmcl doctor`")
        else:
            print(f"fastest {what} (*): {_constants(tuning.winner)}")


def _store(device: Device, tunings: Sequence[Tuning]) -> None:
    winners = {tuning.key: tuning.winner.constants for tuning in tunings if tuning.winner is not None}
    try:
        device.cache.store_tuned(winners)
    except OSError as error:
        raise UsageError(
            f"winners cannot be stored in {device.cache.path} ({error.strerror}); make room there or the folder "
            "writable, set LLMCL_CACHE_DIR, or give --no-store"
        ) from error


def _write(files: dict[str, Path | None], tunings: Sequence[Tuning], titles: Sequence[str], device: str) -> None:
    writers = {"--markdown": _as_markdown, "--csv": _as_csv, "--json": _as_json}
    for option, path in files.items():
        if path is not None:
            write_text(option, path, writers[option](tunings, titles, device))


def _as_markdown(tunings: Sequence[Tuning], titles: Sequence[str], device: str) -> str:
    parts = [f"Device: {device}\n"]
    for tuning, title in zip(tunings, titles, strict=True):
        lines = table("llrrrrr", _header(tuning), _cells(tuning))
        parts.append("\n".join([f"{title}\n", *lines, *(f"\n{line}" for line in _refusals(tuning))]) + "\n")
    return "\n".join(parts)


def _records(tunings: Sequence[Tuning], titles: Sequence[str], device: str) -> list[dict[str, Any]]:
    return [
        {
            "device": device,
            "kernel": tuning.kernel,
            "variant": tuning.variant,
            "of": title,
            "choice": row.label,
            **{name: row.constants.get(name) for name in CONSTANTS},
            "ms": row.ms,
            "speed_up": None if row.ms is None or tuning.baseline_ms is None else tuning.baseline_ms / row.ms,
            **_memory(row),
            "winner": row is tuning.winner,
            "refused": row.refused,
        }
        for tuning, title in zip(tunings, titles, strict=True)
        for row in tuning.rows
    ]


def _as_csv(tunings: Sequence[Tuning], titles: Sequence[str], device: str) -> str:
    text = io.StringIO()
    records = _records(tunings, titles, device)
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _as_json(tunings: Sequence[Tuning], titles: Sequence[str], device: str) -> str:
    return json_text.dumps(_records(tunings, titles, device), indent=2) + "\n"
