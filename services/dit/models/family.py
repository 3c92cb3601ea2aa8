"""What a model family provides: one folder beside this file, found by its name."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import nn

from chitu_diffusion.config.schema import TransformerConfig
from chitu_diffusion.errors import ConfigError


class Constants(Protocol):
    """What a task needs at every step and no step changes, for one or two guidance branches."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence that self-attention runs over."""

    def branch(self, index: int) -> Self:
        """Return the constants of one branch, without copying."""


class Transformer(nn.Module, abc.ABC):
    """A diffusion transformer that predicts the velocity of noisy latents.

    Built from a `TransformerConfig` on the meta device. Its parameter names are those that `rename`
    of its family gives. `fuse` is called once after the weights are read, `prepare` once a task,
    and the module once a step.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def fuse(self) -> None:
        """Rearrange the weights for speed. Their names may change by this."""

    def compile_blocks(self) -> None:
        """Have torch compile what is repeated; the first forward of a shape does it."""
        raise ConfigError(f"infer.compile='block': {type(self).__name__} does not offer it")

    @abc.abstractmethod
    def prepare(
        self, prompt_embeds: torch.Tensor, grid: tuple[int, int, int], timesteps: Sequence[float]
    ) -> Any:
        """Compute a task's `Constants`.

        Args:
            prompt_embeds: (B, text_len, text_dim), zero rows after each prompt's true length.
            grid: latent frames, height and width.
            timesteps: of all steps of the plan, 0 to 1000.
        """

    # forward(latents, step_index, constants, *, attention, parallel, cache): the velocity
    # (B, out_channels, F, H, W) float32 of latents (B, C, F, H, W).


@dataclass(frozen=True)
class ModelFamily:
    """Everything that differs between families."""

    transformer: type[Transformer]
    """Its class."""
    rename: Callable[[str], str]
    """From a weight's name in any published layout, without wrappers, to the module's."""
    weight_dtype: Callable[[str, torch.dtype], torch.dtype]
    """The type of a weight in memory, by its name and the compute type."""
    expert_folders: Callable[[Path, bool], list[Path]]
    """Where a checkpoint keeps its one or two transformers; the flag asks for two."""
    latent_stride: tuple[int, int, int]
    """Frames, rows and columns of video behind one latent."""
