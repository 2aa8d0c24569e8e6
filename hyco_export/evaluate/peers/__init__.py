"""The server's own drafting beside other programs that run the same verifier and head."""
