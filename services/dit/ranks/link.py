"""A rank's end of its call to the front."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from chitu_diffusion.errors import ChituError
from chitu_diffusion.rpc.options import CHANNEL_OPTIONS
from chitu_diffusion.v1 import dit_pb2, rank_pb2, rank_pb2_grpc
from chitu_diffusion.wire import Payload, TensorReceiver

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0

JobMessage: TypeAlias = (
    rank_pb2.SliceJob | rank_pb2.ForwardJob | rank_pb2.MoveJob | dit_pb2.ReleaseRequest
)
Response: TypeAlias = dit_pb2.DenoiseResponse | dit_pb2.ForwardResponse
_Messages: TypeAlias = Iterable[rank_pb2.AttachRequest]


@dataclass
class Job:
    """What the front asks for, and its tensors once all of them are here."""

    message: JobMessage
    payloads: dict[str, Payload] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every tensor has come."""
        if isinstance(self.message, rank_pb2.SliceJob | rank_pb2.ForwardJob):
            return len(self.payloads) == len(self.message.tensors)
        return True


class Link:
    """The call, on threads of its own: it answers whatever the rank is doing.

    The process ends when the call does: a rank without a front is of no use.
    """

    def __init__(
        self,
        address: str,
        secret: str,
        hello: rank_pb2.Hello,
        status: Callable[[], rank_pb2.RankStatus],
        on_abort: Callable[[int], None],
    ) -> None:
        """Join the pool.

        Args:
            address: of the front.
            secret: of the pool.
            hello: who this is.
            status: told with every sign of life; called on a thread.
            on_abort: another rank of the slice of this number failed; called on a thread.
        """
        self._status, self._on_abort = status, on_abort
        self._outgoing: queue.SimpleQueue[_Messages] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._cancelled = -1
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.send([rank_pb2.AttachRequest(hello=hello)])
        stub = rank_pb2_grpc.RankServiceStub(self._channel)
        self._call = stub.Attach(
            self._requests(), metadata=(("authorization", f"Bearer {secret}"),)
        )
        threading.Thread(target=self._listen, name="front", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def jobs(self) -> Iterator[Job]:
        """Wait for jobs, one after the other, for ever."""
        while True:
            yield self._jobs.get()

    def is_cancelled(self, number: int) -> bool:
        """Whether a slice shall end."""
        return number == self._cancelled

    def send(self, messages: _Messages) -> None:
        """Send messages, made one at a time as they go out."""
        self._outgoing.put(messages)

    def reply(
        self, number: int, responses: Iterable[Response], *, replaceable: bool = False
    ) -> None:
        """Send something of a job, made as it goes out."""
        self.send(_replies(number, responses, replaceable))

    def ended(self, ended: rank_pb2.Ended) -> None:
        """Say that a job has ended."""
        self.send([rank_pb2.AttachRequest(ended=ended)])

    def _requests(self) -> Iterator[rank_pb2.AttachRequest]:
        while True:
            yield from self._outgoing.get()

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(HEARTBEAT_S):
            self.send([rank_pb2.AttachRequest(alive=self._status())])

    def _listen(self) -> None:
        try:
            self._take_all()
            log.warning("the front has ended the call: leaving")
        except grpc.RpcError as error:
            log.warning("the front is gone (%s): leaving", error.code().name)
        except BaseException:
            log.exception("the call to the front failed: leaving")
        os._exit(1)

    def _take_all(self) -> None:
        receiver, job = TensorReceiver(), Job(rank_pb2.MoveJob())
        for response in self._call:
            kind = response.WhichOneof("response")
            if kind in ("slice", "forward", "move", "release"):
                job = Job(getattr(response, kind))
            elif kind == "tensor":
                payload = receiver.feed(response.tensor)
                if payload is None:
                    continue
                job.payloads[payload.name] = payload
            else:
                self._take_note(response)
                continue
            if job.complete:
                self._jobs.put(job)

    def _take_note(self, response: rank_pb2.AttachResponse) -> None:
        """Do at once what does not wait for its turn."""
        kind = response.WhichOneof("response")
        if kind == "cancel":
            self._cancelled = response.cancel.number
        elif kind == "abort":
            self._on_abort(response.abort.number)
        elif kind == "leave":
            log.info("the front lets this rank go")
            os._exit(1 if response.leave.restart else 0)


def failure(error: ChituError) -> rank_pb2.Failure:
    """An error as the front will raise it."""
    return rank_pb2.Failure(reason=error.reason, message=str(error))


def _replies(
    number: int, responses: Iterable[Response], replaceable: bool
) -> Iterator[rank_pb2.AttachRequest]:
    following = iter(responses)
    response = next(following, None)
    while response is not None:
        later = next(following, None)
        yield _reply(number, response, later is not None, replaceable)
        response = later


def _reply(
    number: int, response: Response, more: bool, replaceable: bool
) -> rank_pb2.AttachRequest:
    reply = rank_pb2.Reply(number=number, more=more, replaceable=replaceable)
    if isinstance(response, dit_pb2.DenoiseResponse):
        reply.denoise.CopyFrom(response)
    else:
        reply.forward.CopyFrom(response)
    return rank_pb2.AttachRequest(reply=reply)
