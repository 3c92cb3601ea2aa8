"""Files that other libraries wrote, in their shards, and the memory that reading takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from chitu_diffusion.errors import CheckpointNotFoundError
from services.common.checkpoint import load_weights
from services.encoder.umt5 import TextEncoder
from tests.dit.conftest import make_reference

CPU = torch.device("cpu")


def transformer() -> WanTransformer3DModel:
    return make_reference(0)


def vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    return AutoencoderKLWan(base_dim=8, z_dim=4, num_res_blocks=1, latents_mean=[0.0] * 4)


def empty(model: torch.nn.Module) -> torch.nn.Module:
    return model.to("meta")


def assert_loads(model: torch.nn.Module, folder: Path) -> None:
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = empty(model)
    load_weights(loaded, folder, dtype=torch.float32, device=CPU)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("make", [transformer, vae])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("shard", ["10GB", "100KB"])
def test_diffusers_files(tmp_path: Path, make, safe: bool, shard: str) -> None:
    model = make()
    model.save_pretrained(tmp_path, max_shard_size=shard, safe_serialization=safe)
    files = [path.name for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".bin")]
    assert (len(files) > 1) == (shard != "10GB")
    assert_loads(model, tmp_path)
    if len(files) > 1:
        (tmp_path / sorted(files)[1]).unlink()
        with pytest.raises(CheckpointNotFoundError, match=sorted(files)[1]):
            load_weights(empty(make()), tmp_path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_transformers_files(tmp_path: Path, shard: str) -> None:
    torch.manual_seed(0)
    model = UMT5EncoderModel(
        UMT5Config(vocab_size=64, d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=2)
    ).eval()
    folder = tmp_path / "text_encoder"
    model.save_pretrained(folder, max_shard_size=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard != "10GB")
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 1]])).last_hidden_state[0]
    (rows,) = TextEncoder.load(tmp_path, CPU, torch.float32).encode([[5, 6, 1]])
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


READ = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from chitu_diffusion.memory import peak_rss_bytes, rss_bytes
from services.common.checkpoint import load_weights
with torch.device("meta"):
    net = nn.ModuleList(nn.Linear(1024, rows, bias=False) for rows in json.loads(sys.argv[2]))
before = rss_bytes()
load_weights(net, Path(sys.argv[1]), dtype=torch.bfloat16, device=torch.device("cpu"))
target = sum(p.nbytes for p in net.parameters())
print(json.dumps([target, peak_rss_bytes() - before]))
"""


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_memory_stays_near_the_size_of_the_weights(tmp_path: Path, name: str) -> None:
    # Half of it is one tensor, as an embedding table may be, and comes last.
    rows = [1024] * 25 + [25 * 1024]
    weights = {f"{index}.weight": torch.randn(size, 1024) for index, size in enumerate(rows)}
    if name.endswith(".pth"):
        torch.save(weights, tmp_path / name)
    else:
        save_file(weights, tmp_path / name)
    command = [sys.executable, "-c", READ, str(tmp_path), json.dumps(rows)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    target, taken = json.loads(output)
    assert target == 50 * 1024 * 1024 * 2
    assert target * 0.9 < taken < target * 1.3
