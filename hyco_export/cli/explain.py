"""What `explain` does: cause and cure of an error text or code of the NPU's libraries, from the table of
`graph.qnn_errors`."""

from hyco_export.cli.console import output, say
from hyco_export.graph.qnn_errors import TRAPS, find_known

THE_GRAPH = "the graph"


def explain_text(text: str) -> int:
    """Print what is known; 0 where something is, else 1 and what fails without any error."""
    known = find_known(text)
    if known is not None:
        say(f"seen at: {known.where}")
        say(f"cause: {known.message.format(subject=THE_GRAPH)}")
        say(f"next: {known.hint}")
        return 0
    output.print(f"{text!r} is in no entry of the table; what goes wrong without an error:")
    for trap in TRAPS:
        output.print(f"\n{trap.symptom}\n  cause: {trap.cause}", soft_wrap=True)
        say(f"  next: {trap.cure}")
    return 1
