"""What lasts of a run: its checkpoints and its exports. Other packages import from here alone.

``runs.save`` lists what a checkpoint holds of a run, and ``storage`` writes and reads its folder: ``state.pt``,
``tensors/``, ``config.yaml`` and ``meta.json`` with the SHA-256 of the others. ``runs.restore`` refuses a file whose
hash differs, a metrics.jsonl or samples.jsonl that is shorter than it was, and a checkpoint of another run
(``runs.check_same_identity``). ``runs.export`` writes Hugging Face folders, with their model card.
"""

from tandemrl.training.checkpoint.runs import Resume as Resume
from tandemrl.training.checkpoint.runs import check_folder as check_folder
from tandemrl.training.checkpoint.runs import export as export
from tandemrl.training.checkpoint.runs import restore as restore
from tandemrl.training.checkpoint.runs import save as save
from tandemrl.training.checkpoint.storage import CheckpointError as CheckpointError
from tandemrl.training.checkpoint.storage import DamagedError as DamagedError
from tandemrl.training.checkpoint.storage import latest as latest
from tandemrl.training.checkpoint.storage import lock as lock
