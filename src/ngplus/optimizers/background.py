"""The asynchronous refresh: inverses and eigenbases made beside the training, and taken up when they are ready.

The gathered L or R is handed to a thread of its own (torch's kernels leave Python's lock), on an accelerator with a
stream of its own. Steps go on with the last inverse. Taken up "when ready", a run depends on how busy the machine is;
taken up a given number of steps later, and waited for if need be, it is the same in every run and on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

Job = Callable[[], dict[str, Any]]


@dataclass
class _Started:
    future: Future[dict[str, Any]]
    step: int
    ready: torch.Event | None  # on an accelerator: recorded on the job's stream once all is launched


class Background:
    """The refreshes under way, each by the key of its matrix."""

    def __init__(self) -> None:
        self._started: dict[int, _Started] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """Is there any job whose result has not been taken?"""
        return bool(self._started)

    def start(self, key: int, step: int, device: torch.device, job: Job) -> None:
        """Begins a job."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="ngplus-refresh")
        if device.type == "cpu":
            self._started[key] = _Started(self._thread.submit(job), step, None)
            return
        stream, ready = torch.Stream(device), torch.Event(device)
        stream.wait_stream(torch.accelerator.current_stream(device))

        def on_stream() -> dict[str, Any]:
            with stream:
                result = job()
                ready.record(stream)
            return result

        self._started[key] = _Started(self._thread.submit(on_stream), step, ready)

    def take(self, key: int, step: int, delay: int | None) -> dict[str, Any] | None:
        """The result of a job: with a ``delay``, that many steps after its start, else once it is there."""
        started = self._started.get(key)
        if started is None or (step < started.step + delay if delay is not None else not started.future.done()):
            return None
        del self._started[key]
        result = started.future.result()
        if started.ready is not None:
            torch.accelerator.current_stream().wait_event(started.ready)
        return result

    def drop(self) -> None:
        """Forgets all jobs; those that run are not waited for."""
        for started in self._started.values():
            started.future.cancel()
        self._started.clear()
