"""What every input and output of the three graphs means, and who fills it: the words of bundle.json and BUNDLE.md."""

from hyco_export.bundle.spec import Tensor
from hyco_export.core.device_spec import HEAD_GRAPH, GraphSpec, TensorSpec

HEAD_WORDS = {
    "e": (
        "input embedding of the root, with the embedding's factor",
        "copy the hand-off's `e` as it is: H bytes",
    ),
    "h": (
        "the verifier's hidden state at the position before the root",
        "copy the hand-off's `h` as it is: H bytes",
    ),
    "cos": ("cosines of the root's position", "the host computes and quantises them; chapter 4"),
    "sin": ("sines of the root's position, the sign of rotate-half in the first half", "as cos; chapter 4"),
    "k": (
        "keys of the newest W positions before the root, rotary embedding applied: the hand-off ring",
        "the host copies the hand-off's bytes into slot p mod W; empty slots hold the zero point; chapters 3 and 5",
    ),
    "v": ("values of the same positions", "as k"),
    "mask": (
        "added to the scores of the W slots: 0 visible, the mask value hidden",
        "the host computes it from the positions in the slots; chapter 3",
    ),
    "chain": (
        "rows of the keep set: the most likely token of each of the K steps",
        "row r is token ids[r] of the keep set; chapter 7",
    ),
    "runner_up": (
        "rows of the keep set: the second most likely token of the first steps",
        "row r is token ids[r] of the keep set; chapter 7",
    ),
}
SLM_WORDS = {
    "embeds": (
        "token embeddings with the embedding's factor, one row a token",
        "the host looks them up, unpacks and quantises them; chapter 6",
    ),
    "per_layer": (
        "per-layer embeddings with their factor, one row a token",
        "the host looks them up, unpacks and quantises them; chapter 6",
    ),
    "cos": ("cosines of each row's position", "the host computes and quantises them; chapter 4"),
    "sin": ("sines of each row's position, the sign of rotate-half in the first half", "as cos; chapter 4"),
    "k": (
        "keys of the newest W committed positions of this layer, rotary embedding applied",
        "the host copies rows of k_new into slot p mod W; empty slots hold the zero point; chapter 3",
    ),
    "v": ("values of the same positions", "as k, from v_new"),
    "mask": (
        "added to the scores of the W ring slots, then of the R rows of this pass: 0 visible, the mask value hidden",
        "the host computes it from positions and ancestors; chapter 3",
    ),
    "k_new": (
        "keys of the rows of this pass, in the encoding of the ring",
        "the host copies the rows that are committed, bytes as they are; chapter 3",
    ),
    "v_new": ("values of the rows of this pass, in the encoding of the ring", "as k_new"),
    "logits": (
        "logits of each row over the keep set: column c is token ids[c]",
        "the host takes the best columns of the rows in use; chapter 8",
    ),
}
ROW_AXES = {"logits": 0, "k_new": 1, "v_new": 1}


def described(graph: GraphSpec, side: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """Inputs or outputs of a graph with their words; a name is `kind` or `kind.layer`."""
    words = HEAD_WORDS if graph.name == HEAD_GRAPH else SLM_WORDS
    tensors = []
    for spec in side:
        meaning, handling = words[spec.name.partition(".")[0]]
        scale, zero_point = (spec.encoding.scale, spec.encoding.zero_point) if spec.encoding else (None, None)
        row_axis = ROW_AXES.get(spec.name.partition(".")[0])
        tensors.append(Tensor(spec.name, spec.dtype, spec.shape, scale, zero_point, row_axis, meaning, handling))
    return tuple(tensors)
