"""What serves a pair in a process of its own."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / "apps" / "serve"), str(Path(__file__).parents[1] / "vllm")]
