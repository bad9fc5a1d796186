"""reasoning-gym's generators, with its system prompt and its own graders."""
