"""Conversations from files, folders, Parquet and the Hub, alone or mixed.

Enters: the `data` section of a recipe. Leaves: streams of conversations with their ids.
Read first: `sources.py`.
"""
