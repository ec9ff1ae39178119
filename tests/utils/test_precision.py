"""Curvature is float32 where the user has switched on TF32 or bfloat16 products for the model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ngplus
from ngplus.capture.waiting import Waiting
from ngplus.utils import precision
from ngplus.utils.precision import bfloat16_products, full_precision

pytestmark = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch.backends has fp32_precision from 2.9 on"
)
CPU = torch.device("cpu")
NAMES = ("cuda.matmul", "mkldnn.matmul", "mkldnn.conv")
Setting = Callable[[], None]


def setting(name: str) -> Any:
    backend, _, operation = name.partition(".")
    return getattr(getattr(torch.backends, backend), operation)


def values() -> dict[str, str]:
    return {name: setting(name).fp32_precision for name in NAMES}


def of_all_backends(value: str) -> None:
    torch.backends.fp32_precision = value


def of_the_backend(value: str) -> None:
    setting("cuda.matmul").fp32_precision = "tf32"
    setting("mkldnn.matmul").fp32_precision = value


def of_old(value: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.set_float32_matmul_precision({"tf32": "high", "bf16": "medium"}[value])


WAYS = [of_all_backends, of_the_backend, of_old]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch.testing._internal, which other tests import, forbids changes of these settings
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = "none"
        for name in NAMES:
            setting(name).fp32_precision = "none"


class Products(TorchDispatchMode):
    """The settings at each product of float32 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            self.seen.append(setting("mkldnn.matmul").fp32_precision)
        return func(*args, **(kwargs or {}))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", ["tf32", "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        ngplus.NGAdam,
        ngplus.NGPlus,
        lambda model: ngplus.NGPlus(model, curvature="sample", solver="woodbury", block_size=None),
        lambda model: ngplus.NGPlus(model, curvature="batch"),
        ngplus.Preconditioner,
        ngplus.baselines.KFAC,
        ngplus.baselines.SENG,
    ],
)
def test_every_product_of_the_curvature_is_float32(
    make: Any, value: str, way: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own products keep the precision that the user has set, and so does the setting."""
    captured = Products()
    build = Waiting._build

    def spied(self: Waiting, pending: Any, last: bool) -> None:
        with captured:
            build(self, pending, last)

    monkeypatch.setattr(Waiting, "_build", spied)
    model = net()
    optimizer = make(model)
    way(value)
    before = values()
    x = torch.randn(6, 1, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.zero_grad()
            with Products() as forward:
                loss = model(x).square().mean()
            loss.backward()
            with Products() as step:
                optimizer.step()
    assert values() == before
    assert set(forward.seen) == {before["mkldnn.matmul"]} != {"ieee"}
    assert set(step.seen) == {"ieee"}
    assert set(captured.seen) <= {"ieee"}


def test_products_during_backward_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the sums for L and R, which the sink of the recorder computes."""
    seen: list[str] = []
    taken = ngplus.capture.collector.Collector._accumulate  # type: ignore[attr-defined]

    def spied(self: Any, matrix: Any, factors: Any) -> None:
        seen.append(setting("mkldnn.matmul").fp32_precision)
        taken(self, matrix, factors)

    monkeypatch.setattr("ngplus.capture.collector.Collector._accumulate", spied)
    model = net()
    ngplus_optimizer = ngplus.NGPlus(model)
    of_old("bf16")
    model(torch.randn(6, 1, 6, 6)).square().mean().backward()
    assert seen == ["ieee"] * 2
    assert torch.get_float32_matmul_precision() == "medium"
    ngplus_optimizer.step()
    assert {row.source for row in ngplus_optimizer.plan()} == {"sample"}


def test_the_numbers_are_those_of_the_highest_precision() -> None:
    """On a CPU with bfloat16 products the bits would differ, from 2^18 numbers on."""
    grads = {True: torch.randn(512, 512), False: torch.randn(512)}
    found = []
    for value in ("highest", "medium"):
        torch.set_float32_matmul_precision(value)
        parameter = nn.Parameter(torch.zeros(512, 512))
        optimizer = ngplus.NGAdam([parameter])
        for _ in range(3):
            parameter.grad = grads[True].clone()
            optimizer.step()
        found.append(parameter.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("way", WAYS)
def test_an_inherited_setting_stays_inherited(way: Callable[[str], None]) -> None:
    way("tf32")
    with full_precision(CPU):
        assert setting("mkldnn.matmul").fp32_precision == "ieee"
    before = values()
    if way is of_all_backends:
        torch.backends.fp32_precision = "bf16"
        assert setting("mkldnn.matmul").fp32_precision == "bf16" != before["mkldnn.matmul"]
    elif way is of_old:
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cuda.matmul.allow_tf32


def test_nothing_is_changed_where_products_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_Float32Products", None)  # would raise if it was called
    monkeypatch.setattr(precision, "_set_by_user", lambda found: found.fp32_precision)
    before = values()
    with full_precision(CPU):
        assert values() == before
    torch.backends.fp32_precision = "ieee"
    with full_precision(CPU):
        assert setting("mkldnn.matmul").fp32_precision == "ieee"


def test_threads_restore_what_the_first_has_found() -> None:
    """Autograd runs hooks in a thread for each device, and the setting is that of the process."""
    of_the_backend("bf16")
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with full_precision(CPU):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(10)
    with full_precision(CPU):
        assert bfloat16_products(CPU)  # of the model
        leave.set()
        thread.join()
        assert setting("mkldnn.matmul").fp32_precision == "ieee"
    assert setting("mkldnn.matmul").fp32_precision == "bf16"


def test_it_is_restored_after_an_error() -> None:
    of_the_backend("tf32")
    with pytest.raises(RuntimeError, match="inside"), full_precision(CPU):
        raise RuntimeError("inside")
    assert setting("mkldnn.matmul").fp32_precision == "tf32"


def test_autocast_and_products_together() -> None:
    of_old("tf32")
    a = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16), full_precision(CPU):
        assert (a @ a).dtype == torch.float32
        assert setting("mkldnn.matmul").fp32_precision == "ieee"
    assert setting("mkldnn.matmul").fp32_precision == "tf32"


def test_cuda_settings_are_those_of_cuda() -> None:
    """The settings can be read and set without a GPU."""
    cuda = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    conv = torch.backends.cudnn.conv.fp32_precision
    with full_precision(cuda):
        assert setting("cuda.matmul").fp32_precision == "ieee"
        assert setting("cudnn.conv").fp32_precision == "ieee"
        with full_precision(cuda):
            assert setting("cuda.matmul").fp32_precision == "ieee"
        assert setting("cuda.matmul").fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.conv.fp32_precision == conv
    assert not bfloat16_products(cuda)


def test_torch_before_2_9_has_one_setting() -> None:
    old = precision._Matmul()
    torch.set_float32_matmul_precision("medium")
    assert old.fp32_precision == "bf16"
    old.fp32_precision = "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
    for value in ("none", "tf32"):
        old.fp32_precision = value
    assert torch.get_float32_matmul_precision() == "high"


def test_gradients_of_bfloat16_products_are_covered() -> None:
    """The captured gradients are float32, .grad is the product of bfloat16 numbers: no other use of the weight."""
    model = nn.Linear(8, 4)
    optimizer = ngplus.NGPlus(model, update_every=1)

    def rounded(grad: Tensor) -> Tensor:
        return grad * (1 + 4e-3 * torch.randn_like(grad))

    model.weight.register_hook(rounded)
    of_old("bf16")
    x = torch.randn(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).square().mean().backward()
        optimizer.step()
    assert optimizer.plan()["weight"].source == "sample"
    found = ngplus.gfim(model, lambda y, _: y.square().mean(), x, None)
    assert found.sources["weight"] == "sample"
