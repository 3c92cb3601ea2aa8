"""Names of devices and types: what this host has is found, everything else is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chitu_diffusion.errors import ConfigError, OutOfMemoryError
from services.common.placement import dtype_name, move_module, resolve_device, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(params=[0, 2])
def cuda_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return int(request.param)


def test_auto_takes_the_first_accelerator(cuda_devices: int) -> None:
    assert resolve_device("auto") == (CUDA if cuda_devices else CPU)


@pytest.mark.parametrize(
    ("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:7", 7)]
)
def test_cuda_by_name(cuda_devices: int, name: str, index: int) -> None:
    if index < cuda_devices:
        assert resolve_device(name) == torch.device("cuda", index)
    else:
        with pytest.raises(ConfigError, match=rf"'{name}'.* {cuda_devices} CUDA devices"):
            resolve_device(name)


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:x", "cuda:0 "])
def test_unknown_device(name: str) -> None:
    with pytest.raises(ConfigError, match=r"services\.x\.device="):
        resolve_device(name, "services.x.device")


def test_dtype() -> None:
    assert resolve_dtype("auto", CPU) is torch.float32
    assert resolve_dtype("auto", CUDA) is torch.bfloat16
    assert resolve_dtype("bfloat16", CPU) is torch.bfloat16
    assert resolve_dtype("float32", CUDA) is torch.float32
    with pytest.raises(ConfigError, match=r"infer\.dtype='float16'"):
        resolve_dtype("float16", CPU)


def test_names() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def test_a_module_moves_with_all_its_tensors() -> None:
    module = layers()
    move_module(module, torch.device("meta"))
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}


class Layer(nn.Linear):
    """Notes where it is told to go and keeps its values, as a real device would."""

    def __init__(self, full: Exception | None = None) -> None:
        super().__init__(2, 2)
        self.places: list[str] = []
        self.full = full

    def _apply(self, fn: Any, recurse: bool = True) -> Layer:
        place = fn(torch.empty(1)).device.type
        if self.full is not None and place == "meta":
            raise self.full
        self.places.append(place)
        return self


@pytest.mark.parametrize(
    ("full", "what"),
    [
        (torch.OutOfMemoryError("no room for 12 bytes"), "no room"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: no room for 12 bytes"), "no room"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_module_that_fits_by_half_is_back_where_it_was(full: Exception, what: str) -> None:
    fits, too_much = Layer(), Layer(full)
    with pytest.raises(OutOfMemoryError, match=rf"Sequential does not fit on meta: .*{what}"):
        move_module(nn.Sequential(fits, too_much), torch.device("meta"))
    assert fits.places == ["meta", "cpu"]
    assert too_much.places == ["cpu"]


def test_another_failure_stays_what_it_is_and_the_module_is_back() -> None:
    fits = Layer()
    with pytest.raises(RuntimeError, match="device-side assert"):
        move_module(
            nn.Sequential(fits, Layer(RuntimeError("device-side assert"))), torch.device("meta")
        )
    assert fits.places == ["meta", "cpu"]


def test_memory_left_on_an_accelerator_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    move_module(layers(), CPU)
    with pytest.raises(OutOfMemoryError):
        move_module(
            nn.Sequential(Layer(), Layer(torch.OutOfMemoryError("full"))), torch.device("meta")
        )
    assert emptied == [True, True]
