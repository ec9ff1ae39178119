"""Ranks that wait for work: processes in a gloo group, started once for all tests, since starting takes the longest."""

from __future__ import annotations

import io
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 120.0  # seconds until a task counts as hanging


def _serve(rank: int, world: int, folder: str, link: Connection) -> None:
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", f"file://{folder}/meeting", patience, world_size=world, rank=rank)
    while (task := link.recv()) is not None:
        function, args = task
        answer = io.BytesIO()
        try:
            torch.save(function(rank, world, *args), answer)
            link.send(("done", answer.getvalue()))
        except BaseException:  # CheckpointException is no Exception
            link.send(("failed", traceback.format_exc()))
    dist.destroy_process_group()


class Pool:
    """``run(function, *args)`` calls ``function(rank, world, *args)`` on every rank; the results by rank."""

    def __init__(self, world: int, folder: Path) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = mp.get_context("spawn")
        self._links: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, str(folder), there), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for link in self._links:
            link.send((function, args))
        answers: dict[int, Any] = {}
        while len(answers) < len(self._links):
            ready = wait([link for i, link in enumerate(self._links) if i not in answers], PATIENCE)
            if not ready:
                self.stop()
                raise TimeoutError(f"{function.__name__} hangs on ranks {set(range(len(self._links))) - set(answers)}")
            for link in ready:
                rank = self._links.index(link)  # type: ignore[arg-type]
                outcome, answer = self._links[rank].recv()
                if outcome == "failed":
                    self.stop()
                    raise RuntimeError(f"{function.__name__} failed on rank {rank}:\n{answer}")
                answers[rank] = torch.load(io.BytesIO(answer), weights_only=True)
        return [answers[rank] for rank in range(len(self._links))]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def close(self) -> None:
        for link in self._links:
            link.send(None)
        for process in self._processes:
            process.join(10)
