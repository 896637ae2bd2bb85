"""The engine's own thread: commands come in, what each step produced goes out."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from octavo.core.errors import RequestError, SettingError
from octavo.core.ids import RequestId
from octavo.core.request import FinishReason, Request, RequestStats, SequenceOutput
from octavo.engine.core import EngineCore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Finish:
    """End a completion at a stop string that its text hit after ``num_tokens`` tokens."""

    request_id: RequestId
    num_tokens: int
    index: int


@dataclass(frozen=True, slots=True)
class SetEvictionPolicy:
    """Switch the eviction policy; ``done`` is told that it happened, or why not."""

    name: str
    done: Future[None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Add | Abort | Finish | SetEvictionPolicy | Stop


@dataclass(frozen=True, slots=True)
class Outbox:
    """What leaves the thread at once."""

    outputs: tuple[SequenceOutput, ...] = ()
    finished: tuple[RequestStats, ...] = ()
    has_failed: bool = False
    """Set once, when the engine has stopped for good because of a bug."""


class EngineThread:
    """Runs an engine core on one thread until told to stop.

    ``deliver`` is called on that thread and must hand over quickly.
    """

    def __init__(self, core: EngineCore, deliver: Callable[[Outbox], None]) -> None:
        self._core = core
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Put a command in the inbox; it is taken between steps."""
        self._inbox.put(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread after the step it is in; what is unfinished is dropped."""
        if self._thread.is_alive():
            self.send(Stop())
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self._core.has_work():
                    update = self._core.step()
                    self._deliver(Outbox(update.outputs, update.finished))
        except Exception:
            logger.critical("The engine stopped because of a bug.", exc_info=True)
            self._deliver(Outbox(has_failed=True))

    def _take_commands(self) -> bool:
        """Take what is in the inbox, waiting for a command if there is no work; False: stop."""
        finished: list[RequestStats] = []
        outputs: list[SequenceOutput] = []
        while True:
            try:
                command = self._inbox.get(block=not (self._core.has_work() or finished or outputs))
            except queue.Empty:
                break
            match command:
                case Stop():
                    return False
                case Add(request):
                    try:
                        self._core.add(request)
                    except RequestError as error:
                        for index in range(request.sampling.num_reported):
                            outputs.append(_refusal(request, index, error))
                            finished.append(_refused_stats(request, index))
                case Abort(request_id):
                    finished += self._core.abort(request_id)
                case SetEvictionPolicy(name, done):
                    self._switch(name, done)
                case Finish(request_id, num_tokens, index):
                    stats = self._core.finish(request_id, num_tokens, index)
                    finished += [stats] if stats is not None else []
        if finished or outputs:
            self._deliver(Outbox(tuple(outputs), tuple(finished)))
        return True

    def _switch(self, name: str, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            self._core.set_eviction_policy(name)
        except SettingError as error:
            done.set_exception(error)
        else:
            done.set_result(None)


def _refusal(request: Request, index: int, error: RequestError) -> SequenceOutput:
    return SequenceOutput(
        request.request_id, finish_reason=FinishReason.ERROR, error=error, index=index
    )


def _refused_stats(request: Request, index: int) -> RequestStats:
    return RequestStats(
        request_id=request.request_id,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0,
        num_generation_tokens=0,
        max_tokens=request.sampling.max_tokens or 0,
        finish_reason=FinishReason.ERROR,
        num_preemptions=0,
        arrival_time=request.arrival_time,
        first_scheduled_time=None,
        first_token_time=None,
        last_token_time=None,
        finish_time=request.arrival_time,
        index=index,
    )
