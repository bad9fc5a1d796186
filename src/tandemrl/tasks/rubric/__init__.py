"""The rubric reward model (RRM) and TinyV's verifier: their rows, their prompts, and the judges that are asked."""
