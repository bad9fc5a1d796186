"""Tasksets of verifiers as rows; their episodes are run and scored by `rollout.gateway.verifiers_source`."""
