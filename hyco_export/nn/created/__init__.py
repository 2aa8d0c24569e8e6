"""Checkpoints made here at real sizes: the classes, shapes and layouts of released ones, random weights."""
