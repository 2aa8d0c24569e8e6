"""How many threads torch computes with: the recipe's number, for another one sums in another order."""


def use_threads(count: int | None) -> None:
    """Let torch compute with `count` threads from now on; None leaves the choice to torch."""
    if count is not None:
        import torch

        torch.set_num_threads(count)
