"""The command line. Modules here import only what prints help; everything heavy is imported inside a command."""
