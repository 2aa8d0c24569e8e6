"""Limits that both sides of the wire must know: the server keeps them, and recipes that break them are refused."""

NODE_LIMIT = 64  # nodes of a draft tree, the root not counted: twice the paper's budget of 32
