"""The payload codec: Python objects to bytes plus raw buffers, and back.

A payload is a pickle protocol 5 stream (the *head*) and the large buffers it refers to, in order. NumPy arrays and
torch tensors put their memory into buffers, so that it is never copied on the way out and arrays are built on the
received memory in place. Functions and classes that the other side cannot import (``__main__``, a notebook, a test
function) travel by value, by cloudpickle.

Three facts to know:

- A large ``bytes``, ``bytearray`` or ``str`` stays in the head: the C pickler saves these exact types before it asks
  anybody, so they cannot become buffers. They are copied once out of it.
- Buffers below ``INLINE_BYTES`` stay in the head too. Arrays are writable after ``loads`` either way, if they were.
- Nothing received is unpickled here before the caller has authenticated its sender: that is the caller's duty.

Neither torch, NumPy nor cloudpickle is imported until an object needs it.
"""

from __future__ import annotations

import functools
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.core.errors import AtollError, SerializationError
from atoll.wire.definitions import reduce_cached_property, reduce_class, reduce_function, reduce_named, reduce_weak_dict
from atoll.wire.exception_values import reduce_exception
from atoll.wire.pickle_errors import PLAIN_SCALARS, locate, refusal
from atoll.wire.torch_tensors import TORCH_HANDLERS, same

INLINE_BYTES = 16 * 1024
"""Buffers smaller than this travel inside the head: a segment of their own would cost more than the copy."""

_PLAIN_ITEMS = 64
_PLAIN_LENGTH = 64 * 1024

Roots = Callable[[], Iterable[tuple[str, object]]]


@dataclass(slots=True)
class Payload:
    """One object, ready to travel.

    Attributes:
        chunks: the pickle protocol 5 stream in parts; a large ``bytes`` is one of its own, as it is.
        buffers: out-of-band buffers in order, each a flat contiguous view of bytes (format ``B``).
        notes: lines that the user should see, each once.
    """

    chunks: list[bytes]
    buffers: list[memoryview]
    notes: list[str]

    @property
    def head(self) -> bytes:
        """The pickle stream in one piece."""
        if len(self.chunks) != 1 or type(self.chunks[0]) is not bytes:
            self.chunks = [b"".join(self.chunks)]
        return self.chunks[0]

    @property
    def head_bytes(self) -> int:
        """Its length."""
        return sum(map(len, self.chunks))

    @property
    def num_bytes(self) -> int:
        """Bytes of the head and all buffers together."""
        return self.head_bytes + sum(buffer.nbytes for buffer in self.buffers)


def dumps(obj: object, *, what: str = "the value", roots: Roots | None = None) -> Payload:
    """Serialise ``obj``.

    Args:
        obj: anything.
        what: names ``obj`` in error messages.
        roots: called on failure only; named parts of ``obj`` that a path may start from instead of ``what``,
            such as ``("argument 'cfg'", cfg)``.

    Raises:
        SerializationError: something in ``obj`` cannot travel; the message has the path to it, its type and what
            to do instead.
        AtollError: an object refused for a reason of its own; a note tells where it sits.
    """
    if is_plain(obj):
        return Payload([pickle.dumps(obj, protocol=5)], [], [])
    shared: dict[int, Any] = {}
    while True:
        num_shared = len(shared)
        chunks: list[bytes] = []
        pickler = _pickler_type()(chunks, shared)
        try:
            pickler.dump(obj)
        except MemoryError:
            raise
        except Exception as exc:  # any object's own reduction code runs here and may raise whatever it likes
            starts = [*(roots() if roots is not None else ()), (what, obj)]
            if isinstance(exc, AtollError) and not isinstance(exc, SerializationError):
                exc.add_note(f"found at {locate(pickler.last, starts)}")
                raise
            raise refusal(exc, pickler.last, starts) from exc
        finally:
            # The memo holds every PickleBuffer. It must not be left to the garbage collector: that would keep the
            # user's memory, and CPython (3.11 at least) crashes where it collects a PickleBuffer over a memoryview.
            pickler.clear_memo()
        if len(shared) == num_shared:
            break
    return Payload(chunks, pickler.buffers, pickler.notes)


