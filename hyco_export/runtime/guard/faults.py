"""What a log may say of a fault: where it happened and of what kind, not its message, which could hold a prompt."""

import traceback


def place_of(error: BaseException) -> str:
    """Kind and frames of an error and of those behind it, without their messages and without values."""
    lines = []
    seen: BaseException | None = error
    while seen is not None:
        frames = traceback.StackSummary.extract(traceback.walk_tb(seen.__traceback__))
        where = "".join(f"\n    {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        lines.append(f"{type(seen).__name__}{where}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return "\n  caused by ".join(lines)
