"""Senior and junior write together before your eyes, in a browser: `tandemrl play`."""
