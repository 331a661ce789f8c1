"""The file of `--record`, when turns are deleted."""

from pathlib import Path

from openclaw_rl.learn.reporting import prune_records


def test_lines_of_deleted_turns_and_lines_that_cannot_be_read_are_removed(tmp_path: Path) -> None:
    kept, deleted = '{"turn": 1, "response": ["é"]}\n', '{"turn": 2}\n'
    odd = (
        b"\n",
        b"null\n",
        b'{"turn": null}\n',
        b'{"turn": 1e999}\n',
        b"[" * 100_000 + b"\n",
        b"\xff\n",
        b'{"turn": 1, "resp',
    )
    path = tmp_path / "records.jsonl"
    path.write_bytes(kept.encode() + deleted.encode() + b"".join(odd))
    prune_records(path, {1})
    assert path.read_text("utf-8") == kept
    prune_records(tmp_path / "none.jsonl", {1})