def loads(head: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Rebuild the object of a payload.

    Args:
        head: the pickle stream.
        buffers: one buffer for each of the payload's, in order. Arrays and tensors are built on them without a copy
            and are writable if the buffer is; start them at multiples of 64 bytes. A tensor on a read-only buffer
            is copied, because torch has no read-only tensors.

    Raises:
        Exception: whatever rebuilding raises, such as ModuleNotFoundError for a class that cannot be imported here.
    """
    return pickle.loads(head, buffers=buffers)


def is_plain(obj: object) -> bool:
    """Whether plain pickle gives what cloudpickle would: a few exact builtin scalars in exact builtin containers.

    It must not be asked of anything else: plain pickle sends a function of ``__main__`` by reference.
    """
    todo: list[Any] = [obj]
    for item in todo:  # grows while it is walked; a cycle ends at the limit
        kind = type(item)
        if kind in PLAIN_SCALARS:
            continue
        if kind is str or kind is bytes:
            if len(item) > _PLAIN_LENGTH:
                return False
        elif (kind is not tuple and kind is not list and kind is not dict) or len(item) > _PLAIN_ITEMS:
            return False
        else:
            todo += item
            if kind is dict:
                todo += item.values()
        if len(todo) > _PLAIN_ITEMS:
            return False
    return True


# --- the pickler ---------------------------------------------------------------------------------------------------


@functools.cache
def _pickler_type() -> Any:
    """cloudpickle's pickler with reducers for what it does not handle, or not the way a call needs it."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def __init__(self, chunks: list[bytes], shared: dict[int, Any]) -> None:
            buffers: list[memoryview] = []
            notes: list[str] = []

            # Closures over lists, not methods: a pickler that refers to itself would live until a collection.
            def take_buffer(buffer: pickle.PickleBuffer) -> bool:
                raw = buffer.raw()
                if raw.nbytes < INLINE_BYTES:
                    return True  # it stays in the stream
                buffers.append(raw)
                return False

            def note(line: str) -> None:
                if line not in notes:
                    notes.append(line)

            # A list instead of a BytesIO: a large bytes object is passed to write() as it is, and copied only once.
            super().__init__(_Sink(chunks.append), protocol=5, buffer_callback=take_buffer)
            self.buffers = buffers
            self.notes = notes
            self.note = note
            self.last: object = None
            self.namespaces: dict[int, Any] = {}
            self.tensors: Any = None
            self.kinds = _static_handlers.copy()
            self.shared = shared

        def reducer_override(self, obj: Any) -> Any:
            # The C pickler asks here before it saves anything but exact builtins. If it fails, the object asked
            # about last is the one that failed.
            self.last = obj
            kind = type(obj)
            try:
                handler = self.kinds[kind]
            except KeyError:
                handler = self.kinds[kind] = _handler(kind)
            return NotImplemented if handler is None else handler(self, obj)

        # What cloudpickle does with functions and classes; it leaves everything else to its dispatch table.
        by_cloudpickle = cloudpickle.Pickler.reducer_override

    return Pickler


class _Sink:
    """A file that only has ``write``."""

    __slots__ = ("write",)

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write


def _reduce_function(pickler: Any, function: Any) -> Any:
    reduced = reduce_function(pickler, function)
    if reduced is not NotImplemented and "_torchdynamo_orig_callable" in function.__dict__:
        pickler.note("a function compiled with torch.compile arrives as the original function")
        return same, (function._torchdynamo_orig_callable,)
    return reduced


def _reduce_code(pickler: Any, code: types.CodeType) -> Any:
    """As cloudpickle, which blanks the file name in newer versions: a traceback without it says nothing."""
    maker, args = pickler.dispatch_table[types.CodeType](code)
    file = "".join(code.co_filename)  # a copy: strings that are shared here would make equal functions differ
    return maker, tuple(file if type(arg) is str and arg == "<dynamic-code>" else arg for arg in args)


Handler = Callable[[Any, Any], Any]


def _handler(kind: type) -> Handler | None:
    """The reducer for a type, found by the names in its MRO so that no framework has to be imported to ask."""
    if issubclass(kind, type):
        return reduce_class
    for base in kind.__mro__:
        module: Any = base.__module__
        if not isinstance(module, str):  # a class may call its module anything
            continue
        if module == "torch" or module.startswith("torch."):
            handler = TORCH_HANDLERS.get(base.__qualname__)
        else:
            handler = _OTHERS.get((module, base.__qualname__))
        if handler is not None:
            return handler
    own = (kind.__reduce_ex__, kind.__reduce__)  # what is left to `object` is pickled by class and state, not by name
    return None if own == (object.__reduce_ex__, object.__reduce__) else reduce_named


def _reduce_array(pickler: Any, obj: Any) -> Any:
    """An array that is not contiguous: one copy into a buffer. NumPy would make two, and change the byte order."""
    numpy = sys.modules["numpy"]
    if type(obj) is not numpy.ndarray or obj.nbytes == 0 or obj.flags.forc or obj.dtype.hasobject:
        return NotImplemented
    return numpy.ascontiguousarray(obj).__reduce_ex__(5)


def _reduce_memoryview(pickler: Any, obj: memoryview) -> Any:
    contiguous = obj if obj.c_contiguous else memoryview(obj.tobytes()).cast("B")
    return rebuild_memoryview, (pickle.PickleBuffer(contiguous), obj.format, obj.shape)


def rebuild_memoryview(data: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    """Used in payloads: a memoryview arrives as a memoryview over the received bytes."""
    flat: Any = memoryview(data).cast("B")
    # memoryview.cast takes no shape without elements, and none is needed then
    view: memoryview = flat.cast(format) if 0 in shape else flat.cast(format, shape)
    return view


def _reduce_text_file(pickler: Any, obj: Any) -> Any:
    if obj is sys.stdout or obj is sys.stderr:
        return NotImplemented  # cloudpickle sends these as the other side's own
    raise SerializationError("it belongs to this process. Pass the path and open it inside the function")


def _refuse_thread(pickler: Any, obj: Any) -> Any:
    raise SerializationError("a thread belongs to the process that started it. Start it inside the function")


_OTHERS: dict[tuple[str, str], Handler] = {
    ("numpy", "ndarray"): _reduce_array,
    ("builtins", "memoryview"): _reduce_memoryview,
    ("builtins", "BaseException"): lambda pickler, exc: reduce_exception(exc),
    ("_io", "TextIOWrapper"): _reduce_text_file,
    ("threading", "Thread"): _refuse_thread,
    ("functools", "cached_property"): reduce_cached_property,
    ("weakref", "WeakKeyDictionary"): reduce_weak_dict,
    ("weakref", "WeakValueDictionary"): reduce_weak_dict,
}
# Types that nearly every payload has, looked up once.
_static_handlers: dict[type, Handler | None] = {
    types.FunctionType: _reduce_function,
    types.BuiltinFunctionType: None,
    types.CodeType: _reduce_code,
    types.CellType: None,
    types.ModuleType: None,
    types.MethodType: None,
    type: reduce_class,
}
