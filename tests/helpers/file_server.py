"""A server of files on loopback that misbehaves as told."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves files on loopback, and misbehaves as told; remembers the ranges it was asked for."""

    def __init__(self, files, behave=None):
        self.files, self.behave, self.asked = files, behave or (lambda *_: None), []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})

    def answer(self, request):
        asked = request.headers.get("Range")
        self.asked.append(asked)
        content = self.files.get(request.path.removeprefix("/"))
        if content is None:
            return request.send_error(404)
        if self.behave(self, request, content):
            return None
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if start >= len(content):
            return request.send_error(416)
        request.send_response(206 if asked else 200)
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        request.wfile.write(content[start:])
        return None

    def url(self, file):
        return f"http://127.0.0.1:{self.http.server_address[1]}/{file}"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def send(request, content, announced):
    request.send_response(200)
    request.send_header("Content-Length", str(announced))
    request.end_headers()
    with contextlib.suppress(OSError):
        request.wfile.write(content)
