"""Rollout workers in other processes or on other machines. Only ``ray_workers`` imports ray, and not at its top."""
