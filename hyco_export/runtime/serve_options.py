"""What the operator of a server chooses beside its models. Knows no models and no command line."""

import msgspec

from hyco_export.runtime.batching import Batching


class ServeOptions(msgspec.Struct, frozen=True):
    """How a server uses its machine; none of it changes a token.

    sessions: held at once; None for the usual number.
    cache_bytes: K/V memory of all sessions together; None: half of what is free once the models are loaded.
    context_limit: positions of a session; None: what the verifier was made for. Beyond that its rotary embedding goes
        on, what it makes of such positions is nobody's promise.
    idle_s: after so many seconds a session that nobody calls is forgotten; None: the usual time.
    compiled: let torch's compiler make the layers, at the first passes: for GPUs.
    """

    sessions: int | None = None
    batching: Batching = Batching()
    cache_bytes: int | None = None
    context_limit: int | None = None
    idle_s: float | None = None
    compiled: bool = False
