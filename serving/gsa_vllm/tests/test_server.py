"""Tests that the server of launch/serve.py answers eight simultaneous clients after another client has hung up."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from small_models import SIZES, VARIANTS, save_model

COMMAND = Path(__file__).parents[3] / "launch/serve.py"
OPTIONS = {
    "vllm": ["--dtype", "float32", "--kv-cache-memory-bytes", "16000000"],
    "transformers": ["--device", "cpu"],
}
Complete = Callable[..., Any]


def save_with_tokenizer(folder: Path) -> str:
    vocabulary = {f"word{token}": token for token in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="word0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return save_model(folder, VARIANTS["paper"])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(params=OPTIONS)
def request_to(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Complete]:
    """Start the server, and yield the function that sends the server a request for a completion."""
    folder, port = save_with_tokenizer(tmp_path / "model"), free_port()
    words = ["--hf", folder, "--port", str(port), "--server", request.param, *OPTIONS[request.param]]
    log = tmp_path / "log.txt"

    def open_request(prompt: str, **options: Any) -> Any:
        body = {"model": folder, "prompt": prompt, "max_tokens": 12, "temperature": 0, **options}
        headers = {"Content-Type": "application/json"}
        address = f"http://127.0.0.1:{port}/v1/completions"
        message = urllib.request.Request(address, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(message, timeout=60)

    command = [sys.executable, COMMAND, *words]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
        try:
            deadline = time.monotonic() + 180
            while True:
                try:
                    open_request("word1").close()
                    break
                except OSError:
                    assert server.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(1)
            assert f"{request.param} serves {folder} at http://127.0.0.1:{port}/v1" in log.read_text()
            yield open_request
        finally:
            server.terminate()


def test_clients_get_the_same_answers_together_as_alone(request_to: Complete) -> None:
    def answer(number: int) -> str:
        with request_to(f"word{number} word{number + 9}") as response:
            return json.load(response)["choices"][0]["text"]

    alone = [answer(number) for number in range(8)]
    assert len(set(alone)) == 8
    with request_to("word1", stream=True, max_tokens=200) as stream:
        stream.readline()  # the first token, then hang up
    with ThreadPoolExecutor(8) as clients:
        assert list(clients.map(answer, range(8))) == alone
