"""The processes of torchrun, and the signals that end them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ngplus.lab.runs import RunError


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def started() -> int:
    """How many torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def own(device: str) -> str:
    """The device of this process: under torchrun, "cuda" is a GPU for each."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and started() > 1 else device


@contextmanager
def group(device: str = "cpu") -> Iterator[None]:
    """The process group of torchrun, where there is one and nobody has made it yet."""
    if started() == 1 or dist.is_initialized():
        yield
        return
    # torchrun may give all its restarts one store. Without a name of its own, an attempt can find the addresses that
    # the last one left there, and wait for processes that are gone.
    store, number, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    attempt = dist.PrefixStore(f"attempt {restarts}", store)  # type: ignore[attr-defined]
    backend = "gloo"
    if device.startswith("cuda"):  # flags and sums of what lies on the CPU go by gloo there as well
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(own(device))
    dist.init_process_group(backend, store=attempt, rank=number, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mean(loss: Tensor) -> float:
    shown = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(shown)
        shown /= dist.get_world_size()
    return shown.item()


def any_of(stop: bool) -> bool:
    """Does one of the processes ask for it? All stop in the same step."""
    if world() == 1:
        return stop
    flag = torch.tensor(float(stop))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag > 0)


def check_alike(model: nn.Module) -> None:
    """Raises RunError if the parameters differ between the processes."""
    if world() == 1:
        return
    total = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()]).sum()
    ends = torch.stack([total, -total])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    if bool(ends[0] != -ends[1]):
        raise RunError("The parameters differ between the processes: this optimizer does not synchronise them")


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for an end after the step; a second Ctrl-C is as usual."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: asked
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
