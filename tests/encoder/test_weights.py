"""The text encoder in the original layout."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import UMT5Config, UMT5EncoderModel

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError
from services.encoder.umt5 import TextEncoder
from services.encoder.weights import architecture, transformers_name

CPU = torch.device("cpu")
TINY = Path(__file__).parents[2] / "assets" / "tiny-wan"
FILE = "models_t5_umt5-xxl-enc-bf16.pth"
IN_BLOCK = {
    "layer.0.layer_norm": "norm1",
    "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
    "layer.0.SelfAttention.": "attn.",
    "layer.1.layer_norm": "norm2",
    "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
    "layer.1.DenseReluDense.wi_1": "ffn.fc1",
    "layer.1.DenseReluDense.wo": "ffn.fc2",
}


def original_name(name: str) -> str:
    """Where the original layout keeps one of transformers' names."""
    if name == "shared.weight":
        return "token_embedding.weight"
    if name == "encoder.final_layer_norm.weight":
        return "norm.weight"
    block, rest = re.fullmatch(r"encoder\.block\.(\d+)\.(.+)", name).groups()
    theirs = next(part for part in IN_BLOCK if rest.startswith(part))
    return f"blocks.{block}.{IN_BLOCK[theirs]}{rest.removeprefix(theirs)}"


def original(model: UMT5EncoderModel) -> dict[str, torch.Tensor]:
    state = {k: v for k, v in model.state_dict().items() if k != "encoder.embed_tokens.weight"}
    return {original_name(key): value for key, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_it_gives_the_same_rows_to_the_last_bit(
    ckpt_dir: Path, reference: UMT5EncoderModel, tmp_path: Path, prefix: str
) -> None:
    torch.save({prefix + k: v for k, v in original(reference).items()}, tmp_path / FILE)
    ids = [[5, 6, 40, 7, 22, 9, 1], [1]]
    expected = TextEncoder.load(ckpt_dir, CPU, torch.float32).encode(ids)
    for rows, wanted in zip(
        TextEncoder.load(tmp_path, CPU, torch.float32).encode(ids), expected, strict=True
    ):
        assert torch.equal(rows, wanted)


def test_the_shipped_encoder_in_original_names(tmp_path: Path) -> None:
    shipped = UMT5EncoderModel.from_pretrained(TINY / "text_encoder")
    torch.save(original(shipped), tmp_path / FILE)
    ids = [[5, 6, 40, 7, 22, 9, 1]]
    (expected,) = TextEncoder.load(TINY, CPU, torch.float32).encode(ids)
    (rows,) = TextEncoder.load(tmp_path, CPU, torch.float32).encode(ids)
    assert torch.equal(rows, expected)


def test_every_name_of_the_published_encoder_is_known(tmp_path: Path) -> None:
    with torch.device("meta"):
        published = UMT5EncoderModel(
            UMT5Config(
                vocab_size=256384,
                d_model=4096,
                d_kv=64,
                d_ff=10240,
                num_layers=24,
                num_heads=64,
                feed_forward_proj="gated-gelu",
            )
        )
    weights = original(published)
    assert len(weights) == 2 + 24 * 10
    names = set(published.state_dict()) - {"encoder.embed_tokens.weight"}
    assert {transformers_name(name) for name in weights} == names
    sizes = architecture({k: tuple(v.shape) for k, v in weights.items()}, tmp_path)
    with torch.device("meta"):
        again = UMT5EncoderModel(UMT5Config(**sizes))
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in published.state_dict().items()
    }
    for key in ("dense_act_fn", "layer_norm_epsilon", "relative_attention_max_distance"):
        assert getattr(again.config, key) == getattr(published.config, key)


def test_a_missing_or_another_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"neither text_encoder/.* nor models_t5"):
        TextEncoder.load(tmp_path, CPU, torch.float32)
    torch.save({"something.weight": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=rf"{FILE} is not a UMT5 encoder.*token_embedding"):
        TextEncoder.load(tmp_path, CPU, torch.float32)


def test_a_lost_tensor_is_named(reference: UMT5EncoderModel, tmp_path: Path) -> None:
    weights = original(reference)
    del weights["blocks.1.ffn.gate.0.weight"]
    torch.save(weights, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"1 missing: encoder\.block\.1.*wi_0"):
        TextEncoder.load(tmp_path, CPU, torch.float32)


def test_an_empty_tensor_is_named(reference: UMT5EncoderModel, tmp_path: Path) -> None:
    name = "blocks.0.pos_embedding.embedding.weight"
    torch.save(original(reference) | {name: torch.zeros(32, 0)}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=rf"{FILE}: {name} has no heads"):
        TextEncoder.load(tmp_path, CPU, torch.float32)


def test_the_layout_is_logged_and_diffusers_wins(
    ckpt_dir: Path,
    reference: UMT5EncoderModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    torch.save(original(reference), tmp_path / FILE)
    TextEncoder.load(tmp_path, CPU, torch.float32)
    assert f"text encoder: {tmp_path / FILE} (original layout)" in caplog.messages
    shutil.copytree(ckpt_dir / "text_encoder", tmp_path / "text_encoder")
    (tmp_path / FILE).write_bytes(b"")
    assert TextEncoder.load(tmp_path, CPU, torch.float32).encode([[1]])
    assert (
        f"text encoder: {tmp_path / 'text_encoder'} (diffusers' layout), not {FILE}"
        in caplog.messages
    )
