"""What an EncodeRequest must look like."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chitu_diffusion.errors import InvalidRequestError, Violation
from chitu_diffusion.v1 import encoder_pb2

MAX_INPUTS = 64
MAX_TEXT_CHARS = 100_000


def check_request(request: encoder_pb2.EncodeRequest, vocab_size: int, text_len: int) -> None:
    """Refuse a request that breaks a rule, before any work is done.

    Args:
        request: what came over the wire.
        vocab_size: token ids must be in [0, vocab_size).
        text_len: most tokens of a tokenised input.

    Raises:
        InvalidRequestError: names every input that is wrong.
    """
    count = len(request.inputs)
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError.of("inputs", f"{count} inputs: must be 1 to {MAX_INPUTS}")
    violations = [
        violation
        for index, item in enumerate(request.inputs)
        for violation in _problems(f"inputs[{index}]", item, vocab_size, text_len)
    ]
    if violations:
        raise InvalidRequestError(violations)


def _problems(
    field: str, item: encoder_pb2.TextInput, vocab_size: int, text_len: int
) -> Iterator[Violation]:
    kind = item.WhichOneof("input")
    if kind == "text":
        if len(item.text) > MAX_TEXT_CHARS:
            yield Violation(
                f"{field}.text", f"{len(item.text)} characters: at most {MAX_TEXT_CHARS}"
            )
    elif kind == "token_ids":
        yield from _id_problems(f"{field}.token_ids", item.token_ids.ids, vocab_size, text_len)
    else:
        yield Violation(field, "is empty: must be text or token_ids")


def _id_problems(
    field: str, ids: Sequence[int], vocab_size: int, text_len: int
) -> Iterator[Violation]:
    if not 1 <= len(ids) <= text_len:
        yield Violation(field, f"{len(ids)} ids: must be 1 to {text_len}")
        return
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            yield Violation(f"{field}.ids[{position}]", f"{token}: must be 0 to {vocab_size - 1}")
            return  # one wrong id is enough to find the rest
