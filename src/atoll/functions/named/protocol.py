"""What a named pool's server and its clients say to each other, beside the frames of calls."""

from __future__ import annotations

import os
import pickle

from atoll.gang.call import Request
from atoll.wire.frames import Frame
from atoll.wire.payloads import Segment

GO = b"+"  # what the process that asked for a server answers once it has heard that the pool is up


def request_parts(request: Request) -> tuple[bytes, list[int]]:
    """A request as the bytes and descriptors of a SUBMIT frame."""
    fds = [encoded.segment.fd for encoded in request.encoded if encoded.segment is not None]
    return pickle.dumps(request, protocol=5), fds


def request_from(frame: Frame) -> Request:
    """The request of a SUBMIT frame; takes its descriptors over."""
    request: Request = pickle.loads(frame.rest)
    fds = list(frame.fds)
    for encoded in request.encoded:
        if encoded.table.get("file"):
            fd = fds.pop(0)
            encoded.segment = Segment(fd, os.fstat(fd).st_size, foreign=True)
    return request
