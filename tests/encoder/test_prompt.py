from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from chitu_diffusion.errors import CheckpointError, CheckpointNotFoundError
from services.encoder.prompt import PromptTokenizer, clean
from tests.encoder.conftest import TEXT_LEN, save_tokenizer

ODD = [
    "",
    "   \n\t ",
    "a  red   circle\n on\tblack ",
    "fish &amp; chips &amp;amp; &lt;b&gt; &quot;x&quot; &#233; &#x1F600;",
    "&amp;amp;lt;",
    "红色圆，在黑色！\u3000全角",
    "ＦＵＬＬ　ＷＩＤＴＨ",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 ok\ufe0f",
    "\u05e9\u05dc\u05d5\u05dd \u202eright to left\u202c \u0645\u0631\u062d\u0628\u0627",
    "mojibake: cafÃ© â€œquotedâ€\x9d",
    "no-break\u00a0space \u2028 line \x1c separator \x85 next",
    "curly \u2018quotes\u2019 and ligature \ufb01",
    "zero\x00byte and \x1b[31mescape\x1b[0m",
    "lone surrogate \ud83d here",
]


@pytest.mark.parametrize("text", ODD)
def test_cleans_as_the_diffusers_pipeline_does(text: str) -> None:
    assert clean(text) == prompt_clean(text)


@settings(deadline=None, max_examples=60)  # the first call builds tables
@given(st.text(max_size=60))
def test_cleans_any_text_as_the_diffusers_pipeline_does(text: str) -> None:
    assert clean(text) == prompt_clean(text)


def test_cleaning_repairs_resolves_and_collapses() -> None:
    assert clean(" cafÃ©  &amp;amp;\n cats ") == "café & cats"


@pytest.fixture(scope="module")
def tokenizer(ckpt_dir: Path) -> PromptTokenizer:
    return PromptTokenizer(ckpt_dir, TEXT_LEN)


@pytest.mark.parametrize("text", [*ODD, "x" * 100, "a red circle " * 30])
def test_ids_equal_transformers_own_truncation(
    text: str, tokenizer: PromptTokenizer, ckpt_dir: Path
) -> None:
    reference = AutoTokenizer.from_pretrained(ckpt_dir / "tokenizer")
    expected = reference([prompt_clean(text)], truncation=True, max_length=TEXT_LEN)
    whole = reference([prompt_clean(text)])
    prompt = tokenizer(text)
    assert prompt.ids == expected["input_ids"][0]
    assert prompt.token_count == len(whole["input_ids"][0])


@pytest.mark.parametrize(
    ("content", "length", "truncated"),
    [
        (0, 1, False),
        (TEXT_LEN - 2, TEXT_LEN - 1, False),
        (TEXT_LEN - 1, TEXT_LEN, False),
        (TEXT_LEN, TEXT_LEN, True),
        (5000, TEXT_LEN, True),
    ],
)
def test_cut_keeps_the_end_token(
    content: int, length: int, truncated: bool, tokenizer: PromptTokenizer
) -> None:
    prompt = tokenizer(" ".join(["cat"] * content))
    assert len(prompt.ids) == length
    assert prompt.token_count == content + 1
    assert prompt.truncated is truncated
    assert prompt.ids[-1] == 1
    assert prompt.ids.count(1) == 1


def test_texts_that_differ_only_behind_the_cut_are_equal(tokenizer: PromptTokenizer) -> None:
    start = "cat " * TEXT_LEN
    assert tokenizer(start + "red").ids == tokenizer(start + "black").ids


def test_longest_allowed_text_is_quick(tokenizer: PromptTokenizer) -> None:
    began = time.perf_counter()
    prompt = tokenizer("red cat! " * 11_000)
    assert prompt.truncated
    assert time.perf_counter() - began < 10


def test_sixteen_threads_equal_serial(tokenizer: PromptTokenizer) -> None:
    texts = [f"{'red cat ' * (index % 40)}{index}" for index in range(16 * 50)]
    serial = [tokenizer(text) for text in texts]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(tokenizer, texts)) == serial


def test_reads_the_original_layout(tmp_path: Path, ckpt_dir: Path) -> None:
    shutil.copytree(ckpt_dir / "tokenizer", tmp_path / "google" / "umt5-xxl")
    text = "a red circle"
    assert PromptTokenizer(tmp_path, 8)(text) == PromptTokenizer(ckpt_dir, 8)(text)


def test_settings_saved_with_the_tokenizer_do_not_matter(tmp_path: Path, ckpt_dir: Path) -> None:
    saved = save_tokenizer(tmp_path / "plain")
    saved(["cat"], truncation=True, max_length=3, padding="max_length")
    saved.save_pretrained(tmp_path / "tokenizer")
    prompt = PromptTokenizer(tmp_path, TEXT_LEN)("red cat on a black circle")
    assert prompt == PromptTokenizer(ckpt_dir, TEXT_LEN)("red cat on a black circle")
    assert prompt.token_count == 7


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="neither tokenizer nor google/umt5-xxl"):
        PromptTokenizer(tmp_path, TEXT_LEN)


def test_unreadable_tokenizer_is_named(tmp_path: Path, ckpt_dir: Path) -> None:
    shutil.copytree(ckpt_dir / "tokenizer", tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="unreadable tokenizer"):
        PromptTokenizer(tmp_path, TEXT_LEN)
