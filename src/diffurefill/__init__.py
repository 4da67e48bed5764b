"""Pretrain a masked-diffusion language model on GPUs that vanish; write by draft and refill.

    import diffurefill
    model = diffurefill.load("./run")
    print(model.generate(["def main("], num_tokens=64)[0])

Names are imported when first used: `import diffurefill` costs milliseconds and no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "load": "diffurefill.fleet.loading",
    "generate": "diffurefill.decode.generate",
    "Denoiser": "diffurefill.model.denoiser",
    "RunConfig": "diffurefill.config",
    "Stage": "diffurefill.config",
    "load_preset": "diffurefill.config",
}

__all__ = ["Denoiser", "RunConfig", "Stage", "__version__", "generate", "load", "load_preset"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'diffurefill' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
