"""Reads a next state by rules: whether people are content, correct, reject, repeat or move on, and what they wish.

It is deterministic and takes a few milliseconds. When in doubt it abstains (`ReplyKind.UNCLEAR`).
Phrases are compiled at their first use, which takes seconds. On an event loop, await `ready` first.
"""

from openclaw_rl.judge.rules.instructions import instruct
from openclaw_rl.judge.rules.reply import read_reply, ready
from openclaw_rl.judge.rules.verdict import Reading, ReplyKind
from openclaw_rl.judge.rules.wishes import read_wishes, split_wanted

__all__ = ["Reading", "ReplyKind", "instruct", "read_reply", "read_wishes", "ready", "split_wanted"]
