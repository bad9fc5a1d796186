"""``python -m tandemrl``: the command line."""

from tandemrl.cli.main import main

if __name__ == "__main__":
    main()
