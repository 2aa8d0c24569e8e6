"""What a run will take, by arithmetic from shapes alone: `shapes` of models, `work` to be done, `estimate` of a stage.

One file per stage turns shapes and work into tokens, bytes on disk, memory and binary size. Nothing here reads a file.
"""
