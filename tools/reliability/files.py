"""Mutated files for every reader of data, runs and checkpoints: what comes out is the content, or a documented error.

    python tools/reliability/files.py --files 100000                    # own mutations
    python tools/reliability/files.py --files 100000 --engine atheris   # guided by coverage (pip install atheris)

A reader of the laboratory may raise RunError (runs, presets, checkpoints) or DataError (data), nothing else. A
checkpoint that is refused leaves model and optimizer as they were; one that is taken brings the tensors that were
saved, bit for bit.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import pickle
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kills import STEPS, Small, config, same

from ngplus.lab import collection, loop, presets, runs
from ngplus.lab.runs import RunError
from ngplus.lab.workloads import DataError, cifar10, files, qm9
from ngplus.lab.workloads.files import Folder

DOCUMENTED = (RunError, DataError)


class Readers:
    """A seed and a reader for each kind of file; all files lie in one folder of their own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        torch.set_num_threads(1)
        run = root / "run"
        loop.run(config("ngadam"), Small(), run, checkpoint_every=STEPS)
        self.session = loop._Session(config("ngadam"), Small(), None, "cpu")
        self.begun = self._state()
        self.saved = torch.load(run / "checkpoint.pt", weights_only=True)
        self.folder = Folder("fuzz", root, "")
        collection.write(root / "seed.json", [runs.load(run)])
        self.kinds: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
            "checkpoint.pt": ((run / "checkpoint.pt").read_bytes(), self.checkpoint),
            "config.json": ((run / "config.json").read_bytes(), lambda path: self.run("config.json")),
            "result.json": ((run / "result.json").read_bytes(), lambda path: self.run("result.json")),
            "metrics.jsonl": ((run / "metrics.jsonl").read_bytes(), lambda path: self.run("metrics.jsonl")),
            "presets.json": (
                b'{"workload": "presets", "presets": {"small": {"ngadam": {"hyper": {"lr": 0.01}, "run": {}}}}}',
                lambda path: presets.lookup("presets", "small", "ngadam", root),
            ),
            "collection.json": ((root / "seed.json").read_bytes(), collection.read),
            "text.gz": (gzip.compress(b"ein Satz\nnoch einer\n" * 20), self.folder.text),
            "data.json": (json.dumps({"labels": list(range(50))}).encode(), self.folder.json),
            "qm9.npz": (_molecules(), lambda path: self.fresh(qm9.read, self.folder)),
            "test_batch": (_images(), lambda path: self.fresh(cifar10._read_part, self.folder, "test_batch", 0)),
        }

    def check_seeds(self) -> None:
        """What nobody has damaged is read."""
        for kind, (seed, _) in self.kinds.items():
            assert self.read(kind, seed) == "read", kind

    def read(self, kind: str, content: bytes) -> str:
        """What came of it: "read" or "refused"."""
        path = self.root / kind
        path.write_bytes(content)
        try:
            self.kinds[kind][1](path)
        except DOCUMENTED:
            return "refused"
        finally:
            path.unlink(missing_ok=True)
        return "read"

    def checkpoint(self, path: Path) -> None:
        try:
            self.session._load(path)
        except RunError:
            assert same(self._state(), self.begun), "a checkpoint that was refused has changed something"
            raise
        assert same(self.session.model.state_dict(), self.saved["model"]), "other parameters than those saved"
        assert same(self.session.optimizer.state_dict(), self.saved["optimizer"]), "another state than the one saved"
        self.session = loop._Session(config("ngadam"), Small(), None, "cpu")

    def run(self, name: str) -> None:
        """The run's folder with one file replaced."""
        place = self.root / "run" / name
        before = place.read_bytes()
        place.write_bytes((self.root / name).read_bytes())
        try:
            runs.load(self.root / "run")
        finally:
            place.write_bytes(before)

    def fresh(self, reader: Callable[..., Any], *arguments: Any) -> None:
        """Without the memory of files that were read before."""
        files._memory.clear()
        reader(*arguments)

    def _state(self) -> Any:
        session = self.session
        parts = (session.model.state_dict(), session.optimizer.state_dict(), session.step, session.loss_sum)
        return pickle.loads(pickle.dumps(parts))  # a copy


def _molecules() -> bytes:
    buffer = io.BytesIO()
    names = np.array(["InternalEnergy_0K_au", "other"])
    numbers, places = np.array([6, 1, 8, 1, 1]), np.zeros((5, 3), np.float32)
    np.savez(buffer, N=np.array([2, 3]), Z=numbers, R=places, Y=np.ones((2, 2)), Y_names=names)
    return buffer.getvalue()


def _images() -> bytes:
    content = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}
    return pickle.dumps(content, protocol=2)


def mutated(content: bytes, random: random.Random) -> bytes:
    """One to four of: bits turned, bytes set, a piece cut off, taken out, doubled, moved, or filled with noise."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        at, length = random.randrange(len(data)), random.choice((1, 2, 8, 64, 512))
        what = random.randrange(7)
        if what == 0:
            data[at] ^= 1 << random.randrange(8)
        elif what == 1:
            data[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, ord("0"), ord("9"), ord('"'), ord("{"), ord("}")))
        elif what == 2:
            del data[at:]
        elif what == 3:
            del data[at : at + length]
        elif what == 4:
            data[at:at] = data[at : at + length]
        elif what == 5:
            piece = data[at : at + length]
            del data[at : at + length]
            place = random.randrange(len(data) + 1)
            data[place:place] = piece
        else:
            data[at : at + length] = random.randbytes(min(length, len(data) - at))
    return bytes(data)


def try_many(count: int, seed: int, root: Path) -> Counter[str]:
    readers = Readers(root)
    readers.check_seeds()
    generator = random.Random(seed)
    seen: Counter[str] = Counter()
    for i in range(count):
        kind = list(readers.kinds)[i % len(readers.kinds)]
        seen[f"{kind} {readers.read(kind, mutated(readers.kinds[kind][0], generator))}"] += 1
    return seen


def with_atheris(count: int, root: Path) -> None:
    """libFuzzer's mutations, led by the lines of the readers that they reach. It ends the process."""
    import atheris

    readers = Readers(root)
    for module in (runs, presets, collection, files, qm9, cifar10, loop):
        for name, function in list(vars(module).items()):
            if getattr(function, "__module__", "") == module.__name__ and hasattr(function, "__code__"):
                setattr(module, name, atheris.instrument_func(function))
    corpus = root / "corpus"
    corpus.mkdir()
    kinds = list(readers.kinds)
    for i, kind in enumerate(kinds):
        (corpus / kind).write_bytes(bytes([i]) + readers.kinds[kind][0])

    def one(data: bytes) -> None:
        if data:
            readers.read(kinds[data[0] % len(kinds)], data[1:])

    atheris.Setup([sys.argv[0], f"-runs={count}", "-max_len=65536", "-verbosity=1", str(corpus)], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("own", "atheris"), default="own")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        if arguments.engine == "atheris":
            with_atheris(arguments.files, Path(root))
        print(json.dumps(try_many(arguments.files, arguments.seed, Path(root)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
