"""CALL frames: one packing for all ranks that need the same, one write for each node."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace

from atoll.gang.call import Job
from atoll.gang.members import RankState
from atoll.wire import frames
from atoll.wire.frames import CallHeader, pack

_RANK_FIELD = struct.Struct("<I")
_RANK_AT = 8
_KEPT_FUNCTIONS = 64  # by a rank, each at most 1 MiB: the driver says which one it is to forget


def call_frames(job: Job, states: Sequence[RankState]) -> Iterator[tuple[int, bytes, tuple[int, ...]]]:
    """Node, bytes and descriptors of each write that sends a job to its ranks; notes what the ranks have then."""
    request = job.request
    base = job.header(states[0].port)
    # Where only some have torch from an earlier call, the others import it: all have to agree.
    base.all_have_torch = job.whole_gang and any(state.has_torch for state in states)
    packed: dict[tuple[bool, bool, str | None], tuple[bytearray, tuple[int, ...]]] = {}
    batches: dict[int, list[bytes]] = {}
    for rank in job.ranks:
        state = states[rank]
        digest = request.function.digest
        lacks_function, forget = digest not in state.sent, None
        if request.function.cacheable:
            state.sent.pop(digest, None)
            state.sent[digest] = None
            if len(state.sent) > _KEPT_FUNCTIONS:
                forget = next(iter(state.sent))
                del state.sent[forget]
        needs = (lacks_function, request.path not in (None, state.path), forget)
        if needs not in packed:
            packed[needs] = _pack_call(job, base, *needs)
        if needs[1]:
            state.path = request.path
        data, fds = packed[needs]
        _RANK_FIELD.pack_into(data, _RANK_AT, rank)
        if fds:
            yield state.node, bytes(data), fds
        else:
            batches.setdefault(state.node, []).append(bytes(data))
    for node, batch in batches.items():
        yield node, b"".join(batch), ()


def _pack_call(
    job: Job, base: CallHeader, with_function: bool, with_path: bool, forget: str | None
) -> tuple[bytearray, tuple[int, ...]]:
    request = job.request
    header = replace(base)
    parts: list[bytes | memoryview] = []
    fds: list[int] = []
    for encoded in ([request.function.encoded] if with_function else []) + [request.arguments]:
        parts += encoded.inline
        if encoded.segment is not None:
            fds.append(encoded.segment.fd)
    if with_function:
        header.function_payload = request.function.encoded.table
        header.keep_function = request.function.cacheable
    header.forget = forget
    if with_path:
        header.path = request.path
    return bytearray(pack(frames.CALL, 0, job.number, header.to_wire(), parts, len(fds))), tuple(fds)
