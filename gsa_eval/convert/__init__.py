"""Export models to Hugging Face's transformers and import them (the extra `hf`)."""

from __future__ import annotations

import importlib.util

PACKAGES = ("transformers", "safetensors", "tokenizers")


def missing_package() -> str | None:
    """Returns what to install before other modules of this folder can be imported, or None if nothing is missing."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed; run in the checkout: pip install '.[hf]'"
    return None
