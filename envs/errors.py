"""The error of a user's mistake: the command line ends it in exit code 2 and its one sentence, without a traceback."""


class UserError(ValueError):
    """Something the user gave is wrong: says what, where, what was expected, and what to do."""
