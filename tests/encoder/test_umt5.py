from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, UMT5EncoderModel

from chitu_diffusion.errors import CheckpointError, ComponentError
from services.encoder.prompt import PromptTokenizer
from services.encoder.umt5 import TextEncoder
from tests.encoder.conftest import TEXT_DIM, TEXT_LEN

CPU = torch.device("cpu")
EMBED, SHARED = "encoder.embed_tokens.weight", "shared.weight"
TEXTS = ["a red circle on black", "", "x" * 100, "cat &amp; cat  ü"]


@pytest.fixture(scope="module")
def encoder(ckpt_dir: Path) -> TextEncoder:
    return TextEncoder.load(ckpt_dir, CPU, torch.float32)


def test_rows_equal_transformers_own_model(
    encoder: TextEncoder, reference: UMT5EncoderModel
) -> None:
    ids = [5, 6, 40, 7, 22, 9, 1]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
    (rows,) = encoder.encode([ids])
    assert rows.shape == (len(ids), TEXT_DIM)
    assert rows.abs().mean() > 0.1
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=0)


def test_rows_padded_with_zeros_equal_the_diffusers_pipeline(
    encoder: TextEncoder, reference: UMT5EncoderModel, ckpt_dir: Path
) -> None:
    pipeline = WanPipeline(
        tokenizer=AutoTokenizer.from_pretrained(ckpt_dir / "tokenizer"),
        text_encoder=reference,
        vae=None,
        scheduler=None,
    )
    with torch.no_grad():
        expected, _ = pipeline.encode_prompt(
            TEXTS, do_classifier_free_guidance=False, max_sequence_length=TEXT_LEN
        )
    tokenizer = PromptTokenizer(ckpt_dir, TEXT_LEN)
    rows = encoder.encode([tokenizer(text).ids for text in TEXTS])
    padded = [torch.cat([r, r.new_zeros(TEXT_LEN - len(r), TEXT_DIM)]) for r in rows]
    torch.testing.assert_close(torch.stack(padded), expected, atol=1e-5, rtol=0)


def test_rows_do_not_depend_on_neighbours(encoder: TextEncoder) -> None:
    texts = [[5, 1], [6, 7, 8, 9, 10, 11, 12, 1], [1], [20, 21, 22, 1]]
    together = encoder.encode(texts)
    alone = [encoder.encode([ids])[0] for ids in reversed(texts)][::-1]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


def test_different_texts_give_different_rows(encoder: TextEncoder) -> None:
    first, second = encoder.encode([[5, 6, 1], [6, 5, 1]])
    assert not torch.allclose(first, second, atol=1e-2)


def test_bfloat16_is_near_float32(encoder: TextEncoder, ckpt_dir: Path) -> None:
    half = TextEncoder.load(ckpt_dir, CPU, torch.bfloat16)
    ids = [[5, 6, 7, 8, 9, 1]]
    rows, exact = half.encode(ids)[0], encoder.encode(ids)[0]
    assert rows.dtype == torch.bfloat16
    similarity = torch.cosine_similarity(rows.float(), exact, dim=-1)
    assert similarity.min() > 0.99


def test_nothing_is_left_on_the_meta_device(encoder: TextEncoder) -> None:
    tensors = [*encoder._model.parameters(), *encoder._model.buffers()]
    assert {tensor.device for tensor in tensors} == {CPU}
    assert encoder.parameter_count == sum(tensor.numel() for tensor in encoder._model.parameters())
    assert encoder.weight_bytes == 4 * encoder.parameter_count


def test_all_tensors_move(ckpt_dir: Path) -> None:
    moved = TextEncoder.load(ckpt_dir, CPU, torch.float32)
    moved.to(torch.device("meta"))
    assert moved.device.type == "meta"
    tensors = [*moved._model.parameters(), *moved._model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def _copy(ckpt_dir: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    shutil.copytree(ckpt_dir / "text_encoder", folder / "text_encoder")
    file = folder / "text_encoder" / "model.safetensors"
    return file, load_file(file)


@pytest.mark.parametrize("names", [(SHARED,), (EMBED,), (SHARED, EMBED)])
def test_each_form_of_the_tied_embedding_gives_equal_rows(
    names: tuple[str, ...], encoder: TextEncoder, ckpt_dir: Path, tmp_path: Path
) -> None:
    file, weights = _copy(ckpt_dir, tmp_path)
    table = weights.pop(SHARED, weights.pop(EMBED, torch.empty(0)))
    assert table.any()
    save_file(weights | {name: table.clone() for name in names}, file)
    loaded = TextEncoder.load(tmp_path, CPU, torch.float32)
    assert torch.equal(loaded.encode([[5, 6, 1]])[0], encoder.encode([[5, 6, 1]])[0])
    assert loaded.parameter_count == encoder.parameter_count


def test_missing_embedding_is_refused(ckpt_dir: Path, tmp_path: Path) -> None:
    file, weights = _copy(ckpt_dir, tmp_path)
    save_file({k: v for k, v in weights.items() if k not in (SHARED, EMBED)}, file)
    with pytest.raises(CheckpointError, match=r"shared\.weight"):
        TextEncoder.load(tmp_path, CPU, torch.float32)


def test_values_that_are_not_finite_are_an_error(ckpt_dir: Path, tmp_path: Path) -> None:
    file, weights = _copy(ckpt_dir, tmp_path)
    weights["encoder.final_layer_norm.weight"][0] = torch.nan
    save_file(weights, file)
    encoder = TextEncoder.load(tmp_path, CPU, torch.float32)
    with pytest.raises(ComponentError, match="text 0 are not finite"):
        encoder.encode([[5, 1]])


def test_another_architecture_is_refused(ckpt_dir: Path, tmp_path: Path) -> None:
    _copy(ckpt_dir, tmp_path)
    file = tmp_path / "text_encoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "t5"}))
    with pytest.raises(CheckpointError, match="model_type='t5': must be 'umt5'"):
        TextEncoder.load(tmp_path, CPU, torch.float32)
