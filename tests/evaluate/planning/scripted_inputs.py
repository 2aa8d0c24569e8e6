"""Inputs whose times are round numbers, so that totals can be worked out by hand."""

from hyco_export.evaluate.planning.inputs import (
    DeviceTimes,
    Inputs,
    LinkPoint,
    LinkTimes,
    ServerTimes,
    SystemInput,
    Workload,
)

ALWAYS = ({"chain": 1.0},)  # of a depth


def scripted_inputs(systems, *, rtt_ms=40.0, down_mbit_s=8.0, answer_tokens=21, device=None, **fields):
    """8 Mbit/s is a byte a microsecond: 1,000 bytes take 1 ms."""
    return Inputs(
        device=device or DeviceTimes(head_ms=20.0, slm_pass_ms=10.0, host_ms=5.0, commit_ms=1.0, prefill_ms=2.0),
        link=LinkTimes(name="scripted", points=(LinkPoint(rtt_ms=rtt_ms, down_mbit_s=down_mbit_s),)),
        server=ServerTimes(pass_ms=((1.0, 6.0), (33.0, 22.0)), head_ms=5.0, prefill_ms=30.0),
        workload=Workload(answer_tokens=answer_tokens),
        systems=systems,
        **fields,
    )


def taken(depth, share=1.0, **fields):
    """A system whose every depth is taken with the same share."""
    return SystemInput(acceptance=({"chain": share},) * depth, **fields)
