"""Eurus-2-RL-Data, programs with tests and mathematics, and the sandbox in which programs run."""
