"""The one family of failures that have words; a command ends with the words and without a traceback."""


class BuildError(Exception):
    """What was seen, what was expected, and what to change."""
