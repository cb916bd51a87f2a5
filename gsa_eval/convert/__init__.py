"""Models out to Hugging Face's transformers, and in (the extra `hf`)."""

from __future__ import annotations

import importlib.util

PACKAGES = ("transformers", "safetensors", "tokenizers")


def missing_package() -> str | None:
    """What to install before anything else of this folder can be imported; None if all is there."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed; run in the checkout: pip install '.[hf]'"
    return None
