"""Countdown and calculations as TinyZero has them: its prompts, its splits."""
