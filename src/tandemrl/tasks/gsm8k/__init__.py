"""GSM8K as verl has it: its prompt, and the number after ``####``."""
