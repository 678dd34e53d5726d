"""Makes the modules of the MTP recipe importable: target, sampling, prompts, quantization."""

from __future__ import annotations

import sys
from pathlib import Path

MTP = Path(__file__).resolve().parents[2] / "smollm2-mtp"
# Last, so that this folder's modules win.
sys.path.append(str(MTP / "train"))
