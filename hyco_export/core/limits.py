"""Limits that both sides of the wire must know: the server keeps them, and recipes that break them are refused."""

COLDEST, HOTTEST = 0.01, 100.0  # temperatures other than 0; outside, float32 scores overflow or carry no difference

NODE_LIMIT = 64  # nodes of a draft tree, the root not counted: twice the paper's budget of 32
