"""The models of the tests of vLLM are served here, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "rollout" / "vllm"))
