"""Captions to prompt rows, exactly as `WanPipeline` makes them, with gradients."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, UMT5EncoderModel

from . import shapes
from .models import TEXT_LEN
from .tokenizer import save_tokenizer


class Captions:
    """Tokenises captions once; the tokenizer is written into `folder`."""

    def __init__(self, folder: Path) -> None:
        save_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        templates = (shapes.TEMPLATE, *shapes.PARAPHRASES)
        texts = [scene.caption(words) for scene in shapes.ALL_SCENES for words in templates]
        self._ids: dict[str, list[int]] = {text: tokenizer(text).input_ids for text in ["", *texts]}

    def batch(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return ids and mask, int64 (B, longest caption), padded with 0."""
        rows = [self._ids[text] for text in texts]
        longest = max(len(row) for row in rows)
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return ids, mask


def prompt_rows(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Encode ids (B, L) to (B, TEXT_LEN, d_model); rows past a prompt's true length are zero."""
    rows = encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
    return F.pad(rows, (0, 0, 0, TEXT_LEN - rows.shape[1]))
