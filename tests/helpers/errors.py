"""What an action raises, as a value that ranks can compare."""

from collections.abc import Callable


def message_of(action: Callable[[], object]) -> str:
    """Returns the message of the ValueError that the action raises, or "no error"."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return "no error"
