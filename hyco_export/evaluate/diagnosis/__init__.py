"""What is wrong with a server, a device or an artifact, by name: evidence from golden positions (`core.golden`)."""
