"""Chat clients: OpenAI's calls, answered by sessions that the server drives itself.

Start with `completions`.
"""
