"""The choice of the attention kernel: what was asked for runs, or the reason is told."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from chitu_diffusion.errors import ConfigError
from services.dit.attention import select
from services.dit.attention.sdpa import Sdpa

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def flash_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package flash_attn that is there; its kernel is exact attention on the CPU."""
    module = types.ModuleType("flash_attn")
    module.flash_attn_func = Sdpa()  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)


def test_sdpa_is_softmax_attention() -> None:
    q, k, v = (torch.randn(2, length, 3, 8) for length in (5, 7, 7))
    scores = torch.einsum("bshd,blhd->bhsl", q, k) / 8**0.5
    expected = torch.einsum("bhsl,blhd->bshd", scores.softmax(-1), v)
    torch.testing.assert_close(Sdpa()(q, k, v), expected)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        (CPU, BF16, 128, "CUDA only, not on cpu"),
        (CUDA, FP32, 128, "not float32"),
        (CUDA, BF16, 12, "multiple of 8 up to 256, not 12"),
        (CUDA, BF16, 512, "not 512"),
    ],
)
@pytest.mark.usefixtures("flash_installed")
def test_explicit_kernel_that_cannot_run(
    device: torch.device, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"infer\.attn_type='flash_attn': .*{reason}"):
        select("flash_attn", device, dtype, head_dim, "infer.attn_type")
    assert select("auto", device, dtype, head_dim).name == "sdpa"


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.dit.attention.flash_attn.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="flash-attn is not installed"):
        select("flash_attn", CUDA, BF16, 128)
    assert select("auto", CUDA, BF16, 128).name == "sdpa"


@pytest.mark.usefixtures("flash_installed")
@pytest.mark.parametrize("attn_type", ["auto", "flash_attn"])
def test_flash_where_it_runs(attn_type: str) -> None:
    kernel = select(attn_type, CUDA, BF16, 128)
    assert kernel.name == "flash_attn"
    q = torch.randn(1, 4, 2, 8)
    assert torch.equal(kernel(q, q, q), Sdpa()(q, q, q))


def test_unknown_kernel() -> None:
    with pytest.raises(ConfigError, match=r"attn_type='warp': must be one of"):
        select("warp", CPU, FP32, 64)


@pytest.mark.parametrize("name", ["sage", "sparge"])
def test_a_kernel_that_is_not_built_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"attn_type='{name}': this back end is not built yet"):
        select(name, CPU, FP32, 64)
