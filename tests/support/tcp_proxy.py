"""A TCP connection that can be cut in the middle while both ends live."""

import contextlib
import select
import socket
import threading


class TcpProxy:
    """Passes bytes on between whoever connects to `port` and 127.0.0.1:`target`, in a thread of its own."""

    def __init__(self, target: int, lets_in: bool = True) -> None:
        self._target = target
        self.lets_in = lets_in
        """While not, new connections are closed at once."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.said = bytearray(), bytearray()
        """What was passed on to the target, and from it."""
        self._peers: dict[socket.socket, socket.socket] = {}
        self._from_target: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="tcp proxy", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Closes every connection."""
        with self._lock:
            for peer in self._peers:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        self._stopped = True
        self.cut()
        self._thread.join(10)
        self._listener.close()
        for peer in self._peers:
            peer.close()

    def _run(self) -> None:
        while not self._stopped:
            for ready in select.select([self._listener, *self._peers], [], [], 0.02)[0]:
                if ready is self._listener:
                    self._accept()
                elif ready in self._peers:
                    self._pass_on(ready)

    def _accept(self) -> None:
        theirs, _ = self._listener.accept()
        if not self.lets_in:
            theirs.close()
            return
        ours = socket.create_connection(("127.0.0.1", self._target))
        with self._lock:
            self._peers |= {theirs: ours, ours: theirs}
            self._from_target.add(ours)

    def _pass_on(self, source: socket.socket) -> None:
        target = self._peers[source]
        try:
            data = source.recv(1 << 16)
            self.said[source in self._from_target].extend(data)
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            with self._lock:
                del self._peers[source], self._peers[target]
                self._from_target -= {source, target}
            source.close()
            target.close()
