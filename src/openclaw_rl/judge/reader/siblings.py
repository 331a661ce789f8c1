"""Recognises the next request of the same kind: "create the file b.py" after "create the file a.py"."""

import re

from openclaw_rl.judge.reader.lexicon import Lexicon
from openclaw_rl.judge.reader.opposites import is_question
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.similarity import content, differences, is_form_of, tokens

#: Names that `tokens` would cut into pieces, or that differ only in a small word: "a.py", "src/b", "第一".
_NAME = re.compile(r"\w+(?:[./_-]\w+)+|第\w")


def is_sibling(request: str, message: str, plain: str, lexicon: Lexicon) -> bool:
    """Whether a message asks for the same with another object, and does not refer to the response.

    `plain` is the message as it is searched for phrases. "Make it darker" and "write a shorter poem" refer to the
    response; so does a message that only adds to the request.
    """
    old, new, small = tokens(request), tokens(message), all_small_words()
    old_content, new_content = content(old, small), content(new, small)
    if not old_content or not new_content or is_question(request):
        return False
    # A word that the request has too does not refer to the response: "make slide 4 simpler".
    own = " ".join(word for word in plain.split() if word not in old)
    if lexicon.find("refers", own) or lexicon.find("opposite", plain):
        return False
    first, other = old_content[0], new_content[0]
    if not (old[0] == new[0] or first == other or is_form_of(first, other)):
        return False
    lost, added = differences(old_content, new_content)
    old_names, new_names = set(_NAME.findall(request)), set(_NAME.findall(message))
    return bool(lost or old_names - new_names) and bool(added or new_names - old_names)
