"""A server on this machine that takes W&B runs, hangs or fails, as it is told."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROJECT = {"id": "p", "name": "unit", "entity": {"id": "e", "name": "team"}}
BUCKET = {
    "id": "b",
    "name": "abc",
    "displayName": "test",
    "config": "{}",
    "sweepName": None,
    "project": PROJECT,
}
REFUSAL = {"errors": [{"message": "refused"}]}


class FakeWandb:
    """`does` may change at any time: "answer", "hang", or a status such as 500."""

    def __init__(self, does="answer"):
        self.does = does
        self.received = []
        """Bodies that were answered."""
        fake = self
        self._end = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                while fake.does == "hang" and not fake._end.wait(0.02):
                    pass
                status = 200 if fake.does in ("answer", "hang") else fake.does
                said = REFUSAL
                if status == 200:
                    fake.received.append(body)
                    said = _said_to(body) if self.path == "/graphql" else {}
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(json.dumps(said).encode())

            do_GET = do_POST = do_PUT = do_HEAD = answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def got(self, text):
        return any(text.encode() in body for body in list(self.received))

    def close(self):
        self._end.set()
        self._server.shutdown()
        self._server.server_close()


def _said_to(body):
    if b"UpsertBucket" in body:
        return {"data": {"upsertBucket": {"bucket": BUCKET, "inserted": True}}}
    if b"RunResumeStatus" in body:
        return {"data": {"model": PROJECT | {"bucket": None}}}
    return REFUSAL  # artifacts and files, for which it would have to play a whole store
