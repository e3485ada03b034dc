"""The models of a router: which there are, which are loaded, and which one makes room for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from llmcl.errors import OutOfDeviceMemoryError, counted, shown
from llmcl.serve.errors import RequestError
from llmcl.serve.model_facts import ModelFacts
from llmcl.serve.model_process import KILL_S, ModelProcess

UNLOADED, LOADING, LOADED, SLEEPING = "unloaded", "loading", "loaded", "sleeping"  # as in llama-server
LOAD_FAILED, NO_ROOM = "model_load_failed", "no_room"
_MOST_NAMES = 20  # in a message
_AGAIN_S = 5  # when to ask again for a model that had no room


@dataclass(frozen=True)
class RouterOptions:
    """How a router loads and unloads models."""

    scan: Callable[[], dict[str, str]]  # the models there are: names and sources
    start: Callable[[str, str, Callable[[str], None]], ModelProcess]  # takes name, source and log
    say: Callable[[str], None]  # takes a line of the router's log
    most: int = 4  # loaded models; 0: no limit
    autoload: bool = True
    idle_s: float | None = None  # an idle model is unloaded after this time; None: never
    drain_s: float = 30.0  # for the answers of a model that is unloaded
    max_waiting: int = 72  # requests for a model, waiting or being answered


@dataclass(eq=False)
class RoutedModel:
    """A model and its process."""

    name: str
    source: str
    status: str = UNLOADED
    exit_code: int | None = None  # of the last process, unless the router ended it
    process: ModelProcess | None = None
    loading: asyncio.Task[None] | None = None
    is_unwanted: bool = False  # unloaded while it loads
    answering: int = 0  # requests, waiting for the model or being answered
    last_used: float = 0.0
    needs: dict[str, int] = field(default_factory=dict)  # bytes by memory, by forecast
    max_context: int = 0  # known once the model was loaded, like the facts
    facts: ModelFacts = field(default_factory=ModelFacts)
    alarm: asyncio.TimerHandle | None = None

    def show_status(self) -> dict[str, Any]:
        """Returns the status in llama-server's form."""
        failed = {"failed": True, "exit_code": self.exit_code} if self.exit_code else {}
        return {"value": self.status, **failed}


