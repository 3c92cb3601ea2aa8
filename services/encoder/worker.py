"""Tokenizer and model together: one checked input to rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from chitu_diffusion.config.schema import Config
from chitu_diffusion.errors import CheckpointError, OutOfMemoryError
from chitu_diffusion.v1 import encoder_pb2
from services.encoder.prompt import PromptTokenizer, TokenizedPrompt
from services.encoder.umt5 import TextEncoder


@dataclass(frozen=True)
class Encoded:
    """One input's result."""

    prompt: TokenizedPrompt
    rows: torch.Tensor
    """(length, text_dim) on the CPU, in the compute type."""
    seconds: float
    """Time of the work."""
    waited_seconds: float
    """Time before the work began."""


@dataclass(frozen=True)
class Worker:
    """Tokenizer and model as one piece of work, for one thread."""

    tokenizer: PromptTokenizer
    model: TextEncoder

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return self.model.parameter_count

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters in memory."""
        return self.model.weight_bytes

    @property
    def device(self) -> torch.device:
        """Where the model is and computes."""
        return self.model.device

    def to(self, device: torch.device) -> None:
        """Move the model; `OutOfMemoryError` if it does not fit, and it is where it was."""
        self.model.to(device)

    def encode(self, item: encoder_pb2.TextInput, asked: float) -> Encoded:
        """Encode one checked input.

        Args:
            item: text or token ids.
            asked: `time.perf_counter()` when the turn was asked for.
        """
        began = time.perf_counter()
        if item.WhichOneof("input") == "text":
            prompt = self.tokenizer(item.text)
        else:
            prompt = TokenizedPrompt(list(item.token_ids.ids), len(item.token_ids.ids))
        rows = self._encode(prompt.ids)
        return Encoded(prompt, rows, time.perf_counter() - began, began - asked)

    def _encode(self, ids: list[int]) -> torch.Tensor:
        try:
            return self.model.encode([ids])[0]
        except torch.OutOfMemoryError as error:
            message = str(error)
        # Outside of `except`: the caught error's traceback would keep the tensors alive.
        raise OutOfMemoryError(f"text encoder: {message}")


def load_worker(config: Config, device: torch.device, dtype: torch.dtype) -> Worker:
    """Read the tokenizer and the weights of the configured checkpoint.

    Raises:
        CheckpointNotFoundError: a folder is missing.
        CheckpointError: a file is corrupt, or the parts do not fit each other.
    """
    ckpt_dir, architecture = Path(str(config.models.ckpt_dir)), config.models.transformer
    tokenizer = PromptTokenizer(ckpt_dir, architecture.text_len)
    model = TextEncoder.load(ckpt_dir, device, dtype)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{ckpt_dir}: the tokenizer has {tokenizer.vocab_size} ids, "
            f"the text encoder takes {model.vocab_size}"
        )
    if model.text_dim != architecture.text_dim:
        raise CheckpointError(
            f"{ckpt_dir}: the text encoder gives rows of {model.text_dim} values, "
            f"models.transformer.text_dim={architecture.text_dim}"
        )
    return Worker(tokenizer, model)
