"""CIFAR-10 with a ResNet: PNG files of 10,000 images, or the data set's own Python pickles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ngplus.lab.workloads.base import DataError, Preset, Workload
from ngplus.lab.workloads.files import Arrays, Folder, cached, folder
from ngplus.lab.workloads.resnet import OPTIONAL, Images, ImageTask
from ngplus.lab.workloads.sampling import batch_index, generator, random_crops

HELP = """Get "CIFAR-10 python version" from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it, so that
  DATA/cifar10/data_batch_1 ... data_batch_5, test_batch      (or DATA/cifar-10-batches-py/...)
are there; some of the training batches are enough. Or, as PNG of 1024 x 10000 pixels, an image a row:
  DATA/cifar10/data_batch_1.png ..., test_batch.png, train_lables.json, test_lables.json"""

_MEAN, _STD = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
_PICKLED = {"numpy", "numpy.core.multiarray", "numpy._core.multiarray"}


class _ArraysOnly(pickle._Unpickler):
    """Builds arrays, bytes, lists and dicts; any other class or function in the file is refused.

    The unpickler that is written in Python: a few damaged bytes make the one in C ask for gigabytes.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in _PICKLED and name == "_reconstruct":
            return _empty
        if module in _PICKLED and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):  # bytes, in pickles that Python 3 wrote with protocol 2
            return _latin1
        raise ValueError(f"it refers to {module}.{name}, which is not allowed in a CIFAR-10 file")


def _empty(kind: Any, shape: Any, code: Any) -> Any:
    """The array that a pickle begins with, before its content is set."""
    if kind is not np.ndarray or shape != (0,):
        raise ValueError("it makes an array in a way that is not allowed in a CIFAR-10 file")
    return np.empty(0, np.uint8)


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _from_pickle(path: Path) -> tuple[np.ndarray[Any, Any], list[int]]:
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:  # an unpickler raises what it likes
        raise ValueError(f"{type(error).__name__}: {error}") from error
    content = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
    return np.asarray(content["data"], np.uint8).reshape(-1, 3, 32, 32), list(content["labels"])


def _from_png(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def read(source: Folder) -> tuple[Images, Images]:
    """All training batches that are there, and the test images."""
    train = [part for k in range(1, 6) if (part := _read_part(source, f"data_batch_{k}", (k - 1) * 10000)) is not None]
    test = _read_part(source, "test_batch", 0)
    if not train:
        raise source.missing("data_batch_1 (or data_batch_1.png)")
    if test is None:
        raise source.missing("test_batch (or test_batch.png)")
    return Images(torch.cat([p.pixels for p in train]), torch.cat([p.labels for p in train])), test


def _read_part(source: Folder, name: str, first: int) -> Images | None:
    """One batch; in the PNG form its labels are entries ``first``, ``first`` + 1, ... of the file of labels."""
    path = source.find(name, f"{name}.png")
    if path is None:
        return None
    paths = [path]
    if path.suffix == ".png":
        kind = name.split("_")[0].replace("data", "train")
        paths.append(source.require(f"{kind}_lables.json", f"{kind}_labels.json"))

    def make() -> Arrays:
        with source.reading(path):
            pixels, labels = (_from_png(path), []) if len(paths) == 2 else _from_pickle(path)
        if len(paths) == 2:
            with source.reading(paths[1]):
                labels = source.json(paths[1])[first : first + len(pixels)]
        with source.reading(paths[-1]):
            found = np.asarray(labels, np.int64)
            if len(pixels) != len(found) or len(found) == 0:
                raise ValueError(f"{len(pixels)} images and {len(found)} labels")
            if found.min() < 0 or found.max() > 9:
                raise ValueError("a label is not one of 0 to 9")
        return {"pixels": np.ascontiguousarray(pixels), "labels": found}

    arrays = cached(paths, "cifar10", first, make)
    return Images(torch.from_numpy(arrays["pixels"]), torch.from_numpy(arrays["labels"]))


def augment(pixels: Tensor, random: torch.Generator) -> Tensor:
    """A random crop after padding by 4 black pixels, and a mirror image for half of the images."""
    crops = random_crops(pixels, 4, random)
    mirrored = torch.rand(len(pixels), generator=random) < 0.5
    return torch.where(mirrored[:, None, None, None], crops.flip(3), crops)


class Cifar10Task(ImageTask):
    def __init__(self, train: Images, test: Images, preset: Preset) -> None:
        super().__init__(10, dict(preset.options), _MEAN, _STD)
        self.train, self.test, self.batch_size = train, test, preset.batch_size
        self.augmented = bool(preset.options.get("augment", True))

    def batch(self, seed: int, step: int) -> Images:
        index = batch_index(self.train.size, self.batch_size, seed, step)
        pixels = self.train.pixels[index]
        if self.augmented:
            pixels = augment(pixels, generator(seed, step, 1))
        return Images(pixels, self.train.labels[index])

    def validation(self) -> Iterator[Images]:
        for start in range(0, self.test.size, 500):
            yield Images(self.test.pixels[start : start + 500], self.test.labels[start : start + 500])


class Cifar10(Workload):
    name = "cifar10"
    title = "CIFAR-10, ResNet"
    measure = "accuracy"
    higher_is_better = True
    optional: ClassVar[Mapping[str, Any]] = {**OPTIONAL, "augment": True, "train": 50_000, "test": 10_000}
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": Preset(
            steps=200,
            batch_size=64,
            evaluate_every=10,
            warmup=10,
            target=0.409,
            options={
                "model": {
                    "stem_stride": 2,
                    "embedding_size": 16,
                    "hidden_sizes": [16, 32, 64],
                    "depths": [1, 1, 1],
                    "layer_type": "basic",
                    "downsample_in_first_stage": False,
                },
                "augment": False,
                "test": 1000,
            },
        ),
        "standard": Preset(
            steps=2_340,
            batch_size=128,
            evaluate_every=78,
            warmup=100,
            target=0.742,
            decay=5e-4,
            options={
                "model": {
                    "stem_stride": 2,
                    "embedding_size": 16,
                    "hidden_sizes": [16, 32, 64],
                    "depths": [1, 1, 1],
                    "layer_type": "basic",
                    "downsample_in_first_stage": False,
                },
            },
        ),
        # The paper has no CIFAR-10; this is the usual ResNet-18 for 32 pixels with the usual length of training.
        "paper": Preset(
            steps=78_000,
            batch_size=128,
            evaluate_every=390,
            target=0.95,
            options={
                "model": {
                    "stem_stride": 1,
                    "embedding_size": 64,
                    "hidden_sizes": [64, 128, 256, 512],
                    "depths": [2, 2, 2, 2],
                    "layer_type": "basic",
                    "downsample_in_first_stage": False,
                },
            },
        ),
    }

    def open(self, preset: Preset, data: Path | None) -> Cifar10Task:
        train, test = read(folder(self.name, data, HELP, "cifar-10-batches-py"))
        keep, shown = preset.options.get("train", train.size), preset.options.get("test", test.size)
        if min(keep, shown) < 1:
            raise DataError("cifar10: the options train and test must be 1 or more")
        return Cifar10Task(
            Images(train.pixels[:keep], train.labels[:keep]), Images(test.pixels[:shown], test.labels[:shown]), preset
        )
