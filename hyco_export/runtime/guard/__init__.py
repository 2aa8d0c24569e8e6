"""Between a server's socket and its engine: who may call, how often, how slowly, and whose session it is."""
