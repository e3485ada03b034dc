"""`llmcl warm`: compiles a model's kernels for a device, to speed up later starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from llmcl.cli import options as opt
from llmcl.cli.loading import load_to_answer, progress_bar
from llmcl.cli.option_groups import LoadingToAnswer, with_groups
from llmcl.errors import UsageError, counted

EPILOG = (
    "Later starts with the same model, device, driver and options (--dtype, --kv-dtype, --prompt-lookup...) "
    "compile nothing, here or where the folder is copied to."
)


@with_groups
def warm(
    model: opt.Model,
    cache_dir: Annotated[
        Path | None,
        opt.option(
            opt.OUTPUT_PANEL,
            "--cache-dir",
            metavar="FOLDER",
            env=False,
            help="Folder for the compiled kernels.  [default: the user's cache folder]",
        ),
    ] = None,
    max_sequences: Annotated[
        int,
        opt.option(
            opt.OUTPUT_PANEL,
            "--max-sequences",
            metavar="N",
            parser=opt.whole(1),
            env=False,
            help="Compile for this many answers at once, as in llmcl serve.",
        ),
    ] = 8,
    loading: LoadingToAnswer = LoadingToAnswer(),
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Compile all kernels of a model into the cache, for later starts."""
    if cache_dir is not None:
        os.environ["LLMCL_CACHE_DIR"] = str(cache_dir.absolute())
    from llmcl.engine.warming import warm as compile_all
    from llmcl.runtime.cache_files import cache_dir as cache_folder
    from llmcl.runtime.program import can_keep

    folder = cache_folder()
    if not can_keep():
        raise UsageError(f"compiled kernels cannot be kept in {folder}; give a folder that you may write (--cache-dir)")
    with load_to_answer(model, loading, quiet=quiet) as llm:
        with progress_bar(quiet) as bar:
            compile_all(llm, max_sequences, bar)
        programs = [device.programs for device in llm.devices]
        if quiet:
            return
        compiled, seconds = sum(each.compiled for each in programs), sum(each.compile_s for each in programs)
        said = f"{counted(sum(map(len, programs)), 'program')}, {compiled} compiled in {seconds:.1f} s"
        if all(each.keeps_binaries for each in programs):
            nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            said += f"; {folder} has {nbytes / 1e6:.1f} MB"
        else:
            said += "; PoCL keeps them in a folder of its own (POCL_CACHE_DIR)"
        print(said, file=sys.stderr)
