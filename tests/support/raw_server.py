"""A server of raw sockets that does what it is told: broken connections and byte counts can be tested exactly."""

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from hyco_export.protocol import wire

DROP = b""  # close the connection without an answer
HANG = None  # never answer
LATE = b"late"  # in front of an answer: send it LATE_S after the request
LATE_S = 0.3


def http_answer(body: bytes, status: str = "200 OK", media_type: str = wire.MEDIA_TYPE, extra: str = "") -> bytes:
    """One HTTP/1.1 answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


class RawServer:
    """Listens on a free port; request i gets `answers[i]`, the last one again and again.

    Attributes:
        requests: raw bytes of every request, in order.
        connections: how many were accepted.
        end: set when the server is closed.
    """

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self._answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.end = threading.Event()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "RawServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread, which close alone does not
        for opened in (self._listener, *self._open):
            opened.close()

    def send(self, connection: socket.socket, answer: bytes) -> None:
        connection.sendall(answer)

    def close_connections(self) -> None:
        """What a server does with idle connections."""
        for opened in self._open:
            opened.shutdown(socket.SHUT_RDWR)
            opened.close()
        self._open.clear()

    def _accept(self) -> None:
        while not self.end.is_set():
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(accepted)
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        while True:
            try:
                while (request := _whole_request(buffer)) is None:
                    received = connection.recv(65_536)
                    if not received:
                        return
                    buffer += received
            except OSError:
                return
            buffer = buffer[len(request) :]
            self.requests.append(request)
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if answer is HANG:
                self.end.wait()
                return
            if answer == DROP:
                connection.close()
                return
            if answer.startswith(LATE):
                self.end.wait(LATE_S)
                answer = answer.removeprefix(LATE)
            with suppress(OSError):  # a client may have seen enough
                self.send(connection, answer)
            if len(answer) < _announced(answer):
                connection.close()
                return


def _whole_request(buffer: bytes) -> bytes | None:
    if b"\r\n\r\n" not in buffer:
        return None
    size = _announced(buffer)
    return buffer[:size] if len(buffer) >= size else None


def _announced(message: bytes) -> int:
    """Size of the message that starts here, by its Content-Length."""
    head = message[: message.index(b"\r\n\r\n") + 4]
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return len(head) + (int(lengths[0].split(b":")[1]) if lengths else 0)
