"""The T5-style SentencePiece-unigram tokenizer of the tiny models."""

from __future__ import annotations

import io
import json
from pathlib import Path

import sentencepiece as spm
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import Unigram

from . import shapes
from .models import TEXT_LEN

VOCAB_SIZE = 512  # 3 special tokens, 256 bytes, the rest learnt pieces
PAD, EOS, UNK = 0, 1, 2
TOKENIZER_CLASS = "PreTrainedTokenizerFast"

# So that ordinary English has pieces, too: the captions alone lack half of the alphabet.
_ENGLISH = """
The quick brown fox jumps over the lazy dog. A small boat sails across the calm blue sea at sunset.
Two cats are playing with a ball in the garden while it rains outside, and the camera slowly zooms
in. An astronaut walks on the surface of the moon; behind her the Earth rises. In the city, people
with umbrellas cross the street in front of tall buildings. A bright, static scene of poor quality,
blurred details, extra fingers, bad hands, still picture, worst quality. What is this? How do you
do! Yes, no, maybe: 0 1 2 3 4 5 6 7 8 9. He said "hello" (twice) and she didn't answer him.
Big and small, fast and slow, top and bottom, near and far; orange, purple, pink, brown, golden and
silver stars, rectangles, lines, rings, dots and hexagons of every size spin and bounce around.
Over the mountains an eagle glides in slow motion. Close-up of a woman's face with a smile.
A red car drives along a winding road through the forest, then stops under an old tree. Cinematic
lighting, high detail, realistic texture, soft shadows, wide angle, documentary style, black screen.
A B C D E F G H I J K L M N O P Q R S T U V W X Y Z. a b c d e f g h i j k l m n o p q r s t u v w x
y z. / & % + - = * # @ [ ] { } < >.
"""


def _corpus() -> list[str]:
    """Return the sentences the pieces are learnt from."""
    templates = (shapes.TEMPLATE, *shapes.PARAPHRASES)
    lines = [scene.caption(template) for scene in shapes.ALL_SCENES for template in templates]
    english = [part + "." for part in _ENGLISH.replace("\n", " ").split(".") if part.strip()]
    return lines + english * 8 + [line.lower() for line in english] * 8


def _train() -> bytes:
    """Return a serialised SentencePiece model."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(_corpus()),
        model_writer=model,
        model_type="unigram",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        pad_id=PAD,
        eos_id=EOS,
        unk_id=UNK,
        bos_id=-1,
        pad_piece="<pad>",
        eos_piece="</s>",
        unk_piece="<unk>",
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def save_tokenizer(folder: Path) -> None:
    """Write `spiece.model`, `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = _train()
    (folder / "spiece.model").write_bytes(model)
    pieces = spm.SentencePieceProcessor(model_proto=model)
    vocab = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]
    tokenizer = Tokenizer(Unigram(vocab, unk_id=UNK, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", EOS)]
    )
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, str | int | bool] = {
        # Not "T5TokenizerFast": in transformers 5 that class drops the byte fallback when it reads
        # the very same files, and every unknown character becomes <unk>.
        "tokenizer_class": TOKENIZER_CLASS,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": TEXT_LEN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
