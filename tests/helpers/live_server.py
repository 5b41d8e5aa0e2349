"""The server of `fedgma watch` in a thread."""

import contextlib
import threading

from fedgma.reports.live.runs import LiveRuns
from fedgma.reports.live.server import LiveServer


@contextlib.contextmanager
def serving(*folders):
    """Serves the page of these folders; yields the server."""
    with LiveServer(LiveRuns(folders)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
