"""Where prompts come from: rows in one schema, a resumable sampler, generated tasks and dataset builders.

Nothing here imports torch, so scoring workers and the CLI stay light.
"""
