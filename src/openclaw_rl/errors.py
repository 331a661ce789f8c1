"""The error that a user can mend."""


class UserError(Exception):
    """Something the user can mend; the message is one sentence that says what is wrong and what to do.

    Commands print the message and end with status 2; there is no traceback.
    """
