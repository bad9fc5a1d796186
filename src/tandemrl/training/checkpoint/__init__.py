"""What lasts of a run: its checkpoints and its exports. Other packages import from here alone.

A checkpoint is a folder: ``state.pt`` (as ``runs.save`` fills it: position in the data, rollouts in flight, random
states), ``tensors/`` (weights and moments of every model), ``config.yaml``, and ``meta.json`` with the SHA-256 of the
others. ``runs.restore`` refuses a file whose hash differs (``storage.load`` and ``load_parts``, by
``manifest.verify``), a metrics.jsonl or samples.jsonl that is shorter than it was, and a checkpoint of another run
(``identity.check_same_identity``).

``runs`` saves and restores a run, ``identity`` tells whether it is the same one, ``storage`` writes and reads the
folder of a checkpoint, with ``tensors`` (models and optimisers) and ``manifest`` (hashes). ``export`` writes Hugging
Face folders, with their ``card``.
"""

from tandemrl.training.checkpoint.identity import Resume as Resume
from tandemrl.training.checkpoint.identity import check_accepted as check_accepted
from tandemrl.training.checkpoint.manifest import CheckpointError as CheckpointError
from tandemrl.training.checkpoint.manifest import DamagedError as DamagedError
from tandemrl.training.checkpoint.runs import check_folder as check_folder
from tandemrl.training.checkpoint.runs import check_resume as check_resume
from tandemrl.training.checkpoint.runs import export as export
from tandemrl.training.checkpoint.runs import restore as restore
from tandemrl.training.checkpoint.runs import save as save
from tandemrl.training.checkpoint.storage import is_checkpoint as is_checkpoint
from tandemrl.training.checkpoint.storage import latest as latest
from tandemrl.training.checkpoint.storage import lock as lock
from tandemrl.training.checkpoint.storage import numbered as numbered
from tandemrl.training.checkpoint.storage import step_of as step_of
