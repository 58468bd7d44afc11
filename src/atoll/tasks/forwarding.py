"""Carries connections to ports of this machine into a node's network: ``atoll ssh NAME -L 8008`` for local nodes.

A program: ``python -m atoll.tasks.forwarding PID FD HOST PORT …``. It runs in the node's network and inherits sockets
that listen in the caller's; it ends when the process PID does. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from dataclasses import dataclass

from atoll.core.errors import ConfigError


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


@dataclass(frozen=True, slots=True)
class Forward:
    """Connections to ``port`` here go to ``host:host_port`` as the node sees it."""

    port: int
    host: str
    host_port: int

    @classmethod
    def parse(cls, text: str) -> Forward:
        """From ``PORT``, ``PORT:PORT`` or ``PORT:HOST:PORT``.

        Raises:
            ConfigError: anything else.
        """
        parts = text.split(":")
        numbers = [parts[0], parts[-1]]
        if len(parts) > 3 or not all(_is_port(each) for each in numbers):
            raise ConfigError(
                f"-L {text}: expected PORT, PORT:PORT or PORT:HOST:PORT, as in -L 8265 or -L 9000:localhost:80"
            )
        return cls(int(parts[0]), parts[1] if len(parts) == 3 else "127.0.0.1", int(parts[-1]))

    def listen(self) -> socket.socket:
        """Listen for this machine's own processes.

        Raises:
            ConfigError: the port is taken.
        """
        try:
            return socket.create_server(("127.0.0.1", self.port))
        except OSError as error:
            raise ConfigError(f"-L {self.port}: {error.strerror}; name another one: -L PORT:{self.host_port}") from None


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the other side went away
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _serve(listener: socket.socket, host: str, port: int) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError as error:
            print(f"atoll: {host}:{port} on the node: {error.strerror}", file=sys.stderr)
            writer.close()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        for each in (writer, back):
            each.close()

    async with await asyncio.start_server(carry, sock=listener) as server:
        await server.serve_forever()


async def _main(pid: int, arguments: list[str]) -> None:
    try:
        owner = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(owner, ended.set)
    triples = [arguments[at : at + 3] for at in range(0, len(arguments), 3)]
    serving = [
        asyncio.create_task(_serve(socket.socket(fileno=int(fd)), host, int(port))) for fd, host, port in triples
    ]
    await ended.wait()
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2:]))
