"""Prompt text to token ids: cleaning, tokenising, cutting."""

from __future__ import annotations

import html
import threading
from dataclasses import dataclass
from pathlib import Path

import ftfy
from transformers import AutoTokenizer

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError

# Where a checkpoint keeps its tokenizer: diffusers' layout, then the original one.
_FOLDERS = ("tokenizer", "google/umt5-xxl")


@dataclass(frozen=True)
class TokenizedPrompt:
    """A text as the encoder takes it."""

    ids: list[int]
    """Token ids with the end token, without padding; 1 to text_len of them."""
    token_count: int
    """Tokens of the whole text, end token included, before the cut."""

    @property
    def truncated(self) -> bool:
        """Whether the end of the text was cut off."""
        return self.token_count > len(self.ids)


def clean(text: str) -> str:
    """Repair broken Unicode, resolve HTML entities (also escaped twice), collapse white space.

    Wan's encoder was trained on text cleaned in this way; the token ids depend on it.
    """
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(text))).split())


class PromptTokenizer:
    """A checkpoint's tokenizer, cutting texts at `text_len` tokens. Safe to call from any thread.

    Truncation and padding are settings of the tokenizer object, and changing them while another
    thread encodes raises "Already borrowed". So they are never touched: the whole text is tokenised
    and the cut is made here. The lock guards what else the object may keep.
    """

    def __init__(self, ckpt_dir: Path, text_len: int) -> None:
        """Read the tokenizer under `ckpt_dir`.

        Args:
            ckpt_dir: checkpoint folder, in diffusers' or the original layout.
            text_len: tokens that the model takes, end token included, >= 1.

        Raises:
            CheckpointNotFoundError: there is no tokenizer folder.
            CheckpointError: the files are unreadable, or the tokenizer adds no end token.
        """
        folder = _find_folder(ckpt_dir)
        self._text_len = text_len
        self._lock = threading.Lock()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:
            raise CheckpointError(f"{folder}: unreadable tokenizer: {error}") from error
        self._end: int | None = self._tokenizer.eos_token_id
        if self._end is None or self._tokenize("") != [self._end]:
            raise CheckpointError(f"{folder}: the tokenizer does not add an end token to a text")

    @property
    def vocab_size(self) -> int:
        """Number of ids it can give, added tokens included."""
        return len(self._tokenizer)

    def __call__(self, text: str) -> TokenizedPrompt:
        """Clean and tokenise `text`; "" gives the end token alone."""
        ids = self._tokenize(clean(text))
        if len(ids) <= self._text_len:
            return TokenizedPrompt(ids, len(ids))
        return TokenizedPrompt([*ids[: self._text_len - 1], ids[-1]], len(ids))

    def _tokenize(self, text: str) -> list[int]:
        with self._lock:
            # verbose=False: no warning about long texts, their cut is reported to the caller.
            return list(self._tokenizer(text, verbose=False)["input_ids"])


def _find_folder(ckpt_dir: Path) -> Path:
    for name in _FOLDERS:
        if (ckpt_dir / name).is_dir():
            return ckpt_dir / name
    raise CheckpointNotFoundError(f"{ckpt_dir}: no tokenizer: neither {' nor '.join(_FOLDERS)}")
