"""The error that a user can fix."""


class UserError(Exception):
    """Something that the user can fix; the message is one sentence that says what is wrong and what to do.

    Commands print the message and end with status 2; there is no traceback.
    """
