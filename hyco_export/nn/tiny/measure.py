"""What the family is worth: acceptance of the head's chains and agreement of head and SLM with the verifier.

Everything is measured on answers that the verifier sampled to held-out questions. Exact acceptance is lossless: the
committed text is distributed like the verifier's own samples, and given the text every round is determined. So the
rounds are read off sampled answers instead of being played.
Legend: B rows, T tokens, K chain length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from hyco_export.nn.tiny.batches import Row, answer_mask, ordered_batches, padded_ids
from hyco_export.nn.tiny.chain import ChainContext, drafted_tokens, taught_states, verifier_pass
from hyco_export.nn.tiny.configs import CHAIN_LENGTH


@dataclass(frozen=True)
class ChainResult:
    """Counts over verify rounds: `accepted[i]` chain tokens in round i, `committed` tokens in all rounds."""

    accepted: tuple[int, ...]
    committed: int

    @property
    def mean_accepted_tokens(self) -> float:
        """MAT: committed tokens per verify round, the bonus counted, the first root not."""
        return self.committed / len(self.accepted)

    @property
    def by_depth(self) -> list[float]:
        """Share of rounds whose first k chain tokens are accepted among those whose first k-1 are, k = 1..K."""
        reached = [sum(count >= depth for count in self.accepted) for depth in range(CHAIN_LENGTH + 1)]
        return [after / max(1, before) for before, after in pairwise(reached)]


@torch.no_grad()
def measure_chain(verifier: Gemma4ForCausalLM, head: Gemma4AssistantForCausalLM, rows: Sequence[Row]) -> ChainResult:
    """Play every row's answer as verify rounds with exact acceptance."""
    accepted: list[int] = []
    committed = 0
    for batch in ordered_batches(rows):
        ids = padded_ids(batch)
        seen = verifier_pass(verifier, ids)
        chains = drafted_tokens(ChainContext(head, seen), ids).tolist()
        for row, chain in zip(batch, chains, strict=True):
            for count, tokens in answer_rounds(row, chain):
                accepted.append(count)
                committed += tokens
    return ChainResult(tuple(accepted), committed)


def answer_rounds(row: Row, chains: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """(accepted chain tokens, committed tokens) of each round; `chains[t]` is drafted behind the root at t+1."""
    root, end = row.answer_start, len(row.ids)
    while root + 1 < end:
        following = row.ids[root + 1 : root + 1 + CHAIN_LENGTH]
        matches = [draft == token for draft, token in zip(chains[root - 1], following, strict=False)]
        count = matches.index(False) if False in matches else len(matches)
        # the bonus follows the accepted path, unless the text ended inside it
        committed = min(count + 1, end - 1 - root)
        yield count, committed
        root += committed


@torch.no_grad()
def measure_head_agreement(
    verifier: Gemma4ForCausalLM, head: Gemma4AssistantForCausalLM, rows: Sequence[Row]
) -> list[float]:
    """Teacher-forced top-1 agreement of the head with the verifier at depths 1..K."""
    equal, total = [0] * CHAIN_LENGTH, [0] * CHAIN_LENGTH
    for batch in ordered_batches(rows):
        ids, answers = padded_ids(batch), answer_mask(batch)
        seen = verifier_pass(verifier, ids)
        best = seen.logits().argmax(-1)  # [B, T]
        for k, states in enumerate(taught_states(ChainContext(head, seen), ids)):
            drafts = head.lm_head(states[:, : ids.shape[1] - 2 - k]).argmax(-1)
            wanted = answers[:, 1 : 1 + drafts.shape[1]] & answers[:, 2 + k :]
            hits = (drafts == best[:, k + 1 : -1]) & wanted
            equal[k] += int(hits.sum())
            total[k] += int(wanted.sum())
    return [hits / max(1, count) for hits, count in zip(equal, total, strict=True)]


@torch.no_grad()
def measure_slm_agreement(verifier: Gemma4ForCausalLM, slm: Gemma4ForCausalLM, rows: Sequence[Row]) -> float:
    """Teacher-forced top-1 agreement of the SLM with the verifier over the answers' positions."""
    equal = total = 0
    for batch in ordered_batches(rows):
        ids, answers = padded_ids(batch), answer_mask(batch)[:, 1:]
        wanted = verifier(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        given = slm(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        equal += int(((wanted == given) & answers).sum())
        total += int(answers.sum())
    return equal / max(1, total)


@torch.no_grad()
def mean_entropy(verifier: Gemma4ForCausalLM, rows: Sequence[Row]) -> float:
    """Mean entropy, in nats, of the verifier's distribution over the answers' positions."""
    total, count = 0.0, 0
    for batch in ordered_batches(rows):
        ids, answers = padded_ids(batch), answer_mask(batch)[:, 1:]
        log_probs = verifier_pass(verifier, ids[:, :-1]).logits()[answers].log_softmax(-1)  # [N, V]
        total -= float((log_probs.exp() * log_probs).sum())
        count += len(log_probs)
    return total / max(1, count)
