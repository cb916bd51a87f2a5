"""Tests the refusals of gsa-serve; serving/gsa_vllm/tests starts its servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gsa_eval.commands import serve


@pytest.mark.parametrize(
    ("model_type", "server", "found", "reason"),
    [
        (
            None,
            "vllm",
            ("vllm",),
            "config.json cannot be read: No such file or directory; give the folder of a",
        ),
        (
            "[]",
            "vllm",
            ("vllm",),
            "config.json is damaged: it holds no fields; copy it from its source again",
        ),
        ("{", "vllm", ("vllm",), "config.json is damaged: Expecting property name"),
        ("llama", "vllm", ("vllm",), "model_type is 'llama'; give a folder that export_hf.py wrote"),
        ("gsa", "vllm", (), "vLLM is not installed; run make setup-vllm"),
        ("gsa", "vllm", ("vllm",), "vLLM has no plug-in for GSA; run in the checkout: pip install ./kernels"),
        ("gsa", "transformers", ("transformers",), "the package fastapi is not installed; run: pip install"),
        ("gsa", None, ("vllm", "transformers"), "vLLM has no plug-in for GSA"),
        ("gsa", None, ("transformers",), "the package fastapi is not installed"),
    ],
)
def test_what_cannot_be_served_is_refused(
    model_type: str | None,
    server: str | None,
    found: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if model_type is not None:
        content = model_type if model_type[0] in "[{" else json.dumps({"model_type": model_type})
        (tmp_path / "config.json").write_text(content)
    monkeypatch.setattr(serve, "find_spec", lambda name: name if name in found else None)
    words = ["--hf", str(tmp_path), *(["--server", server] if server else [])]
    monkeypatch.setattr(sys, "argv", ["serve.py", *words])
    assert serve.main() == 2
    assert reason in capsys.readouterr().err
