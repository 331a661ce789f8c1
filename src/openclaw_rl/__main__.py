"""`python -m openclaw_rl …` is the same program as `openclaw-rl …`."""

from openclaw_rl.cli import main

# Worker processes import this module again under another name; only the first import may run the program.
if __name__ == "__main__":
    raise SystemExit(main())
