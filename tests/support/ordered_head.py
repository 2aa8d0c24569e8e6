"""Heads with ordered embeddings, made of heads without: tokens in clusters of equal size, with a centroid each."""

from pathlib import Path

import torch
from torch.nn import functional
from transformers import Gemma4AssistantForCausalLM

ROUNDS = 8  # of clustering


def ordered(head: Gemma4AssistantForCausalLM, centroids: int, best: int, seed: int = 3) -> Gemma4AssistantForCausalLM:
    """The same head in the published form of E2B's and E4B's: its output rows clustered by their direction."""
    config = type(head.config).from_dict(head.config.to_dict())
    config.use_ordered_embeddings, config.num_centroids, config.centroid_intermediate_top_k = True, centroids, best
    made = Gemma4AssistantForCausalLM(config).to(head.lm_head.weight.dtype)
    made.load_state_dict(head.state_dict(), strict=False)
    clusters = balanced_clusters(head.lm_head.weight.detach().float(), centroids, seed)
    with torch.no_grad():
        made.masked_embedding.token_ordering.copy_(clusters.flatten())
        rows = head.lm_head.weight.detach()[clusters].float()  # [centroids, members, M]
        made.masked_embedding.centroids.weight.copy_(rows.mean(dim=1))
    return made.eval().requires_grad_(False)


def balanced_clusters(rows: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """rows [V, M] -> token ids [count, V / count]: every cluster takes the nearest that are left, the surest first."""
    directions = functional.normalize(rows, dim=1)
    size = len(rows) // count
    start = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    centres = directions[start]
    members = torch.empty(count, size, dtype=torch.long)
    for _ in range(ROUNDS):
        scores = directions @ centres.T  # [V, count]
        taken = [0] * count
        for token in scores.max(dim=1).values.argsort(descending=True).tolist():
            cluster = next(each for each in scores[token].argsort(descending=True).tolist() if taken[each] < size)
            members[cluster, taken[cluster]] = token
            taken[cluster] += 1
        centres = functional.normalize(directions[members].mean(dim=1), dim=1)
    return members


def save_ordered(source: Path, folder: Path, centroids: int, best: int) -> Path:
    """A head's checkpoint folder in that form."""
    head = Gemma4AssistantForCausalLM.from_pretrained(source, dtype=torch.float32)
    ordered(head, centroids, best).save_pretrained(folder)
    return folder
