"""Downloads models from a Hugging Face hub, once, into the hub's usual cache folder.

The environment variables of huggingface_hub apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and so on.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from llmcl.architectures.config import config_from_hf
from llmcl.checkpoint.embedding_settings import EMBEDDING_FILES, MODULES_FILE, module_files
from llmcl.checkpoint.files import optional_json, read_bytes, read_json
from llmcl.checkpoint.gguf import check_header, part_names
from llmcl.checkpoint.safetensors import (
    INDEX_FILE,
    check_no_adapter,
    no_weights_message,
    shard_files,
    weight_files,
)
from llmcl.errors import CheckpointError, HubError, UnsupportedModelError, one_line, shown
from llmcl.progress import Progress

_CONFIG_FILE = "config.json"
_SMALL_FILES = (
    _CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_ANSWER_TIMEOUT_S = 10.0
_MAX_HEADER = 1 << 26  # bytes of a GGUF file fetched for a support check
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


# `model-Q4_K_M.gguf`, `model.UD-Q4_K_XL.gguf`, `Q8_0/model-Q8_0-00001-of-00002.gguf`
_PART = re.compile(r"-(\d{5})-of-\d{5}(?=\.gguf$)")
_QUANTISATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32|FP16))\.gguf$", re.IGNORECASE
)


def quantisation(file: str) -> str | None:
    """Returns the quantisation at the end of a GGUF file name, in upper case, or None."""
    match = _QUANTISATION.search(_PART.sub("", file))
    return match[1].upper() if match else None


class Hub:
    """A model on a hub. endpoint and cache_dir: None uses the environment's values."""

    def __init__(
        self,
        repo_id: str,
        *,
        offline: bool = False,
        progress: Progress | None = None,
        endpoint: str | None = None,
        cache_dir: Path | None = None,
    ):
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(repo_id)
        except HFValidationError as error:
            raise HubError(
                f"{shown(repo_id)} is no name of a model of a hub: {one_line(error)} Check the spelling."
            ) from None
        self.repo_id = repo_id
        self.offline = offline
        self.progress = progress
        self.endpoint = endpoint or constants.ENDPOINT
        self.cache_dir = str(cache_dir or constants.HF_HUB_CACHE)
        if self.cache_dir.startswith("~"):
            raise HubError(
                f"the cache of the hub is {self.cache_dir}, and no home folder is known for its ~; set HF_HOME."
            )

    def fetch_folder(self) -> Path:
        """Returns a local folder with the model's configuration, tokenizer and safetensors files. Raises HubError."""
        return self._fetch(self._download_folder, self._cached_folder)

    def fetch_file(self, file: str) -> Path:
        """Returns a local copy of a model file, for example a GGUF file. Raises HubError."""
        return self._fetch(lambda: self._download_file(file), lambda: self._cached_parts(file))

    def fetch_quantisation(self, name: str) -> Path:
        """Returns the GGUF file whose name ends with a quantisation such as Q4_K_M, in any case. Raises HubError."""

        def download() -> Path:
            sizes, _ = self._list_files()
            return self._download_file(self._of_quantisation(name, sizes))

        def cached() -> Path | None:
            paths = [(folder, path) for folder in self._snapshots() for path in sorted(folder.rglob("*.gguf"))]
            files = {path.relative_to(folder).as_posix(): path for folder, path in paths}
            return files[self._of_quantisation(name, files)] if files else None

        return self._fetch(download, cached)

    def fetch_mmproj(self, choose: Callable[[Iterable[str]], str | None]) -> Path:
        """Returns the file with the vision tower. choose: picks it among the model's files. Raises HubError."""

        def chosen(files: Iterable[str]) -> str:
            if (file := choose(files)) is None:
                raise HubError(
                    f"the model {self.repo_id} on the hub has no mmproj file with a vision tower; give one "
                    "(--mmproj FILE, mmproj), or another model"
                )
            return file

        def download() -> Path:
            sizes, commit = self._list_files()
            file = chosen(sizes)
            path = self._download(file, sizes[file], commit)
            self._remember(file, commit)
            return path

        def cached() -> Path | None:
            files = {
                path.relative_to(folder).as_posix(): path
                for folder in self._snapshots()
                for path in sorted(folder.rglob("*mmproj*.gguf"))
            }
            return files[chosen(files)] if files else None

        return self._fetch(download, cached)

    def _of_quantisation(self, name: str, files: Iterable[str]) -> str:
        all_files = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
        fits = [file for file in all_files if quantisation(file) == name.upper()]
        first = [file for file in fits if not _PART.search(file) or _PART.search(file)[1] == "00001"]  # type: ignore[index]
        if not first:
            there = one_line(", ".join(dict.fromkeys(filter(None, map(quantisation, all_files)))) or "none", 400)
            raise HubError(f"the model {self.repo_id} on the hub has no GGUF file of {shown(name)}; it has: {there}.")
        if len(first) > 1:
            raise HubError(
                f"the model {self.repo_id} on the hub has several GGUF files of {shown(name)}: "
                f"{one_line(', '.join(first), 400)}. Give {self.repo_id}/FILE."
            )
        return first[0]

    def _snapshots(self) -> list[Path]:
        """Returns the folder of the cache's `main` in a list, or an empty list if there is none."""
        from huggingface_hub.file_download import repo_folder_name

        folder = Path(self.cache_dir) / repo_folder_name(repo_id=self.repo_id, repo_type="model")
        main = folder / "refs" / "main"
        return [folder / "snapshots" / main.read_text().strip()] if main.is_file() else []

    def _fetch(self, download: Callable[[], Path], cached: Callable[[], Path | None]) -> Path:
        """Returns `download()`, or the cached copy if offline or if the hub does not answer."""
        failure: Exception | None = None
        if not self.offline:
            try:
                return download()
            except CheckpointError:
                raise
            except Exception as error:  # the type depends on the HTTP library used by huggingface_hub
                status = _http_status(error)
                if status is not None and 400 <= status < 500 and status != 429:
                    raise self._refused(error, status) from error
                failure = error
        path = cached()
        if path is None:
            raise self._unreachable(failure) from failure
        if failure is not None:
            _log.warning(
                "the hub at %s does not answer; using the copy of %s in the cache", self.endpoint, self.repo_id
            )
        return path

    def _download_folder(self) -> Path:
        sizes, commit = self._list_files()
        self._named(check_no_adapter, sizes)
        if _CONFIG_FILE not in sizes:
            hint = "It is not a transformers model."
            if gguf_files := sorted(file for file in sizes if file.endswith(".gguf")):
                hint = f"It has GGUF files: name one of them, for example {self.repo_id}/{one_line(gguf_files[0], 80)}."
            raise HubError(f"the model {self.repo_id} on the hub has no {_CONFIG_FILE}. {hint}")
        index = None
        if INDEX_FILE in sizes:
            index = shard_files(self._download(INDEX_FILE, sizes[INDEX_FILE], commit))
        weights = self._named(weight_files, sizes, index)
        if not weights:
            raise UnsupportedModelError(f"{self.repo_id}: {no_weights_message(sizes)}")
        if missing := [file for file in weights if file not in sizes]:
            raise HubError(
                f"the model {self.repo_id} on the hub lacks {one_line(missing[0], 80)}, which its {INDEX_FILE} names."
            )
        for file in (file for file in _SMALL_FILES if file in sizes):
            path = self._download(file, sizes[file], commit)
        self._check_config(path.parent)
        of_embeddings = [file for file in EMBEDDING_FILES if file in sizes]
        for file in of_embeddings:
            self._download(file, sizes[file], commit)
        if MODULES_FILE in of_embeddings:
            listed = self._named(module_files, read_bytes(path.parent / MODULES_FILE))
            for file in (file for file in listed if file in sizes):
                self._download(file, sizes[file], commit)
        for file in weights:
            path = self._download(file, sizes[file], commit)
        self._remember(_CONFIG_FILE, commit)
        return path.parent

    def _check_config(self, folder: Path) -> None:
        """Raises UnsupportedModelError for an unsupported model before the weights are downloaded."""
        settings = read_json(folder / _CONFIG_FILE), optional_json(folder / "generation_config.json")
        self._named(config_from_hf, *settings)

    def _named(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls the function and puts the model's name before any CheckpointError."""
        try:
            return function(*arguments)
        except CheckpointError as error:
            raise type(error)(f"{self.repo_id}: {error}") from error

    def _download_file(self, file: str) -> Path:
        sizes, commit = self._list_files()
        if file not in sizes:
            there = one_line(", ".join(sorted(name for name in sizes if name.endswith(".gguf"))[:12]) or "none", 800)
            raise HubError(f"the model {self.repo_id} on the hub has no file {file}; its GGUF files: {there}.")
        parts = part_names(file)
        if missing := next((part for part in parts if part not in sizes), None):
            raise HubError(f"the model {self.repo_id} on the hub lacks {missing}, a part of the split file {file}.")
        self._named(self._check_header, parts[0], commit)
        paths = {part: self._download(part, sizes[part], commit) for part in parts}
        for part in parts:
            self._remember(part, commit)
        return paths[file]

    def _check_header(self, file: str, commit: str) -> None:
        """Raises UnsupportedModelError for an unsupported GGUF file before the download.

        If the header cannot be fetched, the check happens after the download.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if self._cached(file) is not None:
            return
        url = hf_hub_url(self.repo_id, file, revision=commit, endpoint=self.endpoint)
        try:
            location = get_hf_file_metadata(url, endpoint=self.endpoint).location
            headers = build_hf_headers() if urlsplit(location).netloc == urlsplit(url).netloc else {}
            request = Request(location, headers=headers | {"Range": f"bytes=0-{_MAX_HEADER - 1}"})
            with urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
                beginning = b""
                while len(beginning) < _MAX_HEADER and (more := answer.read(max(len(beginning), 1 << 20))):
                    beginning += more
                    if check_header(beginning):
                        return
        except UnsupportedModelError:
            raise
        except Exception as error:
            _log.debug("the beginning of %s cannot be had: %s", file, error)

    def _list_files(self) -> tuple[dict[str, int], str]:
        """Returns ({file: bytes}, commit) for the model's main branch."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint)
        info = api.model_info(self.repo_id, files_metadata=True, timeout=_ANSWER_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return sizes, info.sha or "main"

    def _download(self, file: str, n_bytes: int, commit: str) -> Path:
        from huggingface_hub import hf_hub_download

        bar = _bar_class(self.progress, f"downloading {file}", n_bytes)
        path = hf_hub_download(
            self.repo_id, file, revision=commit, endpoint=self.endpoint, cache_dir=self.cache_dir, tqdm_class=bar
        )
        return Path(path)

    def _remember(self, file: str, commit: str) -> None:
        """Points the cache's `main` to the commit. Called last, when all files are there."""
        from huggingface_hub import hf_hub_download

        cached = self._cached(file)
        if cached is None or commit not in cached.parts:
            bar = _bar_class(None, file, 0)
            hf_hub_download(self.repo_id, file, endpoint=self.endpoint, cache_dir=self.cache_dir, tqdm_class=bar)

    def _cached(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repo_id, file, cache_dir=self.cache_dir)
        return Path(path) if isinstance(path, str) else None

    def _cached_parts(self, file: str) -> Path | None:
        """Returns the path of the file if all parts of a split file are in the cache."""
        paths = {part: self._cached(part) for part in part_names(file)}
        return paths[file] if all(paths.values()) else None

    def _cached_folder(self) -> Path | None:
        config_path = self._cached(_CONFIG_FILE)
        if config_path is None:
            return None
        folder = config_path.parent
        names = {path.name for path in folder.iterdir() if path.is_file()}
        index = shard_files(folder / INDEX_FILE) if INDEX_FILE in names else None
        try:
            weights = weight_files(names, index)
        except CheckpointError:  # some files are not downloaded yet
            return None
        return folder if weights and names.issuperset(weights) else None

    def _refused(self, error: Exception, status: int) -> HubError:
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        page = f"{self.endpoint}/{self.repo_id}"
        if isinstance(error, GatedRepoError) or status == 403:
            return HubError(
                f"the model {self.repo_id} is gated. Accept its terms at {page}, then set HF_TOKEN to an "
                "access token (or run `hf auth login`)."
            )
        if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
            return HubError(
                f"the hub at {self.endpoint} has no model {self.repo_id}, or it is private. Check the "
                "spelling; for a private model set HF_TOKEN (or run `hf auth login`); for a model on this "
                "machine give the path of its folder or .gguf file."
            )
        return HubError(f"the hub at {self.endpoint} refused the model {self.repo_id}: {_first_line(error)}")

    def _unreachable(self, error: Exception | None) -> HubError:
        elsewhere = "or give the path of a folder or .gguf file"
        if error is None:
            return HubError(
                f"the model {self.repo_id} is not (or not completely) in the cache {self.cache_dir}, and "
                f"--offline forbids to download it. Run once without --offline, {elsewhere}."
            )
        return HubError(
            f"cannot fetch the model {self.repo_id} from the hub at {self.endpoint} ({_first_line(error)}), "
            f"and the cache {self.cache_dir} does not hold it. Check the network and HF_ENDPOINT, "
            f"{elsewhere}. Once a model has been downloaded, --offline uses it without the network."
        )


def _http_status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {one_line(lines[0])}"


def _bar_class(progress: Progress | None, what: str, total_bytes: int) -> Any:
    """Returns a class that huggingface_hub uses as a tqdm bar. It draws nothing and calls `progress`."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class ProgressBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, initial: int = 0, **kwargs: Any):
            super().__init__(disable=True)
            self.done_bytes = int(initial or 0)
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.done_bytes += int(n or 0)
            if progress is not None:
                progress(what, self.done_bytes, total_bytes)

    return ProgressBar
