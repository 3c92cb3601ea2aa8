"""UMT5: token ids to embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import UMT5Config, UMT5EncoderModel

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError, ComponentError
from services.common.checkpoint import load_weights, shapes
from services.common.placement import move_module
from services.encoder.weights import architecture, find_weights, transformers_name

# Checkpoints store the embedding table once or twice, under either name.
_TIED = {"encoder.embed_tokens.weight": "shared.weight"}


class TextEncoder:
    """A UMT5 encoder with its weights. Calls must not overlap."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        """Take a loaded `UMT5EncoderModel` that lives on `device` in `dtype`."""
        self._model = model.eval().requires_grad_(False)
        self.device = device
        self.dtype = dtype
        self.vocab_size: int = model.config.vocab_size
        self.text_dim: int = model.config.d_model

    @classmethod
    def load(cls, ckpt_dir: Path, device: torch.device, dtype: torch.dtype) -> TextEncoder:
        """Read the text encoder of a checkpoint in diffusers' or the original layout.

        Raises:
            CheckpointNotFoundError: it has none, or its config.json is missing.
            CheckpointError: another architecture, or weights that do not fit it exactly.
        """
        weights = find_weights(ckpt_dir)
        original = weights.is_file()
        config = _original_config(weights) if original else _read_config(weights)
        # On the meta device nothing is allocated or initialised; the loader brings the memory.
        with torch.device("meta"):
            model = UMT5EncoderModel(config)
        load_weights(
            model,
            weights,
            rename=transformers_name if original else None,
            dtype=dtype,
            device=device,
            tied=_TIED,
        )
        return cls(model, device, dtype)

    @property
    def parameter_count(self) -> int:
        """Number of parameters, shared ones counted once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters in memory."""
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def to(self, device: torch.device) -> None:
        """Move the weights; `OutOfMemoryError` if they do not fit, and they are where they were."""
        move_module(self._model, device)
        self.device = device

    def encode(self, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Encode texts; the rows of one do not depend on the others, to the last bit.

        Each text runs alone at its true length. A padded batch would need a mask and would still
        differ in the last bits with the neighbours' lengths, as matrix products of other sizes
        round differently.

        Args:
            token_ids: ids in [0, vocab_size) with the end token, without padding, >= 1 a text.

        Returns:
            For each text a tensor (length, text_dim) of `dtype` on the CPU.

        Raises:
            ComponentError: a value is not finite.
        """
        return [self._encode_one(index, ids) for index, ids in enumerate(token_ids)]

    @torch.inference_mode()
    def _encode_one(self, index: int, ids: Sequence[int]) -> torch.Tensor:
        input_ids = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        hidden = self._model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
        rows: torch.Tensor = hidden.last_hidden_state[0].cpu()
        if not torch.isfinite(rows).all():
            raise ComponentError(f"text encoder: values of text {index} are not finite")
        return rows


def _original_config(file: Path) -> Any:
    return UMT5Config(**architecture(shapes(file), file))


def _read_config(folder: Path) -> Any:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointNotFoundError(f"{file}: not found")
    try:
        config, _ = UMT5Config.get_config_dict(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: unreadable: {error}") from error
    kind = config.get("model_type")
    if kind != "umt5":
        raise CheckpointError(f"{file}: model_type={kind!r}: must be 'umt5'")
    return UMT5Config.from_dict(config)
