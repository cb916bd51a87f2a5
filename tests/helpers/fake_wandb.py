"""Simulates a W&B server on this machine that accepts runs, hangs, fails or refuses connections on demand."""

import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROJECT = {"id": "p", "name": "unit", "entity": {"id": "e", "name": "team"}}
REFUSAL = {"errors": [{"message": "refused"}]}
EMPTY = {"summaryMetrics": "{}", "config": "{}", "tags": [], "notes": None, "wandbConfig": '{"t": 1}'}


class FakeWandb:
    """Holds the server; `does` may change at any time: "answer", "hang", or a status such as 500."""

    def __init__(self, does="answer"):
        self.does = does
        self.received = []
        """Bodies that were answered."""
        self.history = {}
        """Maps each run to its records by line number; a line that is sent again replaces the earlier one."""
        self._end = threading.Event()
        self._handler = self._make_handler()
        self._listen(0)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def refuse(self):
        """Refuse connections until `come_back`."""
        self._server.shutdown()
        self._server.server_close()

    def come_back(self):
        self.does = "answer"
        self._listen(self._server.server_port)

    def got(self, text):
        return any(text.encode() in body for body in list(self.received))

    def steps(self, run_id):
        """Return the steps of a run's records in the order of its lines; no line may be missing."""
        lines = self.history.get(run_id, {})
        assert sorted(lines) == list(range(len(lines))), sorted(lines)
        return [lines[number]["step"] for number in sorted(lines) if "train/loss" in lines[number]]

    def close(self):
        self._end.set()
        self._server.shutdown()
        self._server.server_close()

    def _listen(self, port):
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _make_handler(self):
        fake = self

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
                    said = fake._said_to(body) if self.path == "/graphql" else fake._kept(self.path, body)
                with contextlib.suppress(OSError):  # the client has stopped waiting
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(json.dumps(said).encode())

            do_GET = do_POST = do_PUT = do_HEAD = answer

        return Handler

    def _kept(self, path, body):
        run = re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)
        if run:
            chunk = json.loads(body).get("files", {}).get("wandb-history.jsonl", {"content": []})
            lines = self.history.setdefault(run[1], {})
            for number, line in enumerate(chunk["content"], chunk.get("offset", 0)):
                lines[number] = json.loads(line)
        return {}

    def _said_to(self, body):
        name = json.loads(body).get("variables", {}).get("name")
        if b"UpsertBucket" in body:
            is_new = name not in self.history
            self.history.setdefault(name, {})
            bucket = {"id": "b", "name": name, "displayName": "test", "config": "{}", "sweepName": None}
            return {"data": {"upsertBucket": {"bucket": bucket | {"project": PROJECT}, "inserted": is_new}}}
        if b"RunResumeStatus" in body:
            bucket = self._resumed(name) if name in self.history else None
            return {"data": {"model": PROJECT | {"bucket": bucket}}}
        return REFUSAL  # artifacts and files, which would need a complete store

    def _resumed(self, name):
        lines = self.history[name]
        last = [json.dumps(lines[max(lines)])] if lines else []
        counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps(last), "eventsTail": "[]"}
        return {"id": "b", "name": name, "displayName": "test"} | EMPTY | counts | tails
