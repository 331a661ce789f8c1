"""The quick start: `python run.py --method combine …` runs `openclaw-rl serve --method combine …`."""

import sys

if __name__ == "__main__":
    try:
        from openclaw_rl.cli import main
    except ModuleNotFoundError as error:
        sys.exit(f"{error.name} is not installed. Run 'make run', or '.venv/bin/python run.py …' after 'make install'.")
    sys.exit(main(["serve", *sys.argv[1:]]))
