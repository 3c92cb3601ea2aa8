import grpc
import pytest
from grpc_status import rpc_status

from chitu_diffusion import errors
from chitu_diffusion.errors import ChituError, InvalidRequestError, Violation

LEAVES = [leaf for leaf in vars(errors).values() if isinstance(leaf, type)]
LEAVES = [leaf for leaf in LEAVES if issubclass(leaf, ChituError) and leaf is not ChituError]


class FailedCall(grpc.RpcError, grpc.Call):
    """A call that ended with a status, as a client sees it."""

    def __init__(self, status):
        self._status = rpc_status.to_status(status)

    def code(self):
        return self._status.code

    def details(self):
        return self._status.details

    def trailing_metadata(self):
        return self._status.trailing_metadata

    def initial_metadata(self):
        return ()

    is_active = time_remaining = cancel = add_callback = lambda self, *_: None


FailedCall.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_every_error_survives_the_wire(leaf):
    error = leaf.of("f", "m") if leaf is InvalidRequestError else leaf("what went wrong")
    received = errors.from_rpc_error(FailedCall(errors.to_status(error)))
    assert type(received) is leaf
    assert received.violations == error.violations
    assert str(error) in str(received)


def test_reasons_are_unique_and_upper_snake_case():
    reasons = [leaf.reason for leaf in LEAVES]
    assert len(set(reasons)) == len(reasons)
    assert all(r.replace("_", "").isupper() and len(r) <= 63 for r in reasons)


@pytest.mark.parametrize(
    ("leaf", "builtin"),
    [
        (errors.InvalidRequestError, ValueError),
        (errors.ConfigError, ValueError),
        (errors.CheckpointError, ValueError),
        (errors.CheckpointNotFoundError, FileNotFoundError),
        (errors.ComponentError, RuntimeError),
        (errors.OutOfMemoryError, RuntimeError),
        (errors.NotFoundError, LookupError),
    ],
)
def test_leaves_are_the_builtins_that_users_catch(leaf, builtin):
    assert issubclass(leaf, builtin)


def test_a_status_stays_small_enough_for_a_trailer():
    error = InvalidRequestError(
        [Violation(f"params.field{i}" * 50, "x" * 5000) for i in range(500)]
    )
    assert errors.to_status(error).ByteSize() < 8192


def test_retryable_errors_say_when_to_try_again():
    def has_retry_info(error):
        return any("RetryInfo" in d.type_url for d in errors.to_status(error).details)

    assert has_retry_info(errors.UnavailableError("away"))
    assert not has_retry_info(errors.ComponentError("broken"))


def test_a_status_of_other_origin_becomes_the_nearest_error():
    call = FailedCall(errors.to_status(errors.UnavailableError("x")))
    call.trailing_metadata = tuple
    assert isinstance(errors.from_rpc_error(call), errors.UnavailableError)
