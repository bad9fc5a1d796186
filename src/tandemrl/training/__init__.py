"""Training, from a config to a checkpoint.

``loop`` is where to begin: ``train``, the loop over steps, and ``train_step``, which is one step on one page.

- Before the first step: ``arguments`` (what is passed in Python, and its records), ``preflight`` (is all of it
  here?), ``build`` (config → ``state``: what is fixed, what learns, what progresses).
- In a step: ``rollouts`` (generated, resampled, measured) with ``async_rollouts``, ``experience`` (→ mini-batches with
  log-probs, values, advantages), ``update`` (losses, gradients, optimiser steps), ``evaluation``.
- What stops a run or warns: ``gates``, ``faults``, ``diagnostics``. What it leaves: ``tracking``, ``profiling`` and
  ``checkpoint``, the one door to what lasts.
"""
