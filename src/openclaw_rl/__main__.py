"""`python -m openclaw_rl …` is the same program as `openclaw-rl …`."""


def main() -> int:
    # Here, because each worker process imports the script of the program again, and needs none of the command line.
    from openclaw_rl.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