class Models:
    """All models. Loads one at a time, so that the memory that is left is known."""

    def __init__(self, options: RouterOptions):
        self._options = options
        self._lock = asyncio.Lock()
        self._limits: dict[str, int] = {}  # bytes by memory, for all models: the most that a process has met
        self._processes: set[ModelProcess] = set()  # all that run, also those about to end
        self._tasks: set[asyncio.Task[Any]] = set()
        self.by_name: dict[str, RoutedModel] = {}
        self.rescan()

    def rescan(self) -> None:
        """Looks for models again. A model that is gone is unloaded."""
        sources = self._options.scan()
        before, self.by_name = self.by_name, {}
        for name, source in sources.items():
            kept = before.pop(name, None)
            if kept is not None and kept.source != source:
                before[name] = kept
                kept = None
            self.by_name[name] = kept or RoutedModel(name, source)
        for model in before.values():
            if model.status != UNLOADED:
                self.unload(model, "it is gone")

    def named(self, name: str | None) -> RoutedModel:
        """Raises RequestError, with the names that exist, for another name."""
        names = [*self.by_name]
        there = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES))
        if not name:
            message = f"model: is missing, expected the name of a model; the models here are {there}"
            raise RequestError(400, message, "model", "missing_required_parameter")
        if (model := self.by_name.get(name)) is None:
            message = f"there is no model {shown(name)}; the models here are {there}"
            raise RequestError(404, message, "model", "model_not_found")
        return model

    @asynccontextmanager
    async def in_use(self, model: RoutedModel, *, autoload: bool | None, is_use: bool) -> AsyncIterator[ModelProcess]:
        """Yields the process of a model, loaded before if need be. The model stays loaded meanwhile.

        autoload: whether to load the model; None: as the options say. is_use: whether the model counts as used.
        """
        if model.answering >= self._options.max_waiting:
            message = f"{counted(model.answering, 'request')} for {model.name} are under way; try again later"
            raise RequestError(429, message, code="queue_full", retry_after_s=1)
        model.answering += 1
        self._set_alarm(model)
        try:
            if is_use:
                model.last_used = time.monotonic()
            yield await self._ready(model, self._options.autoload if autoload is None else autoload)
        finally:
            model.answering -= 1
            if is_use:
                model.last_used = time.monotonic()
            self._set_alarm(model)

    def load(self, model: RoutedModel) -> asyncio.Task[None]:
        """Begins to load a model."""
        if model.loading is None:
            model.status, model.exit_code, model.is_unwanted = LOADING, None, False
            model.loading = self._begin(self._load(model))
        return model.loading

    def unload(self, model: RoutedModel, why: str, status: str = UNLOADED) -> None:
        """Begins to unload a model. Answers under way have drain_s to end."""
        process, model.process, model.status, model.exit_code = model.process, None, status, None
        if model.alarm is not None:
            model.alarm.cancel()
        if model.loading is not None:
            model.is_unwanted = True
            if process is not None:
                process.kill()
        elif process is not None:
            self._options.say(f"{model.name}: unloaded, because {why}")
            self._begin(process.stop(self._options.drain_s + KILL_S))

    def close(self) -> None:
        """Ends all processes, after the event loop has ended."""
        for process in self._processes:
            process.close()
        end = time.monotonic() + KILL_S
        for process in self._processes:
            process.wait(end)

    async def _ready(self, model: RoutedModel, autoload: bool) -> ModelProcess:
        if model.process is None or model.status != LOADED:
            if model.loading is None and not autoload and model.status != SLEEPING:
                message = f"the model {model.name} is not loaded; load it with POST /models/load"
                raise RequestError(400, message, "model", "model_not_loaded")
            await asyncio.shield(self.load(model))  # goes on if this client leaves
        if model.process is None:
            raise RequestError(503, f"the model {model.name} was unloaded; try again", retry_after_s=1)
        return model.process

    async def _load(self, model: RoutedModel) -> None:
        start, name, process = time.monotonic(), model.name, None
        try:
            async with self._lock:
                self._check_wanted(model)
                await self._make_place(model)
                self._options.say(f"{name}: loading")
                process = model.process = self._start(model)
                await self._follow(model, process)
            model.status, model.last_used = LOADED, time.monotonic()
        except BaseException as error:
            model.process = None
            if not model.is_unwanted:
                model.status = UNLOADED
            if process is not None:
                process.kill()
                await process.ended.wait()
                self._processes.discard(process)
            is_said = isinstance(error, RequestError) and error.code == LOAD_FAILED  # the process has said why
            self._options.say(f"{name}: not loaded: {f'exit code {model.exit_code}' if is_said else error}")
            raise
        finally:
            model.loading = None
        self._options.say(f"{name}: ready after {time.monotonic() - start:.1f} s")
        self._begin(self._watch(model, process))
        self._set_alarm(model)

    def _check_wanted(self, model: RoutedModel) -> None:
        if model.is_unwanted:
            raise RequestError(503, f"the model {model.name} was unloaded while it loaded", retry_after_s=1)

    def _start(self, model: RoutedModel) -> ModelProcess:
        def log(line: str) -> None:
            self._options.say(line if line.startswith("{") else f"{model.name}: {line}")  # JSON stays JSON

        process = self._options.start(model.name, model.source, log)
        self._processes.add(process)
        return process

    async def _follow(self, model: RoutedModel, process: ModelProcess) -> None:
        """Returns once the model is loaded."""
        while (event := await process.events.get()) is not None:
            if "port" in event:
                process.port = event["port"]
            elif "memories" in event:
                await self._make_memory(model, event["memories"])
                process.tell("go")
            else:
                model.max_context, model.facts = event["max_context"], ModelFacts(**event["facts"])
                return
        self._check_wanted(model)
        model.exit_code = process.exit_code
        reason = process.last_line.removeprefix("error: ") or f"exit code {process.exit_code}"
        raise RequestError(500, f"the model {model.name} cannot be loaded: {reason}", code=LOAD_FAILED)

    async def _watch(self, model: RoutedModel, process: ModelProcess) -> None:
        await process.ended.wait()
        self._processes.discard(process)
        if model.process is process:  # nobody has asked for this end
            model.process, model.status, model.exit_code = None, UNLOADED, process.exit_code
            self._options.say(f"{model.name}: broke off with exit code {process.exit_code}")

    async def _make_place(self, model: RoutedModel) -> None:
        """Unloads idle models until one more may be loaded. Raises RequestError if all others are answering."""
        most = self._options.most
        while most and len(self._others(model)) >= most:
            if not (idle := self._idle(model)):
                message = f"{model.name} has no place: {counted(most, 'model')} may be loaded (--models-max), and all "
                message += "are answering; try again later"
                raise RequestError(503, message, code=NO_ROOM, retry_after_s=_AGAIN_S)
            await self._give_way(idle[0], model)
        if leaving := [each for each in self._processes if each not in {m.process for m in self._others(model)}]:
            await asyncio.gather(*(each.ended.wait() for each in leaving))

    async def _make_memory(self, model: RoutedModel, memories: Sequence[Mapping[str, Any]]) -> None:
        """Unloads idle models until there is room in all memories. Raises RequestError if that is not enough.

        memories: what the model needs, as `Memory` in llmcl/engine/split.py. The host counts only memory that was
        written to, so the forecasts of the loaded models are counted as well.
        """
        model.needs.clear()
        others, idle = self._others(model), self._idle(model)
        free: dict[str, int] = {}
        for memory in memories:
            where, limit = memory["where"], memory["limit"]
            model.needs[where] = model.needs.get(where, 0) + memory["needs"]
            self._limits[where] = max(self._limits.get(where, 0), limit)
            free[where] = self._limits[where] - sum(each.needs.get(where, 0) for each in others)
            if memory["is_measured"]:
                free[where] = min(free[where], limit)
        for where in free:
            self._check_room(model, where, max(0, free[where]), others, idle)
        for victim in idle:
            if any(model.needs[where] > free[where] and victim.needs.get(where) for where in free):
                await self._give_way(victim, model)
                free = {where: n_bytes + victim.needs.get(where, 0) for where, n_bytes in free.items()}

    def _check_room(
        self, model: RoutedModel, where: str, free: int, others: list[RoutedModel], idle: list[RoutedModel]
    ) -> None:
        """Raises RequestError if a memory is too small even without the idle models."""
        needs = model.needs[where]
        self._options.say(f"{model.name}: will need {needs / 2**30:.2f} GiB, {where} has {free / 2**30:.2f} GiB free")
        if needs <= free + sum(each.needs.get(where, 0) for each in idle):
            return
        model.exit_code = OutOfDeviceMemoryError.exit_code
        message = f"{model.name} needs {needs / 2**30:.2f} GiB, and {where} has {free / 2**30:.2f} GiB free"
        if busy := ", ".join(each.name for each in others if each not in idle):
            message += f" as long as models are answering ({busy}); try again later"
            raise RequestError(503, message, code=NO_ROOM, retry_after_s=_AGAIN_S)
        message += "; use a smaller --ctx-size, --kv-dtype or --max-sequences, or a smaller model"
        raise RequestError(503, message, code=NO_ROOM)

    async def _give_way(self, victim: RoutedModel, model: RoutedModel) -> None:
        process = victim.process
        self.unload(victim, f"{model.name} needs its place")
        if process is not None:
            await process.ended.wait()

    def _others(self, model: RoutedModel) -> list[RoutedModel]:
        return [each for each in self.by_name.values() if each.process is not None and each is not model]

    def _idle(self, model: RoutedModel) -> list[RoutedModel]:
        """Returns the other loaded models without a request, the least recently used first."""
        return sorted((m for m in self._others(model) if not m.answering), key=lambda m: m.last_used)

    def _set_alarm(self, model: RoutedModel) -> None:
        """Plans to unload the model once it has been idle for idle_s."""
        if model.alarm is not None:
            model.alarm.cancel()
        idle_s = self._options.idle_s
        if idle_s is None or model.status != LOADED or model.answering:
            return
        left_s = model.last_used + idle_s - time.monotonic()
        why = f"it was idle for {idle_s:g} s"
        model.alarm = asyncio.get_running_loop().call_later(left_s, self.unload, model, why, SLEEPING)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # an error was logged, and the requests that wait raise it
