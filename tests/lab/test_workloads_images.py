"""cifar10 and imagenet: readers, crops, batches and the ResNet, against plain versions."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data import (
    make_cifar10,
    make_imagenet,
    open_tiny,
)
from torch import nn

import ngplus
from ngplus.lab.workloads import cifar10, imagenet
from ngplus.lab.workloads.base import DataError
from ngplus.lab.workloads.resnet import Images, resnet
from ngplus.lab.workloads.sampling import batch_index, generator

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_epoch_has_every_example_once() -> None:
    epochs = [torch.cat([batch_index(10, 3, 0, step) for step in steps]) for steps in (range(3), range(3, 6))]
    for order in epochs:
        assert len(set(order.tolist())) == 9
    assert not torch.equal(*epochs)
    assert sorted(batch_index(4, 100, 0, 7).tolist()) == [0, 1, 2, 3]


def test_cifar10_pickles_are_read_like_pngs(tmp_path: Path) -> None:
    make_cifar10(tmp_path / "cifar10")
    wanted = open_tiny("cifar10", tmp_path)
    public = tmp_path / "other" / "cifar-10-batches-py"
    public.mkdir(parents=True)
    for name, part in (("data_batch_1", wanted.train), ("test_batch", wanted.test)):
        content = {
            b"data": part.pixels.reshape(-1, 3072).numpy(),
            b"labels": part.labels.tolist(),
            b"batch_label": b"x",
        }
        (public / name).write_bytes(pickle.dumps(content, protocol=2))
    found = open_tiny("cifar10", tmp_path / "other")
    assert torch.equal(found.train.pixels, wanted.train.pixels)
    assert torch.equal(found.test.labels, wanted.test.labels)


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('run')",)


@pytest.mark.parametrize("content", [Evil(), {b"data": Evil(), b"labels": [1]}, {b"labels": [1]}, [1, 2]])
def test_cifar10_pickles_run_nothing(content: Any, tmp_path: Path) -> None:
    make_cifar10(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "data_batch_2").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="data_batch_2"):
        open_tiny("cifar10", tmp_path)


def test_cifar10_labels_fit_the_images(tmp_path: Path) -> None:
    make_cifar10(tmp_path / "cifar10")
    (tmp_path / "cifar10" / "test_lables.json").write_text("[1, 2, 3]")
    with pytest.raises(DataError, match=r"test_lables\.json.*20 images and 3 labels"):
        open_tiny("cifar10", tmp_path)


def test_augmentation_moves_and_mirrors() -> None:
    image = torch.arange(3 * 32 * 32).reshape(1, 3, 32, 32).expand(40, -1, -1, -1)
    out = cifar10.augment(image, generator(0))
    padded = nn.functional.pad(image[0], (4, 4, 4, 4))
    windows = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    windows += [window.flip(2) for window in windows]
    assert all(any(torch.equal(one, window) for window in windows) for one in out)
    assert len({tuple(one.flatten().tolist()) for one in out}) > 20


def test_resnet50_is_v1_5() -> None:
    with torch.device("meta"):
        model = resnet(1000, **imagenet.RESNET50)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032  # torchvision's
    strided = [c for c in model.modules() if isinstance(c, nn.Conv2d) and c.stride == (2, 2)]
    # the stem, and in three stages the 3 x 3 convolution and the shortcut
    assert sorted(c.kernel_size[0] for c in strided) == [1, 1, 1, 3, 3, 3, 7]
    assert all(c.in_channels != c.out_channels for c in strided if c.kernel_size == (1, 1))


def test_imagenet_micro_batches_add_up(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    model = task.model().eval()  # without batch statistics, which see a micro-batch alone
    batch = task.batch(0, 0)
    parts = list(task.split(batch))
    assert [part.size for _, part in parts] == [3, 3, 2]
    total = sum(share * task.loss(model, part) for share, part in parts)
    torch.testing.assert_close(total, task.loss(model, batch))


def test_imagenet_accumulates_with_ngplus(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    torch.manual_seed(0)
    model = task.model().train()
    optimizer = ngplus.NGPlus(model, lr=0.01, update_every=2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = 0.0
        for share, part in task.split(task.batch(0, 0)):
            scaled = share * task.loss(model, part)
            scaled.backward()
            loss += float(scaled.detach())
        optimizer.step()
        losses.append(loss)
    assert losses[-1] < losses[0]


def test_imagenet_classes(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    assert task.classes == 2
    labels = torch.cat([batch.labels for batch in task.validation()])
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    (tmp_path / "imagenet" / "val" / "n99").mkdir()
    with pytest.raises(DataError, match="train/n99"):
        open_tiny("imagenet", tmp_path)


def test_imagenet_looks_at_as_many_images_as_asked_for(tmp_path: Path) -> None:
    make_imagenet(tmp_path / "imagenet")
    for asked, want in ((1, [0]), (2, [0, 1]), (4, [0, 0, 1, 1]), (100, [0, 0, 0, 1, 1, 1])):
        task = open_tiny("imagenet", tmp_path, validation=asked)
        assert torch.cat([batch.labels for batch in task.validation()]).tolist() == want
    with pytest.raises(DataError, match="1 or more"):
        open_tiny("imagenet", tmp_path, validation=0)


def test_imagenet_reads_the_next_batch_of_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_imagenet(tmp_path / "imagenet")
    task = open_tiny("imagenet", tmp_path)
    monkeypatch.setattr(imagenet.processes, "world", lambda: 2)
    task.batch(0, 1)
    assert task._next is not None
    assert task._next[0] == (0, 3)


@pytest.mark.parametrize("size", [(300, 200), (20, 400), (400, 20), (1, 1)])
def test_crops_have_the_size(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (10, 200, 30))
    assert imagenet.middle_crop(image, 64).size == (64, 64)
    for seed in range(5):
        assert imagenet.random_crop(image, 64, np.random.default_rng(seed)).size == (64, 64)


def test_images_of_other_modes(tmp_path: Path) -> None:
    """Grey, palette and CMYK images are in ImageNet."""
    make_imagenet(tmp_path / "imagenet")
    for k, mode in enumerate(("L", "CMYK")):
        Image.new(mode, (30, 40)).save(tmp_path / "imagenet" / "val" / "n01" / f"n01_{k}.JPEG")
    pixels = torch.cat([batch.pixels for batch in open_tiny("imagenet", tmp_path).validation()])
    assert pixels.shape == (6, 3, 32, 32)


def test_images_is_plain() -> None:
    assert Images(torch.zeros(3, 3, 2, 2, dtype=torch.uint8), torch.zeros(3)).size == 3
