"""A TCP proxy in the loopback that a test can make cut, delay or drop what goes through it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time


class TcpProxy:
    """Listens on a free port and passes bytes to and from ``127.0.0.1:port``."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        self.delay = 0.0
        """Seconds that each piece of data comes later."""
        self.dropping = False
        """Whether data vanishes. TCP knows no gaps: cut the connections before it is passed on again."""
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(TimeoutError, OSError):
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._pairs.append((near, far))
                threading.Thread(target=self._pass, args=(near, far), daemon=True).start()

    def _pass(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            for end in other:
                selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(1):
                    data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                    if not data:
                        return
                    if self.delay:
                        time.sleep(self.delay)
                    if not self.dropping:
                        other[key.fileobj].sendall(data)  # type: ignore[index]

    def cut(self) -> None:
        """Resets every connection: bytes under way are lost."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.shutdown(socket.SHUT_RDWR)
                    end.close()

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        self.cut()
        self._listener.close()
